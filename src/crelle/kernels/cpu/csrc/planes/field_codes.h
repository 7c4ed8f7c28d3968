// Uniform and affine grids of 1 to 8 bits by sdot, four inputs of four outputs at a time: see Stream::Fields.
//
// A vector of codes has 16 bytes: inputs 4 u ... 4 u + 3 of the chunk for outputs 4 q ... 4 q + 3 of the block (quad
// q). One instruction multiplies it by four integers of x. With x in two bytes (Precision::Exact) that is 16
// multiply-adds a cycle on a core with two pipes of 128 bits, twice the rate of f32; with one byte it is 32.
//
// Taking codes out of their fields costs 1 (4 bits), 1.5 (2 bits) or 4.4 (3 bits) instructions a vector. Few rows of x
// share them in registers. For more rows a segment is unpacked to bytes in L1 first, and all rows of x pass over it.
// Integer sums are exact and the f32 operations have one order: a row of x has the same bits in any batch.
//
// Included inside a namespace of the including file.

constexpr int kSdotRows = 16, kQuads = kSdotRows / 4, kSteps = kChunk / 4;  // kSteps: vectors of codes in a chunk
constexpr int kSdotTokens = 64;  // rows of x that pass over one unpacked segment

// What fields of F bits hold of codes of P bits: vector U of the quad whose fields lie at `at`.
template <int P, int F, int U>
CRELLE_INLINE uint8x16_t field(const uint8_t *at) {
  constexpr int kFirst = P & -(2 * F);  // wider fields lie before, and hold the lower bits
  constexpr int kFrom = U * F % 8, kUp = kFirst - kFrom;
  uint8x16_t v = vld1q_u8(at + 16 * (kFirst + U * F / 8));
  if constexpr (kUp > 0) v = vshlq_n_u8(v, kUp);
  if constexpr (kUp < 0) v = vshrq_n_u8(v, -kUp);
  if constexpr (F == 8 || kUp == F - 8) return v;
  return vandq_u8(v, vdupq_n_u8(static_cast<uint8_t>(((1 << F) - 1) << kFirst)));
}

template <int P, int U>
CRELLE_INLINE int8x16_t codes_at(const uint8_t *at) {
  constexpr int kWidest = P == 8 ? 8 : P >= 4 ? 4 : P >= 2 ? 2 : 1;
  uint8x16_t v = field<P, kWidest, U>(at);
  if constexpr (kWidest > 2 && (P & 2) && P != 8) v = vorrq_u8(v, field<P, 2, U>(at));
  if constexpr (kWidest > 1 && (P & 1) && P != 8) v = vorrq_u8(v, field<P, 1, U>(at));
  return vreinterpretq_s8_u8(v);
}

template <class F, int... U>
CRELLE_INLINE void for_steps(F &&fn, std::integer_sequence<int, U...>) {
  (fn(std::integral_constant<int, U>{}), ...);
}
using Steps = std::make_integer_sequence<int, kSteps>;

// Integer sums over a segment for Q quads from `codes` on and M rows of x, D bytes each.
template <int P, int Q, int M, int D>
CRELLE_INLINE void segment_sums(const uint8_t *codes, const uint8_t *const (&x)[M], int chunks,
                                int32x4_t (&acc)[Q][M][D]) {
  for (auto &quad : acc)
    for (auto &row : quad)
      for (auto &a : row) a = vdupq_n_s32(0);
  for (int c = 0; c < chunks; ++c, codes += kQuads * P * 16) {
    if constexpr (P < 8 || M * D <= 4)
      for (int line = 0; line < Q * P * 16; line += 64) prefetch_stream(codes + line);
    int8x16_t d[M][D];
    for_steps(
        [&](auto u) __attribute__((always_inline)) {
          if constexpr (u % 4 == 0)
            for (int m = 0; m < M; ++m)
              for (int i = 0; i < D; ++i) d[m][i] = vreinterpretq_s8_u8(vld1q_u8(x[m] + (c * D + i) * kChunk + u * 4));
          int8x16_t w[Q];
          for (int q = 0; q < Q; ++q) w[q] = codes_at<P, u>(codes + q * P * 16);
          for (int q = 0; q < Q; ++q)
            for (int m = 0; m < M; ++m)
              for (int i = 0; i < D; ++i) acc[q][m][i] = vdotq_laneq_s32(acc[q][m][i], w[q], d[m][i], u % 4);
        },
        Steps{});
  }
}

