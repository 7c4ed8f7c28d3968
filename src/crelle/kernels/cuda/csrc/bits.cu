// x [M, K] as the decode kernel wants it: integers of eight digits in base -4, one scale per 128 inputs, cut into bits.
//
//   bits    u32 [2 blocks, 32, M, 2]
//           half block, lane 4g + t, instruction i, low and high bit of a digit: bit j of the word belongs to input
//           32t + j, and to the token and the digit that column g of instruction i has
//   xscale  f32 [2 blocks, M, 1 + PARTS]
//           half block, token: s, where x = s * integer; then the sum of the integers (in units of 2^-39), or PARTS
//           sums where so many groups of weights are in a half block
//
// M is 1, 2 or 4: a buffer for three tokens has room for four. A token has L = 4 / M pairs of columns; pair l of token
// m is columns 2 (L m + l) and the next, and holds digits 8/L l + 2i and the next in instruction i.
//
// One warp makes 128 inputs of a token. Before that an operation of the model may be applied (`Op`), so that its result
// is never written: each thread block repeats the sums over the whole row that norms need.
#include "numbers.cuh"

namespace crelle {

constexpr float LARGEST = 13107;  // what eight digits of base -4 hold on both sides of 0

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int i = 16; i; i /= 2) v += __shfl_xor_sync(~0u, v, i);
  return v;
}

// Bit c of lane r becomes bit r of lane c.
__device__ __forceinline__ uint32 transposed(uint32 x, int lane) {
  uint32 keep = 0x0000ffff;
#pragma unroll
  for (int i = 16; i; i /= 2, keep ^= keep << i) {
    const uint32 other = __shfl_xor_sync(~0u, x, i);
    x = lane & i ? (other >> i & keep) | (x & ~keep) : (x & keep) | (other & keep) << i;
  }
  return x;
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
           const int *__restrict__ order, uint32 *bits, float *xscale, int K, int blocks, float eps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, m = blockIdx.y, half = blockIdx.x * WARPS + warp;
  x += (size_t)m * K * (OP == SILU_MUL ? 2 : 1);
  next_may_start();
  float v[4], gain[4] = {}, shift[4] = {};
  int from[4];  // what does not depend on the previous kernel
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int at = half * 128 + 32 * i + lane;
    from[i] = half >= 2 * blocks ? -1 : order ? order[at] : at < K ? at : -1;
    if (from[i] < 0) continue;
    if constexpr (OP == RMS_NORM || OP == LAYER_NORM) gain[i] = number(weight[from[i]]);
    if constexpr (OP == LAYER_NORM) shift[i] = number(bias[from[i]]);
  }
  previous_is_done();

  // This warp's inputs first: they are under way while the row is summed up.
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int k = from[i];
    v[i] = k < 0 ? 0 : number(x[k]);
    if constexpr (OP == SILU_MUL) gain[i] = k < 0 ? 0 : number(x[K + k]);
  }
  float mean = 0, scale = 1;
  if constexpr (OP == RMS_NORM || OP == LAYER_NORM) {
    float sum = 0, squares = 0;
    const auto add = [&](float a) { sum += a, squares = fmaf(a, a, squares); };
    const int vectors = K % 8 ? 0 : K / 8;
    for (int i = threadIdx.x; i < vectors; i += WARPS * 32) {
      const uint4 w = reinterpret_cast<const uint4 *>(x)[i];
      const X *eight = reinterpret_cast<const X *>(&w);
#pragma unroll
      for (int j = 0; j < 8; j++) add(number(eight[j]));
    }
    for (int k = 8 * vectors + threadIdx.x; k < K; k += WARPS * 32) add(number(x[k]));
    const float2 all = block_sum<WARPS>(sum, squares);
    if constexpr (OP == LAYER_NORM) mean = all.x / K;
    scale = rsqrtf(all.y / K - mean * mean + eps);
  }
  if (half >= 2 * blocks) return;

  float largest = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (OP == RMS_NORM) v[i] = number(rounded<X>(v[i] * scale)) * gain[i];
    if constexpr (OP == LAYER_NORM) v[i] = from[i] < 0 ? 0 : (v[i] - mean) * scale * gain[i] + shift[i];
    if constexpr (OP == SILU_MUL) v[i] = v[i] / (1 + __expf(-v[i])) * gain[i];
    if constexpr (OP == RELU) v[i] = fmaxf(v[i], 0);
    largest = fmaxf(largest, fabsf(v[i]));
  }
#pragma unroll
  for (int i = 16; i; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
  const float up = largest > 0 ? LARGEST / largest : 0;

  uint32 packed[2];      // the digits, 16 bits each, of inputs (lane, 32 + lane) and (64 + lane, 96 + lane)
  int sums[PARTS] = {};  // each over 4 / PARTS runs of 32 inputs
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int q = __float2int_rn(v[i] * up);
    const uint32 digits = (q + 0xCCCC) ^ 0xCCCC;
    packed[i / 2] = i % 2 ? packed[i / 2] | digits << 16 : digits;
    sums[i * PARTS / 4] += q;
  }
  constexpr int L = 4 / M, DIGITS = 8 / L;  // pairs of columns of a token; digits that a pair holds
#pragma unroll
  for (int i = 0; i < 2; i++) {
    // Transposed, lane j has bit j % 16 of 32 inputs: the word that column and instruction of that digit want.
    const uint32 word = transposed(packed[i], lane);
    const int run = 2 * i + lane / 16, digit = lane % 16 / 2, column = 2 * (L * m + digit / DIGITS) + digit % 2;
    bits[((half * 32 + 4 * column + run) * M + digit % DIGITS / 2) * 2 + lane % 2] = word;
  }
  xscale += (half * M + m) * (1 + PARTS);
  if (lane == 0) xscale[0] = largest / LARGEST;
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    const int s = __reduce_add_sync(~0u, sums[i]);
    if (lane == 0) xscale[1 + i] = s * 0x1p-39f;  // the unit in which decode.cu adds up
  }
}

}  // namespace crelle
