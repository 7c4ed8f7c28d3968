// What a kernel does to x on its way into a product (`Prologue`): norms, activations, gated activations.
#pragma once
#include "ptx/tensorcore.cuh"

namespace crelle {

// 8 values from `k` on of a row of K, zeros behind its end; ALIGNED: K is a multiple of 8.
template <bool ALIGNED, typename T>
__device__ __forceinline__ uint4 eight(const T *row, int k, int K) {
  if constexpr (ALIGNED) {
    return k < K ? *reinterpret_cast<const uint4 *>(row + k) : make_uint4(0, 0, 0, 0);
  } else {
    const unsigned short *from = reinterpret_cast<const unsigned short *>(row);
    const auto two = [&](int i) {
      return (k + i < K ? from[k + i] : 0u) | (k + i + 1 < K ? (uint32)from[k + i + 1] << 16 : 0u);
    };
    return make_uint4(two(0), two(2), two(4), two(6));
  }
}

// Sums of M tokens' values and of their squares, over the thread block; all threads must come.
template <int M, int WARPS>
__device__ __forceinline__ void block_sums(float2 (&part)[M][WARPS], float (&sum)[M], float (&squares)[M]) {
#pragma unroll
  for (int m = 0; m < M; m++) {
#pragma unroll
    for (int i = 16; i; i /= 2) {
      sum[m] += __shfl_xor_sync(~0u, sum[m], i), squares[m] += __shfl_xor_sync(~0u, squares[m], i);
    }
    if ((threadIdx.x & 31) == 0) part[m][threadIdx.x >> 5] = make_float2(sum[m], squares[m]);
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < M; m++) {
    sum[m] = squares[m] = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum[m] += part[m][w].x, squares[m] += part[m][w].y;
  }
}

struct Norm {
  float mean, scale;
};

template <Prologue OP>
__device__ __forceinline__ Norm norm_of(float2 sums, int K, float eps) {
  const float mean = OP == LAYER_NORM ? sums.x / K : 0;
  return {mean, rsqrtf(relu(sums.y / K - mean * mean) + eps)};
}

// An activation of 8 values; gated: times those of `up`.
template <Prologue OP, typename T>
__device__ __forceinline__ void activate(float (&f)[8], uint4 up) {
  float g[8];
  if constexpr (is_gated(OP)) open<T>(g, up);
  if constexpr (OP == SILU_MUL) {
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = __fdividef(f[i], 1 + __expf(-f[i])) * g[i];
  }
  if constexpr (is_gelu(OP)) {
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = is_gated(OP) ? gelu_of<OP>(f[i]) * g[i] : gelu_of<OP>(f[i]);
  }
  if constexpr (OP == RELU) {
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = relu(f[i]);
  }
}

// f of 8 inputs from k on; x: the token's row, which gated ops read in a second place; v: what stands at k.
template <Prologue OP, bool ALIGNED, typename T>
__device__ __forceinline__ uint4 applied(uint4 v, const T *x, int k, int K, Norm n, const T *norm, const T *shift) {
  if constexpr (OP == PLAIN) return v;
  float f[8];
  open<T>(f, v);
  if constexpr (OP == RMS_NORM || OP == LAYER_NORM) {
    float g[8];
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = (f[i] - n.mean) * n.scale;
    if (norm) {
      open<T>(g, eight<ALIGNED>(norm, k, K));
#pragma unroll
      for (int i = 0; i < 8; i++) f[i] = (OP == RMS_NORM ? to_float(from_float<T>(f[i])) : f[i]) * g[i];
    }
    if (OP == LAYER_NORM && shift) {
      open<T>(g, eight<ALIGNED>(shift, k, K));
#pragma unroll
      for (int i = 0; i < 8; i++) f[i] += g[i];
    }
    if constexpr (OP == LAYER_NORM) {  // what is behind the end stays 0
#pragma unroll
      for (int i = 0; i < 8; i++) f[i] = k + i < K ? f[i] : 0;
    }
  } else {
    uint4 up = {};
    if constexpr (is_gated(OP)) up = eight<ALIGNED>(x + K, k, K);
    activate<OP, T>(f, up);
  }
  return closed<T>(f);
}

}  // namespace crelle
