// Products with a matrix that is not quantized, read where it lies (a memory-mapped file, a torch tensor).
//
// Four outputs at a time: four chains of multiply-adds hide the latency, and x is loaded once for all of them. The
// values are widened to f32 in registers; the matrix is read once for up to four rows of x. From eight rows on it is
// three outputs for eight rows: a value is widened once for eight products, and eight sums are folded as one. On Arm it
// is two outputs for three rows from three rows on. A row has the same bits in all cases.
//
// Included inside a namespace of the including file, after simd.h.

template <class T, int R, int M>
CRELLE_INLINE void dense_tile(const T *w, size_t K, const float *x, size_t ldx, float *y, size_t ldy) {
  Part sums[M][R][kParts] = {};
  const auto step = [&](auto &&x_at, auto &&w_at) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      Part v[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) v[m] = load_part(x_at(m) + p * kPartLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Part values = load_part(w_at(r) + p * kPartLanes);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) sums[m][r][p] += values * v[m];
      }
    }
  };
  size_t k = 0;
  for (; k + kLanes <= K; k += kLanes)
    step([&](int m) __attribute__((always_inline)) { return x + m * ldx + k; },
         [&](int r) __attribute__((always_inline)) { return w + r * K + k; });
  if (k < K) {  // zeros behind the end
    float last_x[M][kLanes] = {};
    T last_w[R][kLanes] = {};
    for (int m = 0; m < M; ++m) __builtin_memcpy(last_x[m], x + m * ldx + k, (K - k) * sizeof(float));
    for (int r = 0; r < R; ++r) __builtin_memcpy(last_w[r], w + r * K + k, (K - k) * sizeof(T));
    step([&](int m) __attribute__((always_inline)) { return last_x[m]; },
         [&](int r) __attribute__((always_inline)) { return last_w[r]; });
  }
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) {
      Vec sum;
      __builtin_memcpy(&sum, sums[m][r], sizeof sum);
      y[m * ldy + r] = sum_of(sum);
    }
}

// The sums of eight vectors, each folded as sum_of does it: halves, quarters, pairs, neighbours.
CRELLE_INLINE void sums_of_8(const Vec (&v)[8], float *out, size_t ld) {
  Vec a[4], b[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)  // vectors 2i and 2i + 1 in the halves of one
    a[i] =
        __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
        __builtin_shufflevector(v[2 * i], v[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(a[2 * i], a[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  const Vec c = __builtin_shufflevector(b[0], b[1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
                __builtin_shufflevector(b[0], b[1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  const Vec d = c + __builtin_shufflevector(c, c, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  for (int i = 0; i < 8; ++i) out[i * ld] = d[2 * i];
}

// R outputs for eight rows of x; all sums in registers, so R <= 3. Ahead: prefetch the next R outputs.
template <class T, int R, bool Ahead>
CRELLE_INLINE void dense_eight(const T *w, size_t K, const float *x, size_t ldx, float *y, size_t ldy) {
  Vec sums[R][8] = {};
  size_t k = 0;
  const auto step = [&](auto &&take) __attribute__((always_inline)) {
    Vec values[R];
#pragma GCC unroll 3
    for (int r = 0; r < R; ++r) {
      if constexpr (Ahead) __builtin_prefetch(w + (R + r) * K + k);
      values[r] = take(w + r * K + k);
    }
#pragma GCC unroll 8
    for (int m = 0; m < 8; ++m) {
      const Vec v = take(x + m * ldx + k);
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) sums[r][m] += values[r] * v;
    }
  };
  for (; k + kLanes <= K; k += kLanes) step([](const auto *p) __attribute__((always_inline)) { return load(p); });
  if (k < K)
    step([n = static_cast<int>(K - k)](const auto *p) __attribute__((always_inline)) { return load_first(p, n); });
#pragma GCC unroll 3
  for (int r = 0; r < R; ++r) sums_of_8(sums[r], y + r, ldy);
}

template <class T, int R, int Rows = kRegisters >= 32 ? 4 : 1>
void dense_tiles(const T *w, size_t K, const float *x, size_t ldx, int M, float *y, size_t ldy) {
  int m = 0;
  if constexpr (Rows > 1)
    for (; m + Rows <= M; m += Rows) dense_tile<T, R, Rows>(w, K, x + m * ldx, ldx, y + m * ldy, ldy);
  for (; m < M; ++m) dense_tile<T, R, 1>(w, K, x + m * ldx, ldx, y + m * ldy, ldy);
}

template <class T>
void dense_rows(const T *w, size_t K, const float *x, size_t ldx, int M, float *y, size_t ldy, int row0, int row1) {
  int n = row0;
  if constexpr (kRegisters >= 32) {
    if (const int many = M / 8 * 8) {  // all rows of x while the outputs' weights are in the cache
      for (; n + 3 <= row1; n += 3) {
        dense_eight<T, 3, true>(w + n * K, K, x, ldx, y + n, ldy);
        for (int m = 8; m < many; m += 8)
          dense_eight<T, 3, false>(w + n * K, K, x + m * ldx, ldx, y + m * ldy + n, ldy);
        dense_tiles<T, 3>(w + n * K, K, x + many * ldx, ldx, M - many, y + many * ldy + n, ldy);
      }
    }
  }
#if defined(__aarch64__)
  if (M >= 3)  // 24 sums, and six products for two values that are widened
    for (; n + 2 <= row1; n += 2) dense_tiles<T, 2, 3>(w + n * K, K, x, ldx, M, y + n, ldy);
#endif
  for (; n + 4 <= row1; n += 4) dense_tiles<T, 4>(w + n * K, K, x, ldx, M, y + n, ldy);
  for (; n < row1; ++n) dense_tiles<T, 1>(w + n * K, K, x, ldx, M, y + n, ldy);
}

inline void dense(const Dense &w, const float *x, size_t ldx, int M, float *y, size_t ldy, int row0, int row1) {
  if (w.type == DType::F32)
    dense_rows(reinterpret_cast<const float *>(w.data), w.K, x, ldx, M, y, ldy, row0, row1);
  else if (w.type == DType::F16)
    dense_rows(reinterpret_cast<const Half *>(w.data), w.K, x, ldx, M, y, ldy, row0, row1);
  else
    dense_rows(reinterpret_cast<const Bfloat *>(w.data), w.K, x, ldx, M, y, ldy, row0, row1);
}
