// Attention of a block of queries over all keys that they see, in f32 whatever the cache holds.
//
// Lanes are queries: 16 tokens of one head, as in transposed_ops.h. Scores, softmax and outputs then need no sums
// across lanes, and keys and values are read as they lie, a value at a time for all lanes. Query heads that share keys
// stand side by side. Keys come in runs of kKeys; the softmax is kept up to date from run to run (largest score so far,
// sum, weighted values), so that a run's scores never leave L1.
//
// Included inside a namespace of the including file, after simd.h and small_ops.h.

constexpr float kUnseen = -1e38f;  // the score of a key that is not looked at: its weight is 0, and it is finite
constexpr int kKeys = 64;          // of a run
constexpr int kBeside = kRegisters >= 32 ? 3 : 1;             // vectors of queries at a time
constexpr int kDeep = kRegisters >= 32 ? 8 : kRegisters / 2;  // keys, or channels of a value, at a time

// Vectors of queries that are looked at together, and what is known of them so far.
template <int W>
struct Queries {
  const float *q[W];  // [D][16]
  float *out[W];      // [D][16]
  float *top[W], *total[W];
  int position[W];  // of lane 0
};

// Scores of R keys for W vectors of queries: out [R][W].
template <int R, int W>
CRELLE_INLINE void block_scores(const float *k, const Queries<W> &a, int D, float *out) {
  Part sums[R][W][kParts] = {};
  for (int d = 0; d < D; ++d)
#pragma GCC unroll 3
    for (int w = 0; w < W; ++w)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        const Part v = load_part(a.q[w] + d * kLanes + p * kPartLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r][w][p] += v * k[size_t(r) * D + d];
      }
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w)
      for (int p = 0; p < kParts; ++p) store_part(out + (r * W + w) * kLanes + p * kPartLanes, sums[r][w][p]);
}

// Channels [d, d + R) of the outputs: out = out * factor + sum over keys of weight * value.
template <int R, int W>
CRELLE_INLINE void block_values(const float *v, const float *weights, int keys, int D, const Vec (&factor)[W], int d,
                                const Queries<W> &a) {
  Part sums[R][W][kParts];
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w)
      for (int p = 0; p < kParts; ++p) {
        const Part by = load_part(reinterpret_cast<const float *>(&factor[w]) + p * kPartLanes);
        sums[r][w][p] = load_part(a.out[w] + (d + r) * kLanes + p * kPartLanes) * by;
      }
  for (int i = 0; i < keys; ++i)
#pragma GCC unroll 3
    for (int w = 0; w < W; ++w)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        const Part by = load_part(weights + (i * W + w) * kLanes + p * kPartLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r][w][p] += by * v[size_t(i) * D + d + r];
      }
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w)
      for (int p = 0; p < kParts; ++p) store_part(a.out[w] + (d + r) * kLanes + p * kPartLanes, sums[r][w][p]);
}

// Whether some of 16 queries from `position` on do not see some of these keys; and which of them see one key.
CRELLE_INLINE bool some_unseen(int from, int keys, int position, int window) {
  return from + keys - 1 > position || (window && from <= position + kLanes - 1 - window);
}
CRELLE_INLINE Int seen_by(int key, int position, int window) {
  const Int lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Int here = lane + position, oldest = window ? here - window : Int{} - 1, all_key = Int{} + key;
  return (all_key <= here) & (all_key > oldest);
}

// The same for values of which some are not finite: 0 * NaN is NaN, so that what a query does not see has to be left
// out, where a weight of 0 is enough otherwise.
template <int W>
void block_values_seen(const float *v, const float *weights, int from, int keys, int D, const Vec (&factor)[W],
                       int window, const Queries<W> &a) {
  for (int w = 0; w < W; ++w)
    for (int d = 0; d < D; ++d) {
      Vec sum = load(a.out[w] + d * kLanes) * factor[w];
      for (int i = 0; i < keys; ++i) {
        const Vec value = seen_by(from + i, a.position[w], window) ? all(v[size_t(i) * D + d]) : Vec{};
        sum += load(weights + (i * W + w) * kLanes) * value;  // rounded once, as there
      }
      store(a.out[w] + d * kLanes, sum);
    }
}

inline bool all_finite(const float *v, size_t n) {
  Vec wrong = {};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) wrong += load(v + i) * 0.0f;
  float rest = sum_of(wrong);
  for (; i < n; ++i) rest += v[i] * 0.0f;
  return rest == 0.0f;
}

// Scores of one vector of queries to weights, exp(score - largest so far); returns what earlier weights shrink by. The
// total of a query that sees a score that is not finite is NaN (see weigh).
template <int W>
CRELLE_INLINE Vec block_softmax(float *s, int from, int keys, int position, int window, float *tops, float *totals) {
  if (some_unseen(from, keys, position, window))
    for (int i = 0; i < keys; ++i)
      store(s + i * W * kLanes, seen_by(from + i, position, window) ? load(s + i * W * kLanes) : all(kUnseen));
  const auto weight = [](Part x) __attribute__((always_inline)) { return x < -87.0f ? Part{} : exp_each(x); };
  Vec factors;
  for (int p = 0; p < kParts; ++p) {
    float *const at = s + p * kPartLanes, *const of_total = totals + p * kPartLanes;
    const Part before = load_part(tops + p * kPartLanes);
    Part top = before, total = {};
    for (int i = 0; i < keys; ++i) {
      const Part score = load_part(at + i * W * kLanes);
      top = score > top ? score : top;
      total += score * 0.0f;
    }
    for (int i = 0; i < keys; ++i) {
      const Part e = weight(load_part(at + i * W * kLanes) - top);
      store_part(at + i * W * kLanes, e);
      total += e;
    }
    const Part factor = weight(before - top);
    store_part(tops + p * kPartLanes, top);
    store_part(of_total, load_part(of_total) * factor + total);
    store_part(reinterpret_cast<float *>(&factors) + p * kPartLanes, factor);
  }
  return factors;
}