CRELLE_INLINE float32x4_t quad_scales(const Weight &w, const uint8_t *at, int q) {
  return w.wide_scales ? vreinterpretq_f32_u8(vld1q_u8(at + 16 * q))
                       : vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at + 8 * q)));
}

// What a sum of x, not of codes, is multiplied by and taken from the products of quad q: zero points times scales.
template <int P>
CRELLE_INLINE float32x4_t quad_offsets(const Weight &w, const uint8_t *group, const uint8_t *zeros, int q,
                                       float32x4_t scales) {
  constexpr float kStored = P == 8 ? kByteZero : 0;  // codes are less by that
  if (w.kind == Kind::Affine) {
    const float32x4_t low = quad_scales(w, group + kSdotRows * w.scale_size(), q);
    return vnegq_f32(vfmaq_n_f32(low, scales, kStored));
  }
  float32x4_t zero = vdupq_n_f32(1 << (P - 1));
  if (w.bias) {
    uint32_t four;
    __builtin_memcpy(&four, zeros + 4 * q, 4);
    const uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
    zero = vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
  }
  return vmulq_f32(vsubq_f32(zero, vdupq_n_f32(kStored)), scales);
}

// What there is of up to kSdotTokens rows of x.
struct SdotInputs {
  const uint8_t *digits;  // of the first row, row_bytes apart
  size_t row_bytes;
  const float *scales;  // [segments][kSdotTokens]
  const float *sums;    // [groups][kSdotTokens]
  int rows;
};

// One segment of a block for M rows of x: f(q, m) += the integer sums, scaled.
template <int P, int D, int M, class F>
CRELLE_INLINE void add_segment(const uint8_t *x0, size_t row_bytes, const float *x_scale, const uint8_t *codes,
                               const float32x4_t (&scales)[kQuads], int chunks, F &&f) {
  constexpr int Q = M * D > 4 ? 2 : kQuads;  // 16 registers of sums at most
  const uint8_t *x[M];
  for (int m = 0; m < M; ++m) x[m] = x0 + m * row_bytes;
#pragma GCC unroll 2
  for (int q0 = 0; q0 < kQuads; q0 += Q) {
    int32x4_t acc[Q][M][D];
    segment_sums<P, Q, M, D>(codes + q0 * P * 16, x, chunks, acc);
    for (int q = 0; q < Q; ++q) {
      float32x4_t t[M];
      for (int m = 0; m < M; ++m) t[m] = f(q0 + q, m);
      for (int m = 0; m < M; ++m) {
        int32x4_t sum = acc[q][m][0];
        if constexpr (D == 2) sum = vaddq_s32(vshlq_n_s32(sum, 8), acc[q][m][1]);
        t[m] = vfmaq_f32(t[m], vmulq_n_f32(vcvtq_f32_s32(sum), x_scale[m]), scales[q0 + q]);
      }
      for (int m = 0; m < M; ++m) f(q0 + q, m) = t[m];
    }
  }
}

template <class F>
CRELLE_INLINE void store_block(const Weight &w, int b, int rows, float *y, size_t ldy, F &&f) {
  const int outputs = w.N - b * kSdotRows;
  y += size_t(b) * kSdotRows;
  for (int m = 0; m < rows; ++m, y += ldy)
    for (int q = 0; q < kQuads && 4 * q < outputs; ++q) {
      const float32x4_t v = f(q, m);
      __builtin_memcpy(y + 4 * q, &v, (outputs - 4 * q < 4 ? outputs - 4 * q : 4) * sizeof(float));
    }
}

