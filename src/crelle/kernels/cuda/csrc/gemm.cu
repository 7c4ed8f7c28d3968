// GEMM for many tokens, y [M, N] = x [M, K] W.T: weights are dequantized to 16 bits in registers, once per tile of
// tokens and never written anywhere, for mma with f32 accumulators.
//
// The weights are those of bmma_gemv.cu, bit for bit: a lane finds the planes of its own rows and inputs contiguous,
// and x is packed into their order once (pack_x, below), since x is smaller and often serves several weights.
//   dequant.cuh      planes to values: looked up by byte permutation (dequant_lut.cuh); larger codes directly
//   gemm_sm90.cuh    sm_90a: wgmma, x by bulk copies, stream-K (stream_k.cuh)
//   gemm_sm80.cuh    everything else: warp mma, cp.async
// On an H200, group 128, the tile of tokens that wins: as many as there are, up to 256; where that makes fewer than
// about 50 tiles, at most 128. One thread block of two warpgroups on a multiprocessor is best, of three up to 64 tokens
// where rows are many; with 256 tokens the tensor cores are busy 80% of the time. Up to 32 tokens skinny_gemm.cu is
// faster. docs/notes/tried-and-lost.md has the others.
#include "dequant.cuh"
#include "x_layout.cuh"
#include "gemm_sm80.cuh"
#include "gemm_sm90.cuh"

namespace crelle {

// x [M, K] in the order in which the matrix instructions take it, and ready to be copied to shared memory as it is:
//   xs [4 blocks, M', 64]   64 inputs of a token: 128 bytes, eight units of 16; M' = M rounded up to 8
// Unit u = 0 ... 15 of half a block (x_layout.cuh) stands at place (u ^ token) % 8 of its 128 bytes, the hardware's
// swizzle. perm [256 blocks]: which input stands where, -1 for none, or null. Half a block of 32 tokens comes to
// shared memory as it is, then a thread makes two units; grid (2 blocks, ceil(M' / 32)), 256 threads. The first of them
// also clear `semaphores`.
template <typename X>
__global__ void __launch_bounds__(256) pack_x(const X *__restrict__ x, const int *__restrict__ perm, uint4 *xs,
                                              int *semaphores, int count, int M, int K, bool stride16) {
  constexpr int ROW = 128 + 8;  // of shared memory: tokens begin in different banks
  __shared__ __align__(16) X rows[32 * ROW];
  const int u = threadIdx.x % 16, padded = (M + 7) & ~7;
  const bool pieces = !perm && K % 8 == 0 && (reinterpret_cast<size_t>(x) & 15) == 0;
  launch_dependents();
  grid_dependency_wait();
  if (blockIdx.y == 0)
    for (int i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) semaphores[i] = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = threadIdx.x / 16 + 16 * i, token = blockIdx.y * 32 + row, at = blockIdx.x * 128 + u * 8;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (pieces) {
      if (token < M && at < K) v = __ldg(reinterpret_cast<const uint4 *>(x + (size_t)token * K + at));
    } else {
      X each[8];
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const int k = perm ? perm[at + j] : at + j < K ? at + j : -1;
        each[j] = k >= 0 && token < M ? x[(size_t)token * K + k] : from_float<X>(0);
      }
      v = *reinterpret_cast<const uint4 *>(each);
    }
    *reinterpret_cast<uint4 *>(rows + row * ROW + u * 8) = v;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = threadIdx.x / 16 + 16 * i, token = blockIdx.y * 32 + row;
    if (token >= padded) return;
    const X *const from = rows + row * ROW;
    X v[8];
#pragma unroll
    for (int p = 0; p < 8; p++) v[p] = from[input_at(u, p, stride16)];
    xs[((size_t)(blockIdx.x * 2 + u / 8) * padded + token) * 8 + (u ^ token) % 8] = *reinterpret_cast<const uint4 *>(v);
  }
}

}  // namespace crelle
