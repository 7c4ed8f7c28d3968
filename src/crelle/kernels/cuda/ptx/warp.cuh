// Reductions over the 32 lanes of a warp; every lane gets the result.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int i = 16; i; i /= 2) v += __shfl_xor_sync(~0u, v, i);
  return v;
}

}  // namespace crelle
