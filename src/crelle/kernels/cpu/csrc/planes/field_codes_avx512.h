// field_codes.h with vectors of 512 bits: vpdpbusd where there is VNNI (64 multiply-adds an instruction, two a cycle on
// most cores), else vpmaddubsw, whose 16-bit sums of codes of up to 4 bits are widened once a chunk.
//
// Included inside a namespace of the including file, before field_codes.h.

struct FieldV {
  using Codes = __m512i;
  using Digits = __m512i;
  using Ints = __m512i;
  using Floats = __m512;
  static constexpr int kLanes = 16, kMostRows = 8, kDigitSteps = 1;
  static constexpr float kByteOffset = 0;  // codes are unsigned
#if defined(__AVX512VNNI__)
  static constexpr int kMostBits = 8;
#else
  // 16-bit sums of larger codes would have to be widened at once: look-ups are faster.
  static constexpr int kMostBits = 4;
#endif
  static constexpr int kSums = 16;
  // Two rows are a decode step with a draft; codes of 5 to 7 bits are rare.
  static constexpr int few_rows(int P, int) { return P > 4 && P < 8 ? 0 : 2; }

  static CRELLE_INLINE Codes load(const uint8_t *p) { return load_once(p); }
  static CRELLE_INLINE void store(uint8_t *p, Codes v) { _mm512_store_si512(p, v); }
  static CRELLE_INLINE Codes unflipped(Codes v) { return _mm512_xor_si512(v, _mm512_set1_epi8(char(kByteZero))); }
  template <int F, int Up, int First>
  static CRELLE_INLINE Codes bits(Codes v) {
    if constexpr (Up > 0) v = _mm512_slli_epi16(v, Up);
    if constexpr (Up < 0) v = _mm512_srli_epi16(v, -Up);
    return _mm512_and_si512(v, _mm512_set1_epi8(char(((1 << F) - 1) << First)));
  }
  static CRELLE_INLINE Codes either(Codes a, Codes b) { return _mm512_or_si512(a, b); }
  static CRELLE_INLINE Digits digits(const uint8_t *p) {
    int four;
    __builtin_memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
  }

#if defined(__AVX512VNNI__)
  struct Sums {
    using Chunk = Ints;
    static CRELLE_INLINE Chunk begin(Ints sum) { return sum; }
    template <int>
    static CRELLE_INLINE Chunk add(Chunk sum, Codes w, Digits d) {
      return _mm512_dpbusd_epi32(sum, w, d);
    }
    static CRELLE_INLINE Ints end(Ints, Chunk sum) { return sum; }
  };
#else
  struct Sums {  // eight sums of two products of at most 15 * 128 fit 16 bits
    using Chunk = Ints;
    static CRELLE_INLINE Chunk begin(Ints) { return zero(); }
    template <int>
    static CRELLE_INLINE Chunk add(Chunk words, Codes w, Digits d) {
      words = _mm512_add_epi16(words, _mm512_maddubs_epi16(w, d));
      __asm__("" : "+v"(words));  // GCC would keep all products of a chunk, in memory, and add them as a tree
      return words;
    }
    static CRELLE_INLINE Ints end(Ints sum, Chunk words) {
      return FieldV::add(sum, _mm512_madd_epi16(words, _mm512_set1_epi16(1)));
    }
  };
#endif

  static CRELLE_INLINE Ints zero() { return _mm512_setzero_si512(); }
  static CRELLE_INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static CRELLE_INLINE Ints times_256(Ints a) { return _mm512_slli_epi32(a, 8); }
  static CRELLE_INLINE Floats to_float(Ints a) { return _mm512_cvtepi32_ps(a); }
  static CRELLE_INLINE Floats floats(float v) { return _mm512_set1_ps(v); }
  static CRELLE_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static CRELLE_INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static CRELLE_INLINE Floats negative(Floats a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static CRELLE_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static CRELLE_INLINE Floats minus_product(Floats c, Floats a, Floats b) { return _mm512_fnmadd_ps(a, b, c); }
  static CRELLE_INLINE Floats load_floats(const uint8_t *p) { return _mm512_loadu_ps(p); }
  static CRELLE_INLINE Floats load_halves(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  }
  static CRELLE_INLINE Floats load_bytes(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
  }
};
