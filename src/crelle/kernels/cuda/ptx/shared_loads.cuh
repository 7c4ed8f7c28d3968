// Predicated loads from shared memory, and a value that is not there before others are.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

// 8 or 16 bytes of shared memory, or what `to` was.
__device__ __forceinline__ void load_if(bool there, uint2 &to, uint32 from) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n @p ld.shared.v2.u32 {%0, %1}, [%2];\n}"
               : "+r"(to.x), "+r"(to.y)
               : "r"(from), "r"((uint32)there));
}
__device__ __forceinline__ void load_if(bool there, uint4 &to, uint32 from) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
               : "r"(from), "r"((uint32)there));
}

// Zero, but not before `seen` is there (see dequant.cuh). `positive` is; the compiler must not know.
__device__ __forceinline__ int nothing(uint32 seen, int positive) {
  int zero;
  asm volatile("shr.u32 %0, %1, %2;" : "=r"(zero) : "r"(seen), "r"(positive < 0 ? 31 : 32));
  return zero;
}

}  // namespace crelle
