// x [M, K] as bmma_gemv.cu wants it, bit-serial: integers of eight digits, one scale per 128 inputs, as bits
// (bitserial.cuh has the digits and their layout).
//
// One warp encodes 128 inputs of a token. The prologue may be an operation of the model (`Prologue`), whose result is
// never written: each thread block repeats the sums over the whole row that norms need.
#include "planes/bitserial.cuh"

namespace crelle {

// x [tokens, K] (gated: [tokens, 2K], gate then up); perm [256 blocks], which input stands where, -1 for none, or
// null; grid (ceil(2 blocks / WARPS), tokens)
template <Prologue OP, int PARTS, int M, int WARPS, typename X>
__global__ void __launch_bounds__(WARPS * 32)
    encode(const X *x, const X *__restrict__ weight, const X *__restrict__ bias, const int *__restrict__ perm,
           uint32 *bits, float *xscale, int K, int blocks, float eps) {
  const int lane = threadIdx.x & 31, m = blockIdx.y, half = blockIdx.x * WARPS + (threadIdx.x >> 5);
  x += (size_t)m * K * (is_gated(OP) ? 2 : 1);
  launch_dependents();
  Quarter<OP, X> mine;
  mine.place(weight, bias, perm, half, K, blocks, lane);
  grid_dependency_wait();
  mine.read(x, K);  // under way while the row is summed up
  const float2 row = statistics<OP, WARPS>(x, K, eps);
  if (half >= 2 * blocks) return;
  mine.apply(row);
  write_bitserial<PARTS, M>(mine.v, bits, xscale, half, m, lane);
}

}  // namespace crelle
