// From a row of x to digits: what encode.cu does in a launch of its own and decode_attention.cu for its heads.
//
//   bits    u32 [2 blocks, ceil(M / 2), 32, min(2 M, 4)]
//           half block, pair of instructions, lane 4g + t: first and second bit of a digit in base 3, for both; bit j
//           of the word belongs to input 32t + j, and to the token and the digit that column g of the instruction has
//   bits    u32 [blocks, 32, 4], for one token and groups of at least 128 inputs
//           block, lane 4g + t: low and high bit of digit 2 (g % 4) in base -4, then of the next; bit j of the word
//           belongs to input 32t + j of half g / 4
//   xscale  f32 [2 blocks, M, 1 + PARTS]
//           half block, token: s, where x = s * integer; then the sum of the integers (in units of 2^-42), or PARTS
//           sums where so many groups of weights are in a half block
//
// M is 1, 2 or 4: a buffer for three tokens has room for four. A token has L = 4 / M pairs of columns; pair l of token
// m is columns 2 (L m + l) and the next, and holds digits 8/L l + 2i and the next in instruction i.
#pragma once
#include "ptx/warp.cuh"

namespace crelle {

constexpr float LARGEST = 13107;             // what eight digits of base -4 hold on both sides of 0
constexpr float MOST = 2186, LEAST = -4374;  // what eight digits of base 3 hold, the last of them below 0

// Of values >= 0 or NaN, whose bits have their order: NaN is above inf.
__device__ __forceinline__ float warp_max(float v) {
  return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(v)));
}

// Bit c of lane r becomes bit r of lane c.
__device__ __forceinline__ uint32 transposed_bits(uint32 x, int lane) {
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

// What norms need to know of a whole row: its mean (0 for an RMS norm) and one over its size. All threads call it.
template <Prologue OP, int WARPS, typename X>
__device__ __forceinline__ float2 statistics(const X *x, int K, float eps) {
  if constexpr (OP == RMS_NORM || OP == LAYER_NORM) {
    float sum = 0, squares = 0;
    const auto add = [&](float a) { sum += a, squares = fmaf(a, a, squares); };
    const int vectors = K % 8 ? 0 : K / 8;
    for (int i = threadIdx.x; i < vectors; i += WARPS * 32) {
      const uint4 w = __ldcg(reinterpret_cast<const uint4 *>(x) + i);
      const X *eight = reinterpret_cast<const X *>(&w);
#pragma unroll
      for (int j = 0; j < 8; j++) add(to_float(eight[j]));
    }
    for (int k = 8 * vectors + threadIdx.x; k < K; k += WARPS * 32) add(to_float(__ldcg(x + k)));
    const float2 all = block_sum<WARPS>(sum, squares);
    const float mean = OP == LAYER_NORM ? all.x / K : 0;
    return make_float2(mean, rsqrtf(all.y / K - mean * mean + eps));
  }
  return make_float2(0, 1);
}

// A lane's four inputs of a half block, and what an operation wants to know of them.
template <Prologue OP, typename X>
struct Quarter {
  float v[4], gain[4], shift[4];
  int from[4];  // where they come from; -1: nowhere, and they are 0

  // What does not depend on the previous kernel: where, and a norm's weights.
  __device__ __forceinline__ void place(const X *weight, const X *bias, const int *perm, int half, int K, int blocks,
                                        int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = half * 128 + 32 * i + lane;
      from[i] = half >= 2 * blocks ? -1 : perm ? perm[at] : at < K ? at : -1;
      gain[i] = shift[i] = 0;
      if (from[i] < 0) continue;
      if constexpr (OP == RMS_NORM || OP == LAYER_NORM) gain[i] = to_float(weight[from[i]]);
      if constexpr (OP == LAYER_NORM) shift[i] = to_float(bias[from[i]]);
    }
  }

  __device__ __forceinline__ void read(const X *x, int K) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int k = from[i];
      v[i] = k < 0 ? 0 : to_float(__ldcg(x + k));
      if constexpr (is_gated(OP)) gain[i] = k < 0 ? 0 : to_float(__ldcg(x + K + k));
    }
  }

  __device__ __forceinline__ void apply(float2 row) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (OP == RMS_NORM) v[i] = to_float(from_float<X>(v[i] * row.y)) * gain[i];
      if constexpr (OP == LAYER_NORM) v[i] = from[i] < 0 ? 0 : (v[i] - row.x) * row.y * gain[i] + shift[i];
      if constexpr (OP == SILU_MUL) v[i] = v[i] / (1 + __expf(-v[i])) * gain[i];
      if constexpr (OP == RELU) v[i] = relu(v[i]);
      if constexpr (is_gelu(OP)) v[i] = is_gated(OP) ? gelu_of<OP>(v[i]) * gain[i] : gelu_of<OP>(v[i]);
    }
  }
};

