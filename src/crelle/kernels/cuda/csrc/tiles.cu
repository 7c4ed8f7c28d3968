// y [M, N] = x [M, K] W.T for many tokens: weights become 16-bit numbers in registers, tensor cores do the rest.
//
// The weights are those of decode.cu, bit for bit: a lane finds the planes of its own rows and inputs in one piece, and
// x is brought into their order once (arrange, below), since x is smaller and often serves several matrices. A weight
// is unpacked once per tile of tokens, never written anywhere, and the sums are fp32.
//   tiles_weights.cuh   planes to numbers: tables of three planes looked up by byte permutation; larger codes directly
//   tiles_hopper.cuh    sm_90a: warpgroup instructions, x by bulk copies, work cut into equal shares
//   tiles_ampere.cuh    everything else: warp instructions, cp.async
// On an H200, group 128, the tile of tokens that wins: as many as there are, up to 256 (16, 32, 64, 128, 192, 256);
// where that makes fewer than about 50 tiles, at most 128. Up to 32 tokens the unpacking is the limit, and several
// thread blocks a multiprocessor hide its latencies; from 128 on one thread block of two warpgroups is best; with 256
// tokens the tensor cores are busy. Lost: clusters that fetch x together (1.3 times slower); clusters that split K
// (1.03 to 1.3 times slower at 128 tokens, where tiles do not come out even; but 1.2 to 1.5 times faster for 4096 x
// 4096 at 16 tokens, probably since here the parts of a tile are awaited one after the other); signs by shift and
// exclusive or instead of tables (9 instructions a pair at three planes, tables 5).
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
