// The vectors of integer_kernel.h on AVX2: dot products of bytes by vpmaddubsw, as 16-bit sums.
//
// Included inside a namespace of the including file.

struct IntegerV {
  using Bytes = __m256i;
  using Ints = __m256i;
  using Floats = __m256;
  using Digits = const uint8_t *;  // dwords of it are broadcast by the load
  using Acc = __m256i;
  static constexpr int kLanes = 8, kRegisters = 16, kTokens = 4, kBlocks = 1, kByteOffset = 0;
  static constexpr bool kRolled = false;
  static constexpr bool kNarrow = true;

  static CRELLE_INLINE Bytes load(const uint8_t *p) {
    Bytes v = _mm256_load_si256(reinterpret_cast<const __m256i *>(p));
    __asm__("" : "+x"(v));  // once, not as the operand of several instructions
    return v;
  }
  static CRELLE_INLINE Digits digits(const uint8_t *p) { return p; }
  template <int I>
  static CRELLE_INLINE __m256i four(Digits x) {
    int v;
    __builtin_memcpy(&v, x + 4 * I, 4);
    return _mm256_set1_epi32(v);
  }
  static CRELLE_INLINE Bytes low_nibbles(Bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
  static CRELLE_INLINE Bytes high_nibbles(Bytes v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
  static CRELLE_INLINE Acc no_sums() { return _mm256_setzero_si256(); }
  static CRELLE_INLINE Ints sums(Acc a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
  template <int I>
  static CRELLE_INLINE Acc dot(Acc acc, Bytes codes, Digits x) {
    return _mm256_add_epi16(acc, _mm256_maddubs_epi16(codes, four<I>(x)));
  }
  // One factor has to be unsigned: the sign of a code goes to x. Both lie within 127, so that no pair saturates.
  template <int I>
  static CRELLE_INLINE Ints dot_bytes(Ints acc, Bytes codes, Digits x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(four<I>(x), codes));
    return _mm256_add_epi32(acc, sums(pairs));
  }
  static CRELLE_INLINE Ints ints(int v) { return _mm256_set1_epi32(v); }
  static CRELLE_INLINE Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
  static CRELLE_INLINE Ints mul(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
  static CRELLE_INLINE Ints expand(const uint8_t *p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
  }
  static CRELLE_INLINE Floats floats(float v) { return _mm256_set1_ps(v); }
  static CRELLE_INLINE Floats to_float(Ints v) { return _mm256_cvtepi32_ps(v); }
  static CRELLE_INLINE Floats mul_floats(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static CRELLE_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static CRELLE_INLINE Floats load_floats(const uint8_t *p) {
    return _mm256_loadu_ps(reinterpret_cast<const float *>(p));
  }
  static CRELLE_INLINE Floats load_halves(const uint8_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  }
  static CRELLE_INLINE void store(float *p, Floats v) { _mm256_storeu_ps(p, v); }
};
