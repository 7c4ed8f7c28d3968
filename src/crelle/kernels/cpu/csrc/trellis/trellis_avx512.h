// The vectors of trellis_kernel.h on AVX-512 with VNNI; without it AVX2's are used. With VBMI one instruction takes
// both states of a lane from their places; without it, shifts do.
//
// With VBMI, 16 states take five operations of the two ports that do such work (x of 8 bits: four): one for their
// places, two for vpmulld, one for each digit of x. That is the limit, not memory: 4096 x 4096 at 2 bits takes 0.62 ms
// on one thread of a Sapphire Rapids core (8 bits: 0.49), 0.38 (0.46) of the speed of a plain read; `mul1` twice as
// long.
//
// Included inside a namespace of the including file.

struct TrellisV {
  using Word = __m512i;
  using Ints = __m512i;
  using Floats = __m512;
  using X = __m512i;
  static constexpr int kSequences = 8;

  static CRELLE_INLINE Word load(const uint8_t *p) { return load_once(p); }
  static CRELLE_INLINE Word middle(Word a, Word b) {
    return _mm512_mask_shuffle_epi32(_mm512_srli_epi64(a, 32), 0xaaaa, b, _MM_PERM_CDAB);
  }
#if defined(__AVX512VBMI__)
  template <int A, int B>
  static CRELLE_INLINE Ints states(Word w) {
    constexpr uint64_t kBits = A | (A + 8) << 8 | uint64_t{B | (B + 8) << 8} << 32;
    return _mm512_maskz_multishift_epi64_epi8(0x3333333333333333, _mm512_set1_epi64(kBits), w);
  }
#else
  template <int A, int B>
  static CRELLE_INLINE Ints states(Word w) {
    const __m512i both = _mm512_shuffle_epi32(A ? _mm512_srli_epi64(w, A) : w, _MM_PERM_CCAA);
    const __m512i apart = _mm512_srlv_epi32(both, _mm512_set1_epi64(int64_t{B - A} << 32));
    return _mm512_and_si512(apart, _mm512_set1_epi32(0xffff));
  }
#endif
  static CRELLE_INLINE Ints ints(int v) { return _mm512_set1_epi32(v); }
  static CRELLE_INLINE Ints load_ints(const uint8_t *p) { return _mm512_loadu_si512(p); }
  static CRELLE_INLINE Ints times(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
  template <bool Pair>
  static CRELLE_INLINE Ints minus_zero(Ints sums) {
    return times(sums, ints(-trellis_code(Pair).zero));
  }
  static CRELLE_INLINE __m512i in_lanes(uint64_t order) {  // bytes of each 128 bits, for two lanes of 64
    return _mm512_broadcast_i32x4(
        _mm_set_epi64x(static_cast<int64_t>(order + 0x0808080808080808u), static_cast<int64_t>(order)));
  }
  static constexpr bool kDigits = true;
  template <bool Pair, int Part>
  static CRELLE_INLINE X inputs(const uint8_t *p) {
    constexpr uint64_t kOrder = Pair ? 0x0302030201000100 : Part ? 0x0303030301010101 : 0x0202020200000000;
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
#if defined(__AVX512VBMI__)
    constexpr uint64_t kNext = 0x0404040404040404;
    const __m512i order =
        _mm512_setr_epi64(kOrder, kOrder + kNext, kOrder + 2 * kNext, kOrder + 3 * kNext, kOrder + 4 * kNext,
                          kOrder + 5 * kNext, kOrder + 6 * kNext, kOrder + 7 * kNext);
    return _mm512_permutexvar_epi8(order, _mm512_castsi256_si512(bytes));
#else
    return _mm512_shuffle_epi8(_mm512_cvtepu32_epi64(bytes), in_lanes(kOrder));
#endif
  }
  template <bool Pair>
  static CRELLE_INLINE Ints factor(Ints products) {
    return products;
  }
  // Written out: GCC 12 copies each sum before and after the intrinsic.
  static CRELLE_INLINE Ints dot(Ints acc, Ints products, X x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(products), "v"(x));
    return acc;
  }
  static CRELLE_INLINE Ints digit_sums(Ints hi, Ints lo) { return _mm512_add_epi32(_mm512_slli_epi32(hi, 8), lo); }
  static CRELLE_INLINE Floats floats(float v) { return _mm512_set1_ps(v); }
  static CRELLE_INLINE Floats to_float(Ints v) { return _mm512_cvtepi32_ps(v); }
  static CRELLE_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static CRELLE_INLINE Floats load_floats(const uint8_t *p) { return _mm512_loadu_ps(p); }
  static CRELLE_INLINE void store_ints(uint8_t *p, Ints v) { _mm512_storeu_si512(p, v); }
  static CRELLE_INLINE void store(float *p, Floats v) { _mm512_storeu_ps(p, v); }
};

// Many rows of x of 16 bits: the bytes of a weight are added up once for all of them, as on AVX2, so that one
// multiplication is left of four. The sums are the same integers.
struct TrellisWideV : TrellisV {
  static constexpr bool kDigits = false;

  // x as int16, from its digits.
  template <bool Pair, int Part>
  static CRELLE_INLINE X joined(const uint8_t *hi, const uint8_t *lo) {
    const auto wide = [](const uint8_t *p) {
      return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    };
    const __m512i four = _mm512_add_epi16(_mm512_slli_epi16(wide(hi), 8), wide(lo));
    if constexpr (Pair) return four;
    return _mm512_shuffle_epi8(four, in_lanes(Part ? 0x0706070603020302 : 0x0504050401000100));
  }
  template <bool Pair>
  static CRELLE_INLINE Ints factor(Ints products) {
    if constexpr (Pair) products = _mm512_shuffle_epi8(products, in_lanes(0x0705060403010200));
    return _mm512_maddubs_epi16(products, _mm512_set1_epi8(1));
  }
  static CRELLE_INLINE Ints dot(Ints acc, Ints values, X x) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(values), "v"(x));
    return acc;
  }
};
