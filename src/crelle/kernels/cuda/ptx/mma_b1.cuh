// The tensor core instruction for bits, and how its operands are read from shared memory.
#pragma once
#include "ptx/pipeline.cuh"

namespace crelle {

// c += how often, per row and column, a bit of the plane meets a bit of x, in 256 of each.
__device__ __forceinline__ void count(int (&c)[4], uint4 plane, uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
      "%1, "
      "%2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(plane.x), "r"(plane.y), "r"(plane.z), "r"(plane.w), "r"(b0), "r"(b1));
}

// Two words of shared memory, twice: loading them again is cheaper than copying registers into place.
__device__ __forceinline__ uint4 twice(const void *p) {
  uint4 v;
  asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared_address(p)) : "memory");
  asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.z), "=r"(v.w) : "r"(shared_address(p)) : "memory");
  return v;
}

}  // namespace crelle
