// The small ops of prefill over tiles: 16 tokens side by side, x [n][16], a vector for each feature.
//
// Sums over features then are sums of vectors, and a token's norm and angle apply lane by lane: nothing is ever added
// up across a vector. It is also what products of tiles take and give (gemm.h). Rows become tiles when tokens are
// looked up, and tiles rows when keys and values are stored.
//
// Included inside a namespace of the including file, after simd.h.

// Rows to columns, 16 x 16: four rounds, each exchanges half of what two vectors hold.
CRELLE_INLINE void transpose_16(Vec (&v)[16]) {
  const auto round = [&](int apart, auto low, auto high) __attribute__((always_inline)) {
    Vec t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      if (!(i & apart)) t[i] = low(v[i], v[i + apart]), t[i + apart] = high(v[i], v[i + apart]);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) v[i] = t[i];
  };
  round(
      8,
      [](Vec a, Vec b) {
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
      },
      [](Vec a, Vec b) {
        return __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
      });
  round(
      4,
      [](Vec a, Vec b) {
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
      },
      [](Vec a, Vec b) {
        return __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
      });
  round(
      2,
      [](Vec a, Vec b) {
        return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      },
      [](Vec a, Vec b) {
        return __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
      });
  round(
      1,
      [](Vec a, Vec b) {
        return __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
      },
      [](Vec a, Vec b) {
        return __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
      });
}

// Up to 16 rows of n, ld apart, to a tile, or added to it; zeros where rows are missing.
inline void tile_of_rows(const float *rows, size_t ld, int count, int n, bool add, float *tile) {
  for (int at = 0; at < n; at += kLanes, rows += kLanes) {
    const int left = n - at < kLanes ? n - at : kLanes;
    Vec v[16] = {};
    for (int i = 0; i < count; ++i) v[i] = left == kLanes ? load(rows + i * ld) : load_first(rows + i * ld, left);
    transpose_16(v);
    for (int i = 0; i < left; ++i, tile += kLanes) store(tile, add ? load(tile) + v[i] : v[i]);
  }
}

inline void rows_of_tile(const float *tile, int count, int n, float *rows, size_t ld) {
  for (int at = 0; at < n; at += kLanes, rows += kLanes) {
    const int left = n - at < kLanes ? n - at : kLanes;
    Vec v[16] = {};
    for (int i = 0; i < left; ++i, tile += kLanes) v[i] = load(tile);
    transpose_16(v);
    for (int i = 0; i < count; ++i)
      if (left == kLanes)
        store(rows + i * ld, v[i]);
      else
        store_first(rows + i * ld, v[i], left);
  }
}

inline void norm_tile(const float *x, const float *weight, float eps, int n, float *y) {
  Vec squares[4] = {};
  int i = 0;
  for (; i + 4 <= n; i += 4)
    for (int j = 0; j < 4; ++j) {
      const Vec v = load(x + (i + j) * kLanes);
      squares[j] += v * v;
    }
  for (; i < n; ++i) squares[0] += load(x + i * kLanes) * load(x + i * kLanes);
  const Vec mean = ((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(n) + eps;
  Vec factor;
  for (int l = 0; l < kLanes; ++l) factor[l] = 1.0f / __builtin_sqrtf(mean[l]);
  for (i = 0; i < n; ++i) store(y + i * kLanes, load(x + i * kLanes) * factor * weight[i]);
}

inline void layer_norm_tile(const float *x, const float *weight, const float *bias, float eps, int n, float *y) {
  Vec sum = {}, squares = {};
  for (int i = 0; i < n; ++i) sum += load(x + i * kLanes);
  const Vec mean = sum / static_cast<float>(n);
  for (int i = 0; i < n; ++i) {
    const Vec v = load(x + i * kLanes) - mean;
    squares += v * v;
  }
  const Vec variance = squares / static_cast<float>(n) + eps;
  Vec factor;
  for (int l = 0; l < kLanes; ++l) factor[l] = 1.0f / __builtin_sqrtf(variance[l]);
  for (int i = 0; i < n; ++i) {
    const Vec v = (load(x + i * kLanes) - mean) * factor * weight[i];
    store(y + i * kLanes, bias ? v + bias[i] : v);
  }
}

// Rope, and a factor: pairs (i, i + D/2); cos and sin [D/2][16].
inline void rope_tile(float *x, const float *cos, const float *sin, float factor, int D) {
  float *y = x + D / 2 * kLanes;
  for (int i = 0; i < D / 2 * kLanes; i += kLanes) {
    const Vec a = load(x + i), b = load(y + i), c = load(cos + i) * factor, s = load(sin + i) * factor;
    store(x + i, a * c - b * s);
    store(y + i, b * c + a * s);
  }
}

inline void add_to_tile(float *x, const float *bias, int n) {
  for (int i = 0; i < n; ++i) store(x + i * kLanes, load(x + i * kLanes) + bias[i]);
}