// The eight digits of an integer in base -4, two bits each.
__device__ __forceinline__ uint32 base_minus4_digits(int q) { return (q + 0xCCCC) ^ 0xCCCC; }

// The same in base 3, where as many bits are set as a digit says; the last one counts below 0.
__device__ __forceinline__ uint32 base3_digits(int q) {
  const uint32 u = q - static_cast<int>(LEAST);
  const uint32 v = u + (u * 6473 >> 19) * (0x10000 - 81);  // u % 81 and, 16 bits up, u / 81: four digits each
  const uint32 third = v * 171 >> 9 & 0x3F003F, ninth = v * 57 >> 9 & 0xF000F, last = v * 19 >> 9 & 0x30003;
  const uint32 pairs = v + third + 4 * ninth + 16 * last;  // digit i is v / 3^i - 3 (v / 3^(i + 1)): 4^i times that
  const uint32 set = pairs + (pairs >> 1 & 0x550055);      // 2 is both bits
  return ((set | set >> 8) & 0xFFFF) ^ 0xC000;
}

// A warp writes the digits of 128 inputs of token m; lane l has inputs l, 32 + l, 64 + l, 96 + l. Where one of them is
// NaN or infinite, s is, and the digits are 0: s * 0 is NaN in every product of this token.
template <int PARTS, int M>
__device__ __forceinline__ void write_bitserial(const float (&v)[4], uint32 *bits, float *xscale, int half, int m,
                                                int lane) {
  constexpr bool ONE = M == 1 && PARTS == 1;
  const float most = max_nan(max_nan(v[0], v[1]), max_nan(v[2], v[3]));
  const float least = min_nan(min_nan(v[0], v[1]), min_nan(v[2], v[3]));
  float s;
  if constexpr (ONE) {
    s = warp_max(max_nan(most, -least)) * (1 / LARGEST);
  } else {  // the side of 0 that reaches farther becomes the negative one
    const float above = warp_max(max_nan(most, 0)), below = warp_max(max_nan(-least, 0));
    s = max_nan(max_nan(above, below) * (-1 / LEAST), min_nan(above, below) * (1 / MOST));
    s = above > below ? -s : s;
  }
  const float up = fabsf(s) > 0x1p-120f ? __fdividef(1, s) : 0;

  uint32 packed[2];      // the digits, 16 bits each, of inputs (lane, 32 + lane) and (64 + lane, 96 + lane)
  int sums[PARTS] = {};  // each over 4 / PARTS runs of 32 inputs
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int q = __float2int_rn(v[i] * up);
    const uint32 digits = ONE ? base_minus4_digits(q) : base3_digits(q);
    packed[i / 2] = i % 2 ? packed[i / 2] | digits << 16 : digits;
    sums[i * PARTS / 4] += q;
  }
  constexpr int L = 4 / M, DIGITS = 8 / L;  // pairs of columns of a token; digits that a pair holds
#pragma unroll
  for (int i = 0; i < 2; i++) {
    // Transposed, lane j has bit j % 16 of 32 inputs: the word that column and instruction of that digit want.
    const uint32 word = transposed_bits(packed[i], lane);
    const int run = 2 * i + lane / 16, digit = lane % 16 / 2, column = 2 * (L * m + digit / DIGITS) + digit % 2;
    const int instruction = digit % DIGITS / 2;
    if (ONE)
      bits[(half / 2 * 32 + 4 * (half % 2 * 4 + digit / 2) + run) * 4 + lane % 4] = word;
    else
      bits[half * (64 * M) + instruction / 2 * 128 + (4 * column + run) * (M == 1 ? 2 : 4) + instruction % 2 * 2 +
           lane % 2] = word;
  }
  xscale += (half * M + m) * (1 + PARTS);
  if (lane == 0) xscale[0] = s;
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    const int sum = __reduce_add_sync(~0u, sums[i]);
    if (lane == 0) xscale[1 + i] = sum * 0x1p-42f;  // the unit in which bmma_block.cuh adds up
  }
}

}  // namespace crelle
