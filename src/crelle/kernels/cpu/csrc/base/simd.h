// Sixteen floats at a time in GCC's portable vectors; intrinsics only where GCC 12 takes a conversion apart.
//
// Included inside a namespace of the including file.

using Vec = float __attribute__((vector_size(64)));
using Int = int __attribute__((vector_size(64)));

constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kRegisters = 32;  // how many Vec the machine holds
#elif defined(__AVX2__)
constexpr int kRegisters = 8;
#elif defined(__aarch64__)
constexpr int kRegisters = 8;
#else
constexpr int kRegisters = 4;
#endif

// As wide as the machine's vectors: GCC 12 keeps sums of wider ones in memory.
#if defined(__AVX512F__)
using Part = Vec;
#elif defined(__AVX2__)
using Part = float __attribute__((vector_size(32)));
#else
using Part = float __attribute__((vector_size(16)));
#endif
using PartInt = int __attribute__((vector_size(sizeof(Part))));
using PartWord = uint32_t __attribute__((vector_size(sizeof(Part))));
constexpr int kParts = sizeof(Vec) / sizeof(Part), kPartLanes = kLanes / kParts;

CRELLE_INLINE Part load_part(const float *p) {
  Part v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
CRELLE_INLINE void store_part(float *p, Part v) { __builtin_memcpy(p, &v, sizeof v); }

CRELLE_INLINE Vec all(float v) { return Vec{} + v; }
CRELLE_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }
CRELLE_INLINE Vec smaller(Vec a, Vec b) { return a < b ? a : b; }

CRELLE_INLINE Vec load(const float *p) {
  Vec v;
  __builtin_memcpy(&v, p, 64);
  return v;
}

CRELLE_INLINE Vec load(const Half *p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif defined(__AVX2__)
  const __m256 h[2] = {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))),
                       _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 8)))};
  Vec v;
  __builtin_memcpy(&v, h, 64);
  return v;
#elif defined(__aarch64__)
  float32x4_t f[4];
  for (int i = 0; i < 4; ++i)
    f[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t *>(p) + 4 * i)));
  Vec v;
  __builtin_memcpy(&v, f, 64);
  return v;
#else
  float f[kLanes];
  for (int i = 0; i < kLanes; ++i) f[i] = float_of_half(p[i].bits);
  return load(f);
#endif
}

CRELLE_INLINE Vec load(const Bfloat *p) {
#if defined(__AVX512F__)
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
#elif defined(__AVX2__)
  __m256i h[2];
  for (int i = 0; i < 2; ++i)
    h[i] = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 8 * i))), 16);
  Vec v;
  __builtin_memcpy(&v, h, 64);
  return v;
#else
  uint32_t bits[kLanes];
  for (int i = 0; i < kLanes; ++i) bits[i] = uint32_t{p[i].bits} << 16;
  Vec v;
  __builtin_memcpy(&v, bits, 64);
  return v;
#endif
}

CRELLE_INLINE Part load_part(const Half *p) {
#if defined(__AVX512F__)
  return load(p);
#elif defined(__AVX2__)
  return (Part)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#elif defined(__aarch64__)
  return (Part)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t *>(p))));
#else
  Part v;
  for (int i = 0; i < kPartLanes; ++i) v[i] = float_of_half(p[i].bits);
  return v;
#endif
}

CRELLE_INLINE Part load_part(const Bfloat *p) {
#if defined(__AVX512F__)
  return load(p);
#elif defined(__AVX2__)
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  return (Part)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);
#elif defined(__aarch64__)
  return (Part)vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t *>(p)), 16);
#else
  PartInt v;
  for (int i = 0; i < kPartLanes; ++i) v[i] = static_cast<int>(uint32_t{p[i].bits} << 16);
  return (Part)v;
#endif
}

// The first n of 16, zeros behind them: nothing beyond p[n] is touched.
template <class T>
CRELLE_INLINE Vec load_first(const T *p, int n) {
  T some[kLanes] = {};
  __builtin_memcpy(some, p, n * sizeof(T));
  return load(some);
}

CRELLE_INLINE void store(float *p, Vec v) { __builtin_memcpy(p, &v, 64); }
CRELLE_INLINE void store_first(float *p, Vec v, int n) { __builtin_memcpy(p, &v, n * sizeof(float)); }

