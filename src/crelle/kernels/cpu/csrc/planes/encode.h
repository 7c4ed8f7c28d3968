// Activations to integers (see activations.h), in GCC's portable vectors: each instruction set's file compiles it
// for itself, inside a namespace of its own.
//
// Rounding is by adding 1.5 * 2^23: the sum's low bits are then the nearest integer in two's complement, so
// truncating it to a byte is all the conversion that there is. A bias costs nothing, it is part of the constant.

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#define CRELLE_SWAP_1 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#define CRELLE_SWAP_2 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#define CRELLE_SWAP_1 1, 0, 3, 2, 5, 4, 7, 6
#define CRELLE_SWAP_2 2, 3, 0, 1, 6, 7, 4, 5
#else
constexpr int kLanes = 4;
#define CRELLE_SWAP_1 1, 0, 3, 2
#define CRELLE_SWAP_2 2, 3, 0, 1
#endif
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int __attribute__((vector_size(4 * kLanes)));

// A row's largest value, as bits: 2^-60 and 2^100. Below, and above, a row is scaled first.
constexpr int kLeastTop = (127 - 60) << 23, kMostTop = (127 + 100) << 23;
constexpr float kLeastScale = 0x1p-120f;  // of a segment: its inverse is finite

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23, bits 0x4b400000
constexpr int kRoundBits = 0x4b400000;

CRELLE_INLINE Floats load(const float *p) {
  Floats v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// The low bytes of 16 integers. GCC 12 takes vectors apart to convert them, hence the intrinsics.
CRELLE_INLINE void store_low_bytes(uint8_t *p, const Ints (&v)[16 / kLanes]) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8((__m512i)v[0]));
#elif defined(__AVX2__)
  const __m256i words = _mm256_packus_epi32((__m256i)(v[0] & 255), (__m256i)(v[1] & 255));
  const __m256i order = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(order), _mm256_extracti128_si256(order, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), bytes);
