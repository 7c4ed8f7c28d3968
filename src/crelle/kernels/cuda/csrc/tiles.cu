// y [M, N] = x [M, K] W.T for many tokens: weights become 16-bit numbers in registers, tensor cores do the rest.
#include "tiles_weights.cuh"
#include "tiles_ampere.cuh"
#include "tiles_hopper.cuh"

namespace crelle {

// x [M, K] in the order in which the matrix instructions take it, and ready to be copied to shared memory as it is:
//   xs [4 blocks, M', 64]   64 inputs of a token: 128 bytes, eight units of 16; M' = M rounded up to 8
// Unit u = 0 ... 15 of half a block is one lane's inputs after the other's (tiles_weights.cuh); it stands at place (u ^
// token) % 8 of its 128 bytes, the hardware's swizzle. order [256 blocks]: which input stands where, -1 for none, or
// null. A thread makes a unit; grid (2 blocks, ceil(M' / 16)), 256 threads. The first of them also clear `flags`.
template <typename X>
__global__ void __launch_bounds__(256)
    arrange(const X *__restrict__ x, const int *__restrict__ order, uint4 *xs, int *flags, int count, int M, int K) {
  const int u = threadIdx.x % 16, token = blockIdx.y * 16 + threadIdx.x / 16, padded = (M + 7) & ~7;
  next_may_start();
  previous_is_done();
  if (blockIdx.y == 0)
    for (int i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) flags[i] = 0;
  if (token >= padded) return;
  const int first = blockIdx.x * 128 + u / 8 * 16 + u / 2 % 4 + u % 2 * 8;
  X v[8];
#pragma unroll
  for (int p = 0; p < 8; p++) {
    const int at = first + p / 2 * 32 + p % 2 * 4, k = order ? order[at] : at < K ? at : -1;
    v[p] = k >= 0 && token < M ? x[(size_t)token * K + k] : rounded<X>(0);
  }
  xs[((size_t)(blockIdx.x * 2 + u / 8) * padded + token) * 8 + (u ^ token) % 8] = *reinterpret_cast<const uint4 *>(v);
}

}  // namespace crelle
