#include "decoder/decoder.h"

#include <algorithm>
#include <bit>

#include "planes/matmul.h"

namespace crelle::cpu {
namespace {

// Equal runs of rows, of whole units.
template <class Share>
std::vector<Share> equal_shares(int rows, int unit, int threads) {
  std::vector<Share> out;
  const int units = (rows + unit - 1) / unit;
  for (int t = 0; t < threads; ++t)
    out.push_back({std::min(rows, part(units, t, threads) * unit), std::min(rows, part(units, t + 1, threads) * unit)});
  return out;
}

// Partition matrices that are multiplied in one phase into shares of equal bytes, each a run of whole units.
// `together`: the matrices have the same rows, and a thread gets the same rows of each.
template <class Share>
void partition(const std::vector<const Matrix *> &group, bool together, int threads, std::vector<Share> *out) {
  int unit = 16;
  for (const Matrix *m : group) unit = std::max(unit, m->unit());
  double total = 0, begun = 0;
  for (const Matrix *m : group) total += m->bytes_per_row() * m->N;
  for (size_t i = 0; i < group.size(); ++i) {
    const Matrix &m = *group[i];
    out[i].assign(threads, {0, 0});
    if (together && i > 0) {
      out[i] = out[0];
      continue;
    }
    const double each = together ? total / m.N : m.bytes_per_row();
    int row = 0;
    for (int t = 0; t < threads; ++t) {
      out[i][t].row0 = row;
      const double end = (total * (t + 1) / threads - begun) / each;  // rows up to here, if units could be split
      if (t + 1 == threads) row = m.N;
      while (row < m.N && row + 0.5 * unit <= end) row = std::min(m.N, row + unit);
      out[i][t].row1 = row;
    }
    begun += each * m.N;
  }
}

}  // namespace

double Matrix::bytes_per_row() const {
  return coded ? static_cast<double>(coded->bytes()) / coded->N : double(K) * size_of(dense.type);
}

std::pair<const uint8_t *, const uint8_t *> Matrix::bytes(int row0, int row1) const {
  if (!coded) return {dense.row(row0), dense.row(row1)};
  return {coded->block(row0 / coded->R), coded->block((row1 + coded->R - 1) / coded->R)};
}

std::string Model::problem() const {
  const int q = heads * head_size, kv = kv_heads * head_size;
  if (heads < 1 || kv_heads < 1 || heads % kv_heads) return "heads must be a multiple of kv_heads";
  if (head_size < 2 || head_size % 2) return "head_size must be even";
  for (const Rope &r : ropes)
    if (r.frequency.empty() || r.channels() > head_size) return "a rope has 1 to head_size/2 frequencies";
  if (layers.empty()) return "a model has at least one layer";
  const auto is = [](const Matrix &m, int N, int K) { return m.N == N && m.K == K; };
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerWeights &l = layers[i];
    const auto fits = [&](const FeedForward &f) {
      return is(f.gate, f.gate.N, width) && (!l.gated || is(f.up, f.gate.N, width)) && is(f.down, width, f.gate.N);
    };
    if (!is(l.q, q, width) || !is(l.k, kv, width) || !is(l.v, kv, width) || !is(l.o, width, q) ||
        (l.experts ? !is(l.experts.router, l.experts.count, width) : !fits(l.mlp)) ||
        !std::all_of(l.experts.each.begin(), l.experts.each.end(), fits) ||
        (l.experts.shared() && !is(l.experts.shared_gate, 1, width)))
      return "layer " + std::to_string(i) + " has a matrix of another shape than the model's sizes ask for";
    if (l.experts && (l.experts.top < 1 || l.experts.top > l.experts.count ||
                      int(l.experts.each.size()) != l.experts.count + l.experts.shared()))
      return "layer " + std::to_string(i) + " has other experts than its sizes ask for";
    if (l.parallel && (l.post_attention_norm || l.stream_attention_norm))
      return "layer " + std::to_string(i) +
             " norms what attention returns, though the feed-forward does not wait for it";
    if (!l.q_norm != !l.k_norm) return "layer " + std::to_string(i) + " has only one of q_norm and k_norm";
    if (l.rope >= int(ropes.size())) return "layer " + std::to_string(i) + " names a rope that is not there";
  }
  if (positions.N && (positions.K != width || position_offset < 0 || position_offset >= positions.N))
    return "learned positions must have `width` columns, and rows from the offset on";
  if (embedding.K < 1 || head.K != embedding.K || head.N < 1) return "embedding and head must have the same columns";
  if (embedding.K != width && !(is(project_in, width, embedding.K) && is(project_out, embedding.K, width)))
    return "projections must stand between embeddings, and a head, of another width than the layers";
  return "";
}

Decoder::Decoder(Model model) : model_(std::move(model)) {
  for (LayerWeights &l : model_.layers) {
    find_kinds({&l.q, &l.k, &l.v});
    find_kinds({&l.o});
    find_kinds({&l.experts.router, &l.experts.shared_gate});
    find_kinds({&l.mlp.gate, &l.mlp.up});
    find_kinds({&l.mlp.down});
    for (FeedForward &f : l.experts.each) {
      find_kinds({&f.gate, &f.up});
      find_kinds({&f.down});
    }
  }
  for (Matrix *m : {&model_.head, &model_.project_in, &model_.project_out}) find_kinds({m});
  ops_ = &ops_of(kinds_.empty() ? isa() : *kinds_.front().first->isa);
}

