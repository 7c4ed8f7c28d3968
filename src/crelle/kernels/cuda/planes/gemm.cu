// GEMM for many tokens, y [M, N] = x [M, K] W.T: weights are dequantized to 16 bits in registers, once per tile of
// tokens and never written anywhere, for mma with f32 accumulators.
//
// The weights are those of bmma_gemv.cu, bit for bit: a lane finds the planes of its own rows and inputs contiguous,
// and x is packed into their order once (pack_x.cu), since x is smaller and often serves several weights.
//   dequant.cuh      planes to values: looked up by byte permutation (dequant_lut.cuh); larger codes directly
//   gemm_sm90.cuh    sm_90a: wgmma, x by bulk copies, stream-K (stream_k.cuh)
//   gemm_sm80.cuh    everything else: warp mma, cp.async
// On an H200, group 128, the tile of tokens that wins: as many as there are, up to 256; where that makes fewer than
// about 50 tiles, at most 128. One thread block of two warpgroups on a multiprocessor is best, of three up to 64 tokens
// where rows are many; with 256 tokens the tensor cores are busy 80% of the time. Up to 32 tokens skinny_gemm.cu is
// faster. docs/notes/tried-and-lost.md has the others.
#include "planes/plane_source.cuh"
#include "mainloop/gemm_sm80.cuh"
#include "mainloop/gemm_sm90.cuh"

namespace crelle {

// words, scales: as of PlaneSource; the others as of gemm_sm90_tiles.
#if __CUDA_ARCH__ == 900
template <int P, ScaleKind KIND, int GROUPS, int NT, int WG, int XC, int XS, int WS, int OCCUPANCY, int SPLIT_K,
          typename S, typename X>
__global__ void __cluster_dims__(SPLIT_K, 1, 1) __launch_bounds__(gemm_sm90_threads(NT, WG), OCCUPANCY)
    gemm_sm90(const char *__restrict__ words, const char *__restrict__ scales, const char *__restrict__ xs,
              const X *__restrict__ bias, X *y, float4 *partial, int *semaphores, int N, int M, int blocks, int planes,
              int blocks_per_scale, int whole) {
  using Source = PlaneSource<P, KIND, GROUPS, S, X>;
  gemm_sm90_tiles<Source, NT, WG, XC, XS, WS, SPLIT_K>(Source(words, scales, blocks, planes, blocks_per_scale), xs,
                                                       bias, (const X *)nullptr, y, partial, semaphores, N, M, blocks,
                                                       whole, N);
}
#endif

template <int P, ScaleKind KIND, int GROUPS, int NT, int TILES, int WARPS_N, int WARPS_K, int STAGES, typename S,
          typename X>
__global__ void __launch_bounds__(WARPS_N * WARPS_K * 32)
    gemm_sm80(const char *__restrict__ words, const char *__restrict__ scales, const char *__restrict__ xs,
              const X *__restrict__ bias, X *y, int N, int M, int blocks, int planes, int blocks_per_scale) {
  using Source = PlaneSource<P, KIND, GROUPS, S, X>;
  gemm_sm80_tiles<Source, NT, TILES, WARPS_N, WARPS_K, STAGES>(Source(words, scales, blocks, planes, blocks_per_scale),
                                                               xs, bias, (const X *)nullptr, y, N, M, blocks, N);
}

}  // namespace crelle
