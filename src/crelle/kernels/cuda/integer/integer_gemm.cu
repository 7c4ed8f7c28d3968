// GEMM of integer weights and integer activations, y [M, N] = x [M, K] W.T + bias + residual: groups with a scale each
// (Atom) or two levels of scales (QServe, LiquidGEMM), 4 and 8 bits, 8-bit outlier channels last.
//
//   y = sum over groups of scale_x[m, g] scale_w[n, g] (sum over k in g of x[m, k] w[n, k])
//
// The inner sums are exact. x: int8, a row for each token, channels in the weight's order, blocks of 128
// (integer_x.py); weights: integer_layout.py, which says how they lie, integer_weights.cuh, how they become bytes.
//   integer_sm90.cuh    sm_90a: wgmma, everything by the copy engine, stream-K
//   integer_sm80.cuh    everything else: warp mma, of bytes and of half bytes, cp.async
#include "integer/integer_sm80.cuh"
#if __CUDA_ARCH__ == 900
#include "integer/integer_sm90.cuh"
#endif

namespace crelle {

#if __CUDA_ARCH__ == 900
template <IntegerScheme SCHEME, int SUBS, int SEGMENTS, bool HAS_WIDE, int NT, int WG, int STAGES, int OCCUPANCY,
          int SPLIT_K, typename X>
__global__ void __cluster_dims__(SPLIT_K, 1, 1) __launch_bounds__(integer_sm90_threads(NT, WG, OCCUPANCY), OCCUPANCY)
    integer_gemm_sm90(const __grid_constant__ TensorMap x_map, const char *__restrict__ pieces,
                      const float *__restrict__ x_scales, const float *__restrict__ row_scale,
                      const X *__restrict__ bias, const X *residual, X *y, float4 *partial, int *semaphores,
                      const __grid_constant__ IntegerShape shape, int whole, int stride) {
  integer_sm90_tiles<SCHEME, SUBS, SEGMENTS, HAS_WIDE, NT, WG, STAGES, OCCUPANCY, SPLIT_K>(
      x_map, pieces, x_scales, row_scale, bias, residual, y, partial, semaphores, shape, whole, stride);
}
#endif

template <IntegerScheme SCHEME, int SUBS, int SEGMENTS, bool HAS_WIDE, bool S4, int NT, int TILES, int WARPS_N,
          int WARPS_K, int STAGES, int W_STAGES, int OCCUPANCY, typename X>
__global__ void __launch_bounds__(WARPS_N * WARPS_K * 32, OCCUPANCY)
    integer_gemm_sm80(const char *__restrict__ x, const char *__restrict__ pieces, const float *__restrict__ x_scales,
                      const float *__restrict__ row_scale, const X *__restrict__ bias, const X *residual, X *y,
                      const __grid_constant__ IntegerShape shape, int stride) {
  integer_sm80_tiles<SCHEME, SUBS, SEGMENTS, HAS_WIDE, S4, NT, TILES, WARPS_N, WARPS_K, STAGES, W_STAGES>(
      x, pieces, x_scales, row_scale, bias, residual, y, shape, stride);
}

}  // namespace crelle
