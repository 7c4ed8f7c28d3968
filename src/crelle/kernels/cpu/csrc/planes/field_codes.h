// Uniform and affine grids of 1 to 8 bits by dot products of bytes, four inputs of some outputs at a time: see
// Stream::Fields. FieldV is the instruction set:
//
//   field_codes_neon.h   sdot                    4 outputs to a vector
//   field_codes_x86.h    vpmaddubsw, vpdpbusd    8 or 16
//
// A vector of codes holds inputs 4 u ... 4 u + 3 of the chunk for kLanes outputs; a block has four such vectors. One
// instruction multiplies it by four integers of x. With x in two bytes (Precision::Exact) that takes two instructions.
//
// Taking codes out of their fields costs 1 (4 bits), 1.5 (2 bits) or 4.4 (3 bits) instructions a vector. Few rows of x
// share them in registers. For more rows a segment is unpacked to bytes in L1 first, and all rows of x pass over it.
// Integer sums are exact and the f32 operations have one order: a row of x has the same bits in any batch.
//
// Included inside a namespace of the including file, after encode.h and FieldV.

constexpr int kSteps = kChunk / 4;  // vectors of codes in a chunk
constexpr int kVectorBytes = 4 * FieldV::kLanes, kBlockVectors = 4, kFieldRows = kBlockVectors * FieldV::kLanes;
constexpr int kFieldTokens = 64;  // rows of x that pass over one unpacked segment

// What fields of F bits hold of codes of P bits: vector U of those whose fields lie at `at`.
template <int P, int F, int U>
CRELLE_INLINE FieldV::Codes field(const uint8_t *at) {
  constexpr int kFirst = P & -(2 * F);  // wider fields lie before, and hold the lower bits
  constexpr int kFrom = U * F % 8;
  const auto v = FieldV::load(at + kVectorBytes * (kFirst + U * F / 8));
  if constexpr (F == 8)
    return FieldV::unflipped(v);
  else
    return FieldV::template bits<F, kFirst - kFrom, kFirst>(v);
}

template <int P, int U>
CRELLE_INLINE FieldV::Codes codes_at(const uint8_t *at) {
  constexpr int kWidest = P == 8 ? 8 : P >= 4 ? 4 : P >= 2 ? 2 : 1;
  auto v = field<P, kWidest, U>(at);
  if constexpr (kWidest > 2 && (P & 2) && P != 8) v = FieldV::either(v, field<P, 2, U>(at));
  if constexpr (kWidest > 1 && (P & 1) && P != 8) v = FieldV::either(v, field<P, 1, U>(at));
  return v;
}

template <class F, int... U>
CRELLE_INLINE void for_steps(F &&fn, std::integer_sequence<int, U...>) {
  (fn(std::integral_constant<int, U>{}), ...);
}
using Steps = std::make_integer_sequence<int, kSteps>;

// Codes where they lie in their fields, or unpacked to bytes; kStride: from one vector's to the next one's.
template <int P>
struct PackedCodes {
  static constexpr int kStride = P * kVectorBytes;
  template <int U>
  static CRELLE_INLINE FieldV::Codes at(const uint8_t *from) {
    return codes_at<P, U>(from);
  }
};
struct ByteCodes {
  static constexpr int kStride = kSteps * kVectorBytes;
  template <int U>
  static CRELLE_INLINE FieldV::Codes at(const uint8_t *from) {
    return FieldV::load(from + U * kVectorBytes);
  }
};

