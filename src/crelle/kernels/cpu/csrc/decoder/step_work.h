// What one thread of a decode step works with: decoder_step.cpp walks through the layers, step_attention.cpp and
// step_experts.cpp are two of their parts.
#pragma once

#include <algorithm>
#include <chrono>
#include <initializer_list>
#include <utility>

#include "decoder/decoder.h"

namespace crelle::cpu {

struct Decoder::Work {
  Decoder &d;
  const Cache &cache;
  const Tokens &in;
  const int t, n;
  float *logits;

  const int64_t *const token = in.token, *const position = in.position, *const row = in.row;
  const int B = in.count;

  const Model &model = d.model_;
  const Ops &ops = *d.ops_;
  const int width = model.width, H = model.heads, Hkv = model.kv_heads, D = model.head_size;
  const size_t ld = padded(width), ld_qkv = padded(size_t(H + 2 * Hkv) * D);
  const size_t ld_in = padded(std::max({width, H * D, model.words()}));
  const size_t ld_angles = padded(model.angles());
  float *const stream = floats_of(d.stream_), *const qkv = floats_of(d.qkv_), *const branch = floats_of(d.branch_);
  // With one row every thread has an input of its own; more rows are shared and lie in the first thread's.
  const bool alone = B == 1;
  float *const own = floats_of(d.scratch_) + t * d.scratch_floats_;
  float *const input = alone ? own : floats_of(d.scratch_);
  float *const output = own + B * ld_in, *const head_scratch = output + B * ld_in;
  const int in0 = alone ? 0 : part(B, t, n), in1 = alone ? 1 : part(B, t + 1, n);
  float *const run_k = head_scratch + (kHeads + 3) * padded(D) + kHeads * padded(kRun + 1);
  float *const run_v = run_k + padded(size_t(kRun) * D);
  int unpacked[4] = {-1, -1, -1, -1};  // which (layer, row, head, first key) lies there
  // Whether keys and values of all tokens are stored, and queries made ready, before attention begins. Where some are
  // of one sequence it must be so; with pages and several sequences it is cheaper than to do it again for every head.
  const bool ahead = in.together || (!alone && cache.paged());
  using Clock = std::chrono::steady_clock;
  Clock::time_point last{};

  void run();

  // decoder_step.cpp
  void embed();
  void embed_row(int b, float *x) const;
  void project_in();
  void attention_layer(const LayerWeights &l, int layer, const std::vector<Share> *share);
  void mlp_layer(const LayerWeights &l, const std::vector<Share> *share);
  void finish();
  void project_out(int rows, int first, int last);
  const Share &share_outside(int i) const { return d.shares_[model.layers.size() * kMatrices + i][t]; }
  void sync(Phase phase);
  void wait() { d.barrier_.arrive_and_wait(t, n); }
  static double seconds_since(Clock::time_point then) {
    return std::chrono::duration<double>(Clock::now() - then).count();
  }
  static void prefetch_rows(const Matrix &m, const Share &s);
  void norm(const Norm &norm);
  void encode(std::initializer_list<const Matrix *> group, const float *x, size_t ldx, int begin, int end);
  const Activations *encoded(const Matrix &m) const {
    return m.kind < 0 ? nullptr : &d.encoded_[m.kind][alone ? t : 0];
  }
  void multiply(const Matrix &m, const Share &s, const Activations *encoded, const float *x, size_t ldx, int M,
                float *y, size_t ldy);
  void multiply(const Matrix &m, const Share &s, const float *x, size_t ldx, int M, float *y, size_t ldy) {
    multiply(m, s, encoded(m), x, ldx, M, y, ldy);
  }
  // Where a thread leaves its share of what attention or feed-forward returns: norms need all of it.
  struct Rows {
    float *data;
    size_t pitch;
  };
  Rows attention_output(const LayerWeights &l) const {
    return l.post_attention_norm || l.parallel ? Rows{branch, ld} : Rows{output, ld_in};
  }
  Rows mlp_output(const LayerWeights &l) const { return l.post_mlp_norm ? Rows{branch, ld} : Rows{output, ld_in}; }
  void add_to_stream(const LayerWeights &l, const Norm &post, const Norm &after, const Share &s);
  void add_rows(const float *y, size_t pitch, float factor, const Share &s);
  void feed_forward(const LayerWeights &l, const std::vector<Share> *share);

  // step_attention.cpp
  int first_key(const LayerWeights &l, int b) const;
  void norm_qk(const LayerWeights &l);
  void attention(const LayerWeights &l, int layer);
  PagedHead paged(int layer, int b, int kv) const;
  void prefetch(const LayerWeights &l, int layer, int b, int kv, int run);
  void append(const LayerWeights &l, int layer);
  void query(const LayerWeights &l, int layer, int b, const float *from, float *out);
  void attend(const LayerWeights &l, int layer, int b, int kv, int head, int heads, int from, int to, int run);
  void attend(const Attend &a, int b, int head, int run);
  void place(const LayerWeights &l, int b, const float *from, const Norm &norm, float *out);
  void attend_pages(const LayerWeights &l, int layer, int b, int kv, int head, int heads, int from, int to, int run);
  void combine_heads(const LayerWeights &l, int layer);

  // step_experts.cpp
  void experts(const LayerWeights &l, const std::vector<Share> *share);
  void route(const LayerWeights &l, const Share &s);
  void encode_groups(const LayerWeights &l, const float *x, size_t ldx, bool down);
  const Activations *encode_own(const Matrix &m, const Weight *&now, const float *x);
  void gate_and_up(const LayerWeights &l, size_t inner);
  void down_and_sum(const LayerWeights &l, size_t inner, const Share &s);
};

}  // namespace crelle::cpu
