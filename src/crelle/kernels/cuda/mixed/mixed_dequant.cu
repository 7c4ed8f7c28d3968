// A mixed 2/4-bit weight (mixed_layout.py) as a plain matrix [N, K], outliers added: for products of many tokens.
//
// A thread block takes 16 rows. A lane has the codes of 16 neighbouring inputs of rows g and g + 8, so it writes runs
// of 8 values.
#include "mixed/mixed_codes.cuh"
#include "mixed/mixed_outliers.cuh"

namespace crelle {

// 8 values of a row from input `first` on; ALIGNED: K is a multiple of 8, so none is cut.
template <bool ALIGNED, typename T>
__device__ __forceinline__ void write8(T *row, int first, int K, const float (&v)[8]) {
  if (first < 0) return;
  if constexpr (ALIGNED) {
    *reinterpret_cast<uint4 *>(row + first) = closed<T>(v);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (first + i < K) row[first + i] = from_float<T>(v[i]);
  }
}

template <int SUBS, int WARPS, bool ALIGNED, typename T>
__global__ void __launch_bounds__(WARPS * 32)
    mixed_dequant(const char *__restrict__ tiles, const __half2 *__restrict__ grid_rows,
                  const uint32 *__restrict__ outliers, const unsigned char *__restrict__ outlier_rows,
                  const int *__restrict__ starts, const int *__restrict__ perm, T *out, int N, int K, int U2, int U4,
                  float outlier_scale) {
  constexpr int UNIT2 = 1024 + 240 * SUBS;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane / 4, t = lane % 4, tile = blockIdx.x;
  const char *const mine = tiles + (size_t)tile * (U2 * UNIT2 + U4 * 1024);
  launch_dependents();
  grid_dependency_wait();
#pragma unroll 1
  for (int unit = warp; unit < U2; unit += WARPS) {
    const char *const piece = mine + unit * UNIT2;
    Scales<SUBS> s[2];
    s[0].decode(0, piece, lane, 0x3f800000u), s[1].decode(1, piece, lane, 0x3f800000u);
    const uint4 codes[2] = {*reinterpret_cast<const uint4 *>(piece + lane * 16),
                            *reinterpret_cast<const uint4 *>(piece + 512 + lane * 16)};
    const uint32 words[2][4] = {{codes[0].x, codes[0].y, codes[0].z, codes[0].w},
                                {codes[1].x, codes[1].y, codes[1].z, codes[1].w}};
#pragma unroll
    for (int i = 0; i < 8; i++) {  // [set][row half]
      const int set = i / 2, half = i % 2, n = tile * 16 + g + 8 * half;
      if (n >= N) continue;
      const uint32 word = words[set / 2][2 * half + set % 2];
      const int *const where = perm + unit * 256 + set * 64 + t * 16;
#pragma unroll
      for (int run = 0; run < 2; run++) {
        const int k = SUBS == 2 ? run : 0;
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const int bit = SUBS == 1 ? 2 * j + 16 * run : 2 * (4 * run + j % 4) + 16 * (j / 4);
          v[j] = s[set / 2].scale[k][set % 2][half] * ((float)(word >> bit & 3) - s[0].zero(k, set, half));
        }
        write8<ALIGNED>(out + (size_t)n * K, where[SUBS == 1 ? run : 8 * run], K, v);
      }
    }
  }
#pragma unroll 1
  for (int unit = warp; unit < U4; unit += WARPS) {
    const char *const piece = mine + U2 * UNIT2 + unit * 1024;
    const uint4 codes[2] = {*reinterpret_cast<const uint4 *>(piece + lane * 16),
                            *reinterpret_cast<const uint4 *>(piece + 512 + lane * 16)};
    const uint32 words[2][4] = {{codes[0].x, codes[0].y, codes[0].z, codes[0].w},
                                {codes[1].x, codes[1].y, codes[1].z, codes[1].w}};
#pragma unroll
    for (int i = 0; i < 8; i++) {  // [row half][word]
      const int half = i / 4, n = tile * 16 + g + 8 * half;
      if (n >= N) continue;
      const float2 grid = __half22float2(grid_rows[n]);
      const uint32 word = words[half][i % 4];
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = grid.x * ((float)(word >> 4 * j & 15) - grid.y);
      write8<ALIGNED>(out + (size_t)n * K, perm[U2 * 256 + unit * 128 + t * 32 + i % 4 * 8], K, v);
    }
  }
  if (!outliers) return;
  __syncthreads();
  for (int i = starts[tile] * 4 + threadIdx.x; i < starts[tile + 1] * 4; i += WARPS * 32) {
    const uint32 word = outliers[i];
    const Outlier o(word, U2);
    const int n = tile * 16 + outlier_rows[i / 4] % 16, k = perm[o.place];
    if (word >> 16 == 0 || n >= N || k < 0) continue;
    const float v = o.value(word) * outlier_scale;
    T &to = out[(size_t)n * K + k];
    to = from_float<T>(to_float(to) + v);
  }
}

}  // namespace crelle
