// One query head over a run of cached keys and values, in f32 whatever the cache holds.
//
// Scores of 16 keys are summed side by side, lane by lane, and the 16 vectors folded into one at the end: a fold per
// key would cost more than its products. The run is short (decoder.h cuts a sequence into runs of kRun), so the scores
// stay in L1 and the softmax needs no second look at the keys. Parts of a sequence are put together by `combine`.
// The values are asked for while the keys are looked at.
//
// Included inside a namespace of the including file, after lanes.h.

// Vector j of a row of D numbers; the last one may be a part.
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

template <class T>
CRELLE_INLINE void scores_of_16(const float *q, const T *k, int D, float *out) {
  if constexpr (kRegisters >= 32) {
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
  } else {
    for (int i = 0; i < 16; ++i) out[i] = score(q, k + size_t(i) * D, D);
  }
}

// Add weight[i] * v[i] for W vectors of the head from vector j0 on: even and odd keys apart, to have enough chains.
template <class T, int W, bool Whole, class Rows>
CRELLE_INLINE void add_values(const Rows &v, const T *own, const float *weight, int count, int D, int j0, float *out) {
  const auto take = [&](const T *row, int j) {
    return Whole ? load(row + j * kLanes) : load_first(row + j * kLanes, D - j * kLanes);
  };
  Vec sums[2][W] = {};
  int i = 0;
  for (; i + 2 <= count; i += 2) {
    const T *two = v(i);
    for (int e = 0; e < 2; ++e)
      for (int j = 0; j < W; ++j) sums[e][j] += take(two + e * D, j0 + j) * weight[i + e];
  }
  if (i < count)
    for (int j = 0; j < W; ++j) sums[0][j] += take(v(i), j0 + j) * weight[i];
  if (own)
    for (int j = 0; j < W; ++j) sums[1][j] += take(own, j0 + j) * weight[count];
  for (int j = 0; j < W; ++j)
    if constexpr (Whole)
      store(out + (j0 + j) * kLanes, sums[0][j] + sums[1][j]);
    else
      store_first(out + (j0 + j) * kLanes, sums[0][j] + sums[1][j], D - (j0 + j) * kLanes);
}

template <class T, bool Apart>
Attended attend_typed(const Attend &a, float *out) {
  const auto row = [&](const uint8_t *in_a_row, const uint8_t *const *apart, int i) __attribute__((always_inline)) {
    if constexpr (Apart) return reinterpret_cast<const T *>(apart[i / 16]) + size_t(i % 16) * a.D;
    return reinterpret_cast<const T *>(in_a_row) + size_t(i) * a.D;
  };
  const auto k = [&](int i) __attribute__((always_inline)) { return row(a.k, a.k16, i); };
  const auto v = [&](int i) __attribute__((always_inline)) { return row(a.v, a.v16, i); };
  const T *k_own = reinterpret_cast<const T *>(a.k_own), *v_own = reinterpret_cast<const T *>(a.v_own);
  int i = 0;
  for (; i + 16 <= a.count; i += 16) {
    const auto *values = reinterpret_cast<const uint8_t *>(v(i));
    for (size_t at = 0; at < 16 * a.D * sizeof(T); at += 64) __builtin_prefetch(values + at);
    scores_of_16(a.q, k(i), a.D, a.scores + i);
  }
  for (; i < a.count; ++i) a.scores[i] = score(a.q, k(i), a.D);
  if (k_own) a.scores[i++] = score(a.q, k_own, a.D);
  const int all_keys = i;
  for (; i % kLanes; ++i) a.scores[i] = -__builtin_inff();

  Vec tops = all(-__builtin_inff()), total = {};
  for (i = 0; i < all_keys; i += kLanes) tops = larger(load(a.scores + i), tops);
  const float top = top_of(tops);
  for (i = 0; i < all_keys; i += kLanes) {
    const Vec s = load(a.scores + i) - top, e = s < -87.0f ? Vec{} : exp_of(s);
    store(a.scores + i, e);
    total += e;
  }

  constexpr int W = kRegisters >= 32 ? 4 : 1;
  int j = 0;
  for (; (j + W) * kLanes <= a.D; j += W) add_values<T, W, true>(v, v_own, a.scores, a.count, a.D, j, out);
  for (; (j + 1) * kLanes <= a.D; ++j) add_values<T, 1, true>(v, v_own, a.scores, a.count, a.D, j, out);
  if (j * kLanes < a.D) add_values<T, 1, false>(v, v_own, a.scores, a.count, a.D, j, out);
  return {top, sum_of(total)};
}

template <bool Apart>
Attended attend_any(const Attend &a, float *out) {
  if (a.type == Number::F32) return attend_typed<float, Apart>(a, out);
  if (a.type == Number::F16) return attend_typed<Half, Apart>(a, out);
  return attend_typed<Bfloat, Apart>(a, out);
}

inline Attended attend(const Attend &a, float *out) {
  return a.k16 ? attend_any<true>(a, out) : attend_any<false>(a, out);
}

inline void combine(const Attended *parts, const float *sums, size_t stride, int count, int D, float *out) {
  float top = parts[0].top, total = 0;
  for (int c = 1; c < count; ++c) top = parts[c].top > top ? parts[c].top : top;
  for (int d = 0; d < D; ++d) out[d] = 0;
  for (int c = 0; c < count; ++c) {
    const float factor = count == 1 ? 1.0f : exp_of(all(parts[c].top - top))[0];
    total += factor * parts[c].sum;
    for (int d = 0; d < D; ++d) out[d] += factor * sums[c * stride + d];
  }
  const float inverse = 1.0f / total;
  for (int d = 0; d < D; ++d) out[d] *= inverse;
}
