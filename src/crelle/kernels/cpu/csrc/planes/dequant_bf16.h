// Codes of 16 outputs and one chunk to bf16 values, row by row: [16 rows][32 inputs], an AMX tile.
//
// A group has at most 2^P different values per output. Up to 5 bits these are a register of bf16, and one vpermw looks
// 32 values up. Wider codes are computed in f32. With D = 2 every value comes as hi + lo, two bf16 that together have
// 16 bits.
//
// Included inside a namespace of the including file, after unpack_codes.h.

// 32 f32 to bf16: hi, and lo = what hi left over.
template <int D>
CRELLE_INLINE void split(__m512 a, __m512 b, __m512i (&out)[D]) {
  out[0] = (__m512i)_mm512_cvtne2ps_pbh(b, a);
  if constexpr (D == 2) {
    const __m512 ha = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(out[0])), 16));
    const __m512 hb =
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(out[0], 1)), 16));
    out[1] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_sub_ps(b, hb), _mm512_sub_ps(a, ha));
  }
}

// The values of 16 codes of output n.
CRELLE_INLINE __m512 values_of_codes(const Weight &w, const GroupScales &s, int n, __m512i code) {
  if (w.kind == Kind::Uniform)
    return _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(s.offset[n])),
                         _mm512_set1_ps(s.alpha[0][n]));
  __m512 v = _mm512_setzero_ps();
  for (int p = w.P - 1; p >= 0; --p) {
    const __mmask16 set = _mm512_test_epi32_mask(code, _mm512_set1_epi32(1 << (w.P - 1 - p)));
    const __m512 alpha = _mm512_set1_ps(s.alpha[p][n]);
    v = _mm512_mask_add_ps(_mm512_sub_ps(v, alpha), set, v, alpha);
  }
  return _mm512_add_ps(v, _mm512_set1_ps(s.offset[n]));
}

// Tables of a group's values for 16 outputs; used when P <= 5.
template <int D>
struct Tables {
  __m512i of[16][D];

  void fill(const Weight &w, const GroupScales &s) {
    const __m512i codes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int n = 0; n < 16; ++n) {
      const __m512 low = values_of_codes(w, s, n, codes);
      split<D>(low, w.P == 5 ? values_of_codes(w, s, n, _mm512_add_epi32(codes, _mm512_set1_epi32(16))) : low, of[n]);
    }
  }
};

// One chunk of outputs 16 r ... 16 r + 15.
template <int D>
CRELLE_INLINE void chunk_numbers(const Weight &w, const uint8_t *chunk, int r, const GroupScales &s, const Tables<D> &t,
                                 uint8_t *out) {
  for_codes(w, chunk, r, [&](int n, __m256i codes) __attribute__((always_inline)) {
    __m512i parts[D];
    if (w.P <= 5) {
      const __m512i index = _mm512_cvtepu8_epi16(codes);
      for (int d = 0; d < D; ++d) parts[d] = _mm512_permutexvar_epi16(index, t.of[n][d]);
    } else {
      split<D>(values_of_codes(w, s, n, _mm512_cvtepu8_epi32(_mm256_castsi256_si128(codes))),
               values_of_codes(w, s, n, _mm512_cvtepu8_epi32(_mm256_extracti128_si256(codes, 1))), parts);
    }
    for (int d = 0; d < D; ++d) _mm512_store_si512(out + d * kTileBytes + n * 64, parts[d]);
  });
}

// All of block b: out [R/16][chunks][D][16][32] bf16.
template <int D>
inline void dequantize_block(const Weight &w, int b, uint8_t *out) {
  for (int r = 0; r < w.R / 16; ++r)
    for_groups(w, b, r, [&](int g, const uint8_t *chunk, const GroupScales &s) {
      Tables<D> t;
      if (w.P <= 5) t.fill(w, s);
      for (int c = 0; c < w.partition.chunks_of(g); ++c, chunk += w.chunk_bytes, out += D * kTileBytes)
        chunk_numbers<D>(w, chunk, r, s, t, out);
    });
}
