// One step of a decoder: what each thread does between the barriers.
#include <algorithm>
#include <cmath>

#include "decoder/step_work.h"
#include "planes/matmul.h"

namespace crelle::cpu {

void Decoder::Work::run() {
  if (d.timing_) last = Clock::now();
  embed();
  sync(Embed);
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const LayerWeights &l = model.layers[i];
    const std::vector<Share> *share = &d.shares_[i * kMatrices];
    attention_layer(l, int(i), share);
    mlp_layer(l, share);
  }
  if (in.wanted > 0) finish();
}

void Decoder::Work::attention_layer(const LayerWeights &l, int layer, const std::vector<Share> *share) {
  prefetch_rows(l.q, share[0][t]);
  norm(l.norm_attention);
  encode({&l.q, &l.k, &l.v}, input, ld_in, in0, in1);
  float *q = qkv, *k = q + H * D, *v = k + Hkv * D;
  multiply(l.q, share[0][t], input, ld_in, B, q, ld_qkv);
  multiply(l.k, share[1][t], input, ld_in, B, k, ld_qkv);
  multiply(l.v, share[2][t], input, ld_in, B, v, ld_qkv);
  sync(Qkv);
  if (l.whole_qk_norm) {
    norm_qk(l);
    wait();
  }
  if (ahead) {
    append(l, layer);
    wait();
  }
  attention(l, layer);
  sync(Attention);
  prefetch_rows(l.o, share[3][t]);
  combine_heads(l, layer);
  encode({&l.o}, input, ld_in, in0, in1);
  const Rows y = attention_output(l);
  multiply(l.o, share[3][t], input, ld_in, B, y.data, y.pitch);
  if (!l.parallel) add_to_stream(l, l.post_attention_norm, l.stream_attention_norm, share[3][t]);
  sync(Output);
}

void Decoder::Work::mlp_layer(const LayerWeights &l, const std::vector<Share> *share) {
  if (l.experts)
    experts(l, share);
  else
    feed_forward(l, share);
  // Where attention read the same stream, it waits in `branch`.
  if (l.parallel) add_rows(branch, ld, l.residual_scale, share[6][t]);
  add_to_stream(l, l.post_mlp_norm, l.stream_mlp_norm, share[6][t]);
  sync(Down);
}

void Decoder::Work::feed_forward(const LayerWeights &l, const std::vector<Share> *share) {
  const FeedForward &f = l.mlp;
  prefetch_rows(f.gate, share[4][t]);
  norm(l.norm_mlp);
  l.gated ? encode({&f.gate, &f.up}, input, ld_in, in0, in1) : encode({&f.gate}, input, ld_in, in0, in1);
  const size_t inner = padded(f.gate.N);
  float *gate = floats_of(d.hidden_), *up = gate + B * inner;
  multiply(f.gate, share[4][t], input, ld_in, B, gate, inner);
  if (l.gated) multiply(f.up, share[5][t], input, ld_in, B, up, inner);
  const auto [row0, row1] = share[4][t];
  for (int b = 0; b < B; ++b) {
    const size_t at = b * inner + row0;
    ops.activate(l.activation, gate + at, l.gated ? up + at : nullptr, row1 - row0);
  }
  sync(GateUp);
  prefetch_rows(f.down, share[6][t]);
  encode({&f.down}, gate, inner, in0, in1);
  const Rows y = mlp_output(l);
  multiply(f.down, share[6][t], gate, inner, B, y.data, y.pitch);
}

void Decoder::Work::sync(Phase phase) {
  if (!d.timing_ || t > 0) return wait();
  const auto here = Clock::now();
  wait();
  d.times_.waited += seconds_since(here);
  d.times_.phase[phase] += seconds_since(last);
  last = Clock::now();
}

