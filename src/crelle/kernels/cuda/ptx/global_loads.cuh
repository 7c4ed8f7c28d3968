// Reads of what the kernel before this one wrote, and lines that are to be in L2.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

// 16 bytes as the kernel before this one left them: a plain read, and not before the wait for that kernel.
__device__ __forceinline__ uint4 read_now(const uint4 *p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// A line of 128 bytes comes to L2; what it holds may still change.
__device__ __forceinline__ void prefetch_line(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

}  // namespace crelle
