// Planes by vpermb and vpdpbusd: 16 outputs and 32 inputs of one plane from every 64 bytes of weights.
//
// A dword of the weight vector belongs to one output; its byte j holds 8 inputs. A 64-byte register holds four tables
// of 16 bytes: those of inputs 8j...8j+3 in one register, of 8j+4...8j+7 in another. The index of a byte is its nibble
// plus 16 j, one vpternlogd: (w & 0x0f) | 0x30201000. vpermb looks all 64 up at once, and vpdpbusd with ones adds the
// four bytes of each dword into its output's int32: no widening, no overflow, about 3.5 cycles for 512 bit-weights.
// With 2^(P-1-p) in place of the ones the planes of a uniform grid add up in the same accumulators for nothing.
//
// Included inside a namespace of the including file.

constexpr int kRows = 32;  // R: two vectors of 16 outputs share the loads of the tables
constexpr int kVectors = kRows / 16;

CRELLE_INLINE __m512 scales_at(const Weight &w, const uint8_t *at, int i) {
  return w.wide_scales ? _mm512_loadu_ps(at + 64 * i)
                       : _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at + 32 * i)));
}

CRELLE_INLINE void store_rows(const Weight &w, int b, int r, __m512 f, float *y) {
  const int left = w.N - b * kRows - 16 * r;
  const __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
  _mm512_mask_storeu_ps(y + size_t(b) * kRows + 16 * r, mask, f);
}

// How the 32 registers are used: half of them are sums, for M rows of x, B blocks of V vectors of 16 outputs, D digits.
// A chain of vpdpbusd has a latency of 5 cycles per link, so that one sum is not enough where all planes share it.
template <int P, bool Fused, int D>
struct Registers {
  static constexpr int kBudget = 16;
  static constexpr int kSums = Fused || P == 1 ? 2 : P;
  static constexpr bool kRare = P > 4;  // one row and one block at a time: less to compile
  static constexpr int kPairs = kRare ? 1 : kBudget / kSums / D;
  static constexpr int kMany = kPairs >= 4 ? 4 : kPairs >= 2 ? 2 : 1;  // rows of x at once
  static constexpr int kBlocks = kPairs >= 2 ? 2 : 1;                  // blocks at once, for one row of x
  // Vectors of each of B blocks at once.
  static constexpr int vectors(int M, int B) { return kSums * D * M * B * kVectors <= kBudget ? kVectors : 1; }
  static constexpr int sum_of(int p, int half) { return Fused || P == 1 ? half : p; }
};

// Sums of `n` chunks for vectors [r0, r0 + V) of each of B blocks and M rows of x, whose tables start at tables[m].
template <int P, bool Fused, int D, int M, int B, int V, int S>
CRELLE_INLINE void quad_segment(const uint8_t *const (&codes)[B], const uint8_t *const (&tables)[M], int n, int r0,
                                __m512i (&acc)[B * V][M][S][D]) {
  using Use = Registers<P, Fused, D>;
  const __m512i nibble = _mm512_set1_epi8(0x0f), lane = _mm512_set1_epi32(0x30201000);
  for (auto &v : acc)
    for (auto &m : v)
      for (auto &s : m)
        for (auto &d : s) d = _mm512_setzero_si512();
  for (int c = 0; c < n; ++c) {
#pragma GCC unroll 4
    for (int v = 0; v < B * V; ++v)
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        const uint8_t *at = codes[v / V] + ((c * kVectors + r0 + v % V) * P + p) * 64;
        prefetch_stream(at);
        const __m512i bits = load_once(at);
        const __m512i low = _mm512_ternarylogic_epi32(bits, nibble, lane, 0xea);  // (bits & nibble) | lane
        const __m512i high = _mm512_ternarylogic_epi32(_mm512_srli_epi16(bits, 4), nibble, lane, 0xea);
        const __m512i place = _mm512_set1_epi8(static_cast<char>(Fused ? 1 << (P - 1 - p) : 1));
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
          for (int d = 0; d < D; ++d) {
            const uint8_t *t = tables[m] + (c * D + d) * 128;
            __m512i &a = acc[v][m][Use::sum_of(p, 0)][d], &b = acc[v][m][Use::sum_of(p, 1)][d];
            a = _mm512_dpbusd_epi32(a, place, _mm512_permutexvar_epi8(low, _mm512_load_si512(t)));
            b = _mm512_dpbusd_epi32(b, place, _mm512_permutexvar_epi8(high, _mm512_load_si512(t + 64)));
          }
      }
  }
}

// The total of accumulators [first, first + count), both digits together.
template <int D, int S>
CRELLE_INLINE __m512i total(const __m512i (&acc)[S][D], int first, int count) {
  __m512i sum[D];
  for (int d = 0; d < D; ++d) {
    sum[d] = acc[first][d];
    for (int s = 1; s < count; ++s) sum[d] = _mm512_add_epi32(sum[d], acc[first + s][d]);
  }
  return D == 1 ? sum[0] : _mm512_add_epi32(_mm512_slli_epi32(sum[0], 8), sum[D - 1]);
}

// The zero points of 16 outputs of a uniform grid.
CRELLE_INLINE __m512 zeros_at(const uint8_t *zeros, int r) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i *>(zeros + 16 * r))));
}

