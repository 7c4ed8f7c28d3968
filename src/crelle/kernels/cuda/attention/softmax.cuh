// Softmax of attention: exp2, and reductions over the rows of an mma's result.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

constexpr float MASKED = -3e38f;  // the logit of what is not seen

__device__ __forceinline__ float exp2_approx(float v) {
  float to;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(to) : "f"(v));
  return to;
}

__device__ __forceinline__ float max_of_rows(float v) {
#pragma unroll
  for (int i = 4; i < 32; i *= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, i));
  return v;
}
__device__ __forceinline__ float sum_of_rows(float v) {
#pragma unroll
  for (int i = 4; i < 32; i *= 2) v += __shfl_xor_sync(~0u, v, i);
  return v;
}

}  // namespace crelle
