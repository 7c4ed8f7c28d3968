// What all files with tiles of plain C++ need. Slow, for tests; sums are f32, added up input by input as AMX does.
//
// Included inside a namespace of the including file, after simd.h.

struct EmulatedTile {
  static constexpr int kBytes = 16 * 64;

  static CRELLE_INLINE void transpose(Int (&v)[16]) {
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < i; ++j) {
        const int other = v[i][j];
        v[i][j] = v[j][i];
        v[j][i] = other;
      }
  }

  // 32 bf16: those of a, then those of b.
  static CRELLE_INLINE Int round(Vec a, Vec b) {
    Bfloat both[32];
    for (int i = 0; i < 16; ++i) {
      store_one(both + i, a[i]);
      store_one(both + 16 + i, b[i]);
    }
    Int v;
    __builtin_memcpy(&v, both, sizeof v);
    return v;
  }

  static void begin() {}
  static void end() {}

  // 2 x 2 products of tiles, `steps` times: y [32, 32] = or += those of a [2][16 rows][32] and b [2][16 pairs][16
  // columns][2].
  static void multiply_blocks(const uint8_t *a, const uint8_t *b, int steps, float *y, size_t stride, bool add) {
    for (int i = 0; i < 32 && !add; ++i) std::fill(y + i * stride, y + i * stride + 32, 0.0f);
    for (int step = 0; step < steps; ++step, a += 2 * kBytes, b += 2 * kBytes)
      for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) multiply_tile(a + i * kBytes, b + j * kBytes, y + i * 16 * stride + j * 16, stride);
  }

private:
  static void multiply_tile(const uint8_t *a, const uint8_t *b, float *y, size_t stride) {
    const auto *left = reinterpret_cast<const Bfloat *>(a), *right = reinterpret_cast<const Bfloat *>(b);
    for (int m = 0; m < 16; ++m)
      for (int k = 0; k < 32; ++k)
        for (int n = 0; n < 16; ++n)
          y[m * stride + n] += value(left[m * 32 + k]) * value(right[k / 2 * 32 + 2 * n + k % 2]);
  }

  static float value(Bfloat v) {
    const uint32_t bits = uint32_t{v.bits} << 16;
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return f;
  }
};