// Integer sums over a segment for Q vectors from `codes` on and M rows of x, D bytes each: with two bytes 256 times the
// sums of the first plus those of the second. Where a chunk's sums are 16 bits (Sums::kChunked) both are added to one
// sum as they are widened; elsewhere each byte has a sum until the end.
template <class C, int Q, int M, int D>
CRELLE_INLINE void segment_sums(const uint8_t *codes, const uint8_t *const (&x)[M], int chunks,
                                FieldV::Ints (&total)[Q][M]) {
  using Sums = FieldV::Sums;
  typename Sums::Chunk sums[Q][M][D];
  const auto clear = [&]() __attribute__((always_inline)) {
    for (auto &vector : sums)
      for (auto &row : vector)
        for (auto &a : row) a = FieldV::zero();
  };
  clear();
  for (auto &vector : total)
    for (auto &a : vector) a = FieldV::zero();
  for (int c = 0; c < chunks; ++c, codes += kBlockVectors * C::kStride) {
    if constexpr (C::kStride < kSteps * kVectorBytes || M * D <= 4) {
#pragma GCC unroll 32
      for (int line = 0; line < Q * C::kStride; line += 64) prefetch_stream(codes + line);
    }
    FieldV::Digits d[M][D];
    for_steps(
        [&](auto u) __attribute__((always_inline)) {
          if constexpr (u % FieldV::kDigitSteps == 0)
            for (int m = 0; m < M; ++m)
              for (int i = 0; i < D; ++i) d[m][i] = FieldV::digits(x[m] + (c * D + i) * kChunk + u * 4);
          FieldV::Codes w[Q];
          for (int q = 0; q < Q; ++q) w[q] = C::template at<u>(codes + q * C::kStride);
          for (int q = 0; q < Q; ++q)
            for (int m = 0; m < M; ++m)
              for (int i = 0; i < D; ++i)
                sums[q][m][i] = Sums::template add<u % FieldV::kDigitSteps>(sums[q][m][i], w[q], d[m][i]);
        },
        Steps{});
    if constexpr (Sums::kChunked) {
      for (int q = 0; q < Q; ++q)
        for (int m = 0; m < M; ++m)
          for (int i = 0; i < D; ++i) total[q][m] = Sums::end(total[q][m], sums[q][m][i], i + 1 < D ? 256 : 1);
      clear();
    }
  }
  if constexpr (!Sums::kChunked)
    for (int q = 0; q < Q; ++q)
      for (int m = 0; m < M; ++m) {
        total[q][m] = sums[q][m][0];
        if constexpr (D == 2) total[q][m] = FieldV::add(FieldV::times_256(total[q][m]), sums[q][m][1]);
      }
}

CRELLE_INLINE FieldV::Floats field_scales(const Weight &w, const uint8_t *at, int q) {
  return w.wide_scales ? FieldV::load_floats(at + 4 * FieldV::kLanes * q)
                       : FieldV::load_halves(at + 2 * FieldV::kLanes * q);
}

// What a sum of x, not of codes, is multiplied by and taken from the products of vector q: zero points times scales.
template <int P>
CRELLE_INLINE FieldV::Floats field_offsets(const Weight &w, const uint8_t *group, const uint8_t *zeros, int q,
                                           FieldV::Floats scales) {
  constexpr float kStored = P == 8 ? FieldV::kByteOffset : 0;  // multiplied codes are less by that
  if (w.kind == Kind::Affine) {
    const auto low = field_scales(w, group + kFieldRows * w.scale_size(), q);
    return FieldV::negative(FieldV::fma(scales, FieldV::floats(kStored), low));
  }
  const auto zero = w.bias ? FieldV::load_bytes(zeros + FieldV::kLanes * q) : FieldV::floats(1 << (P - 1));
  return FieldV::mul(FieldV::sub(zero, FieldV::floats(kStored)), scales);
}

// What there is of up to kFieldTokens rows of x.
struct FieldInputs {
  const uint8_t *digits;  // of the first row, row_bytes apart
  size_t row_bytes;
  const float *scales;  // [segments][kFieldTokens]
  const float *sums;    // [groups][kFieldTokens]
  int rows;
};

// One segment of a block for M rows of x: f(q, m) += the integer sums, scaled.
template <class C, int D, int M, class F>
CRELLE_INLINE void add_segment(const uint8_t *x0, size_t row_bytes, const float *x_scale, const uint8_t *codes,
                               const FieldV::Floats (&scales)[kBlockVectors], int chunks, F &&f) {
  constexpr int kMost = FieldV::kSums / (M * D);  // that many vectors' sums fit the registers
  constexpr int Q = kMost >= 4 ? 4 : kMost >= 2 ? 2 : 1;
  const uint8_t *x[M];
  for (int m = 0; m < M; ++m) x[m] = x0 + m * row_bytes;
#pragma GCC unroll 4
  for (int q0 = 0; q0 < kBlockVectors; q0 += Q) {
    FieldV::Ints total[Q][M];
    segment_sums<C, Q, M, D>(codes + q0 * C::kStride, x, chunks, total);
    for (int q = 0; q < Q; ++q) {
      FieldV::Floats t[M];
      for (int m = 0; m < M; ++m) t[m] = f(q0 + q, m);
      for (int m = 0; m < M; ++m) {
        const auto scaled = FieldV::mul(FieldV::to_float(total[q][m]), FieldV::floats(x_scale[m]));
        t[m] = FieldV::fma(scaled, scales[q0 + q], t[m]);
      }
      for (int m = 0; m < M; ++m) f(q0 + q, m) = t[m];
    }
  }
}