// Block b: goes through the weight's groups, adds up segments of them by `add`(x, scales of x, codes, scales, chunks)
// in f(quad, row), subtracts the groups' offsets and stores.
template <int P, int D, class Sums, class Add>
CRELLE_INLINE void sum_block(const Weight &w, const SdotInputs &in, int b, int rows, float *y, size_t ldy, Sums &&f,
                             Add &&add) {
  const uint8_t *zeros = w.block(b), *at = zeros + w.zeros_bytes, *x = in.digits;
  const float *x_scale = in.scales, *x_sum = in.sums;
  for (int g = 0; g < w.partition.groups; ++g, zeros += kSdotRows, x_sum += kSdotTokens) {
    float32x4_t scales[kQuads];
    const uint8_t *const group = at;
    for (int q = 0; q < kQuads; ++q) scales[q] = quad_scales(w, group, q);
    at += w.scale_bytes;
    for (int left = w.partition.chunks_of(g); left > 0; left -= kSegmentChunks, x_scale += kSdotTokens) {
      const int n = left < kSegmentChunks ? left : kSegmentChunks;
      add(x, x_scale, at, scales, n);
      at += n * w.chunk_bytes;
      x += n * kChunk * D;
    }
    for (int q = 0; q < kQuads; ++q) {
      const float32x4_t offset = quad_offsets<P>(w, group, zeros, q, scales[q]);
      for (int m = 0; m < rows; ++m) f(q, m) = vfmsq_n_f32(f(q, m), offset, x_sum[m]);
    }
  }
  store_block(w, b, rows, y, ldy, f);
}

// Block b for M rows of x, codes straight from their fields.
template <int P, int D, int M>
void few_rows_block(const Weight &w, const SdotInputs &in, int b, float *y, size_t ldy) {
  float32x4_t sums[kQuads][M] = {};
  const auto f = [&](int q, int m) __attribute__((always_inline)) -> float32x4_t & { return sums[q][m]; };
  const auto add =
      [&](const uint8_t *x, const float *x_scale, const uint8_t *codes, const float32x4_t(&scales)[kQuads], int n)
          __attribute__((always_inline)) { add_segment<P, D, M>(x, in.row_bytes, x_scale, codes, scales, n, f); };
  sum_block<P, D>(w, in, b, M, y, ldy, f, add);
}

template <int P>
void unpack(const uint8_t *codes, int chunks, uint8_t *out) {
  for (int i = 0; i < chunks * kQuads; ++i, codes += P * 16, out += kSteps * 16) {
    prefetch_stream(codes);
    for_steps(
        [&](auto u)
            __attribute__((always_inline)) { vst1q_u8(out + 16 * u, vreinterpretq_u8_s8(codes_at<P, u>(codes))); },
        Steps{});
  }
}

using QuadSums = float32x4_t[kQuads][kSdotTokens];

// Rows [m, m + M) of x by codes of 8 bits, in the kernel above or unpacked.
template <int D, int M>
void add_bytes(const uint8_t *x, size_t row_bytes, const float *x_scale, const uint8_t *codes,
               const float32x4_t (&scales)[kQuads], int chunks, QuadSums &sums, int m) {
  const auto f = [&](int q, int i) __attribute__((always_inline)) -> float32x4_t & { return sums[q][m + i]; };
  add_segment<8, D, M>(x + m * row_bytes, row_bytes, x_scale + m, codes, scales, chunks, f);
}

// Function M - 1 of the table is for M rows of x.
template <int D>
constexpr int kMostRows = 8 / D;
template <int D>
using RowCounts = std::make_integer_sequence<int, kMostRows<D>>;

