// Planes by 16-byte look-ups (pshufb, tbl): the kernel of AVX2, AVX-512 BW and NEON, over a vector type V.
//
// A vector of V::kRows weight bytes is 8 inputs of one plane for kRows outputs: two table look-ups (low and high
// nibble) give kRows unsigned bytes each. Bytes are summed as 16-bit words, twice: `all` adds the words as they are
// (even byte + 256 * odd byte, modulo 2^16), `odd` adds the words shifted right by 8. After a segment the even sums
// are all - 256 * odd. A segment has 32 tables, so a sum stays below 32 * 255 and nothing is lost: widening costs two
// shifts per look-up instead of two unpacks, and happens once per 128 inputs. Few rows of x share the indices; a row's
// operations do not depend on how many.
//
// Included inside a namespace of the including file, after V is known.

// What is summed: `all` and `odd` for each digit of the tables.
template <class V, int D>
struct ByteSums {
  typename V::Bytes all[D], odd[D];
};

// Rows of x that share the indices, and planes at a time: all sums must stay in registers.
template <class V>
constexpr int kLutRows = V::kRegisters / 8;
template <class V, int D, int M>
constexpr int kLutPlanes = V::kRegisters >= 32 ? V::kRegisters / (4 * D * M)
                           : D * M == 1        ? 2
                                               : 1;

// B planes from p0 on, of `chunks` chunks, by M rows of tables. Entries are stored with a bias that makes them
// unsigned; the sums of the first digit begin at what takes it away.
template <class V, int P, int p0, int B, int D, int M>
CRELLE_INLINE void add_planes(const uint8_t *codes, const uint8_t *const (&tables)[M], int chunks,
                              ByteSums<V, D> (&sums)[B][M]) {
  const int bias = -128 * 8 * chunks;
  for (auto &plane : sums)
    for (auto &row : plane)
      for (int d = 0; d < D; ++d) {
        row.all[d] = d == 0 ? V::words(257 * bias) : V::words(0);
        row.odd[d] = d == 0 ? V::words(bias) : V::words(0);
      }
  for (size_t at = 0, end = size_t(chunks) * 128 * D; at < end; codes += 4 * P * V::kRows) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j, at += 32 * D) {
      const uint8_t *const from = codes + j * P * V::kRows;
      if constexpr (p0 == 0)
        for (int line = 0; line < P * V::kRows; line += 64) prefetch_stream(from + line);
      for (int b = 0; b < B; ++b) {
        const auto bits = V::load(from + (p0 + b) * V::kRows);
        const auto low = V::low_nibbles(bits), high = V::high_nibbles(bits);
        for (int m = 0; m < M; ++m)
          for (int d = 0; d < D; ++d) {
            const auto u = V::look_up(V::table(tables[m] + at + 16 * d), low);
            const auto v = V::look_up(V::table(tables[m] + at + 16 * (D + d)), high);
            auto &s = sums[b][m];
            s.all[d] = V::accumulate(s.all[d], V::add16(u, v));
            s.odd[d] = V::accumulate(s.odd[d], V::add16(V::odd_bytes(u), V::odd_bytes(v)));
          }
      }
    }
  }
}

// The signed sums of one plane as four vectors of int32, rows in order.
template <class V, int D>
CRELLE_INLINE void plane_sums(const ByteSums<V, D> &s, typename V::Ints (&out)[4]) {
  const auto even = V::even_sums(s.all[0], s.odd[0]);
  if constexpr (D == 2) {
    V::template combine<256>(even, V::even_sums(s.all[1], s.odd[1]), out[0], out[1]);
    V::template combine<256>(s.odd[0], s.odd[1], out[2], out[3]);
  } else {
    V::template combine<1>(even, V::words(0), out[0], out[1]);
    V::template combine<1>(s.odd[0], V::words(0), out[2], out[3]);
  }
}

template <class V>
CRELLE_INLINE typename V::Floats scales_at(const Weight &w, const uint8_t *at, int i) {
  constexpr int kRowsEach = V::kRows / 4;
  return w.wide_scales ? V::load_floats(at + 4 * kRowsEach * i) : V::load_halves(at + 2 * kRowsEach * i);
}

// One segment: dot += sum_p alpha_p sum_k b_p x_k, in units of the segment's scale; fused, sum_p 2^(P-1-p) sum_k b_p
// x_k.
template <class V, int P, bool Fused, int D, int M, int p0 = 0>
CRELLE_INLINE void byte_segment(const Weight &w, const uint8_t *codes, const uint8_t *scales,
                                const uint8_t *const (&tables)[M], int chunks, typename V::Ints (&fused)[M][4],
                                typename V::Floats (&dot)[M][4]) {
  constexpr int kBatch = kLutPlanes<V, D, M>, B = P - p0 < kBatch ? P - p0 : kBatch;
  ByteSums<V, D> sums[B][M];
  add_planes<V, P, p0, B, D, M>(codes, tables, chunks, sums);
  for (int b = 0; b < B; ++b) {
    typename V::Ints s[M][4];
    for (int m = 0; m < M; ++m) plane_sums<V, D>(sums[b][m], s[m]);
    for (int i = 0; i < 4; ++i)
      if constexpr (Fused) {
        for (int m = 0; m < M; ++m)
          fused[m][i] = p0 + b == 0 ? s[m][i] : V::add32(V::add32(fused[m][i], fused[m][i]), s[m][i]);
      } else {
        const auto alpha = scales_at<V>(w, scales, 4 * (p0 + b) + i);
        for (int m = 0; m < M; ++m) dot[m][i] = V::fma(V::to_float(s[m][i]), alpha, dot[m][i]);
      }
  }
  if constexpr (p0 + B < P)
    byte_segment<V, P, Fused, D, M, p0 + B>(w, codes, scales, tables, chunks, fused, dot);
  else if constexpr (Fused)
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < 4; ++i) dot[m][i] = V::to_float(fused[m][i]);
}

