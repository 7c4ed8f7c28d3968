// The GEMM with the warp mma that every chip since Ampere has: a warp holds TILES tiles of 16 rows and all NT tokens of
// its thread block. WARPS_N warps along N share x; WARPS_K groups of them split K and add up in a fixed order. A
// pipeline stage is a block of 256 inputs, of x and of the weights.
#pragma once
#include "ptx/copies.cuh"
#include "ptx/tensorcore.cuh"

namespace crelle {

// Four steps, 64 inputs, for all tiles and tokens. `x`: where they begin.
template <int NT, int TILES, typename X>
__device__ __forceinline__ void gemm_sm80_chunk(float (&d)[TILES][NT / 8][4], const uint32 (&a)[TILES][4][4],
                                                const char *x, int lane) {
#pragma unroll
  for (int s = 0; s < 4; s++) {
    const int token = NT == 8 ? lane & 7 : (lane & 7) + (lane >> 4) * 8, unit = 2 * s + (lane >> 3 & 1);
    const char *const from = x + token * 128 + ((unit ^ token) & 7) * 16;
#pragma unroll
    for (int c = 0; c < NT / 8; c += 2) {
      uint32 b[NT == 8 ? 2 : 4];
      matrices(b, from + c * 1024);
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        multiply<X>(d[j][c], a[j][s][0], a[j][s][1], a[j][s][2], a[j][s][3], b[0], b[1]);
        if constexpr (NT > 8) multiply<X>(d[j][c + 1], a[j][s][0], a[j][s][1], a[j][s][2], a[j][s][3], b[2], b[3]);
      }
    }
  }
}

// Arguments as of `gemm_sm90_tiles`; grid (ceil(N / (16 TILES WARPS_N)), ceil(M / NT)). Shared: WARPS_K times STAGES
// stages, then the warps' scratch; sums take their place at the end.
template <typename Source, int NT, int TILES, int WARPS_N, int WARPS_K, int STAGES, typename X>
__device__ __forceinline__ void gemm_sm80_tiles(const Source &source, const char *__restrict__ xs,
                                                const X *__restrict__ bias, const X *residual, X *y, int N, int M,
                                                int blocks, int stride) {
  constexpr int ROWS = WARPS_N * TILES * 16, STRIDE = ROWS + 4, X_BYTES = NT * 512;
  constexpr int STAGE = X_BYTES + WARPS_N * TILES * Source::BYTES;
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
  const int row = blockIdx.x * ROWS, token = blockIdx.y * NT, padded = (M + 7) & ~7, tokens = min(NT, padded - token);
  const int begin = blocks * warp_k / WARPS_K, mine = blocks * (warp_k + 1) / WARPS_K - begin;
  char *const stages = shared + warp_k * (STAGES * STAGE);
  char *const scratch = shared + WARPS_K * STAGES * STAGE + warp * Source::SCRATCH;

  launch_dependents();
  grid_dependency_wait();
  const auto row_tile = [&](int j) { return min(row / 16 + warp_n * TILES + j, (N - 1) / 16); };
  const auto fetch = [&](int i) {
    if (i < mine) {
      char *const to = stages + i % STAGES * STAGE;
      const char *from = xs + ((size_t)(begin + i) * 4 * padded + token) * 128;
      for (int j = threadIdx.x % (WARPS_N * 32); j < 4 * tokens * 8; j += WARPS_N * 32) {
        const int chunk = j / (tokens * 8), at = j % (tokens * 8) * 16;
        copy_16(shared_address(to + chunk * (NT * 128) + at), from + (size_t)chunk * padded * 128 + at);
      }
#pragma unroll
      for (int j = 0; j < TILES; j++)
        source.copy(to + X_BYTES + (warp_n * TILES + j) * Source::BYTES, row_tile(j), begin + i, lane);
    }
    commit_copies();
  };

  float d[TILES][NT / 8][4];
#pragma unroll
  for (int i = 0; i < TILES * NT / 2; i++) d[i / (NT / 2)][i % (NT / 2) / 4][i % 4] = 0;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) fetch(s);
  typename Source::W w[TILES];
#pragma unroll
  for (int j = 0; j < TILES; j++) w[j].begin_tile(source, row_tile(j), lane);
  for (int i = lane * 16; i < Source::SCRATCH; i += 512)
    *reinterpret_cast<uint4 *>(scratch + i) = make_uint4(0, 0, 0, 0);
#pragma unroll 1
  for (int i = 0; i < mine; i++) {
    wait_for_copies<STAGES - 2>();
    team_sync<WARPS_N * 32, WARPS_K>(1 + warp_k);
    fetch(i + STAGES - 1);
    const char *stage = stages + i % STAGES * STAGE;
#pragma unroll Source::SCRATCH> 0 ? 2 : 1
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int j = 0; j < TILES; j++)
        w[j].load(source, stage + X_BYTES + (warp_n * TILES + j) * Source::BYTES, row_tile(j), begin + i, h, lane);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        uint32 a[TILES][4][4];
#pragma unroll
        for (int j = 0; j < TILES; j++) w[j].unpack(a[j], 2 * h + c, scratch, lane);
        gemm_sm80_chunk<NT, TILES, X>(d, a, stage + (2 * h + c) * (NT * 128), lane);
      }
    }
  }
  wait_for_copies<0>();
  __syncthreads();  // no warp reads the stages any more: results take their place

  float *const results = reinterpret_cast<float *>(shared);
  const int t = lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    const int r = (warp_n * TILES + j) * 16 + lane / 4;
    if constexpr (requires { source.row_scales(0, 0); }) {
      const float2 scale = source.row_scales(row_tile(j), lane);
#pragma unroll
      for (int i = 0; i < NT / 2; i++) d[j][i / 4][i % 4] *= i % 4 < 2 ? scale.x : scale.y;
    }
#pragma unroll
    for (int c = 0; c < NT / 8; c++) {
      float *const to = results + (warp_k * NT + c * 8 + t) * STRIDE + r;
      to[0] = d[j][c][0], to[STRIDE] = d[j][c][1], to[8] = d[j][c][2], to[STRIDE + 8] = d[j][c][3];
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < NT * ROWS; i += WARPS_N * WARPS_K * 32) {
    const int m = i / ROWS, n = row + i % ROWS;
    if (token + m >= M || n >= N) continue;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < WARPS_K; k++) sum += results[(k * NT + m) * STRIDE + i % ROWS];
    if (bias) sum += to_float(bias[n]);
    if constexpr (Source::RESIDUAL)
      if (residual) sum += to_float(residual[(size_t)(token + m) * stride + n]);
    y[(size_t)(token + m) * stride + n] = from_float<X>(sum);
  }
}

}  // namespace crelle