template <class F>
CRELLE_INLINE void store_block(const Weight &w, int b, int rows, float *y, size_t ldy, F &&f) {
  constexpr int L = FieldV::kLanes;
  const int outputs = w.N - b * kFieldRows;
  y += size_t(b) * kFieldRows;
  for (int m = 0; m < rows; ++m, y += ldy)
    for (int q = 0; q < kBlockVectors && L * q < outputs; ++q) {
      const FieldV::Floats v = f(q, m);
      if (outputs >= kFieldRows)
        __builtin_memcpy(y + L * q, &v, sizeof v);  // a store, not a call
      else
        __builtin_memcpy(y + L * q, &v, (outputs - L * q < L ? outputs - L * q : L) * sizeof(float));
    }
}

// Block b: goes through the weight's groups, adds up segments of them by `add`(x, scales of x, codes, scales, chunks)
// in f(vector, row), subtracts the groups' offsets and stores.
template <int P, int D, class Sums, class Add>
CRELLE_INLINE void sum_block(const Weight &w, const FieldInputs &in, int b, int rows, float *y, size_t ldy, Sums &&f,
                             Add &&add) {
  const uint8_t *zeros = w.block(b), *at = zeros + w.zeros_bytes, *x = in.digits;
  const float *x_scale = in.scales, *x_sum = in.sums;
  for (int g = 0; g < w.partition.groups; ++g, zeros += kFieldRows, x_sum += kFieldTokens) {
    FieldV::Floats scales[kBlockVectors];
    const uint8_t *const group = at;
    for (int q = 0; q < kBlockVectors; ++q) scales[q] = field_scales(w, group, q);
    at += w.scale_bytes;
    for (int left = w.partition.chunks_of(g); left > 0; left -= kSegmentChunks, x_scale += kFieldTokens) {
      const int n = left < kSegmentChunks ? left : kSegmentChunks;
      add(x, x_scale, at, scales, n);
      at += n * w.chunk_bytes;
      x += n * kChunk * D;
    }
    for (int q = 0; q < kBlockVectors; ++q) {
      const auto offset = field_offsets<P>(w, group, zeros, q, scales[q]);
      for (int m = 0; m < rows; ++m) f(q, m) = FieldV::minus_product(f(q, m), offset, FieldV::floats(x_sum[m]));
    }
  }
  store_block(w, b, rows, y, ldy, f);
}

// Block b for M rows of x, codes straight from their fields.
template <int P, int D, int M>
void few_rows_block(const Weight &w, const FieldInputs &in, int b, float *y, size_t ldy) {
  FieldV::Floats sums[kBlockVectors][M] = {};
  const auto f = [&](int q, int m) __attribute__((always_inline)) -> FieldV::Floats & { return sums[q][m]; };
  const auto add = [&](const uint8_t *x, const float *x_scale, const uint8_t *codes,
                       const FieldV::Floats(&scales)[kBlockVectors], int n) __attribute__((always_inline)) {
    add_segment<PackedCodes<P>, D, M>(x, in.row_bytes, x_scale, codes, scales, n, f);
  };
  sum_block<P, D>(w, in, b, M, y, ldy, f, add);
}

template <int P>
void unpack(const uint8_t *codes, int chunks, uint8_t *out) {
  for (int i = 0; i < chunks * kBlockVectors; ++i, codes += P * kVectorBytes, out += kSteps * kVectorBytes) {
    for (int line = 0; line < P * kVectorBytes; line += 64) prefetch_stream(codes + line);
    for_steps([&](auto u)
                  __attribute__((always_inline)) { FieldV::store(out + kVectorBytes * u, codes_at<P, u>(codes)); },
              Steps{});
  }
}

using VectorSums = FieldV::Floats[kBlockVectors][kFieldTokens];

// Rows [m, m + M) of x by codes that are bytes.
template <int D, int M>
void add_bytes(const uint8_t *x, size_t row_bytes, const float *x_scale, const uint8_t *codes,
               const FieldV::Floats (&scales)[kBlockVectors], int chunks, VectorSums &sums, int m) {
  const auto f = [&](int q, int i) __attribute__((always_inline)) -> FieldV::Floats & { return sums[q][m + i]; };
  add_segment<ByteCodes, D, M>(x + m * row_bytes, row_bytes, x_scale + m, codes, scales, chunks, f);
}

// Function M - 1 of the table is for M rows of x.
template <int D>
constexpr int kMostRows = FieldV::kMostRows / D;