template <int D, int... M>
constexpr auto add_bytes_table(std::integer_sequence<int, M...>) {
  return std::array{add_bytes<D, M + 1>...};
}
template <int P, int D, int... M>
constexpr auto few_rows_table(std::integer_sequence<int, M...>) {
  return std::array{few_rows_block<P, D, M + 1>...};
}

// Block b for up to kSdotTokens rows of x.
template <int P, int D>
void many_rows_block(const Weight &w, const SdotInputs &in, int b, float *y, size_t ldy) {
  static constexpr auto kAdd = add_bytes_table<D>(RowCounts<D>{});
  QuadSums sums;
  const auto f = [&](int q, int m) __attribute__((always_inline)) -> float32x4_t & { return sums[q][m]; };
  for (int q = 0; q < kQuads; ++q)
    for (int m = 0; m < in.rows; ++m) f(q, m) = vdupq_n_f32(0);
  alignas(64) uint8_t bytes[kSegmentChunks * kQuads * kSteps * 16];
  const auto add = [&](const uint8_t *x, const float *x_scale, const uint8_t *codes, const float32x4_t(&scales)[kQuads],
                       int n) __attribute__((always_inline)) {
    if constexpr (P < 8) unpack<P>(codes, n, bytes);
    for (int m = 0; m < in.rows; m += kMostRows<D>) {
      const int count = in.rows - m < kMostRows<D> ? in.rows - m : kMostRows<D>;
      kAdd[count - 1](x, in.row_bytes, x_scale, P < 8 ? bytes : codes, scales, n, sums, m);
    }
  };
  sum_block<P, D>(w, in, b, in.rows, y, ldy, f, add);
}

// Codes of many bits take little to unpack: few functions, which take long to compile, read them from their fields.
template <int P, int D>
constexpr int kFewRows = P <= 4 ? kMostRows<D> : kMostRows<D> / 2;

template <int P, int D>
void sdot_blocks(const Weight &w, const SdotInputs &in, float *y, size_t ldy, int b0, int b1) {
  static constexpr auto kFew = few_rows_table<P, D>(std::make_integer_sequence<int, kFewRows<P, D>>{});
  const auto run = in.rows <= kFewRows<P, D> ? kFew[in.rows - 1] : many_rows_block<P, D>;
  for (int b = b0; b < b1; ++b) run(w, in, b, y, ldy);
}

template <int P>
void sdot_all_rows(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  static thread_local Buffer scratch;
  const int segments = w.partition.segments, groups = w.partition.groups;
  scratch.grow(sizeof(float) * (segments + groups) * kSdotTokens);
  float *const scales = floats_of(scratch), *const sums = scales + segments * kSdotTokens;
  for (int m0 = 0; m0 < a.M; m0 += kSdotTokens) {
    const int rows = a.M - m0 < kSdotTokens ? a.M - m0 : kSdotTokens;
    for (int m = 0; m < rows; ++m) {
      for (int i = 0; i < segments; ++i) scales[i * kSdotTokens + m] = a.scales(m0 + m)[i];
      for (int g = 0; g < groups; ++g) sums[g * kSdotTokens + m] = a.sums(m0 + m)[g];
    }
    const SdotInputs in{a.row(m0), a.row_bytes, scales, sums, rows};
    (a.precision == Precision::Int8 ? sdot_blocks<P, 1> : sdot_blocks<P, 2>)(w, in, y + m0 * ldy, ldy, b0, b1);
  }
}

inline void sdot_matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  using Run = void (*)(const Weight &, const Activations &, float *, size_t, int, int);
  static constexpr Run kRun[8] = {sdot_all_rows<1>, sdot_all_rows<2>, sdot_all_rows<3>, sdot_all_rows<4>,
                                  sdot_all_rows<5>, sdot_all_rows<6>, sdot_all_rows<7>, sdot_all_rows<8>};
  kRun[w.P - 1](w, a, y, ldy, b0, b1);
}
