// x [M, K] as the decode kernel wants it: integers of eight digits in base -4, one scale per 128 inputs, cut into bits.
//
//   bits    u32 [2 blocks, 32, M, 2]        half block, lane 4g + t, instruction i, low and high bit: bit j of a word
//   belongs
//                                           to input 32t + j, to the token and the digit that column g of instruction i
//                                           has
//   xscale  f32 [2 blocks, M, 1 + PARTS]    per half block and token: s, where x = s * integer; then the sum of the
//   integers,
//                                           or PARTS sums where so many groups of weights are in a half block
// M is 1, 2 or 4: a buffer for three tokens has room for four. A token has L = 4 / M pairs of columns; pair l of token
// m is columns 2 (L m + l) and the next, and holds digits 8/L l + 2i and the next in instruction i.
//
// One warp makes 128 inputs of a token. Before that an operation of the model may be applied (`Op`), so that its result
// is never written: each thread block repeats the sums over the whole row that norms need.
#include "numbers.cuh"

namespace crelle {

constexpr float LARGEST = 13107;  // what eight digits of base -4 hold on both sides of 0

enum Op { PLAIN, RMS_NORM, LAYER_NORM, SILU_MUL, RELU };

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int i = 16; i; i /= 2) v += __shfl_xor_sync(~0u, v, i);
  return v;
}

template <int WARPS>
__device__ __forceinline__ float2 block_sum(float a, float b) {
  __shared__ float2 part[WARPS];
  a = warp_sum(a), b = warp_sum(b);
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = make_float2(a, b);
  __syncthreads();
  float2 sum = make_float2(0, 0);
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum.x += part[w].x, sum.y += part[w].y;
  return sum;
}

// x [tokens, K] (SILU_MUL: [tokens, 2K], gate then up); order [256 blocks], which input stands where, -1 for none, or
// null; grid (ceil(2 blocks / WARPS), tokens)
template <Op OP, int PARTS, int M, int WARPS, typename X>
__global__ void __launch_bounds__(WARPS * 32)
    encode(const X *__restrict__ x, const X *__restrict__ weight, const X *__restrict__ bias,
           const int *__restrict__ order, uint2 *bits, float *xscale, int K, int blocks, float eps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, m = blockIdx.y, half = blockIdx.x * WARPS + warp;
  x += (size_t)m * K * (OP == SILU_MUL ? 2 : 1);
  next_may_start();
  previous_is_done();

  float mean = 0, scale = 1;
  if constexpr (OP == RMS_NORM || OP == LAYER_NORM) {
    float sum = 0, squares = 0;
    for (int k = threadIdx.x; k < K; k += WARPS * 32) {
      const float v = number(x[k]);
      sum += v, squares = fmaf(v, v, squares);
    }
    const float2 all = block_sum<WARPS>(sum, squares);
    if constexpr (OP == LAYER_NORM) mean = all.x / K;
    scale = rsqrtf(all.y / K - mean * mean + eps);
  }
  if (half >= 2 * blocks) return;

  float v[4], largest = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int at = half * 128 + 32 * i + lane, k = order ? order[at] : at < K ? at : -1;
    v[i] = 0;
    if (k >= 0) {
      v[i] = number(x[k]);
      if constexpr (OP == RMS_NORM) v[i] = number(rounded<X>(v[i] * scale)) * number(weight[k]);
      if constexpr (OP == LAYER_NORM) v[i] = (v[i] - mean) * scale * number(weight[k]) + number(bias[k]);
      if constexpr (OP == SILU_MUL) v[i] = v[i] / (1 + __expf(-v[i])) * number(x[K + k]);
      if constexpr (OP == RELU) v[i] = fmaxf(v[i], 0);
    }
    largest = fmaxf(largest, fabsf(v[i]));
  }
#pragma unroll
  for (int i = 16; i; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
  const float up = largest > 0 ? LARGEST / largest : 0;

  constexpr int L = 4 / M, DIGITS = 8 / L;  // pairs of columns; digits that a pair holds
  int sums[PARTS] = {};                     // each over 4 / PARTS runs of 32 inputs
  uint32 low[M] = {}, high[M] = {};         // of instruction i, for the column and the inputs of this lane
  const int column = lane / 4 - 2 * L * m;  // among those of this token
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int q = __float2int_rn(v[i] * up), digits = (q + 0xCCCC) ^ 0xCCCC;
    sums[i * PARTS / 4] += q;
#pragma unroll
    for (int d = 0; d < 8; d++) {
      const uint32 l = __ballot_sync(~0u, digits >> (2 * d) & 1), h = __ballot_sync(~0u, digits >> (2 * d + 1) & 1);
      if (lane % 4 == i && column == 2 * (d / DIGITS) + d % 2) low[d % DIGITS / 2] = l, high[d % DIGITS / 2] = h;
    }
  }
  if (0 <= column && column < 2 * L) {
#pragma unroll
    for (int i = 0; i < M; i++) bits[(half * 32 + lane) * M + i] = make_uint2(low[i], high[i]);
  }
  xscale += (half * M + m) * (1 + PARTS);
  if (lane == 0) xscale[0] = largest / LARGEST;
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    const int s = __reduce_add_sync(~0u, sums[i]);
    if (lane == 0) xscale[1 + i] = s;
  }
}

}  // namespace crelle
