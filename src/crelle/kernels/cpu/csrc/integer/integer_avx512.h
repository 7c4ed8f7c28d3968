// The vectors of integer_kernel.h on AVX-512: dot products of bytes by vpdpbusd where the file is compiled for VNNI,
// otherwise by vpmaddubsw as 16-bit sums.
//
// Included inside a namespace of the including file.

struct IntegerV {
  using Bytes = __m512i;
  using Ints = __m512i;
  using Floats = __m512;
  using Digits = const uint8_t *;  // dwords of it are broadcast by the load
  using Acc = __m512i;
  static constexpr int kLanes = 16, kRegisters = 32, kBlocks = 2;
  static constexpr bool kRolled = false;

  static CRELLE_INLINE Bytes load(const uint8_t *p) { return load_once(p); }
  static CRELLE_INLINE Digits digits(const uint8_t *p) { return p; }
  template <int I>
  static CRELLE_INLINE __m512i four(Digits x) {
    int v;
    __builtin_memcpy(&v, x + 4 * I, 4);
    return _mm512_set1_epi32(v);
  }
  static CRELLE_INLINE Bytes low_nibbles(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  static CRELLE_INLINE Bytes high_nibbles(Bytes v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
  static CRELLE_INLINE Acc no_sums() { return _mm512_setzero_si512(); }
#if defined(__AVX512VNNI__)
  static constexpr int kTokens = 8, kByteOffset = 128;
  static constexpr bool kNarrow = false;
  template <int I>
  static CRELLE_INLINE Acc dot(Acc acc, Bytes codes, Digits x) {
    return _mm512_dpbusd_epi32(acc, codes, four<I>(x));
  }
  // The first factor is unsigned: codes + 128.
  template <int I>
  static CRELLE_INLINE Ints dot_bytes(Ints acc, Bytes codes, Digits x) {
    return dot<I>(acc, _mm512_xor_si512(codes, _mm512_set1_epi8(-128)), x);
  }
#else
  static constexpr int kTokens = 4, kByteOffset = 0;
  static constexpr bool kNarrow = true;
  static CRELLE_INLINE Ints sums(Acc a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
  template <int I>
  static CRELLE_INLINE Acc dot(Acc acc, Bytes codes, Digits x) {
    return _mm512_add_epi16(acc, _mm512_maddubs_epi16(codes, four<I>(x)));
  }
  // The first factor is unsigned: the sign of a code goes to x. Both lie within 127, so that no pair saturates.
  template <int I>
  static CRELLE_INLINE Ints dot_bytes(Ints acc, Bytes codes, Digits x) {
    const __m512i v = four<I>(x);
    const __m512i turned = _mm512_mask_sub_epi8(v, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), v);
    return _mm512_add_epi32(acc, sums(_mm512_maddubs_epi16(_mm512_abs_epi8(codes), turned)));
  }
#endif
  static CRELLE_INLINE Ints ints(int v) { return _mm512_set1_epi32(v); }
  static CRELLE_INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static CRELLE_INLINE Ints mul(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
  static CRELLE_INLINE Ints expand(const uint8_t *p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  }
  static CRELLE_INLINE Floats floats(float v) { return _mm512_set1_ps(v); }
  static CRELLE_INLINE Floats to_float(Ints v) { return _mm512_cvtepi32_ps(v); }
  static CRELLE_INLINE Floats mul_floats(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static CRELLE_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static CRELLE_INLINE Floats load_floats(const uint8_t *p) { return _mm512_loadu_ps(p); }
  static CRELLE_INLINE Floats load_halves(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  }
  static CRELLE_INLINE void store(float *p, Floats v) { _mm512_storeu_ps(p, v); }
};