// Keys and values [from, from + keys).
template <int W>
void block_run(const AttendBlock &b, const Queries<W> &a, const float *k, const float *v, int from, int keys,
               float *scores) {
  const int D = b.D;
  int i = 0;
  for (; i + kDeep <= keys; i += kDeep) block_scores<kDeep, W>(k + size_t(i) * D, a, D, scores + i * W * kLanes);
  for (; i < keys; ++i) block_scores<1, W>(k + size_t(i) * D, a, D, scores + i * W * kLanes);
  if (b.softcap > 0) cap(scores, b.softcap, keys * W * kLanes);
  Vec factor[W];
  for (int w = 0; w < W; ++w)
    factor[w] = block_softmax<W>(scores + w * kLanes, from, keys, a.position[w], b.window, a.top[w], a.total[w]);
  // Positions rise with w, so that those of the first see the least, and a window hides the most from the last.
  if ((some_unseen(from, keys, a.position[0], b.window) || some_unseen(from, keys, a.position[W - 1], b.window)) &&
      !all_finite(v, size_t(keys) * D))
    return block_values_seen<W>(v, scores, from, keys, D, factor, b.window, a);
  int d = 0;
  for (; d + kDeep <= D; d += kDeep) block_values<kDeep, W>(v, scores, keys, D, factor, d, a);
  for (; d < D; ++d) block_values<1, W>(v, scores, keys, D, factor, d, a);
}

inline size_t attend_block_scratch(int heads, int D) {  // in floats
  return 2 * size_t(heads) * kBlockTokens + size_t{kKeys} * kBeside * kLanes + 2 * size_t{kKeys} * D;
}

inline void attend_block(const AttendBlock &b, float *scratch) {
  const int D = b.D, tiles = (b.count + kLanes - 1) / kLanes, vectors = tiles * b.heads;
  float *tops = scratch, *totals = tops + vectors * kLanes, *scores = totals + vectors * kLanes;
  float *wide_k = scores + kKeys * kBeside * kLanes, *wide_v = wide_k + size_t{kKeys} * D;

  const auto at = [&](int i) { return i / b.heads * b.pitch + size_t(i % b.heads) * D * kLanes; };  // of vector i
  for (int i = 0; i < vectors; ++i) {
    store(tops + i * kLanes, all(-1e30f));  // finite: a run that a query does not see changes nothing
    store(totals + i * kLanes, Vec{});
    __builtin_memset(b.out + at(i), 0, D * sizeof(Vec));
  }

  const size_t row = D * size_of(b.type);
  const int end = b.position + b.count, oldest = b.window ? b.position - b.window + 1 : 0;
  for (int from = oldest > 0 ? oldest / kKeys * kKeys : 0; from < end; from += kKeys) {
    const int to = from + kKeys < end ? from + kKeys : end;
    const float *k = reinterpret_cast<const float *>(b.k + from * row);
    const float *v = reinterpret_cast<const float *>(b.v + from * row);
    if (b.read) {
      b.read(b.pages, from, to - from, wide_k, wide_v), k = wide_k, v = wide_v;
    } else if (b.type != DType::F32) {
      load_floats(b.type, b.k + from * row, wide_k, (to - from) * D), k = wide_k;
      load_floats(b.type, b.v + from * row, wide_v, (to - from) * D), v = wide_v;
    }
    const auto look = [&](int i, auto beside) {
      constexpr int W = decltype(beside)::value;
      Queries<W> a;
      for (int w = 0; w < W; ++w) {
        a.q[w] = b.q + at(i + w), a.out[w] = b.out + at(i + w);
        a.top[w] = tops + (i + w) * kLanes, a.total[w] = totals + (i + w) * kLanes;
        a.position[w] = b.position + (i + w) / b.heads * kLanes;
      }
      const int last = a.position[W - 1] + kLanes;  // the first key that none of them sees
      if (from >= last || (b.window && to <= a.position[0] - b.window + 1)) return;
      block_run<W>(b, a, k, v, from, (to < last ? to : last) - from, scores);
    };
    int i = 0;
    for (; i + kBeside <= vectors; i += kBeside) look(i, std::integral_constant<int, kBeside>{});
    for (; i < vectors; ++i) look(i, std::integral_constant<int, 1>{});
  }

  for (int i = 0; i < vectors; ++i) {
    Vec total = load(totals + i * kLanes);
    if (b.sinks) total += exp_of(b.sinks[i % b.heads] - load(tops + i * kLanes));  // e^88 where that is too much
    const Vec inverse = 1.0f / total;
    float *out = b.out + at(i);
    for (int d = 0; d < D * kLanes; d += kLanes) store(out + d, load(out + d) * inverse);
  }
}
