// The GEMM with the warp mma that every chip since Ampere has: a warp holds TILES tiles of 16 rows and all NT tokens of
// its thread block. WARPS_N warps along N share x; WARPS_K groups of them split K and add up in a fixed order. A
// pipeline stage is a block of 256 inputs, of x and of the weights.
#pragma once
#include "mma.cuh"
#include "pipeline.cuh"
#include "dequant.cuh"

namespace crelle {

__device__ __forceinline__ void copy_16(uint32 to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Step STEP of half a block, for all tiles and tokens. `x` is the address of the half block's first 64 inputs.
template <int STEP, int NT, int TILES, typename X, typename W>
__device__ __forceinline__ void gemm_sm80_step(float (&d)[TILES][NT / 8][4], W (&w)[TILES], uint32 x, int lane) {
  uint32 a[TILES][4];
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    if (STEP == 4) w[j].next_half();
    w[j].template step<STEP % 4>(a[j]);
  }
  const int token = (lane & 7) + (lane >> 4) * 8, unit = (2 * STEP) % 8 + (lane >> 3 & 1);
  const uint32 from = x + STEP / 4 * (NT * 128) + token * 128 + ((unit ^ token) & 7) * 16;
#pragma unroll
  for (int c = 0; c < NT / 8; c += 2) {
    uint32 b[4];
    if constexpr (NT == 8)
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                   : "=r"(b[0]), "=r"(b[1])
                   : "r"(x + STEP / 4 * (NT * 128) + (lane & 7) * 128 + ((unit ^ lane) & 7) * 16)
                   : "memory");
    else
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                   : "r"(from + c * 1024)
                   : "memory");
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      multiply<X>(d[j][c], a[j][0], a[j][1], a[j][2], a[j][3], b[0], b[1]);
      if constexpr (NT > 8) multiply<X>(d[j][c + 1], a[j][0], a[j][1], a[j][2], a[j][3], b[2], b[3]);
    }
  }
}

// Arguments as of `gemm_sm90`; grid (ceil(N / (16 TILES WARPS_N)), ceil(M / NT))
template <int P, ScaleKind KIND, int GROUPS, int NT, int TILES, int WARPS_N, int WARPS_K, int STAGES, typename S,
          typename X>
__global__ void __launch_bounds__(WARPS_N * WARPS_K * 32)
    gemm_sm80(const char *__restrict__ words, const char *__restrict__ scales, const char *__restrict__ xs,
              const X *__restrict__ bias, X *y, int N, int M, int blocks, int planes, int blocks_per_scale) {
  using W = Weights<P, KIND, GROUPS, S, X, uses_stride16(KIND, P)>;
  constexpr int ROWS = WARPS_N * TILES * 16, STRIDE = ROWS + 4, X_BYTES = NT * 512;
  constexpr int STAGE = X_BYTES + WARPS_N * TILES * W::BYTES;
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
  const int row = blockIdx.x * ROWS, token = blockIdx.y * NT, padded = (M + 7) & ~7, tokens = min(NT, padded - token);
  const int begin = blocks * warp_k / WARPS_K, mine = blocks * (warp_k + 1) / WARPS_K - begin;
  char *const stages = shared + warp_k * (STAGES * STAGE);

  launch_dependents();
  grid_dependency_wait();
  const auto fetch = [&](int i) {
    if (i < mine) {
      char *const to = stages + i % STAGES * STAGE;
      const char *from = xs + ((size_t)(begin + i) * 4 * padded + token) * 128;
      for (int j = threadIdx.x % (WARPS_N * 32); j < 4 * tokens * 8; j += WARPS_N * 32) {
        const int chunk = j / (tokens * 8), at = j % (tokens * 8) * 16;
        copy_16(shared_address(to + chunk * (NT * 128) + at), from + (size_t)chunk * padded * 128 + at);
      }
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        const int tile = min(row / 16 + warp_n * TILES + j, (N - 1) / 16), b = begin + i;
        const int set = GROUPS > 1 ? tile * blocks + b
                                   : tile * ((blocks + blocks_per_scale - 1) / blocks_per_scale) + b / blocks_per_scale;
        const uint32 at = shared_address(to + X_BYTES + (warp_n * TILES + j) * W::BYTES);
        for (int k = lane * 16; k < W::PLANE_BYTES; k += 512)
          copy_16(at + k, words + (size_t)(tile * blocks + b) * (planes * 512) + k);
        for (int k = lane * 16; k < W::SCALE_BYTES; k += 512)
          copy_16(at + W::PLANE_BYTES + k, scales + (size_t)set * W::SCALE_BYTES + k);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  const auto team_sync = [&] { asm volatile("bar.sync %0, %1;" ::"r"(1 + warp_k), "n"(WARPS_N * 32) : "memory"); };

  float d[TILES][NT / 8][4];
#pragma unroll
  for (int i = 0; i < TILES * NT / 2; i++) d[i / (NT / 2)][i % (NT / 2) / 4][i % 4] = 0;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) fetch(s);
#pragma unroll 1
  for (int i = 0; i < mine; i++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    team_sync();
    fetch(i + STAGES - 1);
    const char *stage = stages + i % STAGES * STAGE;
#pragma unroll 1
    for (int h = 0; h < 2; h++) {
      W w[TILES];
#pragma unroll
      for (int j = 0; j < TILES; j++) w[j].load(stage + X_BYTES + (warp_n * TILES + j) * W::BYTES, h, lane);
      const uint32 x = shared_address(stage) + h * (NT * 256);
      gemm_sm80_step<0, NT, TILES, X>(d, w, x, lane), gemm_sm80_step<1, NT, TILES, X>(d, w, x, lane);
      gemm_sm80_step<2, NT, TILES, X>(d, w, x, lane), gemm_sm80_step<3, NT, TILES, X>(d, w, x, lane);
      gemm_sm80_step<4, NT, TILES, X>(d, w, x, lane), gemm_sm80_step<5, NT, TILES, X>(d, w, x, lane);
      gemm_sm80_step<6, NT, TILES, X>(d, w, x, lane), gemm_sm80_step<7, NT, TILES, X>(d, w, x, lane);
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();  // no warp reads the stages any more: results take their place

  float *const results = reinterpret_cast<float *>(shared);
  const int t = lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    const int r = (warp_n * TILES + j) * 16 + lane / 4;
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
    y[(size_t)(token + m) * N + n] = from_float<X>(sum);
  }
}

}  // namespace crelle
