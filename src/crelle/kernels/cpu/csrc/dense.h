// Products with a matrix that is not quantized, read where it lies (a memory-mapped file, a torch tensor).
//
// Four outputs at a time: four chains of multiply-adds hide the latency, and x is loaded once for all of them. The
// numbers are widened to f32 in registers; the matrix is read once for up to four rows of x.
//
// Included inside a namespace of the including file, after lanes.h.

template <class T, int R, int M>
CRELLE_INLINE void dense_tile(const T *w, size_t K, const float *x, size_t ldx, float *y, size_t ldy) {
  Vec sums[M][R] = {};
  size_t k = 0;
  const auto step = [&](auto &&take) {
    Vec v[M];
    for (int m = 0; m < M; ++m) v[m] = take(x + m * ldx + k);
    for (int r = 0; r < R; ++r) {
      const Vec numbers = take(w + r * K + k);
      for (int m = 0; m < M; ++m) sums[m][r] += numbers * v[m];
    }
  };
  for (; k + kLanes <= K; k += kLanes) step([](const auto *p) { return load(p); });
  if (k < K) step([n = static_cast<int>(K - k)](const auto *p) { return load_first(p, n); });
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) y[m * ldy + r] = sum_of(sums[m][r]);
}

template <class T, int R>
void dense_tiles(const T *w, size_t K, const float *x, size_t ldx, int M, float *y, size_t ldy) {
  int m = 0;
  if constexpr (kRegisters >= 32)
    for (; m + 4 <= M; m += 4) dense_tile<T, R, 4>(w, K, x + m * ldx, ldx, y + m * ldy, ldy);
  for (; m < M; ++m) dense_tile<T, R, 1>(w, K, x + m * ldx, ldx, y + m * ldy, ldy);
}

template <class T>
void dense_rows(const T *w, size_t K, const float *x, size_t ldx, int M, float *y, size_t ldy, int row0, int row1) {
  int n = row0;
  for (; n + 4 <= row1; n += 4) dense_tiles<T, 4>(w + n * K, K, x, ldx, M, y + n, ldy);
  for (; n < row1; ++n) dense_tiles<T, 1>(w + n * K, K, x, ldx, M, y + n, ldy);
}

inline void dense(const Dense &w, const float *x, size_t ldx, int M, float *y, size_t ldy, int row0, int row1) {
  if (w.type == Number::F32)
    dense_rows(reinterpret_cast<const float *>(w.data), w.K, x, ldx, M, y, ldy, row0, row1);
  else if (w.type == Number::F16)
    dense_rows(reinterpret_cast<const Half *>(w.data), w.K, x, ldx, M, y, ldy, row0, row1);
  else
    dense_rows(reinterpret_cast<const Bfloat *>(w.data), w.K, x, ldx, M, y, ldy, row0, row1);
}