// Blocks b, b + apart, … (B of them) for rows [m0, m0 + M) of x. Two blocks far apart are two streams from memory,
// which DRAM serves faster than one, and they share the loads of the tables.
template <int P, bool Fused, int D, int M, int B>
void quad_block(const Weight &w, const Activations &a, int m0, int b, int apart, float *y, size_t ldy) {
  using Use = Registers<P, Fused, D>;
  constexpr int kParts = Fused ? 1 : P, V = Use::vectors(M, B), S = Use::kSums;
  const uint8_t *at[B], *zeros[B], *scales[B], *tables[M];
  const float *scale[M], *sum[M];
  for (int m = 0; m < M; ++m) tables[m] = a.row(m0 + m), scale[m] = a.scales(m0 + m), sum[m] = a.sums(m0 + m);
  for (int i = 0; i < B; ++i) zeros[i] = w.block(b + i * apart), at[i] = zeros[i] + w.zeros_bytes;
  __m512 f[B * kVectors][M];
  for (auto &r : f)
    for (auto &v : r) v = _mm512_setzero_ps();
  for (int g = 0; g < w.partition.groups; ++g) {
    for (int i = 0; i < B; ++i) scales[i] = at[i], at[i] += w.scale_bytes;
    for (int left = w.partition.chunks_of(g); left > 0; left -= kSegmentChunks) {
      const int n = left < kSegmentChunks ? left : kSegmentChunks;
#pragma GCC unroll 2
      for (int r0 = 0; r0 < kVectors; r0 += V) {
        __m512i acc[B * V][M][S][D];
        if (M == 1 && !Use::kRare && n == kSegmentChunks)
          quad_segment<P, Fused, D, M, B, V, S>(at, tables, kSegmentChunks, r0, acc);
        else
          quad_segment<P, Fused, D, M, B, V, S>(at, tables, n, r0, acc);
#pragma GCC unroll 4
        for (int v = 0; v < B * V; ++v)
#pragma GCC unroll 4
          for (int m = 0; m < M; ++m) {
            __m512 dot = _mm512_setzero_ps();
#pragma GCC unroll 8
            for (int p = 0; p < kParts; ++p) {
              const __m512 t = _mm512_cvtepi32_ps(kParts == 1 ? total<D>(acc[v][m], 0, S) : total<D>(acc[v][m], p, 1));
              dot = _mm512_fmadd_ps(t, scales_at(w, scales[v / V], kVectors * p + r0 + v % V), dot);
            }
            const __m512 unit = _mm512_set1_ps(Fused ? 0.5f * *scale[m] : *scale[m]);
            __m512 &sum_of_row = f[v / V * kVectors + r0 + v % V][m];
            sum_of_row = _mm512_fmadd_ps(dot, unit, sum_of_row);
          }
      }
      for (int i = 0; i < B; ++i) at[i] += n * (kVectors * P * 64);
      for (int m = 0; m < M; ++m) tables[m] += n * 128 * D, ++scale[m];
    }
    for (int r = 0; r < B * kVectors; ++r)
      for (int m = 0; m < M; ++m) {
        const int i = r / kVectors, v = r % kVectors;
        const __m512 x = _mm512_set1_ps(sum[m][g]);
        if constexpr (Fused) {  // q = (sum_p 2^(P-1-p) b_p + 2^P - 1) / 2
          __m512 offset = _mm512_set1_ps(-0.5f);
          if (w.bias) offset = _mm512_sub_ps(_mm512_set1_ps(0.5f * ((1 << P) - 1)), zeros_at(zeros[i], v));
          f[r][m] = _mm512_fmadd_ps(scales_at(w, scales[i], v), _mm512_mul_ps(offset, x), f[r][m]);
        } else if (w.bias) {
          f[r][m] = _mm512_fmadd_ps(scales_at(w, scales[i], kVectors * P + v), x, f[r][m]);
        }
      }
    for (int i = 0; i < B; ++i) zeros[i] += kRows;
  }
  for (int r = 0; r < B * kVectors; ++r)
    for (int m = 0; m < M; ++m) store_rows(w, b + r / kVectors * apart, r % kVectors, f[r][m], y + (m0 + m) * ldy);
}

template <int P, bool Fused, int D>
void quad_blocks_at(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  constexpr int kMany = Registers<P, Fused, D>::kMany, kBlocks = Registers<P, Fused, D>::kBlocks;
  if (kBlocks == 2 && a.M == 1) {
    const int apart = (b1 - b0) / 2;
    for (int b = b0; b < b0 + apart; ++b) quad_block<P, Fused, D, 1, kBlocks>(w, a, 0, b, apart, y, ldy);
    b0 += 2 * apart;
  }
  for (int b = b0; b < b1; ++b) {  // all rows of x while the block is in the cache
    int m = 0;
    if constexpr (kMany > 1)
      for (; m + kMany <= a.M; m += kMany) quad_block<P, Fused, D, kMany, 1>(w, a, m, b, 0, y, ldy);
    for (; m < a.M; ++m) quad_block<P, Fused, D, 1, 1>(w, a, m, b, 0, y, ldy);
  }
}

template <int P, bool Fused>
void quad_blocks(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  (a.precision == Precision::Int8 ? quad_blocks_at<P, Fused, 1> : quad_blocks_at<P, Fused, 2>)(w, a, y, ldy, b0, b1);
}
