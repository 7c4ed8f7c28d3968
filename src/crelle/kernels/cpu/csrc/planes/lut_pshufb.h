// Planes by 16-byte look-ups (pshufb, tbl): the kernel of AVX2, AVX-512 BW and NEON, over a vector type V.
//
// A vector of V::kRows weight bytes is 8 inputs of one plane for kRows outputs: two table look-ups (low and high
// nibble) give kRows unsigned bytes each. Bytes are summed as 16-bit words, twice: `all` adds the words as they are
// (even byte + 256 * odd byte, modulo 2^16), `odd` adds the words shifted right by 8. After a segment the even sums
// are all - 256 * odd. A segment has 32 tables, so a sum stays below 32 * 255 and nothing is lost: widening costs two
// shifts per look-up instead of two unpacks, and happens once per 128 inputs.
//
// Included inside a namespace of the including file, after V is known.

// What is summed: `all` and `odd` for each digit of the tables.
template <class V, int D>
struct ByteSums {
  typename V::Bytes all[D], odd[D];
};

// Add B planes, from p0 on, of `chunks` chunks.
template <class V, int P, int p0, int B, int D>
CRELLE_INLINE void add_planes(const uint8_t *codes, const uint8_t *tables, int chunks, ByteSums<V, D> (&sums)[B]) {
  for (int b = 0; b < B; ++b)
    for (int d = 0; d < D; ++d) sums[b].all[d] = sums[b].odd[d] = V::zero();
  for (int j = 0; j < chunks * 4; ++j, codes += P * V::kRows, tables += 32 * D) {
    typename V::Bytes even[D], odd[D];
    for (int d = 0; d < D; ++d) even[d] = V::table(tables + 16 * d), odd[d] = V::table(tables + 16 * (D + d));
    if constexpr (p0 == 0)
      for (int line = 0; line < P * V::kRows; line += 64) prefetch_stream(codes + line);
    for (int b = 0; b < B; ++b) {
      const auto bits = V::load(codes + (p0 + b) * V::kRows);
      const auto low = V::low_nibbles(bits), high = V::high_nibbles(bits);
      for (int d = 0; d < D; ++d) {
        const auto u = V::look_up(even[d], low), v = V::look_up(odd[d], high);
        sums[b].all[d] = V::add16(sums[b].all[d], V::add16(u, v));
        sums[b].odd[d] = V::add16(sums[b].odd[d], V::add16(V::odd_bytes(u), V::odd_bytes(v)));
      }
    }
  }
}

// The signed sums of one plane as four vectors of int32, rows in order.
template <class V, int D>
CRELLE_INLINE void plane_sums(const ByteSums<V, D> &s, int tables, typename V::Ints (&out)[4]) {
  V::widen(V::even_sums(s.all[0], s.odd[0]), s.odd[0], out);
  if constexpr (D == 2) {
    typename V::Ints low[4];
    V::widen(V::even_sums(s.all[1], s.odd[1]), s.odd[1], low);
    for (int i = 0; i < 4; ++i) out[i] = V::add32(V::shift_left(out[i], 8), low[i]);
  }
  const auto bias = V::ints(tables * (D == 1 ? 128 : 32768));
  for (int i = 0; i < 4; ++i) out[i] = V::sub32(out[i], bias);
}

template <class V>
CRELLE_INLINE typename V::Floats scales_at(const Weight &w, const uint8_t *at, int i) {
  constexpr int kRowsEach = V::kRows / 4;
  return w.wide_scales ? V::load_floats(at + 4 * kRowsEach * i) : V::load_halves(at + 2 * kRowsEach * i);
}

