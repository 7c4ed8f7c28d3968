// Attention of a decode step: keys and values of new tokens, and what each query sees of them and of the cache.
#include <algorithm>

#include "attention/hadamard.h"
#include "decoder/step_work.h"

namespace crelle::cpu {

// Queries, and keys, of all heads normed as one vector each.
void Decoder::Work::norm_qk(const LayerWeights &l) {
  for (int i = part(2 * B, t, n); i < part(2 * B, t + 1, n); ++i) {
    float *const q = qkv + i / 2 * ld_qkv, *const k = q + H * D;
    if (i % 2)
      norm_row(ops, l.k_norm, k, Hkv * D, k);
    else
      norm_row(ops, l.q_norm, q, H * D, q);
  }
}

// The runs of keys that row b sees: [first, last] in steps of kRun from position 0 on.
int Decoder::Work::first_key(const LayerWeights &l, int b) const {
  return l.window && position[b] >= l.window ? int(position[b]) - l.window + 1 : 0;
}

// Pieces of work: row of the batch, kv head, run of keys, query head; neighbours read the same keys. Tokens of one
// sequence that stand side by side take a run one after the other. Each thread takes the pieces whose middle lies in
// its share of all keys. While the heads of a run look at its keys, those of the next run are prefetched.
void Decoder::Work::attention(const LayerWeights &l, int layer) {
  const int G = H / Hkv;
  int64_t total = 0, done = 0;
  constexpr int kFixed = 16;  // what a piece costs in addition to its keys, in keys
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

PagedHead Decoder::Work::paged(int layer, int b, int kv) const {
  return {cache, in.pages + size_t(row[b]) * in.width, layer, kv, Hkv, D};
}

void Decoder::Work::prefetch(const LayerWeights &l, int layer, int b, int kv, int run) {
  const PagedHead where = paged(layer, b, kv);
  const int from = std::max(first_key(l, b), run * kRun), to = std::min(int(position[b]), run * kRun + kRun - 1);
  where.prefetch(from, to - from + 1);
}

// Store the keys and values of all tokens: where some of them belong to one sequence, the later ones see the earlier.
// Of pages, also make the queries ready where they lie.
void Decoder::Work::append(const LayerWeights &l, int layer) {
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
void Decoder::Work::query(const LayerWeights &l, int layer, int b, const float *from, float *out) {
  place(l, b, from, l.q_norm, out);
  if (cache.rotates(layer, 0)) hadamard(out, D, cache.hadamard_block);
  ops.scale(out, l.scale, D);
  if (l.rotated_scale != 1) ops.scale(out, l.rotated_scale, model.ropes[l.rope].channels());
}

// Heads [head, head + heads) over the keys [from, to].
void Decoder::Work::attend(const LayerWeights &l, int layer, int b, int kv, int head, int heads, int from, int to,
                           int run) {
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
  a.softcap = l.softcap;
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

void Decoder::Work::attend(const Attend &a, int b, int head, int run) {
  const size_t at = (size_t(b) * H + head) * d.runs_ + run, apart = d.runs_;
  ops.attend(a, reinterpret_cast<AttentionPartial *>(d.parts_.data()) + at, apart, floats_of(d.sums_) + at * padded(D),
             apart * padded(D));
}

// A head of q or k: normed and rotated by its position where the model does that.
void Decoder::Work::place(const LayerWeights &l, int b, const float *from, const Norm &norm, float *out) {
  if (norm && !l.whole_qk_norm)
    norm_row(ops, norm, from, D, out);
  else
    std::copy_n(from, D, out);
  if (l.rope < 0) return;
  const Rope &rope = model.ropes[l.rope];
  const float *cos = floats_of(d.angles_) + b * ld_angles + rope.at;
  ops.rope(out, cos, cos + rope.channels() / 2, rope.channels());
}

// The same over pages: a run of codes becomes floats once for all heads that read it; values are read as they lie.
void Decoder::Work::attend_pages(const LayerWeights &l, int layer, int b, int kv, int head, int heads, int from, int to,
                                 int run) {
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
    const int all = in.together ? int(std::min<int64_t>(from / kRun * kRun + kRun - 1, in.upto[b])) - from + 1 : count;
    where.read(ops, 0, from, all, run_k);
    where.read(ops, 1, from, all, run_v);
    std::copy_n(now, 4, unpacked);
  }
  Attend a{as_they_lie ? c.type : DType::F32,  D,     heads,   q,       reinterpret_cast<uint8_t *>(run_k),
           reinterpret_cast<uint8_t *>(run_v), count, nullptr, nullptr, own_v + padded(D)};
  a.softcap = l.softcap;
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

void Decoder::Work::combine_heads(const LayerWeights &l, int layer) {
  for (int b = in0; b < in1; ++b) {
    const int runs = int(position[b]) / kRun - first_key(l, b) / kRun + 1;
    for (int h = 0; h < H; ++h) {
      const size_t at = (size_t(b) * H + h) * d.runs_;
      ops.combine(reinterpret_cast<const AttentionPartial *>(d.parts_.data()) + at, floats_of(d.sums_) + at * padded(D),
                  padded(D), runs, D, l.sinks ? l.sinks + h : nullptr, input + b * ld_in + h * D);
      if (cache.rotates(layer, 1)) hadamard(input + b * ld_in + h * D, D, cache.hadamard_block);
    }
  }
}

}  // namespace crelle::cpu
