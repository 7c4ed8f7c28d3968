// The vectors of trellis_kernel.h on AVX2: the bytes of a weight are added up to 16 bits, and multiplied by 16 bits of
// x.
//
// Included inside a namespace of the including file.

struct TrellisV {
  using Word = __m256i;
  using Ints = __m256i;
  using Floats = __m256;
  using X = __m256i;
  static constexpr int kSequences = 4;
  static constexpr bool kDigits = false;

  static CRELLE_INLINE Word load(const uint8_t *p) {
    Word v = _mm256_load_si256(reinterpret_cast<const __m256i *>(p));
    __asm__("" : "+x"(v));  // once, not as the operand of several instructions
    return v;
  }
  static CRELLE_INLINE Word middle(Word a, Word b) {
    return _mm256_blend_epi32(_mm256_srli_epi64(a, 32), _mm256_slli_epi64(b, 32), 0xaa);
  }
  template <int A, int B>
  static CRELLE_INLINE Ints states(Word w) {
    const __m256i both = _mm256_shuffle_epi32(A ? _mm256_srli_epi64(w, A) : w, 0xa0);
    const __m256i apart = _mm256_srlv_epi32(both, _mm256_set1_epi64x(int64_t{B - A} << 32));
    return _mm256_and_si256(apart, _mm256_set1_epi32(0xffff));
  }
  static CRELLE_INLINE Ints ints(int v) { return _mm256_set1_epi32(v); }
  static CRELLE_INLINE Ints load_ints(const uint8_t *p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
  }
  static CRELLE_INLINE Ints times(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
  template <bool Pair>
  static CRELLE_INLINE Ints minus_zero(Ints sums) {
    return times(sums, ints(-trellis_code(Pair).zero));
  }
  static CRELLE_INLINE __m256i in_lanes(uint64_t order) {  // bytes of each 128 bits, for two lanes of 64
    return _mm256_broadcastsi128_si256(
        _mm_set_epi64x(static_cast<int64_t>(order + 0x0808080808080808u), static_cast<int64_t>(order)));
  }
  template <bool Pair, int Part>
  static CRELLE_INLINE X inputs(const uint8_t *p) {
    const __m256i four = load_ints(p);
    if constexpr (Pair) return four;
    return _mm256_shuffle_epi8(four, in_lanes(Part ? 0x0706070603020302 : 0x0504050401000100));
  }
  template <bool Pair>
  static CRELLE_INLINE Ints factor(Ints products) {
    if constexpr (Pair) products = _mm256_shuffle_epi8(products, in_lanes(0x0705060403010200));
    return _mm256_maddubs_epi16(products, _mm256_set1_epi8(1));
  }
  static CRELLE_INLINE Ints dot(Ints acc, Ints values, X x) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(values, x));
  }
  static CRELLE_INLINE Ints digit_sums(Ints hi, Ints lo) { return _mm256_add_epi32(_mm256_slli_epi32(hi, 8), lo); }
  static CRELLE_INLINE Floats floats(float v) { return _mm256_set1_ps(v); }
  static CRELLE_INLINE Floats to_float(Ints v) { return _mm256_cvtepi32_ps(v); }
  static CRELLE_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static CRELLE_INLINE Floats load_floats(const uint8_t *p) {
    return _mm256_loadu_ps(reinterpret_cast<const float *>(p));
  }
  static CRELLE_INLINE void store_ints(uint8_t *p, Ints v) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), v); }
  static CRELLE_INLINE void store(float *p, Floats v) { _mm256_storeu_ps(p, v); }
};
