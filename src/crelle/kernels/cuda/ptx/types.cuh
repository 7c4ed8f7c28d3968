// 16- and 32-bit floats: conversions, prologues and activations, vector loads, programmatic dependent launch.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace crelle {

using half = __half;
using bfloat16 = __nv_bfloat16;
using uint32 = unsigned int;

// A if YES, else B: what std::conditional is, which the runtime compiler comes without.
template <bool YES, typename A, typename B>
struct Conditional {
  using type = A;
};
template <typename A, typename B>
struct Conditional<false, A, B> {
  using type = B;
};

// What a prologue may do to x on its way into a product. GELU is by erf, GELU_TANH its tanh approximation; gated ones
// (..._MUL) have gate, then up in x.
enum Prologue { PLAIN, RMS_NORM, LAYER_NORM, SILU_MUL, RELU, GELU, GELU_TANH, GELU_MUL, GELU_TANH_MUL };

__host__ __device__ constexpr bool is_gated(Prologue op) {
  return op == SILU_MUL || op == GELU_MUL || op == GELU_TANH_MUL;
}
__host__ __device__ constexpr bool is_gelu(Prologue op) {
  return op == GELU || op == GELU_TANH || op == GELU_MUL || op == GELU_TANH_MUL;
}

__device__ __forceinline__ float to_float(half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(float v) { return v; }

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ half from_float<half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ bfloat16 from_float<bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}

// The larger and the smaller of two, NaN where either is: fmaxf and fminf drop a NaN, and a kernel must not.
__device__ __forceinline__ float max_nan(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}
__device__ __forceinline__ float min_nan(float a, float b) {
  float m;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}
__device__ __forceinline__ float relu(float v) { return max_nan(v, 0); }

// v Phi(v), or v / (1 + exp(-2u)), which is v (1 + tanh(u)) / 2 for u = sqrt(2 / pi) (v + 0.044715 v^3).
template <bool TANH>
__device__ __forceinline__ float gelu(float v) {
  if constexpr (TANH) return __fdividef(v, 1 + __expf(-1.5957691216057308f * fmaf(0.044715f * v * v, v, v)));
  return 0.5f * v * (1 + erff(v * 0.70710678118654752f));
}
template <Prologue OP>
__device__ __forceinline__ float gelu_of(float v) {
  return gelu < OP == GELU_TANH || OP == GELU_TANH_MUL > (v);
}

// A value that is to stay in a register: the compiler would make it anew where it is used. (Thread blocks have one row
// of threads here, which it does not know.)
__device__ __forceinline__ uint32 kept(uint32 v) {
  uint32 same;
  asm("add.u32 %0, %1, %2;" : "=r"(same) : "r"(v), "r"(blockDim.y - 1));
  return same;
}

// WORDS consecutive words, in the widest loads that their alignment allows.
template <int WORDS>
__device__ __forceinline__ void take(uint32 (&to)[WORDS], const uint32 *from) {
  if constexpr (WORDS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      uint4 v = *reinterpret_cast<const uint4 *>(from + i);
      to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
  } else if constexpr (WORDS % 2 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 2) {
      uint2 v = *reinterpret_cast<const uint2 *>(from + i);
      to[i] = v.x, to[i + 1] = v.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < WORDS; i++) to[i] = from[i];
  }
}

// Programmatic dependent launch: a kernel may start while the one before it ends, as long as it reads only what no
// kernel writes (weights) until `grid_dependency_wait`. Both are nothing on chips before Hopper and in ordinary
// launches.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace crelle