CRELLE_INLINE void store_one(Half *p, float f) { p->bits = half_of_float(f); }
CRELLE_INLINE void store_one(float *p, float f) { *p = f; }
CRELLE_INLINE void store_one(Bfloat *p, float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  p->bits =
      static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The bits of store_one for each.
CRELLE_INLINE void store_part(Bfloat *p, Part v) {
  const PartWord bits = (PartWord)v, nan = PartWord{} + 0x7fc0;
  const PartWord found = v == v ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : nan;
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16((__m512i)found));
#elif defined(__AVX2__)
  const __m128i low = _mm256_castsi256_si128((__m256i)found), high = _mm256_extracti128_si256((__m256i)found, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm_packus_epi32(low, high));
#elif defined(__aarch64__)
  vst1_u16(reinterpret_cast<uint16_t *>(p), vmovn_u32((uint32x4_t)found));
#else
  using Short = uint16_t __attribute__((vector_size(sizeof(Part) / 2)));
  const Short some = __builtin_convertvector(found, Short);
  __builtin_memcpy(p, &some, sizeof some);
#endif
}

// Fold a vector's halves together until one lane is left: always in the same order.
template <class Op>
CRELLE_INLINE float fold(Vec v, Op op) {
  v = op(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = op(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = op(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = op(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}
CRELLE_INLINE float sum_of(Vec v) {
  return fold(v, [](Vec a, Vec b) { return a + b; });
}
CRELLE_INLINE float top_of(Vec v) { return fold(v, larger); }

// Lane i of the result: the sum of vector i. Pairs of vectors are interleaved and added, four times.
CRELLE_INLINE Vec sums_of_16(const Vec (&v)[16]) {
  Vec a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // vectors i, i + 8: lanes 2j, 2j+1 of both
    const Vec x = v[i], y = v[i + 8];
    a[i] = __builtin_shufflevector(x, y, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(x, y, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Vec x = a[i], y = a[i + 4];
    b[i] = __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const Vec x = b[i], y = b[i + 2];
    c[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           __builtin_shufflevector(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  const Vec d = __builtin_shufflevector(c[0], c[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                __builtin_shufflevector(c[0], c[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  // Lane bits, low to high, now count i + 8, i + 4, i + 2, i + 1: reverse them.
  return __builtin_shufflevector(d, d, 0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15);
}

// Lanes 0 ... 7 of the result: the sums of eight vectors, each added up as sums_of_16 does it.
CRELLE_INLINE Vec sums_of_8(const Vec (&v)[8]) {
  Vec a[4], b[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Vec x = v[i], y = v[i + 4];
    a[i] = __builtin_shufflevector(x, y, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(x, y, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const Vec x = a[i], y = a[i + 2];
    b[i] = __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  const Vec c = __builtin_shufflevector(b[0], b[1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
                __builtin_shufflevector(b[0], b[1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  const Vec d = c + __builtin_shufflevector(c, c, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  return __builtin_shufflevector(d, d, 0, 4, 2, 6, 1, 5, 3, 7, 0, 4, 2, 6, 1, 5, 3, 7);
}

// e^x to about 1 ulp for x in [-87, 88]; clamped outside. 2^n by adding n to the exponent, e^r by its series. What it
// makes of NaN is not defined (a product instead of that sum would keep it, and made attention 8% slower): callers see
// to it that NaN stays NaN.
template <class V>
CRELLE_INLINE V exp_each(V x) {
  using Ints = decltype(x < x);
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  x = x < -87.0f ? V{} - 87.0f : x;
  x = x > 88.0f ? V{} + 88.0f : x;
  const V shifted = x * 1.44269504f + kRound, n = shifted - kRound;
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts: the first product is exact
  V p = V{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  return (V)((Ints)p + ((Ints)shifted << 23));
}

CRELLE_INLINE Vec exp_of(Vec x) {
  for (int p = 0; p < kParts; ++p) {
    float *const at = reinterpret_cast<float *>(&x) + p * kPartLanes;
    store_part(at, exp_each(load_part(at)));
  }
  return x;
}