template <int D, int... M>
constexpr auto add_bytes_table(std::integer_sequence<int, M...>) {
  return std::array{add_bytes<D, M + 1>...};
}
template <int P, int D, int... M>
constexpr auto few_rows_table(std::integer_sequence<int, M...>) {
  return std::array{few_rows_block<P, D, M + 1>...};
}

// Block b for up to kFieldTokens rows of x.
template <int P, int D>
void many_rows_block(const Weight &w, const FieldInputs &in, int b, float *y, size_t ldy) {
  constexpr bool kUnpacks = P < 8 || FieldV::kByteOffset == 0;  // bytes may lie as they are multiplied
  static constexpr auto kAdd = add_bytes_table<D>(std::make_integer_sequence<int, kMostRows<D>>{});
  VectorSums sums;
  const auto f = [&](int q, int m) __attribute__((always_inline)) -> FieldV::Floats & { return sums[q][m]; };
  for (int q = 0; q < kBlockVectors; ++q)
    for (int m = 0; m < in.rows; ++m) f(q, m) = FieldV::floats(0);
  alignas(64) uint8_t bytes[kSegmentChunks * kBlockVectors * kSteps * kVectorBytes];
  const auto add = [&](const uint8_t *x, const float *x_scale, const uint8_t *codes,
                       const FieldV::Floats(&scales)[kBlockVectors], int n) __attribute__((always_inline)) {
    if constexpr (kUnpacks) unpack<P>(codes, n, bytes);
    for (int m = 0; m < in.rows; m += kMostRows<D>) {
      const int count = in.rows - m < kMostRows<D> ? in.rows - m : kMostRows<D>;
      kAdd[count - 1](x, in.row_bytes, x_scale, kUnpacks ? bytes : codes, scales, n, sums, m);
    }
  };
  sum_block<P, D>(w, in, b, in.rows, y, ldy, f, add);
}

template <int P, int D>
void field_blocks(const Weight &w, const FieldInputs &in, float *y, size_t ldy, int b0, int b1) {
  constexpr int kFew = FieldV::few_rows(P, D);
  auto run = many_rows_block<P, D>;
  if constexpr (kFew > 0) {
    static constexpr auto kRun = few_rows_table<P, D>(std::make_integer_sequence<int, kFew>{});
    if (in.rows <= kFew) run = kRun[in.rows - 1];
  }
  for (int b = b0; b < b1; ++b) run(w, in, b, y, ldy);
}

using FieldBlocks = void (*)(const Weight &, const FieldInputs &, float *, size_t, int, int);

inline void field_rows(FieldBlocks run, const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  static thread_local Buffer scratch;
  const int segments = w.partition.segments, groups = w.partition.groups;
  scratch.grow(sizeof(float) * (segments + groups) * kFieldTokens);
  float *const scales = floats_of(scratch), *const sums = scales + segments * kFieldTokens;
  for (int m0 = 0; m0 < a.M; m0 += kFieldTokens) {
    const int rows = a.M - m0 < kFieldTokens ? a.M - m0 : kFieldTokens;
    for (int m = 0; m < rows; ++m) {
      for (int i = 0; i < segments; ++i) scales[i * kFieldTokens + m] = a.scales(m0 + m)[i];
      for (int g = 0; g < groups; ++g) sums[g * kFieldTokens + m] = a.sums(m0 + m)[g];
    }
    const FieldInputs in{a.row(m0), a.row_bytes, scales, sums, rows};
    run(w, in, y + m0 * ldy, ldy, b0, b1);
  }
}

template <int... P>
FieldBlocks field_blocks_of(std::integer_sequence<int, P...>, int bits, Precision precision) {
  static constexpr FieldBlocks kInt8[] = {field_blocks<P + 1, 1>...}, kExact[] = {field_blocks<P + 1, 2>...};
  return (precision == Precision::Int8 ? kInt8 : kExact)[bits - 1];
}

inline void field_matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  field_rows(field_blocks_of(std::make_integer_sequence<int, FieldV::kMostBits>{}, w.P, a.precision), w, a, y, ldy, b0,
             b1);
}

// The instruction sets that include this take grids by fields, as far as FieldV reaches, and planes by look-ups.
inline Stream field_stream(Kind kind, int P) {
  const bool takes = P <= FieldV::kMostBits || (P == 8 && FieldV::kByWords);
  return kind != Kind::Bcq && takes ? Stream::Fields : Stream::BytePlanes;
}

inline void field_encode(Activations &a, const float *x, size_t ldx, int m0, int m1) {
  (takes_tables(a.stream) ? encode_stream<Stream::BytePlanes> : encode_stream<Stream::Fields>)(a, x, ldx, m0, m1);
}
