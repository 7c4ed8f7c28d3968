// 4-bit and 8-bit codes by vpdpbusd on the fields where they lie: one mask and one multiply-add for 64 codes.
//
// A dword of the weight vector holds four (eight) codes of one output; four digits of x are broadcast to all dwords.
// The upper nibbles are not shifted down: their sums are 16 times too large, exactly, and are shifted once a segment.
//
// Included inside a namespace of the including file, after lut_vpermb.h.

// Blocks b, b + apart, … (B of them) for rows [m0, m0 + M) of x; see quad_block.
template <int Bits, int D, int M, int B>
void field_block(const Weight &w, const Activations &a, int m0, int b, int apart, float *y, size_t ldy) {
  constexpr int kSteps = Bits == 4 ? 4 : 8;                     // vectors per chunk and vector of outputs
  constexpr int V = kVectors * M * 2 * D <= 16 ? kVectors : 1;  // vectors of outputs at once, of each block
  const uint8_t *at[B], *zeros[B], *scales[B], *digits[M];
  const float *scale[M], *sum[M];
  for (int m = 0; m < M; ++m) digits[m] = a.row(m0 + m), scale[m] = a.scales(m0 + m), sum[m] = a.sums(m0 + m);
  for (int i = 0; i < B; ++i) zeros[i] = w.block(b + i * apart), at[i] = zeros[i] + w.zeros_bytes;
  const __m512i low = _mm512_set1_epi8(0x0f), high = _mm512_set1_epi8(static_cast<char>(0xf0));
  __m512 f[B * kVectors][M];
  for (auto &r : f)
    for (auto &v : r) v = _mm512_setzero_ps();
  for (int g = 0; g < w.partition.groups; ++g) {
    for (int i = 0; i < B; ++i) scales[i] = at[i], at[i] += w.scale_bytes;
    for (int left = w.partition.chunks_of(g); left > 0; left -= kSegmentChunks) {
      const int n = left < kSegmentChunks ? left : kSegmentChunks;
#pragma GCC unroll 2
      for (int r0 = 0; r0 < kVectors; r0 += V) {
        __m512i acc[B * V][M][2][D];  // [1]: the upper nibbles, or every other step
        for (auto &v : acc)
          for (auto &m : v)
            for (auto &half : m)
              for (auto &d : half) d = _mm512_setzero_si512();
        for (int c = 0; c < n; ++c)
#pragma GCC unroll 8
          for (int j = 0; j < kSteps; ++j)
#pragma GCC unroll 4
            for (int v = 0; v < B * V; ++v) {
              const uint8_t *from = at[v / V] + ((c * kSteps + j) * kVectors + r0 + v % V) * 64;
              prefetch_stream(from);
              const __m512i codes = load_once(from);
#pragma GCC unroll 4
              for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
                for (int d = 0; d < D; ++d) {
                  const auto four = [&](int i) __attribute__((always_inline)) {
                    int x;
                    __builtin_memcpy(&x, digits[m] + (c * D + d) * 32 + 4 * i, 4);
                    return _mm512_set1_epi32(x);
                  };
                  __m512i(&s)[2][D] = acc[v][m];
                  if constexpr (Bits == 4) {
                    s[0][d] = _mm512_dpbusd_epi32(s[0][d], _mm512_and_si512(codes, low), four(2 * j));
                    s[1][d] = _mm512_dpbusd_epi32(s[1][d], _mm512_and_si512(codes, high), four(2 * j + 1));
                  } else {
                    s[j & 1][d] = _mm512_dpbusd_epi32(s[j & 1][d], codes, four(j));
                  }
                }
            }
        for (int v = 0; v < B * V; ++v)
          for (int m = 0; m < M; ++m) {
            __m512i(&s)[2][D] = acc[v][m];
            if constexpr (Bits == 4)
              for (int d = 0; d < D; ++d) s[1][d] = _mm512_srai_epi32(s[1][d], 4);
            const __m512 t = _mm512_mul_ps(_mm512_cvtepi32_ps(total<D>(s, 0, 2)), _mm512_set1_ps(*scale[m]));
            __m512 &sum_of_row = f[v / V * kVectors + r0 + v % V][m];
            sum_of_row = _mm512_fmadd_ps(t, scales_at(w, scales[v / V], r0 + v % V), sum_of_row);
          }
      }
      for (int i = 0; i < B; ++i) at[i] += n * (kSteps * kVectors * 64);
      for (int m = 0; m < M; ++m) digits[m] += n * 32 * D, ++scale[m];
    }
    for (int r = 0; r < B * kVectors; ++r) {
      const int i = r / kVectors, v = r % kVectors;
      const __m512 zero = w.bias ? zeros_at(zeros[i], v) : _mm512_set1_ps(1 << (Bits - 1));
      const __m512 offset = _mm512_mul_ps(zero, scales_at(w, scales[i], v));
      for (int m = 0; m < M; ++m) f[r][m] = _mm512_fnmadd_ps(offset, _mm512_set1_ps(sum[m][g]), f[r][m]);
    }
    for (int i = 0; i < B; ++i) zeros[i] += kRows;
  }
  for (int r = 0; r < B * kVectors; ++r)
    for (int m = 0; m < M; ++m) store_rows(w, b + r / kVectors * apart, r % kVectors, f[r][m], y + (m0 + m) * ldy);
}

template <int Bits, int D>
void field_blocks_at(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  if (a.M == 1) {
    const int apart = (b1 - b0) / 2;
    for (int b = b0; b < b0 + apart; ++b) field_block<Bits, D, 1, 2>(w, a, 0, b, apart, y, ldy);
    b0 += 2 * apart;
  }
  for (int b = b0; b < b1; ++b) {
    int m = 0;
    for (; m + 4 <= a.M; m += 4) field_block<Bits, D, 4, 1>(w, a, m, b, 0, y, ldy);
    for (; m < a.M; ++m) field_block<Bits, D, 1, 1>(w, a, m, b, 0, y, ldy);
  }
}

template <int Bits>
void field_blocks(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  (a.precision == Precision::Int8 ? field_blocks_at<Bits, 1> : field_blocks_at<Bits, 2>)(w, a, y, ldy, b0, b1);
}
