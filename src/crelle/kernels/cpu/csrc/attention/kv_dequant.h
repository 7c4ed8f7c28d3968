// Rows of codes of 8, 4, 3 or 2 bits back to floats: (code - zero) * scale, a scale and a zero for each group of
// channels.
//
// Included inside a namespace of the including file, after simd.h. Written for the compiler's own vectors, and once
// more by hand for AVX-512: a step of 16 sequences spent 15.5 ms in attention over 4-bit pages, and 11.8 with it.

#if defined(__AVX512F__)
// Bytes of 16 codes of 2 bits that begin at `from`.
CRELLE_INLINE __m128i sixteen_pairs(const uint8_t *from) {
  int four;
  __builtin_memcpy(&four, from, 4);
  const __m512i wide = _mm512_srlv_epi32(_mm512_set1_epi32(four),
                                         _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
  return _mm512_cvtepi32_epi8(_mm512_and_si512(wide, _mm512_set1_epi32(3)));
}

// 16 codes as floats; `at` is where they begin in their row of D, in codes: a multiple of 16.
template <int Bits>
CRELLE_INLINE __m512 sixteen_codes(const uint8_t *codes, int at, int D) {
  const uint8_t *from = codes + at * (Bits == 3 ? 2 : Bits) / 8;
  __m128i bytes;
  if constexpr (Bits == 4) {
    const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)), low = _mm_set1_epi8(15);
    bytes = _mm_unpacklo_epi8(_mm_and_si128(pairs, low), _mm_and_si128(_mm_srli_epi16(pairs, 4), low));
  } else if constexpr (Bits == 8) {
    bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
  } else {
    bytes = sixteen_pairs(from);
  }
  __m512i wide = _mm512_cvtepu8_epi32(bytes);
  if constexpr (Bits == 3) {
    uint16_t third;
    __builtin_memcpy(&third, codes + D / 4 + at / 8, 2);
    wide = _mm512_mask_add_epi32(wide, third, wide, _mm512_set1_epi32(4));
  }
  return _mm512_cvtepi32_ps(wide);
}

// Groups of whole vectors: what heads of 32, 64 and 128 channels have.
template <int Bits>
void unpack_sixteens(const uint8_t *codes, const int16_t *words, int rows, int D, int groups, float *out) {
  constexpr int zero_bits = Bits == 8 ? 8 : 6;
  const int each = D / groups;
  for (int r = 0; r < rows; ++r, codes += D * Bits / 8, words += groups, out += D)
    for (int g = 0; g < groups; ++g) {
      const uint16_t word = static_cast<uint16_t>(words[g]);
      const __m512 scale = _mm512_set1_ps(_cvtsh_ss(static_cast<uint16_t>(word >> zero_bits << (zero_bits - 1))));
      const __m512 zero = _mm512_set1_ps(static_cast<float>(word & ((1 << zero_bits) - 1)) *
                                         (1.0f / static_cast<float>(1 << (zero_bits - Bits))));
      for (int i = g * each; i < (g + 1) * each; i += 16)
        _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_sub_ps(sixteen_codes<Bits>(codes, i, D), zero), scale));
    }
}
#endif

// A row's codes, a byte each.
CRELLE_INLINE void widen_codes(int bits, const uint8_t *codes, int D, uint8_t *wide) {
  if (bits == 4) {
    for (int i = 0; i < D / 2; ++i) wide[2 * i] = codes[i] & 15, wide[2 * i + 1] = static_cast<uint8_t>(codes[i] >> 4);
    return;
  }
  for (int i = 0; i < (D + 3) / 4; ++i)
    for (int j = 0; j < 4; ++j) wide[4 * i + j] = codes[i] >> 2 * j & 3;
  if (bits == 3)
    for (int i = 0; i < D; ++i)
      wide[i] = static_cast<uint8_t>(wide[i] | (codes[(D + 3) / 4 + i / 8] >> i % 8 & 1) << 2);
}

inline void unpack(int bits, const uint8_t *codes, const int16_t *words, int rows, int D, int groups, float *out) {
  const int each = D / groups, zero_bits = bits == 8 ? 8 : 6;
#if defined(__AVX512F__)
  if (each % 16 == 0)
    return (bits == 4   ? unpack_sixteens<4>
            : bits == 8 ? unpack_sixteens<8>
            : bits == 3 ? unpack_sixteens<3>
                        : unpack_sixteens<2>)(codes, words, rows, D, groups, out);
#endif
  uint8_t wide[512];
  const int row = bits == 3 ? (D + 3) / 4 + (D + 7) / 8 : (D * bits + 7) / 8;
  for (int r = 0; r < rows; ++r, codes += row) {
    const uint8_t *code = codes;
    if (bits != 8) widen_codes(bits, codes, D, wide), code = wide;
    for (int g = 0; g < groups; ++g, ++words, code += each, out += each) {
      const uint16_t word = static_cast<uint16_t>(*words);
      const float scale = float_of_half(static_cast<uint16_t>(word >> zero_bits << (zero_bits - 1)));
      const float zero =
          static_cast<float>(word & ((1 << zero_bits) - 1)) * (1.0f / static_cast<float>(1 << (zero_bits - bits)));
      for (int i = 0; i < each; ++i) out[i] = (static_cast<float>(code[i]) - zero) * scale;
    }
  }
}