// Block b for rows [m0, m0 + M) of x.
template <class V, int P, bool Fused, int D, int M>
void byte_block(const Weight &w, const Activations &a, int m0, int b, float *y, size_t ldy) {
  constexpr int kRowsEach = V::kRows / 4;
  const uint8_t *at = w.block(b), *zeros = at, *tables[M];
  at += w.zeros_bytes;
  const float *scale[M], *sum[M];
  typename V::Floats f[M][4];
  for (int m = 0; m < M; ++m) {
    tables[m] = a.row(m0 + m), scale[m] = a.scales(m0 + m), sum[m] = a.sums(m0 + m);
    for (int i = 0; i < 4; ++i) f[m][i] = V::floats(0);
  }
  int segment = 0;
  for (int g = 0; g < w.partition.groups; ++g) {
    const uint8_t *scales = at;
    at += w.scale_bytes;
    for (int left = w.partition.chunks_of(g); left > 0; left -= kSegmentChunks, ++segment) {
      const int n = left < kSegmentChunks ? left : kSegmentChunks;
      typename V::Ints fused[M][4];
      typename V::Floats dot[M][4];
      for (int m = 0; m < M; ++m)
        for (int i = 0; i < 4; ++i) dot[m][i] = V::floats(0);
      byte_segment<V, P, Fused, D, M>(w, at, scales, tables, n, fused, dot);
      for (int i = 0; i < 4; ++i)
        for (int m = 0; m < M; ++m) {
          const auto unit = V::floats(Fused ? 0.5f * scale[m][segment] : scale[m][segment]);
          f[m][i] = V::fma(Fused ? V::mul(dot[m][i], scales_at<V>(w, scales, i)) : dot[m][i], unit, f[m][i]);
        }
      at += n * w.chunk_bytes;
      for (int m = 0; m < M; ++m) tables[m] += n * 128 * D;
    }
    for (int i = 0; i < 4; ++i) {
      if constexpr (Fused) {  // q = (sum_p 2^(P-1-p) b_p + 2^P - 1) / 2
        constexpr float kMiddle = 0.5f * ((1 << P) - 1);
        const auto offset =
            w.bias ? V::sub(V::floats(kMiddle), V::load_bytes(zeros + kRowsEach * i)) : V::floats(-0.5f);
        const auto scales_here = scales_at<V>(w, scales, i);
        for (int m = 0; m < M; ++m) f[m][i] = V::fma(scales_here, V::mul(offset, V::floats(sum[m][g])), f[m][i]);
      } else if (w.bias) {
        const auto z = scales_at<V>(w, scales, 4 * P + i);
        for (int m = 0; m < M; ++m) f[m][i] = V::fma(z, V::floats(sum[m][g]), f[m][i]);
      }
    }
    zeros += V::kRows;
  }
  const int rows = w.N - b * V::kRows;
  for (int m = 0; m < M; ++m) {
    float *const out = y + (m0 + m) * ldy + size_t(b) * V::kRows;
    if (rows >= V::kRows) {
      for (int i = 0; i < 4; ++i) V::store(out + kRowsEach * i, f[m][i]);
    } else {
      float all[V::kRows];
      for (int i = 0; i < 4; ++i) V::store(all + kRowsEach * i, f[m][i]);
      for (int r = 0; r < rows; ++r) out[r] = all[r];
    }
  }
}

template <class V, int P, bool Fused, int D>
void byte_rows(const Weight &w, const Activations &a, float *y, size_t ldy, int b) {
  int m = 0;
  for (; m + kLutRows<V> <= a.M; m += kLutRows<V>) byte_block<V, P, Fused, D, kLutRows<V>>(w, a, m, b, y, ldy);
  for (; m < a.M; ++m) byte_block<V, P, Fused, D, 1>(w, a, m, b, y, ldy);
}

template <class V, int P, bool Fused>
void byte_blocks(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  const auto rows = a.precision == Precision::Int8 ? byte_rows<V, P, Fused, 1> : byte_rows<V, P, Fused, 2>;
  for (int b = b0; b < b1; ++b) rows(w, a, y, ldy, b);  // all rows of x while the block is in the cache
}

template <class V, bool Fused, int First>
void byte_matmul_of(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  using Run = void (*)(const Weight &, const Activations &, float *, size_t, int, int);
  const auto run = [&]<int... P>(std::integer_sequence<int, P...>) {
    static constexpr Run kRun[] = {byte_blocks<V, First + P, Fused>...};
    kRun[w.P - First](w, a, y, ldy, b0, b1);
  };
  run(std::make_integer_sequence<int, 9 - First>{});
}

// Grids of up to kFields bits have another stream.
template <class V, int kFields>
void byte_matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  (w.kind == Kind::Bcq ? byte_matmul_of<V, false, 1> : byte_matmul_of<V, true, kFields + 1>)(w, a, y, ldy, b0, b1);
}
