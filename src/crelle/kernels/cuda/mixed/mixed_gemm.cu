// GEMM for many tokens and mixed 2/4-bit weights with outliers, y [M, N] = x [M, K] W.T + bias + residual: the tiles of
// gemm.cu, with weights that mixed_source.cuh dequantizes in registers, read once as mixed_gemv.cu reads them. x is
// packed by pack_x.cu, or by the norm before it (residual_norm_pack.cu).
#include "mixed/mixed_source.cuh"
#include "mainloop/gemm_sm80.cuh"
#if __CUDA_ARCH__ == 900
#include "mainloop/gemm_sm90.cuh"
#endif

namespace crelle {

// tiles, grid_rows, outliers, starts: as of MixedSource; the others as of gemm_sm90_tiles.
#if __CUDA_ARCH__ == 900
template <int SUBS, int SPAN, int NT, int WG, int XC, int XS, int WS, int OCCUPANCY, int SPLIT_K, typename X>
__global__ void __cluster_dims__(SPLIT_K, 1, 1) __launch_bounds__(gemm_sm90_threads(NT, WG), OCCUPANCY)
    mixed_gemm_sm90(const char *__restrict__ tiles, const __half2 *__restrict__ grid_rows,
                    const uint4 *__restrict__ outliers, const int *__restrict__ starts, const char *__restrict__ xs,
                    const X *__restrict__ bias, const X *residual, X *y, float4 *partial, int *semaphores, int N, int M,
                    int U2, int U4, int whole, int stride) {
  const MixedSource<SUBS, SPAN, true, X> source(tiles, grid_rows, outliers, starts, U2, U4);
  gemm_sm90_tiles<MixedSource<SUBS, SPAN, true, X>, NT, WG, XC, XS, WS, SPLIT_K>(
      source, xs, bias, residual, y, partial, semaphores, N, M, source.blocks, whole, stride);
}
#endif

template <int SUBS, int NT, int TILES, int WARPS_N, int WARPS_K, int STAGES, typename X>
__global__ void __launch_bounds__(WARPS_N * WARPS_K * 32)
    mixed_gemm_sm80(const char *__restrict__ tiles, const __half2 *__restrict__ grid_rows,
                    const uint4 *__restrict__ outliers, const int *__restrict__ starts, const char *__restrict__ xs,
                    const X *__restrict__ bias, const X *residual, X *y, int N, int M, int U2, int U4, int stride) {
  const MixedSource<SUBS, 1, false, X> source(tiles, grid_rows, outliers, starts, U2, U4);
  gemm_sm80_tiles<MixedSource<SUBS, 1, false, X>, NT, TILES, WARPS_N, WARPS_K, STAGES>(source, xs, bias, residual, y, N,
                                                                                       M, source.blocks, stride);
}

}  // namespace crelle
