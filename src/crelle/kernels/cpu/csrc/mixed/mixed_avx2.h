// The vectors of mixed_kernel.h on AVX2: dot products of bytes by vpmaddubsw, as 16-bit sums.
//
// Included inside a namespace of the including file.

struct MixedV {
  using Bytes = __m256i;
  using Ints = __m256i;
  using Floats = __m256;
  using Digits = const uint8_t *;  // dwords of it are broadcast by the load
  using Acc = __m256i;
  struct Seconds {
    alignas(16) float scale[4];
  };
  static constexpr int kLanes = 8, kRegisters = 16, kRowsOfX = 2;
  static constexpr bool kNarrow = true, kRolled = false;
  static CRELLE_INLINE Acc no_sums() { return _mm256_setzero_si256(); }
  static CRELLE_INLINE Ints sums(Acc a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
  template <int I>
  static CRELLE_INLINE Acc dot(Acc acc, Bytes codes, Digits x) {
    int four;
    __builtin_memcpy(&four, x + 4 * I, 4);
    return _mm256_add_epi16(acc, _mm256_maddubs_epi16(codes, _mm256_set1_epi32(four)));
  }

  static CRELLE_INLINE Bytes load(const uint8_t *p) {
    Bytes v = _mm256_load_si256(reinterpret_cast<const __m256i *>(p));
    __asm__("" : "+x"(v));  // once, not as the operand of four instructions
    return v;
  }
  static CRELLE_INLINE Digits digits(const uint8_t *p) { return p; }
  template <int F>
  static CRELLE_INLINE Bytes field(Bytes v) {
    return _mm256_and_si256(F ? _mm256_srli_epi16(v, 2 * F) : v, _mm256_set1_epi8(3));
  }
  static CRELLE_INLINE Bytes low_nibbles(Bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
  static CRELLE_INLINE Bytes high_nibbles(Bytes v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
  static CRELLE_INLINE Ints zero() { return _mm256_setzero_si256(); }
  static CRELLE_INLINE Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
  static CRELLE_INLINE Ints digit_sums(Ints hi, Ints lo) { return _mm256_add_epi32(_mm256_slli_epi32(hi, 8), lo); }

  static CRELLE_INLINE Ints expand(const uint8_t *p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
  }
  // vpermilps takes the low 2 bits of an index: no mask is needed.
  template <int J>
  static CRELLE_INLINE Ints minus_zero(Ints sums, const uint8_t *header, int i, MixedZeros zeros) {
    const Ints codes = _mm256_srli_epi32(expand(header + kHeaderZeros + i * kLanes), 2 * J);
    const __m256 values = _mm256_broadcast_ps(reinterpret_cast<const __m128 *>(zeros.table));
    return _mm256_add_epi32(sums, _mm256_castps_si256(_mm256_permutevar_ps(values, codes)));
  }
  static CRELLE_INLINE Seconds seconds(const uint8_t *header, const float *scales) {
    const __m128 second = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(header + kHeaderSecond)));
    Seconds s;
    _mm_store_ps(s.scale, _mm_mul_ps(second, _mm_loadu_ps(scales)));
    __asm__("" : "+m"(s));  // to be read back: a broadcast from memory needs no shuffle port
    return s;
  }
  template <int J>
  static CRELLE_INLINE Floats add_scaled(Floats f, Ints sums, const uint8_t *header, int i, const Seconds &s) {
    const Ints both = expand(header + J / 2 * kMixedRows + i * kLanes);
    const Ints codes = J % 2 ? _mm256_srli_epi32(both, 4) : _mm256_and_si256(both, _mm256_set1_epi32(15));
    const Ints scale = _mm256_add_epi32(codes, _mm256_set1_epi32(header[kHeaderSecondZeros + J]));
    const Floats product = _mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_cvtepi32_ps(scale));
    return _mm256_fmadd_ps(product, _mm256_set1_ps(s.scale[J]), f);
  }

  static CRELLE_INLINE Floats floats(float v) { return _mm256_set1_ps(v); }
  static CRELLE_INLINE Floats to_float(Ints v) { return _mm256_cvtepi32_ps(v); }
  static CRELLE_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static CRELLE_INLINE Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static CRELLE_INLINE Floats load_floats(const uint8_t *p) {
    return _mm256_loadu_ps(reinterpret_cast<const float *>(p));
  }
  static CRELLE_INLINE Floats load_halves(const uint8_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  }
  static CRELLE_INLINE Floats load_bytes(const uint8_t *p) { return _mm256_cvtepi32_ps(expand(p)); }
  // Plain loads: vgatherdps is slow on processors with the fix for gather data sampling. Not measured here.
  static CRELLE_INLINE Floats gather(const float *x, const uint8_t *columns) {
    uint16_t c[8];
    __builtin_memcpy(c, columns, sizeof c);
    return _mm256_setr_ps(x[c[0]], x[c[1]], x[c[2]], x[c[3]], x[c[4]], x[c[5]], x[c[6]], x[c[7]]);
  }
  static CRELLE_INLINE void store(float *p, Floats v) { _mm256_storeu_ps(p, v); }
};
