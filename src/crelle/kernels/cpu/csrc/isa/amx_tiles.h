// What all files with AMX tiles need: the configuration, 16 x 16 dwords turned, pairs of bf16.
//
// Included inside a namespace amx of the including file, after immintrin.h.

constexpr int kTileBytes = 16 * 64;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  TileConfig() {
    for (int i = 0; i < 8; ++i) bytes[i] = 64, rows[i] = 16;
  }
};

// GCC's tile intrinsics do not tell the compiler which memory they read and write: everything in memory is written
// here.
CRELLE_INLINE void compiler_fence() { __asm__ volatile("" ::: "memory"); }

// 16 x 16 dwords.
CRELLE_INLINE void transpose(__m512i (&v)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i) {  // quarters: v[i + 4 k] holds columns i, i + 4, i + 8, i + 12 of rows 4 k ... 4 k + 3
    t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i)
    for (int h = 0; h < 2; ++h) {
      v[i + 4 * h] = _mm512_shuffle_i32x4(t[i + 8 * h], t[i + 8 * h + 4], 0x88);
      v[i + 4 * h + 8] = _mm512_shuffle_i32x4(t[i + 8 * h], t[i + 8 * h + 4], 0xdd);
    }
}

// Lane i: what a_i and b_i round to in bf16 (to nearest even; NaN stays NaN), beside each other, a_i first.
CRELLE_INLINE __m512i pair_up(__m512 a, __m512 b) {
  const __m512i interleave =
      _mm512_add_epi32(_mm512_mullo_epi32(_mm512_set1_epi32(0x10001),
                                          _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)),
                       _mm512_set1_epi32(0x100000));
  return _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}
