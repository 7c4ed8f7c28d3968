// Up to kHeads query heads over a run of cached keys and values that they share, in f32 whatever the cache holds.
// A head has the same bits alone and beside others.
//
// Scores of 16 keys are summed side by side, lane by lane, and the 16 vectors folded into one at the end: a fold per
// key would cost more than its products. The run is short (decoder.h splits a sequence into runs of kRun), so the
// scores stay in L1 and the softmax needs no second look at the keys. Parts of a sequence are put together by
// `combine`. The values are prefetched while the keys are looked at.
//
// Included inside a namespace of the including file, after simd.h.

// Vector j of a row of D values; the last one may be a part.
template <class T>
CRELLE_INLINE Vec piece(const T *row, int j, int D) {
  const int left = D - j * kLanes;
  return left >= kLanes ? load(row + j * kLanes) : load_first(row + j * kLanes, left);
}

template <class T>
CRELLE_INLINE float score(const float *q, const T *k, int D) {
  Vec sum = {};
  for (int j = 0; j * kLanes < D; ++j) sum += load(q + j * kLanes) * piece(k, j, D);
  return sum_of(sum);
}

// Scores of 16 keys for H heads; q [H][ldq], out [H][ld].
template <class T, int H>
CRELLE_INLINE void scores_of_16(const float *q, size_t ldq, const T *k, int D, float *out, size_t ld) {
  if constexpr (H == 1 && kRegisters >= 32) {
    Vec sums[16] = {};
    int j = 0;
    for (; (j + 1) * kLanes <= D; ++j) {
      const Vec v = load(q + j * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) sums[i] += v * load(k + size_t(i) * D + j * kLanes);
    }
    if (j * kLanes < D) {
      const Vec v = load(q + j * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) sums[i] += v * load_first(k + size_t(i) * D + j * kLanes, D - j * kLanes);
    }
    store(out, sums_of_16(sums));
  } else if constexpr (kRegisters >= 32) {
    for (int half = 0; half < 16; half += 8) {
      Vec sums[H][8] = {};
      const T *row = k + size_t(half) * D;
      const auto step = [&](int j, auto &&take) __attribute__((always_inline)) {
        Vec v[H];
#pragma GCC unroll 3
        for (int h = 0; h < H; ++h) v[h] = load(q + h * ldq + j * kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
          const Vec values = take(row + size_t(i) * D + j * kLanes);
#pragma GCC unroll 3
          for (int h = 0; h < H; ++h) sums[h][i] += v[h] * values;
        }
      };
      int j = 0;
      for (; (j + 1) * kLanes <= D; ++j) step(j, [](const T *p) __attribute__((always_inline)) { return load(p); });
      if (j * kLanes < D)
        step(j, [left = D - j * kLanes](const T *p) __attribute__((always_inline)) { return load_first(p, left); });
#pragma GCC unroll 3
      for (int h = 0; h < H; ++h) store_first(out + h * ld + half, sums_of_8(sums[h]), 8);
    }
  } else {
    for (int h = 0; h < H; ++h)
      for (int i = 0; i < 16; ++i) out[h * ld + i] = score(q + h * ldq, k + size_t(i) * D, D);
  }
}

// Add weight[i] * v[i] for W vectors of the head from vector j0 on: even and odd keys apart, to have enough chains.
template <class T, int H, int W, bool Whole, class Rows>
CRELLE_INLINE void add_values(const Rows &v, const T *own, const float *weight, size_t ldw, int count, int D, int j0,
                              float *out, size_t ld) {
  Vec sums[H][2][W] = {};
  const auto add = [&](const T *row, int e, int i) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) {
      const int at = (j0 + j) * kLanes;
      const Vec values = Whole ? load(row + at) : load_first(row + at, D - at);
#pragma GCC unroll 3
      for (int h = 0; h < H; ++h) sums[h][e][j] += values * weight[h * ldw + i];
    }
  };
  for (int from = 0; from < count; from += 16) {
    const T *at = v(from);
    const int to = count - from < 16 ? count : from + 16;
    int i = from;
    for (; i + 2 <= to; i += 2, at += 2 * D) {
      add(at, 0, i);
      add(at + D, 1, i + 1);
    }
    if (i < to) add(at, 0, i);
  }
  if (own) add(own, 1, count);
#pragma GCC unroll 3
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) {
      float *to = out + h * ld + (j0 + j) * kLanes;
      const Vec sum = sums[h][0][j] + sums[h][1][j];
      if constexpr (Whole)
        store(to, sum);
      else
        store_first(to, sum, D - (j0 + j) * kLanes);
    }
}