#elif defined(__ARM_NEON) && !defined(CRELLE_PORTABLE)
  const int16x8_t low = vcombine_s16(vmovn_s32((int32x4_t)v[0]), vmovn_s32((int32x4_t)v[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32((int32x4_t)v[2]), vmovn_s32((int32x4_t)v[3]));
  vst1q_s8(reinterpret_cast<int8_t *>(p), vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
#else
  for (int i = 0; i < 16; ++i) p[i] = static_cast<uint8_t>(v[i / kLanes][i % kLanes]);
#endif
}

// Maxima of magnitudes are taken of their bits as integers, where finite < infinity < NaN: a maximum of floats would
// forget a NaN.
CRELLE_INLINE Ints larger(Ints a, Ints b) { return a > b ? a : b; }
CRELLE_INLINE Floats magnitude(Floats v) { return (Floats)((Ints)v & 0x7fffffff); }

// Fold the lanes together, always in the same order.
template <class Vector, class Op>
CRELLE_INLINE auto fold(Vector v, Op op) {
  v = op(v, __builtin_shufflevector(v, v, CRELLE_SWAP_1));
  v = op(v, __builtin_shufflevector(v, v, CRELLE_SWAP_2));
  auto result = v[0];
  for (int i = 4; i < kLanes; i += 4) result = op(Vector{} + result, Vector{} + v[i])[0];
  return result;
}
template <class Vector>
CRELLE_INLINE Vector plus(Vector a, Vector b) {
  return a + b;
}

// Where table i (0...7) of a chunk lies, its digit d (0: the high or only byte): see Stream.
template <Stream S, int D>
constexpr int table_at(int i, int d) {
  return S == Stream::QuadPlanes ? d * 128 + (i & 1) * 64 + (i >> 1) * 16 : (i * D + d) * 16;
}

template <int D>
constexpr float kTop = D == 1 ? 127.0f : 32639.0f;  // 127 * 256 + 127

// The bits of the largest entry of any table of a segment; adds the sum of x.
CRELLE_INLINE int measure_tables(const float *x, int chunks, float &sum) {
  Ints tops = {};
  Floats sums = {};
  for (int k = 0; k < chunks * kChunk; k += kLanes) {
    const Floats v = load(x + k);
    Floats norm = magnitude(v);  // of four neighbours
    norm += __builtin_shufflevector(norm, norm, CRELLE_SWAP_1);
    norm += __builtin_shufflevector(norm, norm, CRELLE_SWAP_2);
    tops = larger((Ints)norm, tops);
    sums += v;
  }
  sum += fold(sums, plus<Floats>);
  return fold(tops, larger);
}

template <Stream S, int D>
CRELLE_INLINE void fill_tables(const float *x, int chunks, float inverse, uint8_t *out) {
  constexpr bool kUnsigned = S == Stream::BytePlanes;
  constexpr float kConstant = kRound + (kUnsigned ? (D == 1 ? 128.0f : 32768.0f) : 0.0f);
  Floats sign[4][16 / kLanes];
  for (int b = 0; b < 4; ++b)
    for (int e = 0; e < 16; ++e) sign[b][e / kLanes][e % kLanes] = e >> b & 1 ? 1.0f : -1.0f;
  for (int c = 0; c < chunks; ++c, x += kChunk, out += 128 * D) {
    float scaled[kChunk];
    for (int k = 0; k < kChunk; ++k) scaled[k] = x[k] * inverse;
    __asm__ volatile("" : : "r"(scaled) : "memory");  // to be read back: a broadcast from memory needs no shuffle port
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const float *v = scaled + 4 * i;
      Ints bits[16 / kLanes], high[16 / kLanes];
      for (int e = 0; e < 16 / kLanes; ++e) {
        const Floats t = (sign[0][e] * v[0] + sign[1][e] * v[1]) + (sign[2][e] * v[2] + sign[3][e] * v[3]);
        bits[e] = (Ints)(t + kConstant);
        high[e] = (kUnsigned ? bits[e] : bits[e] + 128) >> 8;  // signed: the low digit is -128...127
      }
      if constexpr (D == 2) store_low_bytes(out + table_at<S, D>(i, 0), high);
      store_low_bytes(out + table_at<S, D>(i, D - 1), bits);
    }
  }
}

CRELLE_INLINE int measure_digits(const float *x, int chunks) {
  Ints tops = {};
  for (int k = 0; k < chunks * kChunk; k += kLanes) tops = larger((Ints)magnitude(load(x + k)), tops);
  return fold(tops, larger);
}

// Digits, [chunk][D][32]; returns their sum.
template <int D>
CRELLE_INLINE int fill_digits(const float *x, int chunks, float inverse, uint8_t *out) {
  Ints total = {};
  for (int c = 0; c < chunks; ++c, out += kChunk * D)
    for (int k = 0; k < kChunk; k += 16) {
      Ints bits[16 / kLanes], high[16 / kLanes];
      for (int e = 0; e < 16 / kLanes; ++e) {
        bits[e] = (Ints)(load(x + c * kChunk + k + e * kLanes) * inverse + kRound);
        high[e] = (bits[e] + 128) >> 8;
        total += bits[e] - kRoundBits;
      }
      if constexpr (D == 2) store_low_bytes(out + k, high);
      store_low_bytes(out + (D - 1) * kChunk + k, bits);
    }
  return fold(total, plus<Ints>);
}

// Call fn(group, x, chunks) for every segment, x padded with zeros to whole chunks.
template <class F>
CRELLE_INLINE void for_segments(const KPartition &partition, const float *x, F &&fn) {
  for (int g = 0; g < partition.groups; ++g, x += partition.G) {
    const int inputs = partition.inputs_of(g);
    for (int k = 0; k < inputs; k += kSegment) {
      const int n = inputs - k < kSegment ? inputs - k : kSegment, chunks = (n + kChunk - 1) / kChunk;
      if (n == chunks * kChunk) {
        fn(g, x + k, chunks);
      } else {
        float padded[kSegment] = {};
        for (int i = 0; i < n; ++i) padded[i] = x[k + i];
        fn(g, padded, chunks);
      }
    }
  }
}

// Two passes: a segment's scale is known only after a chain of dependent steps, and those of all segments overlap.
//
// A row whose largest value is not finite, or where sums might overflow or scales lose bits, is left to the caller
// (encode_rows in matmul.cpp): its factor becomes 0. A segment far below the others of its row counts as zeros.
template <Stream S, int D>
void encode_row(Activations &a, const float *x, int m) {
  constexpr bool kTables = S == Stream::QuadPlanes || S == Stream::BytePlanes;
  uint8_t *out = a.codes.data() + size_t(m) * a.row_bytes;
  float *scale = a.scales(m), *sums = a.sums(m);
  for (int g = 0; g < a.partition.groups; ++g) sums[g] = 0;
  int most = 0;
  for_segments(a.partition, x, [&](int g, const float *v, int chunks) __attribute__((always_inline)) {
    const int bits = kTables ? measure_tables(v, chunks, sums[g]) : measure_digits(v, chunks);
    most = most > bits ? most : bits;
    float top;
    __builtin_memcpy(&top, &bits, 4);
    *scale++ = top / kTop<D>;
  });
  const bool usual = most == 0 || (most >= kLeastTop && most < kMostTop);
  a.factor(m) = usual ? 1.0f : 0.0f;
  if (!usual) return;
  scale = a.scales(m);
  for_segments(a.partition, x, [&](int g, const float *v, int chunks) __attribute__((always_inline)) {
    const float inverse = *scale > kLeastScale ? 1.0f / *scale : 0.0f;
    if constexpr (kTables)
      fill_tables<S, D>(v, chunks, inverse, out);
    else
      sums[g] += static_cast<float>(fill_digits<D>(v, chunks, inverse, out)) * *scale;
    ++scale;
    out += chunks * (kTables ? 128 : 32) * D;
  });
}

template <Stream S>
void encode_stream(Activations &a, const float *x, size_t ldx, int m0, int m1) {
  for (int m = m0; m < m1; ++m)
    if (a.precision == Precision::Int8)
      encode_row<S, 1>(a, x + size_t(m) * ldx, m);
    else
      encode_row<S, 2>(a, x + size_t(m) * ldx, m);
}

#undef CRELLE_SWAP_1
#undef CRELLE_SWAP_2