// Mixed, integer and trellis matrices that read one input may gather or rotate it in ways of their own: the i-th of
// them has the i-th encoding, or that of an integer or trellis matrix before it with the same integers.
void Decoder::find_kinds(std::initializer_list<Matrix *> group) {
  for (auto m = group.begin(); m != group.end(); ++m) {
    const Weight *w = (*m)->coded;
    int i = 0;
    if (w && w->stream == Stream::Mixed) i = int(m - group.begin());
    if (w && (w->stream == Stream::Integer || w->stream == Stream::Trellis))
      i = int(std::find_if(group.begin(), m,
                           [&](const Matrix *o) {
                             return o->coded && o->coded->stream == w->stream && o->coded->isa == w->isa &&
                                    o->coded->partition == w->partition && same_inputs(*o->coded, *w);
                           }) -
              group.begin());
    (*m)->kind = kind_of(**m, i);
  }
}

int Decoder::kind_of(const Matrix &m, int i) {
  if (!m.coded) return -1;
  const auto same = [&](const std::pair<const Weight *, int> &kind) {
    const Weight *w = kind.first;
    return w->isa == m.coded->isa && w->stream == m.coded->stream && w->partition == m.coded->partition &&
           kind.second == i && (w->stream != Stream::Integer || w->integer->row_bytes == m.coded->integer->row_bytes);
  };
  const auto found = std::find_if(kinds_.begin(), kinds_.end(), same);
  const int kind = static_cast<int>(found - kinds_.begin());
  if (found == kinds_.end()) kinds_.emplace_back(m.coded, i);
  return kind;
}

void Decoder::time_phases(bool on) {
  std::lock_guard lock(mutex_);
  timing_ = on;
  times_ = {};
}

Decoder::Times Decoder::times() {
  std::lock_guard lock(mutex_);
  return times_;
}

void Decoder::arrange_shares(int threads) {
  const int layers = int(model_.layers.size());
  shares_.assign(layers * kMatrices + 3, {});
  for (int i = 0; i < layers; ++i) {
    const LayerWeights &l = model_.layers[i];
    auto *s = &shares_[i * kMatrices];
    partition({&l.q, &l.k, &l.v}, false, threads, s);
    partition({&l.o}, false, threads, s + 3);
    if (l.experts) {  // what comes between is shared out when it is known which of them are read
      int unit = 16;
      for (const FeedForward &f : l.experts.each) unit = std::max(unit, f.down.unit());
      s[4] = equal_shares<Share>(l.experts.count, l.experts.router.unit(), threads);
      s[6] = equal_shares<Share>(model_.width, unit, threads);
    } else {
      partition({&l.mlp.gate, &l.mlp.up}, true, threads, s + 4);
      partition({&l.mlp.down}, false, threads, s + 6);
    }
  }
  auto *s = &shares_[layers * kMatrices];
  for (const Matrix *m : {&model_.head, &model_.project_in, &model_.project_out}) {
    if (m->N) partition({m}, false, threads, s);
    ++s;
  }
}

// Everything that allocates; does nothing from the second step on, until a sequence is twice as long. Buffers never
// shrink: what is arranged for more serves less.
void Decoder::arrange(int threads, int count, int runs) {
  if (threads == threads_ && count <= B_ && runs <= runs_) {
    for (auto &of_kind : encoded_) of_kind[0].M = count;
    return;
  }
  const int B = std::max(count, B_);
  runs_ = std::max(runs_, static_cast<int>(std::bit_ceil(static_cast<unsigned>(runs))));
  const int H = model_.heads, D = model_.head_size;
  size_t widest = padded(std::max({model_.width, H * D, model_.words()}));
  if (threads != threads_) arrange_shares(threads);
  encoded_.resize(kinds_.size());
  for (size_t i = 0; i < kinds_.size(); ++i) {
    encoded_[i].resize(threads);
    for (int t = 0; t < threads; ++t) encoded_[i][t].shape(*kinds_[i].first, t ? 1 : B, model_.precision);
  }
  size_t inner = 0, scores = 0;  // inner: of all feed-forwards that a token takes
  int slots = 0;
  for (const LayerWeights &l : model_.layers) {
    inner = std::max(inner, padded(l.mlp.gate.N));
    size_t widest_expert = 0;
    for (const FeedForward &f : l.experts.each) widest_expert = std::max(widest_expert, padded(f.gate.N));
    inner = std::max(inner, widest_expert * l.experts.of_token());
    scores = std::max(scores, padded(l.experts.each.size()));
    slots = std::max(slots, l.experts.of_token());
  }
  if (slots) {
    scores_.grow(B * scores * 4);
    if (B > 1) gathered_.grow(size_t(B) * slots * padded(model_.width) * 4);
    routed_.resize(std::max(routed_.size(), size_t(B) * slots));
    routing_.resize(threads);
  }
  stream_.grow(B * padded(model_.width) * 4);
  qkv_.grow(B * padded(size_t(H + 2 * model_.kv_heads) * D) * 4);
  hidden_.grow(B * inner * 2 * 4);
  branch_.grow(B * widest * 4);
  parts_.grow(size_t(B) * H * runs_ * sizeof(AttentionPartial));
  sums_.grow(size_t(B) * H * runs_ * padded(D) * 4);
  angles_.grow(size_t(B) * padded(model_.angles()) * 4);
  // A thread's own: the input of a product, its output; queries, a key, its value, scores; of pages, a run as floats.
  scratch_floats_ =
      B * widest * 2 + (kHeads + 3) * padded(D) + kHeads * padded(kRun + 1) + 2 * padded(size_t(kRun) * D);
  scratch_.grow(threads * scratch_floats_ * 4);
  if (threads != threads_) barrier_.reset(threads);
  threads_ = threads, B_ = B;
  for (auto &of_kind : encoded_) of_kind[0].M = count;
}

}  // namespace crelle::cpu