void Decoder::Work::embed() {
  const bool narrow = model.project_in.N > 0;
  for (int b = narrow ? in0 : part(B, t, n); b < (narrow ? in1 : part(B, t + 1, n)); ++b)
    embed_row(b, narrow ? input + b * ld_in : stream + b * ld);
  if (narrow) project_in();
  for (int b = part(B, t, n); b < part(B, t + 1, n); ++b) {
    if (model.positions.N && !narrow) {
      ops.load(model.positions.type, model.positions.row(int(position[b]) + model.position_offset), output, width);
      ops.add(stream + b * ld, output, width);
    }
    for (const Rope &rope : model.ropes) {
      const int half = rope.channels() / 2;
      float *cos = floats_of(d.angles_) + b * ld_angles + rope.at, *sin = cos + half;
      for (int i = 0; i < half; ++i) {
        const float angle = static_cast<float>(position[b]) * rope.frequency[i];
        cos[i] = std::cos(angle), sin[i] = std::sin(angle);
      }
    }
  }
}

void Decoder::Work::embed_row(int b, float *x) const {
  if (model.embedding.coded)
    dequantize_row(*model.embedding.coded, int(token[b]), x);
  else
    ops.load(model.embedding.dense.type, model.embedding.dense.row(int(token[b])), x, model.words());
  if (model.embedding_scale != 1.0f) ops.scale(x, model.embedding_scale, model.words());
}

// The thread's rows of the stream, of embeddings of another width, with learned positions.
void Decoder::Work::project_in() {
  const Share &s = share_outside(1);
  encode({&model.project_in}, input, ld_in, in0, in1);
  multiply(model.project_in, s, input, ld_in, B, stream, ld);
  for (int b = 0; b < B && model.positions.N; ++b) {
    ops.load(model.positions.type, model.positions.row(int(position[b]) + model.position_offset), output, width);
    ops.add(stream + b * ld + s.row0, output + s.row0, s.row1 - s.row0);
  }
}

// Prefetch the first lines of the matrix: they arrive while its input is prepared. No more than a core keeps in
// flight, or the preparation would wait for them.
void Decoder::Work::prefetch_rows(const Matrix &m, const Share &s) {
  auto [at, end] = m.bytes(s.row0, s.row1);
  end = std::min(end, at + 32 * 64);
  for (; at < end; at += 64) __builtin_prefetch(at);
}

void Decoder::Work::norm(const Norm &norm) {
  for (int b = in0; b < in1; ++b)
    if (norm)
      norm_row(ops, norm, stream + b * ld, width, input + b * ld_in);
    else
      std::copy_n(stream + b * ld, width, input + b * ld_in);
}

// Encode this thread's rows of x as the integers that the matrices take; afterwards all rows are ready.
void Decoder::Work::encode(std::initializer_list<const Matrix *> group, const float *x, size_t ldx, int begin,
                           int end) {
  for (auto m = group.begin(); m != group.end(); ++m) {
    const int kind = (*m)->kind;
    if (kind < 0 || std::any_of(group.begin(), m, [&](const Matrix *o) { return o->kind == kind; })) continue;
    encode_rows(d.encoded_[kind][alone ? t : 0], *(*m)->coded, x, ldx, begin, end);
  }
  if (!alone) wait();
  if (d.timing_ && t == 0) d.times_.prepared += seconds_since(last);
}

// Outputs [s.row0, s.row1) of M rows: of x, or of what it was encoded as.
void Decoder::Work::multiply(const Matrix &m, const Share &s, const Activations *encoded, const float *x, size_t ldx,
                             int M, float *y, size_t ldy) {
  const auto [row0, row1] = s;
  if (row0 >= row1) return;
  if (m.coded)
    matmul_rows(*m.coded, *encoded, y, ldy, row0, row1);
  else
    ops.dense(m.dense, x, ldx, M, y, ldy, row0, row1);
  if (m.bias)
    for (int b = 0; b < M; ++b) ops.add(y + b * ldy + row0, m.bias + row0, row1 - row0);
}

