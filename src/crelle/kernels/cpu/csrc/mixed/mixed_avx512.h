// The vectors of mixed_kernel.h on AVX-512: dot products of bytes by vpdpbusd where the file is compiled for VNNI,
// otherwise by vpmaddubsw as 16-bit sums. Scales and zeros are looked up: vpermps and vpermilps take the low 4 and 2
// bits of an index, so that no mask is needed.
//
// Included inside a namespace of the including file.

struct MixedV {
  using Bytes = __m512i;
  using Ints = __m512i;
  using Floats = __m512;
  using Digits = const uint8_t *;  // dwords of it are broadcast by the load
  using Acc = __m512i;
  struct Seconds {
    alignas(16) float scale[4], offset[4];
  };
  static constexpr int kLanes = 16, kRegisters = 32, kRowsOfX = 4;
  static constexpr bool kRolled = false;
  static CRELLE_INLINE Acc no_sums() { return _mm512_setzero_si512(); }
  static CRELLE_INLINE __m512i broadcast(const void *p) {
    int v;
    __builtin_memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
  }
#if defined(__AVX512VNNI__)
  static constexpr bool kNarrow = false;
  static CRELLE_INLINE Ints sums(Acc a) { return a; }
  template <int I>
  static CRELLE_INLINE Acc dot(Acc acc, Bytes codes, Digits x) {
    return _mm512_dpbusd_epi32(acc, codes, broadcast(x + 4 * I));
  }
#else
  static constexpr bool kNarrow = true;
  static CRELLE_INLINE Ints sums(Acc a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
  template <int I>
  static CRELLE_INLINE Acc dot(Acc acc, Bytes codes, Digits x) {
    return _mm512_add_epi16(acc, _mm512_maddubs_epi16(codes, broadcast(x + 4 * I)));
  }
#endif

  static CRELLE_INLINE Bytes load(const uint8_t *p) { return load_once(p); }
  static CRELLE_INLINE Digits digits(const uint8_t *p) { return p; }
  template <int F>
  static CRELLE_INLINE Bytes field(Bytes v) {
    return _mm512_and_si512(F ? _mm512_srli_epi16(v, 2 * F) : v, _mm512_set1_epi8(3));
  }
  static CRELLE_INLINE Bytes low_nibbles(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  static CRELLE_INLINE Bytes high_nibbles(Bytes v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
  static CRELLE_INLINE Ints zero() { return _mm512_setzero_si512(); }
  static CRELLE_INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static CRELLE_INLINE Ints digit_sums(Ints hi, Ints lo) { return _mm512_add_epi32(_mm512_slli_epi32(hi, 8), lo); }

  static CRELLE_INLINE Ints expand(const uint8_t *p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  }
  template <int J>
  static CRELLE_INLINE Ints zero_sums(const uint8_t *header, MixedZeros zeros) {
    const Ints codes = _mm512_srli_epi32(expand(header + kHeaderZeros), 2 * J);
    const __m512 values = _mm512_broadcast_f32x4(_mm_loadu_ps(reinterpret_cast<const float *>(zeros.table)));
    return _mm512_castps_si512(_mm512_permutevar_ps(values, codes));
  }
  template <int J>
  static CRELLE_INLINE Ints minus_zero(Ints sums, const uint8_t *header, int, MixedZeros zeros) {
    return _mm512_add_epi32(sums, zero_sums<J>(header, zeros));
  }
  template <int J, int D>
  static CRELLE_INLINE void begin(Acc (&acc)[D], const uint8_t *header, int, MixedZeros zeros) {
    acc[0] = no_sums();
    acc[D - 1] = zero_sums<J>(header, zeros);
  }
  static CRELLE_INLINE Seconds seconds(const uint8_t *header, const float *scales) {
    const __m128 second = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(header + kHeaderSecond)));
    int four;
    __builtin_memcpy(&four, header + kHeaderSecondZeros, 4);
    const __m128 zeros = _mm_cvtepi32_ps(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(four)));
    const __m128 scale = _mm_mul_ps(second, _mm_loadu_ps(scales));
    Seconds s;
    _mm_store_ps(s.scale, scale);
    _mm_store_ps(s.offset, _mm_mul_ps(scale, zeros));
    __asm__("" : "+m"(s));  // to be read back: a broadcast from memory needs no shuffle port
    return s;
  }
  template <int J>
  static CRELLE_INLINE Floats add_scaled(Floats f, Ints sums, const uint8_t *header, int, const Seconds &s) {
    const Ints codes = _mm512_srli_epi32(expand(header + J / 2 * kMixedRows), J % 2 ? 4 : 0);
    const __m512 all = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512 values = _mm512_fmadd_ps(all, _mm512_set1_ps(s.scale[J]), _mm512_set1_ps(s.offset[J]));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_permutexvar_ps(codes, values), f);
  }

  static CRELLE_INLINE Floats floats(float v) { return _mm512_set1_ps(v); }
  static CRELLE_INLINE Floats to_float(Ints v) { return _mm512_cvtepi32_ps(v); }
  static CRELLE_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static CRELLE_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static CRELLE_INLINE Floats load_floats(const uint8_t *p) { return _mm512_loadu_ps(p); }
  static CRELLE_INLINE Floats load_halves(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  }
  static CRELLE_INLINE Floats load_bytes(const uint8_t *p) { return _mm512_cvtepi32_ps(expand(p)); }
  // Plain loads: vgatherdps is slow on processors with the fix for gather data sampling. Not measured here.
  static CRELLE_INLINE Floats gather(const float *x, const uint8_t *columns) {
    uint16_t c[16];
    __builtin_memcpy(c, columns, sizeof c);
    return _mm512_setr_ps(x[c[0]], x[c[1]], x[c[2]], x[c[3]], x[c[4]], x[c[5]], x[c[6]], x[c[7]], x[c[8]], x[c[9]],
                          x[c[10]], x[c[11]], x[c[12]], x[c[13]], x[c[14]], x[c[15]]);
  }
  static CRELLE_INLINE void store(float *p, Floats v) { _mm512_storeu_ps(p, v); }
};
