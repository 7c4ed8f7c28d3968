// Codes of 8 bits where there is no VNNI: vpmaddwd over 16-bit words, in place of look-ups in eight planes.
//
// vpmaddubsw cannot: two products of 8-bit codes exceed 16 bits. So codes are widened as they are loaded (vpmovsxbw:
// half a vector of Stream::Fields is four inputs of some outputs), and x is one int16, hi * 256 + lo, in both
// precisions. vpmaddwd adds two products of 24 bits into 32: a lane sums at most 64 of 128 * 32639, exactly. An output
// has two lanes, which are added once a segment.
//
// Instructions for 32 codes and a row of x: 2 to widen, 4 to multiply and add, 0.25 broadcasts (look-ups: 21). For more
// rows the widened codes are shared: 4 and (2 + rows) / rows. Integer sums are exact and the f32 operations have one
// order: a row of x has the same bits in any batch.
//
// Included inside a namespace of the including file, after field_codes.h.

constexpr int kWordRows = 4;  // of x at a time
constexpr int kWordStride = kSteps * kVectorBytes;

// Sums over a segment for Q vectors of outputs and M rows of x; ahead: the codes come from memory.
template <int Q, int M>
CRELLE_INLINE void word_sums(const uint8_t *codes, const uint8_t *const (&x)[M], int chunks, bool ahead,
                             FieldV::Ints (&total)[Q][M]) {
  FieldV::Ints sums[Q][2][M];
  for (auto &vector : sums)
    for (auto &half : vector)
      for (auto &sum : half) sum = FieldV::zero();
  for (int c = 0; c < chunks; ++c, codes += kBlockVectors * kWordStride) {
    if (ahead) {
#pragma GCC unroll 32
      for (int line = 0; line < Q * kWordStride; line += 64) prefetch_stream(codes + line);
    }
    for_steps(
        [&](auto u) __attribute__((always_inline)) {
          FieldV::Digits d[M];
          for (int m = 0; m < M; ++m) d[m] = FieldV::four_words(x[m] + 2 * (c * kChunk + u * 4));
          for (int q = 0; q < Q; ++q)
            for (int half = 0; half < 2; ++half) {
              const auto w = FieldV::widened(codes + q * kWordStride + u * kVectorBytes + half * kVectorBytes / 2);
              for (int m = 0; m < M; ++m) sums[q][half][m] = FieldV::add_word_products(sums[q][half][m], w, d[m]);
            }
        },
        Steps{});
  }
  for (int q = 0; q < Q; ++q)
    for (int m = 0; m < M; ++m) total[q][m] = FieldV::neighbour_sums(sums[q][0][m], sums[q][1][m]);
}

// Block b for rows [m0, m0 + M) of x.
template <int M>
void word_block(const Weight &w, const FieldInputs &all, int m0, int b, float *y, size_t ldy) {
  constexpr int kMost = FieldV::kSums / (2 * M), Q = kMost >= 4 ? 4 : kMost >= 2 ? 2 : 1;
  const FieldInputs in{all.digits + m0 * all.row_bytes, all.row_bytes, all.scales + m0, all.sums + m0, M};
  FieldV::Floats sums[kBlockVectors][M] = {};
  const auto f = [&](int q, int m) __attribute__((always_inline)) -> FieldV::Floats & { return sums[q][m]; };
  const auto add = [&](const uint8_t *from, const float *x_scale, const uint8_t *codes,
                       const FieldV::Floats(&scales)[kBlockVectors], int n) __attribute__((always_inline)) {
    const uint8_t *x[M];
    for (int m = 0; m < M; ++m) x[m] = from + m * in.row_bytes;
#pragma GCC unroll 4
    for (int q0 = 0; q0 < kBlockVectors; q0 += Q) {
      FieldV::Ints total[Q][M];
      word_sums<Q, M>(codes + q0 * kWordStride, x, n, m0 == 0, total);
      for (int q = 0; q < Q; ++q)
        for (int m = 0; m < M; ++m) {
          const auto scaled = FieldV::mul(FieldV::to_float(total[q][m]), FieldV::floats(x_scale[m]));
          f(q0 + q, m) = FieldV::fma(scaled, scales[q0 + q], f(q0 + q, m));
        }
    }
  };
  sum_block<8, 2>(w, in, b, M, y + m0 * ldy, ldy, f, add);
}

inline void word_blocks(const Weight &w, const FieldInputs &in, float *y, size_t ldy, int b0, int b1) {
  static constexpr auto kTable = []<int... M>(std::integer_sequence<int, M...>) {
    return std::array{word_block<M + 1>...};
  }(std::make_integer_sequence<int, kWordRows>{});
  for (int b = b0; b < b1; ++b)  // all rows of x while the block is in the cache
    for (int m = 0; m < in.rows; m += kWordRows)
      kTable[in.rows - m < kWordRows ? in.rows - m - 1 : kWordRows - 1](w, in, m, b, y, ldy);
}

// x as int16, of its bytes.
inline void widen_digits(const uint8_t *from, int chunks, int digits, uint8_t *to) {
  for (int c = 0; c < chunks; ++c, from += kChunk * digits)
    for (int k = 0; k < kChunk; k += FieldV::kWords, to += 2 * FieldV::kWords) {
      auto v = FieldV::widened(from + k);
      if (digits == 2) v = FieldV::word_of_digits(v, FieldV::widened(from + kChunk + k));
      FieldV::store(to, v);
    }
}

inline void word_matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  static thread_local Buffer scratch;
  const int chunks = w.partition.chunks, segments = w.partition.segments, groups = w.partition.groups;
  const size_t row_bytes = size_t(chunks) * kChunk * 2, floats = size_t(segments + groups) * kFieldTokens;
  scratch.grow(row_bytes * kFieldTokens + floats * sizeof(float));
  uint8_t *const words = scratch.data();
  float *const scales = floats_of(scratch) + row_bytes * kFieldTokens / sizeof(float);
  float *const sums = scales + size_t(segments) * kFieldTokens;
  for (int m0 = 0; m0 < a.M; m0 += kFieldTokens) {
    const int rows = a.M - m0 < kFieldTokens ? a.M - m0 : kFieldTokens;
    for (int m = 0; m < rows; ++m) {
      widen_digits(a.row(m0 + m), chunks, a.digits(), words + m * row_bytes);
      for (int i = 0; i < segments; ++i) scales[i * kFieldTokens + m] = a.scales(m0 + m)[i];
      for (int g = 0; g < groups; ++g) sums[g * kFieldTokens + m] = a.sums(m0 + m)[g];
    }
    word_blocks(w, {words, row_bytes, scales, sums, rows}, y + m0 * ldy, ldy, b0, b1);
  }
}