// Scores to weights; returns the greatest score and the sum of the weights, which is NaN where a score is not finite:
// a key that is infinite would otherwise have the weight 0 and be forgotten. Not inlined: beside the loops over keys
// and values it cost 8% of attention on NEON.
__attribute__((noinline)) inline AttentionPartial weigh(float *scores, int count) {
  int wrong = 0;
  for (int i = 0; i < count; ++i) {
    int bits;
    __builtin_memcpy(&bits, scores + i, 4);
    wrong |= (bits & 0x7f800000) == 0x7f800000;
  }
  for (int i = count; i % kLanes; ++i) scores[i] = -__builtin_inff();
  Vec tops = all(-__builtin_inff()), total = {};
  for (int i = 0; i < count; i += kLanes) tops = larger(load(scores + i), tops);
  const float top = top_of(tops);
  for (int i = 0; i < count; i += kLanes) {
    const Vec s = load(scores + i) - top, e = s < -87.0f ? Vec{} : exp_of(s);
    store(scores + i, e);
    total += e;
  }
  return {top, wrong ? __builtin_nanf("") : sum_of(total)};
}

template <class T, int H>
void attend_typed(const Attend &a, AttentionPartial *parts, size_t parts_apart, float *out, size_t out_apart) {
  const auto row = [&](const uint8_t *in_a_row, const uint8_t *const *apart, int i) __attribute__((always_inline)) {
    if (a.k16) return reinterpret_cast<const T *>(apart[i / 16]) + size_t(i % 16) * a.D;
    return reinterpret_cast<const T *>(in_a_row) + size_t(i) * a.D;
  };
  const auto k = [&](int i) __attribute__((always_inline)) { return row(a.k, a.k16, i); };
  const auto v = [&](int i) __attribute__((always_inline)) { return row(a.v, a.v16, i); };
  const T *k_own = reinterpret_cast<const T *>(a.k_own), *v_own = reinterpret_cast<const T *>(a.v_own);
  const size_t ldq = (a.D + kLanes - 1) / kLanes * kLanes, ld = (a.count + kLanes) / kLanes * kLanes;
  int i = 0;
  for (; i + 16 <= a.count; i += 16) {
    const auto *values = reinterpret_cast<const uint8_t *>(v(i));
    for (size_t at = 0; at < 16 * a.D * sizeof(T); at += 64) __builtin_prefetch(values + at);
    scores_of_16<T, H>(a.q, ldq, k(i), a.D, a.scores + i, ld);
  }
  for (; i < a.count; ++i)
    for (int h = 0; h < H; ++h) a.scores[h * ld + i] = score(a.q + h * ldq, k(i), a.D);
  for (int h = 0; h < H && k_own; ++h) a.scores[h * ld + a.count] = score(a.q + h * ldq, k_own, a.D);
  const int seen = a.count + (k_own != nullptr);
  for (int h = 0; h < H && a.softcap > 0; ++h) cap(a.scores + h * ld, a.softcap, seen);
  for (int h = 0; h < H; ++h) parts[h * parts_apart] = weigh(a.scores + h * ld, seen);

  constexpr int W = kRegisters >= 32 ? 4 : 1;
  const auto add = [&]<int n, bool Whole>(int j) __attribute__((always_inline)) {
    add_values<T, H, n, Whole>(v, v_own, a.scores, ld, a.count, a.D, j, out, out_apart);
  };
  int j = 0;
  for (; (j + W) * kLanes <= a.D; j += W) add.template operator()<W, true>(j);
  for (; (j + 1) * kLanes <= a.D; ++j) add.template operator()<1, true>(j);
  if (j * kLanes < a.D) add.template operator()<1, false>(j);
}

template <class T>
void attend_heads(const Attend &a, AttentionPartial *parts, size_t parts_apart, float *out, size_t out_apart) {
  if (kRegisters >= 32 && a.heads == 3) return attend_typed<T, 3>(a, parts, parts_apart, out, out_apart);
  if (kRegisters >= 32 && a.heads == 2) return attend_typed<T, 2>(a, parts, parts_apart, out, out_apart);
  Attend one = a;
  for (int h = 0; h < a.heads; ++h, one.q += (a.D + kLanes - 1) / kLanes * kLanes)
    attend_typed<T, 1>(one, parts + h * parts_apart, parts_apart, out + h * out_apart, out_apart);
}

inline void attend(const Attend &a, AttentionPartial *parts, size_t parts_apart, float *out, size_t out_apart) {
  (a.type == DType::F32   ? attend_heads<float>
   : a.type == DType::F16 ? attend_heads<Half>
                          : attend_heads<Bfloat>)(a, parts, parts_apart, out, out_apart);
}

inline void combine(const AttentionPartial *parts, const float *sums, size_t stride, int count, int D,
                    const float *sink, float *out) {
  float top = parts[0].top, total = 0;
  for (int c = 1; c < count; ++c) top = parts[c].top > top ? parts[c].top : top;
  if (sink) {
    top = *sink > top ? *sink : top;
    total = exp_of(all(*sink - top))[0];
  }
  for (int d = 0; d < D; ++d) out[d] = 0;
  for (int c = 0; c < count; ++c) {
    const float factor = count == 1 && !sink ? 1.0f : exp_of(all(parts[c].top - top))[0];
    total += factor * parts[c].sum;
    for (int d = 0; d < D; ++d) out[d] += factor * sums[c * stride + d];
  }
  const float inverse = 1.0f / total;
  for (int d = 0; d < D; ++d) out[d] *= inverse;
}
