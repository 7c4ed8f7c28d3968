// field_codes.h with vectors of 256 bits: vpdpbusd where there is AVX-VNNI (32 multiply-adds an instruction, two a
// cycle on most cores), else vpmaddubsw, whose 16-bit sums of codes of up to 4 bits are widened once a chunk.
//
// Included inside a namespace of the including file, before field_codes.h.

struct FieldV {
  using Codes = __m256i;
  using Digits = __m256i;
  using Ints = __m256i;
  using Floats = __m256;
  static constexpr int kLanes = 8, kMostRows = 4, kDigitSteps = 1;
  static constexpr float kByteOffset = 0;  // codes are unsigned
#if defined(__AVXVNNI__)
  static constexpr int kMostBits = 8;
#else
  // 16-bit sums of larger codes would have to be widened at once: look-ups are faster.
  static constexpr int kMostBits = 4;
#endif
  static constexpr int kSums = 8;
  // Two rows are a decode step with a draft; codes of 5 to 7 bits are rare.
  static constexpr int few_rows(int P, int) { return P > 4 && P < 8 ? 0 : 2; }

  static CRELLE_INLINE Codes load(const uint8_t *p) { return _mm256_load_si256(reinterpret_cast<const __m256i *>(p)); }
  static CRELLE_INLINE void store(uint8_t *p, Codes v) { _mm256_store_si256(reinterpret_cast<__m256i *>(p), v); }
  static CRELLE_INLINE Codes unflipped(Codes v) { return _mm256_xor_si256(v, _mm256_set1_epi8(char(kByteZero))); }
  template <int F, int Up, int First>
  static CRELLE_INLINE Codes bits(Codes v) {
    if constexpr (Up > 0) v = _mm256_slli_epi16(v, Up);
    if constexpr (Up < 0) v = _mm256_srli_epi16(v, -Up);
    return _mm256_and_si256(v, _mm256_set1_epi8(char(((1 << F) - 1) << First)));
  }
  static CRELLE_INLINE Codes either(Codes a, Codes b) { return _mm256_or_si256(a, b); }
  static CRELLE_INLINE Digits digits(const uint8_t *p) {
    int four;
    __builtin_memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
  }

#if defined(__AVXVNNI__)
  struct Sums {
    using Chunk = Ints;
    static CRELLE_INLINE Chunk begin(Ints sum) { return sum; }
    template <int>
    static CRELLE_INLINE Chunk add(Chunk sum, Codes w, Digits d) {
      return _mm256_dpbusd_avx_epi32(sum, w, d);
    }
    static CRELLE_INLINE Ints end(Ints, Chunk sum) { return sum; }
  };
#else
  struct Sums {  // eight sums of two products of at most 15 * 128 fit 16 bits
    using Chunk = Ints;
    static CRELLE_INLINE Chunk begin(Ints) { return zero(); }
    template <int>
    static CRELLE_INLINE Chunk add(Chunk words, Codes w, Digits d) {
      words = _mm256_add_epi16(words, _mm256_maddubs_epi16(w, d));
      __asm__("" : "+x"(words));  // GCC would keep all products of a chunk, in memory, and add them as a tree
      return words;
    }
    static CRELLE_INLINE Ints end(Ints sum, Chunk words) {
      return FieldV::add(sum, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
    }
  };
#endif

  static CRELLE_INLINE Ints zero() { return _mm256_setzero_si256(); }
  static CRELLE_INLINE Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
  static CRELLE_INLINE Ints times_256(Ints a) { return _mm256_slli_epi32(a, 8); }
  static CRELLE_INLINE Floats to_float(Ints a) { return _mm256_cvtepi32_ps(a); }
  static CRELLE_INLINE Floats floats(float v) { return _mm256_set1_ps(v); }
  static CRELLE_INLINE Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static CRELLE_INLINE Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  static CRELLE_INLINE Floats negative(Floats a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
  static CRELLE_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static CRELLE_INLINE Floats minus_product(Floats c, Floats a, Floats b) { return _mm256_fnmadd_ps(a, b, c); }
  static CRELLE_INLINE Floats load_floats(const uint8_t *p) {
    return _mm256_loadu_ps(reinterpret_cast<const float *>(p));
  }
  static CRELLE_INLINE Floats load_halves(const uint8_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  }
  static CRELLE_INLINE Floats load_bytes(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
  }
};