// One segment: dot += sum_p alpha_p sum_k b_p x_k, in units of the segment's scale; fused, sum_p 2^(P-1-p) sum_k b_p
// x_k.
template <class V, int P, bool Fused, int D, int p0 = 0>
CRELLE_INLINE void byte_segment(const Weight &w, const uint8_t *codes, const uint8_t *scales, const uint8_t *tables,
                                int chunks, typename V::Ints (&fused)[4], typename V::Floats (&dot)[4]) {
  constexpr int kBatch = V::kRegisters / (D == 1 ? 4 : 8), B = P - p0 < kBatch ? P - p0 : kBatch;
  ByteSums<V, D> sums[B];
  add_planes<V, P, p0, B, D>(codes, tables, chunks, sums);
  for (int b = 0; b < B; ++b) {
    typename V::Ints s[4];
    plane_sums<V, D>(sums[b], chunks * 8, s);
    for (int i = 0; i < 4; ++i)
      if constexpr (Fused)
        fused[i] = p0 + b == 0 ? s[i] : V::add32(V::add32(fused[i], fused[i]), s[i]);
      else
        dot[i] = V::fma(V::to_float(s[i]), scales_at<V>(w, scales, 4 * (p0 + b) + i), dot[i]);
  }
  if constexpr (p0 + B < P)
    byte_segment<V, P, Fused, D, p0 + B>(w, codes, scales, tables, chunks, fused, dot);
  else if constexpr (Fused)
    for (int i = 0; i < 4; ++i) dot[i] = V::to_float(fused[i]);
}

template <class V, int P, bool Fused, int D>
void byte_block(const Weight &w, const Activations &a, int m, int b, float *y) {
  constexpr int kRowsEach = V::kRows / 4;
  const uint8_t *at = w.block(b), *zeros = at, *tables = a.row(m);
  at += w.zeros_bytes;
  const float *scale = a.scales(m), *sum = a.sums(m);
  typename V::Floats f[4];
  for (int i = 0; i < 4; ++i) f[i] = V::floats(0);
  for (int g = 0; g < w.partition.groups; ++g) {
    const uint8_t *scales = at;
    at += w.scale_bytes;
    for (int left = w.partition.chunks_of(g); left > 0; left -= kSegmentChunks, ++scale) {
      const int n = left < kSegmentChunks ? left : kSegmentChunks;
      typename V::Ints fused[4];
      typename V::Floats dot[4];
      for (int i = 0; i < 4; ++i) dot[i] = V::floats(0);
      byte_segment<V, P, Fused, D>(w, at, scales, tables, n, fused, dot);
      const auto unit = V::floats(Fused ? 0.5f * *scale : *scale);
      for (int i = 0; i < 4; ++i)
        f[i] = V::fma(Fused ? V::mul(dot[i], scales_at<V>(w, scales, i)) : dot[i], unit, f[i]);
      at += n * w.chunk_bytes;
      tables += n * 128 * D;
    }
    const auto x = V::floats(sum[g]);
    for (int i = 0; i < 4; ++i) {
      if constexpr (Fused) {  // q = (sum_p 2^(P-1-p) b_p + 2^P - 1) / 2
        constexpr float kMiddle = 0.5f * ((1 << P) - 1);
        const auto offset =
            w.bias ? V::sub(V::floats(kMiddle), V::load_bytes(zeros + kRowsEach * i)) : V::floats(-0.5f);
        f[i] = V::fma(scales_at<V>(w, scales, i), V::mul(offset, x), f[i]);
      } else if (w.bias) {
        f[i] = V::fma(scales_at<V>(w, scales, 4 * P + i), x, f[i]);
      }
    }
    zeros += V::kRows;
  }
  const int rows = w.N - b * V::kRows;
  if (rows >= V::kRows) {
    for (int i = 0; i < 4; ++i) V::store(y + kRowsEach * i, f[i]);
  } else {
    float all[V::kRows];
    for (int i = 0; i < 4; ++i) V::store(all + kRowsEach * i, f[i]);
    for (int r = 0; r < rows; ++r) y[r] = all[r];
  }
}

template <class V, int P, bool Fused>
void byte_blocks(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  for (int b = b0; b < b1; ++b)  // all rows of x while the block is in the cache
    for (int m = 0; m < a.M; ++m)
      if (a.precision == Precision::Int8)
        byte_block<V, P, Fused, 1>(w, a, m, b, y + m * ldy + size_t(b) * V::kRows);
      else
        byte_block<V, P, Fused, 2>(w, a, m, b, y + m * ldy + size_t(b) * V::kRows);
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
