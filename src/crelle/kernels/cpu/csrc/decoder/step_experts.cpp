// The experts of a decode step. All threads find the same routing; a group is an expert and its tokens.
//
//   router           norm, encode      rows of the router                                      |
//   gate, up         tokens by expert  a share of the rows of all groups' experts, activation  |
//   down             encode            the same rows of each expert, weighted and added up
//
// With one token each thread encodes what its products read for itself. With more, a thread encodes the inputs of some
// groups for all threads, and there is one more barrier before each of the products.
#include <algorithm>
#include <cmath>

#include "decoder/step_work.h"
#include "planes/matmul.h"

namespace crelle::cpu {
void Decoder::Work::experts(const LayerWeights &l, const std::vector<Share> *share) {
  size_t inner = 0;
  for (const FeedForward &f : l.experts.each) inner = std::max(inner, padded(f.gate.N));
  prefetch_rows(l.experts.router, share[4][t]);
  norm(l.norm_mlp);
  route(l, share[4][t]);
  gate_and_up(l, inner);
  sync(GateUp);
  down_and_sum(l, inner, share[6][t]);
}

// The thread's Routing, after all threads have multiplied by the router.
void Decoder::Work::route(const LayerWeights &l, const Share &s) {
  const Experts &x = l.experts;
  const size_t pitch = padded(x.each.size());
  float *const scores = floats_of(d.scores_);
  encode({&x.router, &x.shared_gate}, input, ld_in, in0, in1);
  multiply(x.router, s, input, ld_in, B, scores, pitch);
  if (x.shared() && t == n - 1) multiply(x.shared_gate, {0, 1}, input, ld_in, B, scores + x.count, pitch);
  wait();
  d.routing_[t].route(x, scores, pitch, B);
}

// A token alone: x as m takes it, encoded by this thread unless `now`, whose input it was last, takes the same.
const Activations *Decoder::Work::encode_own(const Matrix &m, const Weight *&now, const float *x) {
  if (!m.coded) return nullptr;
  Activations &a = d.encoded_[m.kind][t];
  if (!now || !a.same_shape(*now) || !same_inputs(*now, *m.coded)) encode_rows(a, *m.coded, x, 0, 0, 1);
  now = m.coded;
  return &a;
}

// Several tokens: the inputs of the groups' products, of slots or (ldx == 0) gathered from `input`.
void Decoder::Work::encode_groups(const LayerWeights &l, const float *x, size_t ldx, bool down) {
  const Routing &routing = d.routing_[t];
  const int S = int(routing.slots.size()), from = part(S, t, n), to = part(S, t + 1, n);
  for (size_t g = 0; g < routing.groups.size(); ++g) {
    const auto [expert, first, count] = routing.groups[g];
    if (first < from || first >= to) continue;
    const FeedForward &f = l.experts.each[expert];
    const float *rows = down ? x + first * ldx : nullptr;
    if (!down) {
      float *const gathered = floats_of(d.gathered_) + first * ld;
      for (int i = 0; i < count; ++i)
        std::copy_n(input + routing.slots[first + i].token * ld_in, width, gathered + i * ld);
      rows = gathered, ldx = ld;
    }
    const auto encode_for = [&](const Matrix &m, Activations &a) {
      if (!m.coded) return;
      a.shape(*m.coded, count, model.precision);
      encode_rows(a, *m.coded, rows, ldx, 0, count);
    };
    auto &[one, other] = d.routed_[g];
    encode_for(down ? f.down : f.gate, one);
    if (!down && l.gated && f.up.coded && !(f.gate.coded && one.fits(*f.up.coded))) encode_for(f.up, other);
  }
  wait();
}

void Decoder::Work::gate_and_up(const LayerWeights &l, size_t inner) {
  const Routing &routing = d.routing_[t];
  float *const gate = floats_of(d.hidden_), *const up = gate + routing.slots.size() * inner;
  // Rows of all groups, one after the other, cost what their bytes do, and a little for each of their tokens.
  const auto row_cost = [&](const Group &g) {
    const FeedForward &f = l.experts.each[g.expert];
    return (f.gate.bytes_per_row() + (l.gated ? f.up.bytes_per_row() : 0)) * (7 + g.count);
  };
  double total = 0, at = 0;
  for (const Group &g : routing.groups) total += row_cost(g) * l.experts.each[g.expert].gate.N;
  const auto share_of = [&](const Group &g) {
    const FeedForward &f = l.experts.each[g.expert];
    const int N = f.gate.N, unit = std::max({16, f.gate.unit(), l.gated ? f.up.unit() : 0});
    const auto row = [&](int thread) {
      const double x = (total * thread / n - at) / row_cost(g);
      return x > N - 0.5 * unit ? N : std::max(0, int(x / unit + 0.5) * unit);
    };
    const Share s{row(t), row(t + 1)};
    at += row_cost(g) * N;
    return s;
  };
  if (!alone) encode_groups(l, nullptr, 0, false);
  const Weight *now = nullptr, *now_up = nullptr;
  for (size_t i = 0; i < routing.groups.size(); ++i) {
    const Group &g = routing.groups[i];
    const FeedForward &f = l.experts.each[g.expert];
    const Share s = share_of(g);
    if (s.row0 >= s.row1) continue;
    const Activations *one = nullptr, *other = nullptr;
    const float *const x = alone ? input : floats_of(d.gathered_) + g.first * ld;
    const size_t ldx = alone ? ld_in : ld;
    const auto product = [&](const Matrix &m, const Activations *a, float *y) {
      multiply(m, s, a, x, ldx, g.count, y + g.first * inner, inner);
    };
    if (alone)
      one = encode_own(f.gate, now, input);
    else
      one = &d.routed_[i][0], other = &d.routed_[i][1];
    product(f.gate, one, gate);
    if (l.gated) {
      if (alone)
        other = f.up.kind == f.gate.kind ? encode_own(f.up, now, input) : encode_own(f.up, now_up, input);
      else if (f.gate.coded && f.up.coded && one->fits(*f.up.coded))
        other = one;
      product(f.up, other, up);
    }
    for (int j = g.first; j < g.first + g.count; ++j)
      ops.activate(l.activation, gate + j * inner + s.row0, l.gated ? up + j * inner + s.row0 : nullptr,
                   s.row1 - s.row0);
  }
}

// Rows s of the weighted sums of the experts' outputs: a token's experts in order.
void Decoder::Work::down_and_sum(const LayerWeights &l, size_t inner, const Share &s) {
  const Routing &routing = d.routing_[t];
  const float *const hidden = floats_of(d.hidden_);
  const Rows sum = mlp_output(l);
  const int rows = s.row1 - s.row0;
  if (!alone) encode_groups(l, hidden, inner, true);
  for (int b = 0; b < B; ++b) std::fill_n(sum.data + b * sum.pitch + s.row0, rows, 0.0f);
  for (size_t i = 0; i < routing.groups.size(); ++i) {
    const auto [expert, first, count] = routing.groups[i];
    const Matrix &down = l.experts.each[expert].down;
    const float *const x = hidden + first * inner;
    const Weight *now = nullptr;
    multiply(down, s, alone ? encode_own(down, now, x) : &d.routed_[i][0], x, inner, count, own, ld_in);
    for (int j = 0; j < count; ++j) {
      const Slot &slot = routing.slots[first + j];
      ops.add_scaled(sum.data + slot.token * sum.pitch + s.row0, own + j * ld_in + s.row0, slot.weight, rows);
    }
  }
}

}  // namespace crelle::cpu
