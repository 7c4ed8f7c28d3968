// field_codes.h with vectors of CRELLE_FIELD_BITS bits, 256 or 512: vpdpbusd where there is VNNI (4 multiply-adds for
// each 32 bits, two instructions a cycle on most cores), else vpmaddubsw, whose 16-bit sums of codes of up to 4 bits
// are widened once a chunk.
//
// Included inside a namespace of the including file, before field_codes.h. The width is not that of the compiler's
// flags: vectors of 256 bits are tested by machines that have the instructions in the encoding of AVX-512 only.

#if CRELLE_FIELD_BITS == 512
#define CRELLE_MM(name) _mm512_##name
#else
#define CRELLE_MM(name) _mm256_##name
#endif
#if CRELLE_FIELD_BITS == 512 && defined(__AVX512VNNI__)
#define CRELLE_DPBUSD _mm512_dpbusd_epi32
#elif CRELLE_FIELD_BITS == 256 && defined(__AVXVNNI__)
#define CRELLE_DPBUSD _mm256_dpbusd_avx_epi32
#endif

struct FieldV {
#if CRELLE_FIELD_BITS == 512
  using Codes = __m512i;
  using Floats = __m512;
  using Half = __m256i;
  static constexpr int kLanes = 16, kMostRows = 8;
  static CRELLE_INLINE Codes load(const uint8_t *p) { return load_once(p); }
  // Of bytes, a fourth of a vector.
  static CRELLE_INLINE __m128i load_fourth(const uint8_t *p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  }
#else
  using Codes = __m256i;
  using Floats = __m256;
  using Half = __m128i;
  static constexpr int kLanes = 8, kMostRows = 4;
  static CRELLE_INLINE Codes load(const uint8_t *p) { return *reinterpret_cast<const __m256i *>(p); }
  static CRELLE_INLINE __m128i load_fourth(const uint8_t *p) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
  }
#endif
  using Digits = Codes;
  using Ints = Codes;
  static constexpr int kDigitSteps = 1, kSums = kLanes;
  static constexpr float kByteOffset = 0;  // codes are unsigned
#if defined(CRELLE_DPBUSD)
  static constexpr int kMostBits = 8;
#else
  // 16-bit sums of larger codes would have to be widened at once: look-ups are faster.
  static constexpr int kMostBits = 4;
#endif
  // Two rows are a decode step with a draft; codes of 5 to 7 bits are rare.
  static constexpr int few_rows(int P, int) { return P > 4 && P < 8 ? 0 : 2; }

  static CRELLE_INLINE void store(uint8_t *p, Codes v) { *reinterpret_cast<Codes *>(p) = v; }
  static CRELLE_INLINE Codes unflipped(Codes v) { return v ^ CRELLE_MM(set1_epi8)(char(kByteZero)); }
  template <int F, int Up, int First>
  static CRELLE_INLINE Codes bits(Codes v) {
    if constexpr (Up > 0) v = CRELLE_MM(slli_epi16)(v, Up);
    if constexpr (Up < 0) v = CRELLE_MM(srli_epi16)(v, -Up);
    return v & CRELLE_MM(set1_epi8)(char(((1 << F) - 1) << First));
  }
  static CRELLE_INLINE Codes either(Codes a, Codes b) { return a | b; }
  static CRELLE_INLINE Digits digits(const uint8_t *p) {
    int four;
    __builtin_memcpy(&four, p, 4);
    return CRELLE_MM(set1_epi32)(four);
  }

#if defined(CRELLE_DPBUSD)
  struct Sums {
    using Chunk = Ints;
    static CRELLE_INLINE Chunk begin(Ints sum) { return sum; }
    template <int>
    static CRELLE_INLINE Chunk add(Chunk sum, Codes w, Digits d) {
      return CRELLE_DPBUSD(sum, w, d);
    }
    static CRELLE_INLINE Ints end(Ints, Chunk sum) { return sum; }
  };
#else
  struct Sums {  // eight sums of two products of at most 15 * 128 fit 16 bits
    using Chunk = Ints;
    static CRELLE_INLINE Chunk begin(Ints) { return zero(); }
    template <int>
    static CRELLE_INLINE Chunk add(Chunk words, Codes w, Digits d) {
      words = CRELLE_MM(add_epi16)(words, CRELLE_MM(maddubs_epi16)(w, d));
      __asm__("" : "+v"(words));  // GCC would keep all products of a chunk, in memory, and add them as a tree
      return words;
    }
    static CRELLE_INLINE Ints end(Ints sum, Chunk words) {
      return FieldV::add(sum, CRELLE_MM(madd_epi16)(words, CRELLE_MM(set1_epi16)(1)));
    }
  };
#endif

  static CRELLE_INLINE Ints zero() { return Ints{}; }
  static CRELLE_INLINE Ints add(Ints a, Ints b) { return CRELLE_MM(add_epi32)(a, b); }
  static CRELLE_INLINE Ints times_256(Ints a) { return CRELLE_MM(slli_epi32)(a, 8); }
  static CRELLE_INLINE Floats to_float(Ints a) { return CRELLE_MM(cvtepi32_ps)(a); }
  static CRELLE_INLINE Floats floats(float v) { return CRELLE_MM(set1_ps)(v); }
  static CRELLE_INLINE Floats mul(Floats a, Floats b) { return CRELLE_MM(mul_ps)(a, b); }
  static CRELLE_INLINE Floats sub(Floats a, Floats b) { return CRELLE_MM(sub_ps)(a, b); }
  static CRELLE_INLINE Floats negative(Floats a) { return -a; }
  static CRELLE_INLINE Floats fma(Floats a, Floats b, Floats c) { return CRELLE_MM(fmadd_ps)(a, b, c); }
  static CRELLE_INLINE Floats minus_product(Floats c, Floats a, Floats b) { return CRELLE_MM(fnmadd_ps)(a, b, c); }
  static CRELLE_INLINE Floats load_floats(const uint8_t *p) {
    return CRELLE_MM(loadu_ps)(reinterpret_cast<const float *>(p));
  }
  static CRELLE_INLINE Floats load_halves(const uint8_t *p) {
    Half h;
    __builtin_memcpy(&h, p, sizeof h);
    return CRELLE_MM(cvtph_ps)(h);
  }
  static CRELLE_INLINE Floats load_bytes(const uint8_t *p) {
    return CRELLE_MM(cvtepi32_ps)(CRELLE_MM(cvtepu8_epi32)(load_fourth(p)));
  }
};

#undef CRELLE_MM
#undef CRELLE_DPBUSD
