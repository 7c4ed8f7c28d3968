// GEMM for many tokens and weights of four-bit floats, y [M, N] = x [M, K] W.T + bias + residual: the tiles of gemm.cu,
// with weights that fp4_source.cuh makes operands in registers, read once as fp4_gemv.cu reads them. x is packed by
// pack_x.cu, or by the norm before it (residual_norm_pack.cu).
#include "fp4/fp4_source.cuh"
#include "mainloop/gemm_sm80.cuh"
#if __CUDA_ARCH__ == 900
#include "mainloop/gemm_sm90.cuh"
#endif

namespace crelle {

// weight: as of Fp4Source; the others as of gemm_sm90_tiles.
#if __CUDA_ARCH__ == 900
template <Fp4Kind KIND, int NT, int WG, int XC, int XS, int WS, int OCCUPANCY, int SPLIT_K, typename X>
__global__ void __cluster_dims__(SPLIT_K, 1, 1) __launch_bounds__(gemm_sm90_threads(NT, WG), OCCUPANCY)
    fp4_gemm_sm90(const char *__restrict__ weight, const char *__restrict__ xs, const X *__restrict__ bias,
                  const X *residual, X *y, float4 *partial, int *semaphores, int N, int M, int blocks, int whole,
                  int stride) {
  gemm_sm90_tiles<Fp4Source<KIND, X>, NT, WG, XC, XS, WS, SPLIT_K>(
      Fp4Source<KIND, X>(weight, blocks), xs, bias, residual, y, partial, semaphores, N, M, blocks, whole, stride);
}
#endif

template <Fp4Kind KIND, int NT, int TILES, int WARPS_N, int WARPS_K, int STAGES, typename X>
__global__ void __launch_bounds__(WARPS_N * WARPS_K * 32)
    fp4_gemm_sm80(const char *__restrict__ weight, const char *__restrict__ xs, const X *__restrict__ bias,
                  const X *residual, X *y, int N, int M, int blocks, int stride) {
  gemm_sm80_tiles<Fp4Source<KIND, X>, NT, TILES, WARPS_N, WARPS_K, STAGES>(Fp4Source<KIND, X>(weight, blocks), xs, bias,
                                                                           residual, y, N, M, blocks, stride);
}

}  // namespace crelle