// The residual stream += what attention or feed-forward returned, or the norm of that where the model has one there.
void Decoder::Work::add_to_stream(const LayerWeights &l, const Norm &post, const Norm &after, const Share &s) {
  if (!post) {
    add_rows(output, ld_in, l.residual_scale, s);
  } else {
    wait();
    for (int b = in0; b < in1; ++b) {  // alone, every thread norms the row for itself and adds its share
      norm_row(ops, post, branch + b * ld, width, output);
      const int row0 = alone ? s.row0 : 0, row1 = alone ? s.row1 : width;
      if (l.residual_scale == 1)
        ops.add(stream + b * ld + row0, output + row0, row1 - row0);
      else
        ops.add_scaled(stream + b * ld + row0, output + row0, l.residual_scale, row1 - row0);
    }
  }
  if (!after) return;
  wait();
  for (int b = part(B, t, n); b < part(B, t + 1, n); ++b) norm_row(ops, after, stream + b * ld, width, stream + b * ld);
}

void Decoder::Work::add_rows(const float *y, size_t pitch, float factor, const Share &s) {
  for (int b = 0; b < B; ++b) {
    float *const to = stream + b * ld + s.row0;
    if (factor == 1)
      ops.add(to, y + b * pitch + s.row0, s.row1 - s.row0);
    else
      ops.add_scaled(to, y + b * pitch + s.row0, factor, s.row1 - s.row0);
  }
}

// Logits of the tokens that are wanted, side by side from the first row of the input on.
void Decoder::Work::finish() {
  const int V = model.head.N, W = in.wanted, first = alone ? 0 : part(W, t, n), last = alone ? 1 : part(W, t + 1, n);
  const Share &s = share_outside(0);
  prefetch_rows(model.head, s);
  for (int i = first; i < last; ++i) {
    const float *x = stream + in.want[i] * ld;
    if (model.norm)
      norm_row(ops, model.norm, x, width, input + i * ld_in);
    else
      std::copy_n(x, width, input + i * ld_in);
  }
  for (const Matrix *m : {&model.head, &model.project_out})
    if (!alone && t == 0 && m->kind >= 0) d.encoded_[m->kind][0].M = W;  // no thread reads it at this point
  if (model.project_out.N) project_out(W, first, last);
  encode({&model.head}, input, ld_in, first, last);
  multiply(model.head, s, input, ld_in, W, logits, V);
  for (int i = 0; i < W; ++i) finish_logits(ops, model, logits + size_t(i) * V + s.row0, s.row1 - s.row0);
  sync(Head);
}

// What the head reads in place of what is normed in `input`.
void Decoder::Work::project_out(int rows, int first, int last) {
  encode({&model.project_out}, input, ld_in, first, last);
  multiply(model.project_out, share_outside(2), input, ld_in, rows, branch, ld_in);
  wait();
  for (int i = first; i < last; ++i) std::copy_n(branch + i * ld_in, model.words(), input + i * ld_in);
}

void Decoder::Tokens::prepare() {
  together = false, last = 0;
  for (int b = 0; b < count; ++b) {
    upto[b] = position[b];
    last = std::max(last, position[b]);
    for (int i = 0; i < count; ++i)
      if (i != b && row[i] == row[b]) together = true, upto[b] = std::max(upto[b], position[i]);
  }
}

void Decoder::step(const Cache &cache, const Tokens &in, float *logits) {
  std::lock_guard lock(mutex_);
  for (bool done = false; !done;) {
    const int threads = Pool::get().threads();
    arrange(threads, in.count, int(in.last) / kRun + 1);
    try {
      Pool::get().run_team([&](int t, int n) {
        if (n != threads) return;  // the thread count changed since: arrange again
        try {
          Work{*this, cache, in, t, n, logits}.run();
        } catch (...) {
          barrier_.abandon(t, n);
          throw;
        }
        if (t == 0) done = true;
      });
    } catch (...) {
      barrier_.reset(threads);
      throw;
    }
  }
}

}  // namespace crelle::cpu
