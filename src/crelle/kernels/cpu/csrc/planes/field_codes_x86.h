// field_codes.h with vectors of CRELLE_FIELD_BITS bits, 256 or 512: vpdpbusd where there is VNNI (4 multiply-adds for
// each 32 bits, two instructions a cycle on most cores), else vpmaddubsw, whose 16-bit sums of codes of up to 4 bits
// are widened once a chunk; codes of 8 bits are left to word_codes_x86.h there.
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
#if defined(CRELLE_DPBUSD)
  static constexpr int kMostBits = 8;
  static constexpr bool kByWords = false;
  static constexpr float kByteOffset = 0;  // codes are unsigned
#else
  // 16-bit sums of larger codes would have to be widened at once: look-ups are faster, except for 8 bits.
  static constexpr int kMostBits = 4;
  static constexpr bool kByWords = true;
  static constexpr float kByteOffset = kByteZero;
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
    static constexpr bool kChunked = false;
    template <int>
    static CRELLE_INLINE Chunk add(Chunk sum, Codes w, Digits d) {
      return CRELLE_DPBUSD(sum, w, d);
    }
    static CRELLE_INLINE Ints end(Ints sum, Chunk part, int factor);  // of those in chunks only
  };
#else
  struct Sums {  // eight sums of two products of at most 15 * 128 fit 16 bits
    using Chunk = Ints;
    static constexpr bool kChunked = true;
    template <int>
    static CRELLE_INLINE Chunk add(Chunk words, Codes w, Digits d) {
      words = CRELLE_MM(add_epi16)(words, CRELLE_MM(maddubs_epi16)(w, d));
      __asm__("" : "+v"(words));  // GCC would keep all products of a chunk, in memory, and add them as a tree
      return words;
    }
    // sum + factor * (the words of a lane)
    static CRELLE_INLINE Ints end(Ints sum, Chunk words, int factor) {
      return FieldV::add(sum, CRELLE_MM(madd_epi16)(words, CRELLE_MM(set1_epi16)(short(factor))));
    }
  };
#endif

#if !defined(CRELLE_DPBUSD)
  // 16-bit words, for word_codes_x86.h.
  static constexpr int kWords = 2 * kLanes;  // of a vector
  static CRELLE_INLINE Codes widened(const uint8_t *p) {
    return CRELLE_MM(cvtepi8_epi16)(*reinterpret_cast<const Half *>(p));
  }
  static CRELLE_INLINE Codes word_of_digits(Codes high, Codes low) {
    return CRELLE_MM(add_epi16)(CRELLE_MM(slli_epi16)(high, 8), low);
  }
  static CRELLE_INLINE Digits four_words(const uint8_t *p) {
    long long four;
    __builtin_memcpy(&four, p, 8);
#if CRELLE_FIELD_BITS == 512
    return _mm512_set1_epi64(four);
#else
    return _mm256_set1_epi64x(four);
#endif
  }
  static CRELLE_INLINE Ints add_word_products(Ints sum, Codes w, Digits d) {
    sum = CRELLE_MM(add_epi32)(sum, CRELLE_MM(madd_epi16)(w, d));
    __asm__("" : "+v"(sum));  // see Sums
    return sum;
  }
  // Sums of neighbouring lanes: those of a first, then those of b.
  static CRELLE_INLINE Ints neighbour_sums(Ints a, Ints b) {
    const auto x = (Floats)a, y = (Floats)b;
    const auto sums = add((Ints)CRELLE_MM(shuffle_ps)(x, y, 0x88), (Ints)CRELLE_MM(shuffle_ps)(x, y, 0xdd));
#if CRELLE_FIELD_BITS == 512
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), sums);
#else
    return _mm256_permute4x64_epi64(sums, 0xd8);
#endif
  }
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
