// One step of a decoder: what each thread does between the barriers.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "decoder/decoder.h"
#include "attention/hadamard.h"
#include "planes/matmul.h"

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
  const size_t ld = padded(width), ld_qkv = padded(size_t(H + 2 * Hkv) * D), ld_in = padded(std::max(width, H *D));
  const size_t ld_angles = padded(model.angles());
  float *const stream = floats_of(d.stream_), *const qkv = floats_of(d.qkv_), *const branch = floats_of(d.branch_);
  // With one row every thread has an input of its own; more rows are shared and lie in the first thread's.
  const bool alone = B == 1;
  float *const own = floats_of(d.scratch_) + t * d.scratch_floats_;
  float *const input = alone ? own : floats_of(d.scratch_);
  float *const output = own + B * ld_in, *const head_scratch = output + B * ld_in;
  const int in0 = alone ? 0 : part(B, t, n), in1 = alone ? 1 : part(B, t + 1, n);
  float *const run_k = head_scratch + (kHeads + 3) * padded(D) + kHeads * padded(kRun + 1), *const run_v =
                                                                                                run_k +
                                                                                                padded(size_t(kRun) *
                                                                                                       D);
  int unpacked[4] = {-1, -1, -1, -1};  // which (layer, row, head, first key) lies there
  // Whether keys and values of all tokens are stored, and queries made ready, before attention begins. Where some are
  // of one sequence it must be so; with pages and several sequences it is cheaper than to do it again for every head.
  const bool ahead = in.together || (!alone && cache.paged());
  using Clock = std::chrono::steady_clock;
  Clock::time_point last{};

  void run() {
    if (d.timing_) last = Clock::now();
    embed();
    sync(Embed);
    for (size_t i = 0; i < model.layers.size(); ++i) {
      const LayerWeights &l = model.layers[i];
      const std::vector<Share> *share = &d.shares_[i * kMatrices];
      prefetch_rows(l.q, share[0][t]);
      norm(l.norm_attention);
      encode({&l.q, &l.k, &l.v}, input, ld_in, in0, in1);
      float *q = qkv, *k = q + H * D, *v = k + Hkv * D;
      multiply(l.q, share[0], input, ld_in, B, q, ld_qkv);
      multiply(l.k, share[1], input, ld_in, B, k, ld_qkv);
      multiply(l.v, share[2], input, ld_in, B, v, ld_qkv);
      sync(Qkv);
      if (ahead) {
        append(l, int(i));
        d.barrier_.arrive_and_wait(t, n);
      }
      attention(l, int(i));
      sync(Attention);
      prefetch_rows(l.o, share[3][t]);
      combine_heads(l, int(i));
      encode({&l.o}, input, ld_in, in0, in1);
      add_to_stream(l.o, share[3], l.post_attention_norm, input, ld_in);
      sync(Output);
      prefetch_rows(l.gate, share[4][t]);
      norm(l.norm_mlp);
      encode({&l.gate, &l.up}, input, ld_in, in0, in1);
      feed_forward(l, share);
      sync(GateUp);
      prefetch_rows(l.down, share[6][t]);
      const size_t inner = padded(l.gate.N);
      encode({&l.down}, floats_of(d.hidden_), inner, in0, in1);
      add_to_stream(l.down, share[6], l.post_mlp_norm, floats_of(d.hidden_), inner);
      sync(Down);
    }
    if (in.wanted > 0) finish();
  }

  void sync(Phase phase) {
    if (!d.timing_ || t > 0) return d.barrier_.arrive_and_wait(t, n);
    const auto here = Clock::now();
    d.barrier_.arrive_and_wait(t, n);
    d.times_.waited += seconds_since(here);
    d.times_.phase[phase] += seconds_since(last);
    last = Clock::now();
  }

  static double seconds_since(Clock::time_point then) {
    return std::chrono::duration<double>(Clock::now() - then).count();
  }

  void embed() {
    for (int b = part(B, t, n); b < part(B, t + 1, n); ++b) {
      float *x = stream + b * ld;
      if (model.embedding.coded)
        dequantize_row(*model.embedding.coded, int(token[b]), x);
      else
        ops.load(model.embedding.dense.type, model.embedding.dense.row(int(token[b])), x, width);
      if (model.embedding_scale != 1.0f) ops.scale(x, model.embedding_scale, width);
      if (model.positions.N) {
        ops.load(model.positions.type, model.positions.row(int(position[b]) + model.position_offset), output, width);
        ops.add(x, output, width);
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

  // Prefetch the first lines of the matrix: they arrive while its input is prepared. No more than a core keeps in
  // flight, or the preparation would wait behind them.
  static void prefetch_rows(const Matrix &m, const Share &s) {
    auto [at, end] = m.bytes(s.row0, s.row1);
    end = std::min(end, at + 32 * 64);
    for (; at < end; at += 64) __builtin_prefetch(at);
  }

  void norm(const Norm &norm) {
    for (int b = in0; b < in1; ++b) norm_row(ops, norm, stream + b * ld, width, input + b * ld_in);
  }

  // Encode this thread's rows of x as the integers that the matrices take; afterwards all rows are ready.
  void encode(std::initializer_list<const Matrix *> group, const float *x, size_t ldx, int begin, int end) {
    for (auto m = group.begin(); m != group.end(); ++m) {
      const int kind = (*m)->kind;
      if (kind < 0 || std::any_of(group.begin(), m, [&](const Matrix *o) { return o->kind == kind; })) continue;
      encode_rows(d.encoded_[kind][alone ? t : 0], *(*m)->coded, x, ldx, begin, end);
    }
    if (!alone) d.barrier_.arrive_and_wait(t, n);
    if (d.timing_ && t == 0) d.times_.prepared += seconds_since(last);
  }

  void multiply(const Matrix &m, const std::vector<Share> &shares, const float *x, size_t ldx, int M, float *y,
                size_t ldy) {
    const auto [row0, row1] = shares[t];
    if (row0 >= row1) return;
    if (m.coded)
      matmul_rows(*m.coded, d.encoded_[m.kind][alone ? t : 0], y, ldy, row0, row1);
    else
      ops.dense(m.dense, x, ldx, M, y, ldy, row0, row1);
    if (m.bias)
      for (int b = 0; b < M; ++b) ops.add(y + b * ldy + row0, m.bias + row0, row1 - row0);
  }

  // The residual stream += x W^T + bias, or the norm of that where the model has one there.
  void add_to_stream(const Matrix &m, const std::vector<Share> &shares, const Norm &post, const float *x, size_t ldx) {
    const Share &s = shares[t];
    if (!post) {
      multiply(m, shares, x, ldx, B, output, ld_in);
      for (int b = 0; b < B; ++b) ops.add(stream + b * ld + s.row0, output + b * ld_in + s.row0, s.row1 - s.row0);
      return;
    }
    multiply(m, shares, x, ldx, B, branch, ld);
    d.barrier_.arrive_and_wait(t, n);
    for (int b = in0; b < in1; ++b) {  // alone, every thread norms the row for itself and adds its share
      norm_row(ops, post, branch + b * ld, width, output);
      if (alone)
        ops.add(stream + s.row0, output + s.row0, s.row1 - s.row0);
      else
        ops.add(stream + b * ld, output, width);
    }
  }

  // The runs of keys that row b sees: [first, last] in steps of kRun from position 0 on.
  int first_key(const LayerWeights &l, int b) const {
    return l.window && position[b] >= l.window ? int(position[b]) - l.window + 1 : 0;
  }

  // Pieces of work: row of the batch, kv head, run of keys, query head; neighbours read the same keys. Tokens of one
  // sequence that stand side by side take a run one after the other. Each thread takes the pieces whose middle lies in
  // its share of all keys. While the heads of a run look at its keys, those of the next run are prefetched.
  void attention(const LayerWeights &l, int layer) {
    const int G = H / Hkv;
    int64_t total = 0, done = 0;
    constexpr int kFixed = 16;  // what a piece costs besides its keys, in keys
    for (int b = 0; b < B; ++b) {
      const int first = first_key(l, b), last = int(position[b]);
      total += int64_t(H) * (last - first + 1 + kFixed * (last / kRun - first / kRun + 1));
    }
    for (int b0 = 0, b1; b0 < B; b0 = b1) {
      int first_run = first_key(l, b0) / kRun, last_run = int(position[b0]) / kRun;
      for (b1 = b0 + 1; b1 < B && row[b1] == row[b0]; ++b1) {
        first_run = std::min(first_run, first_key(l, b1) / kRun);
        last_run = std::max(last_run, int(position[b1]) / kRun);
      }
      for (int kv = 0; kv < Hkv; ++kv)
        for (int run = first_run; run <= last_run; ++run)
          for (int b = b0; b < b1; ++b) {
            const int first = first_key(l, b), last = int(position[b]);
            const int from = std::max(first, run * kRun), to = std::min(last, run * kRun + kRun - 1);
            if (from > to) continue;
            const int cost = to - from + 1 + kFixed;
            int begin = G, end = 0;  // of the heads, those that are mine
            for (int g = 0; g < G; ++g, done += cost) {
              const int64_t middle = 2 * done + cost;  // twice
              if (middle * n < 2 * total * t || middle * n >= 2 * total * (t + 1)) continue;
              begin = std::min(begin, g), end = g + 1;
            }
            if (begin < end && b == b0 && ahead && cache.paged()) {
              if (run < last_run)
                prefetch(l, layer, b, kv, run + 1);
              else if (kv + 1 < Hkv)
                prefetch(l, layer, b, kv + 1, first_run);
              else if (b1 < B)
                prefetch(l, layer, b1, 0, first_key(l, b1) / kRun);
            }
            for (int g = begin, some; g < end; g += some) {
              some = end - g == 4 ? 2 : std::min(kHeads, end - g);
              attend(l, layer, b, kv, kv * G + g, some, from, to, run - first / kRun);
            }
          }
    }
  }

  PagedHead paged(int layer, int b, int kv) const {
    return {cache, in.pages + size_t(row[b]) * in.width, layer, kv, Hkv, D};
  }

  void prefetch(const LayerWeights &l, int layer, int b, int kv, int run) {
    const PagedHead where = paged(layer, b, kv);
    const int from = std::max(first_key(l, b), run * kRun), to = std::min(int(position[b]), run * kRun + kRun - 1);
    where.prefetch(from, to - from + 1);
  }

  // Store the keys and values of all tokens: where some of them belong to one sequence, the later ones see the earlier.
  // Of pages, also make the queries ready where they lie.
  void append(const LayerWeights &l, int layer) {
    float *key = head_scratch;
    const Cache &c = cache;
    for (int i = part(B * Hkv, t, n); i < part(B * Hkv, t + 1, n); ++i) {
      const int b = i / Hkv, kv = i % Hkv, at = int(position[b]);
      float *row_qkv = qkv + b * ld_qkv;
      const float *value = row_qkv + (H + Hkv + kv) * D;
      place(l, b, row_qkv + (H + kv) * D, l.k_norm, key);
      if (c.paged()) {
        const PagedHead where = paged(layer, b, kv);
        where.write(ops, 0, at, key, true, nullptr);
        where.write(ops, 1, at, value, true, nullptr);
        for (int head = kv * (H / Hkv); head < (kv + 1) * (H / Hkv); ++head)
          query(l, layer, b, row_qkv + head * D, row_qkv + head * D);
      } else {
        const size_t row_bytes = D * size_of(c.type), plane = size_t(c.capacity) * row_bytes;
        uint8_t *k = c.layers[layer] + (size_t(row[b]) * Hkv + kv) * plane + at * row_bytes;
        ops.store(c.type, key, k, D);
        ops.store(c.type, value, k + size_t(c.rows) * Hkv * plane, D);
      }
    }
  }

  // A query as attention takes it.
  void query(const LayerWeights &l, int layer, int b, const float *from, float *out) {
    place(l, b, from, l.q_norm, out);
    if (cache.rotates(layer, 0)) hadamard(out, D, cache.hadamard_block);
    ops.scale(out, l.scale, D);
  }

  // Heads [head, head + heads) over the keys [from, to].
  void attend(const LayerWeights &l, int layer, int b, int kv, int head, int heads, int from, int to, int run) {
    const float *row_qkv = qkv + b * ld_qkv;
    float *q = head_scratch, *key = q + kHeads * padded(D), *new_k = key + padded(D), *new_v = new_k + padded(D);
    for (int h = 0; h < heads; ++h) {
      if (ahead && cache.paged())
        std::copy_n(row_qkv + (head + h) * D, D, q + h * padded(D));
      else
        query(l, layer, b, row_qkv + (head + h) * D, q + h * padded(D));
      std::fill(q + h * padded(D) + D, q + (h + 1) * padded(D), 0.0f);
    }
    if (cache.paged()) return attend_pages(l, layer, b, kv, head, heads, from, to, run);
    const DType type = cache.type;
    const size_t row_bytes = D * size_of(type), plane = size_t(cache.capacity) * row_bytes;
    uint8_t *k = cache.layers[layer] + (size_t(row[b]) * Hkv + kv) * plane;
    uint8_t *v = k + size_t(cache.rows) * Hkv * plane;

    for (int i = 0; i < 16; ++i) __builtin_prefetch(k + from * row_bytes + i * 64);

    Attend a{type,
             D,
             heads,
             q,
             k + from * row_bytes,
             v + from * row_bytes,
             to - from + 1,
             nullptr,
             nullptr,
             new_v + padded(D)};
    if (to == position[b]) {  // every head computes the new key again rather than wait for the one that stores it
      place(l, b, row_qkv + (H + kv) * D, l.k_norm, key);
      uint8_t *own_k = reinterpret_cast<uint8_t *>(new_k), *own_v = reinterpret_cast<uint8_t *>(new_v);
      ops.store(type, key, own_k, D);
      ops.store(type, row_qkv + (H + Hkv + kv) * D, own_v, D);
      a.k_own = own_k, a.v_own = own_v;
      --a.count;
      if (head % (H / Hkv) == 0 && !in.together) {
        std::copy_n(own_k, row_bytes, k + to * row_bytes);
        std::copy_n(own_v, row_bytes, v + to * row_bytes);
      }
    }
    attend(a, b, head, run);
  }

  void attend(const Attend &a, int b, int head, int run) {
    const size_t at = (size_t(b) * H + head) * d.runs_ + run, apart = d.runs_;
    ops.attend(a, reinterpret_cast<AttentionPartial *>(d.parts_.data()) + at, apart,
               floats_of(d.sums_) + at * padded(D), apart * padded(D));
  }

  // A head of q or k: normed and rotated by its position where the model does that.
  void place(const LayerWeights &l, int b, const float *from, const Norm &norm, float *out) {
    if (norm)
      norm_row(ops, norm, from, D, out);
    else
      std::copy_n(from, D, out);
    if (l.rope < 0) return;
    const Rope &rope = model.ropes[l.rope];
    const float *cos = floats_of(d.angles_) + b * ld_angles + rope.at;
    ops.rope(out, cos, cos + rope.channels() / 2, rope.channels());
  }

  // The same over pages: a run of codes becomes floats once for all heads that read it; values are read as they lie.
  void attend_pages(const LayerWeights &l, int layer, int b, int kv, int head, int heads, int from, int to, int run) {
    const Cache &c = cache;
    const PagedHead where = paged(layer, b, kv);
    const float *row_qkv = qkv + b * ld_qkv;
    float *q = head_scratch, *key = q + kHeads * padded(D), *own_k = key + padded(D), *own_v = own_k + padded(D);
    const bool newest = to == position[b];
    const int count = to - from + 1 - newest, now[4] = {layer, int(row[b]), kv, from};
    const bool as_they_lie = !where.own().coded() && c.page % 16 == 0 && from % 16 == 0;
    const uint8_t *k16[kRun / 16], *v16[kRun / 16];
    for (int i = 0; as_they_lie && i < count; i += 16)
      k16[i / 16] = where.at(0, from + i), v16[i / 16] = where.at(1, from + i);
    if (!as_they_lie && !std::equal(now, now + 4, unpacked)) {  // for all tokens of the sequence that read this run
      const int all =
          in.together ? int(std::min<int64_t>(from / kRun * kRun + kRun - 1, in.upto[b])) - from + 1 : count;
      where.read(ops, 0, from, all, run_k);
      where.read(ops, 1, from, all, run_v);
      std::copy_n(now, 4, unpacked);
    }
    Attend a{as_they_lie ? c.type : DType::F32,  D,     heads,   q,       reinterpret_cast<uint8_t *>(run_k),
             reinterpret_cast<uint8_t *>(run_v), count, nullptr, nullptr, own_v + padded(D)};
    if (as_they_lie) a.k16 = k16, a.v16 = v16;
    if (newest) {
      a.k_own = reinterpret_cast<uint8_t *>(own_k), a.v_own = reinterpret_cast<uint8_t *>(own_v);
      if (ahead && as_they_lie) {
        a.k_own = where.at(0, to), a.v_own = where.at(1, to);
      } else if (ahead) {
        where.read(ops, 0, to, 1, own_k);
        where.read(ops, 1, to, 1, own_v);
      } else {  // every head codes the new key again rather than wait for the one that stores it
        const bool keep = head % (H / Hkv) == 0;
        place(l, b, row_qkv + (H + kv) * D, l.k_norm, key);
        where.write(ops, 0, to, key, keep, own_k);
        where.write(ops, 1, to, row_qkv + (H + Hkv + kv) * D, keep, own_v);
        if (as_they_lie) {  // as in the pages around it; what is a value there already stays the same
          ops.store(c.type, own_k, reinterpret_cast<uint8_t *>(own_k), D);
          ops.store(c.type, own_v, reinterpret_cast<uint8_t *>(own_v), D);
        }
      }
    }
    attend(a, b, head, run);
  }

  void combine_heads(const LayerWeights &l, int layer) {
    for (int b = in0; b < in1; ++b) {
      const int runs = int(position[b]) / kRun - first_key(l, b) / kRun + 1;
      for (int h = 0; h < H; ++h) {
        const size_t at = (size_t(b) * H + h) * d.runs_;
        ops.combine(reinterpret_cast<const AttentionPartial *>(d.parts_.data()) + at,
                    floats_of(d.sums_) + at * padded(D), padded(D), runs, D, input + b * ld_in + h * D);
        if (cache.rotates(layer, 1)) hadamard(input + b * ld_in + h * D, D, cache.hadamard_block);
      }
    }
  }

  void feed_forward(const LayerWeights &l, const std::vector<Share> *share) {
    const size_t inner = padded(l.gate.N);
    float *gate = floats_of(d.hidden_), *up = gate + B * inner;
    multiply(l.gate, share[4], input, ld_in, B, gate, inner);
    if (l.gated) multiply(l.up, share[5], input, ld_in, B, up, inner);
    const auto [row0, row1] = share[4][t];
    for (int b = 0; b < B; ++b) {
      const size_t at = b * inner + row0;
      ops.activate(l.activation, gate + at, l.gated ? up + at : nullptr, row1 - row0);
    }
  }

  // Logits of the tokens that are wanted, side by side from the first row of the input on.
  void finish() {
    const int V = model.head.N, W = in.wanted, first = alone ? 0 : part(W, t, n), last = alone ? 1 : part(W, t + 1, n);
    prefetch_rows(model.head, d.shares_.back()[t]);
    for (int i = first; i < last; ++i) {
      const float *x = stream + in.want[i] * ld;
      if (model.norm)
        norm_row(ops, model.norm, x, width, input + i * ld_in);
      else
        std::copy_n(x, width, input + i * ld_in);
    }
    if (!alone && t == 0 && model.head.kind >= 0)
      d.encoded_[model.head.kind][0].M = W;  // no thread reads it at this point
    encode({&model.head}, input, ld_in, first, last);
    multiply(model.head, d.shares_.back(), input, ld_in, W, logits, V);
    sync(Head);
  }
};

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
