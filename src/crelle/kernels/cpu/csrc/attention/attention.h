// Up to kHeads query heads over a run of cached keys and values that they share, in f32 whatever the cache holds.
// A head has the same bits alone and beside others.
//
// Scores of 16 keys are summed side by side, lane by lane, and the 16 vectors folded into one at the end: a fold per
// key would cost more than its products. The run is short (decoder.h splits a sequence into runs of kRun), so the
// scores stay in L1 and the softmax needs no second look at the keys. Parts of a sequence are put together by
// `combine`. The values are prefetched while the keys are looked at.
//
// Included inside a namespace of the including file, after simd.h.

// The sum of a vector's lanes, that of sum_of: halves, quarters, pairs.
CRELLE_INLINE float sum_of_parts(const Part (&sums)[kParts]) {
  Vec sum;
  __builtin_memcpy(&sum, sums, sizeof sum);
  return sum_of(sum);
}

template <class T>
CRELLE_INLINE float score(const float *q, const T *k, int D) {
  Part sums[kParts] = {};
  int j = 0;
  for (; j + kLanes <= D; j += kLanes)
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) sums[p] += load_part(q + j + p * kPartLanes) * load_part(k + j + p * kPartLanes);
  if (j < D) {
    T last[kLanes] = {};
    __builtin_memcpy(last, k + j, (D - j) * sizeof(T));
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) sums[p] += load_part(q + j + p * kPartLanes) * load_part(last + p * kPartLanes);
  }
  return sum_of_parts(sums);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// The scores of eight keys for H heads, D a multiple of 16: the bits of `score`. Two parts of a vector for each of as
// many keys as have registers; a value is widened once for all heads.
template <class T, int H>
CRELLE_INLINE void scores_of_8(const float *q, size_t ldq, const T *k, int D, float *out, size_t ld) {
  constexpr int kKeys = H == 1 ? 4 : 2;
  Part all[H][8];
#pragma GCC unroll 4
  for (int i0 = 0; i0 < 8; i0 += kKeys) {
    Part low[H][kKeys] = {}, high[H][kKeys] = {};
    for (int j = 0; j < D; j += kLanes)
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) {
        const T *const at = k + size_t(i0 + i) * D + j;
        const Part a = load_part(at), b = load_part(at + kPartLanes);
#pragma GCC unroll 3
        for (int h = 0; h < H; ++h) {
          low[h][i] += load_part(q + h * ldq + j) * a;
          high[h][i] += load_part(q + h * ldq + j + kPartLanes) * b;
        }
      }
#pragma GCC unroll 3
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) all[h][i0 + i] = low[h][i] + high[h][i];
  }
#pragma GCC unroll 3
  for (int h = 0; h < H; ++h) {
    Part a[4], b[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // keys i and i + 4: halves
      const Part x = all[h][i], y = all[h][i + 4];
      a[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11) +
             __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {  // and i + 2: quarters
      const Part x = a[i], y = a[i + 2];
      b[i] = __builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13) +
             __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    const Part c = __builtin_shufflevector(b[0], b[1], 0, 8, 2, 10, 4, 12, 6, 14) +
                   __builtin_shufflevector(b[0], b[1], 1, 9, 3, 11, 5, 13, 7, 15);
    // Lanes: keys 0, 1, 2, 3, 4 ...
    store_part(out + h * ld, c);
  }
}
#endif

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
#if defined(__AVX2__) && !defined(__AVX512F__)
    if (D % kLanes == 0) {
      scores_of_8<T, H>(q, ldq, k, D, out, ld);
      return scores_of_8<T, H>(q, ldq, k + size_t(8) * D, D, out + 8, ld);
    }
#endif
    for (int h = 0; h < H; ++h)
      for (int i = 0; i < 16; ++i) out[h * ld + i] = score(q + h * ldq, k + size_t(i) * D, D);
  }
}

// Add weight[i] * v[i] for W parts of vectors of the head from channel `first` on: even and odd keys apart, to have
// enough chains. Not whole: the last channels, in one part.
template <class T, int H, int W, bool Whole, class Rows>
CRELLE_INLINE void add_values(const Rows &v, const T *own, const float *weight, size_t ldw, int count, int D, int first,
                              float *out, size_t ld) {
  Part sums[H][2][W] = {};
  const auto add = [&](const T *row, int e, int i) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) {
      const int at = first + j * kPartLanes;
      Part values;
      if constexpr (Whole) {
        values = load_part(row + at);
      } else {
        T some[kPartLanes] = {};
        __builtin_memcpy(some, row + at, (D - at) * sizeof(T));
        values = load_part(some);
      }
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
      const int at = first + j * kPartLanes;
      const Part sum = sums[h][0][j] + sums[h][1][j];
      if constexpr (Whole)
        store_part(out + h * ld + at, sum);
      else
        __builtin_memcpy(out + h * ld + at, &sum, (D - at) * sizeof(float));
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

// Whether heads share what is widened: their sums need the registers.
#if defined(__AVX2__)
constexpr bool kHeadsTogether = true;
#else
constexpr bool kHeadsTogether = kRegisters >= 32;
#endif
// Parts of the values whose sums fit the registers: for even and odd keys.
template <int H>
constexpr int kAddedParts = kRegisters >= 32 ? 4
                            : H == 1         ? 4
                                             : 2;

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

  constexpr int W = kAddedParts<H>;
  const auto add = [&]<int n, bool Whole>(int at) __attribute__((always_inline)) {
    add_values<T, H, n, Whole>(v, v_own, a.scores, ld, a.count, a.D, at, out, out_apart);
  };
  int at = 0;
  for (; at + W * kPartLanes <= a.D; at += W * kPartLanes) add.template operator()<W, true>(at);
  for (; at + kPartLanes <= a.D; at += kPartLanes) add.template operator()<1, true>(at);
  if (at < a.D) add.template operator()<1, false>(at);
}

template <class T>
void attend_heads(const Attend &a, AttentionPartial *parts, size_t parts_apart, float *out, size_t out_apart) {
  if (kHeadsTogether && a.heads == 3) return attend_typed<T, 3>(a, parts, parts_apart, out, out_apart);
  if (kHeadsTogether && a.heads == 2) return attend_typed<T, 2>(a, parts, parts_apart, out, out_apart);
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
