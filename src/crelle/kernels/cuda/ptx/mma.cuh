// The tensor core instructions of a warp: 16-bit floats, m16n8k16, bytes, m16n8k32, and half bytes, m16n8k64.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

// d [16, 8] += a [16, 16] b [16, 8], summed in f32. With g = lane / 4, t = lane % 4, a lane holds
//   d  (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
//   a  pairs of columns: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)      b  pairs of rows: (2t, g), (2t + 8, g)
template <typename T>
__device__ __forceinline__ void multiply(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0,
                                         uint32 b1);
template <>
__device__ __forceinline__ void multiply<half>(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0,
                                               uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply<bfloat16>(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0,
                                                   uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same for a [16, 32] of u8, b [32, 8] of s8 and s32 sums: a lane's pairs are four bytes, from columns or rows 4t
// and 4t + 16 on.
__device__ __forceinline__ void multiply_u8(uint32 (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0,
                                            uint32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, "
      "%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3]));
}

// The same of s8 by s8, and of s4 by s4, where a lane's four bytes are eight values, a [16, 64]: columns or rows 8t and
// 8t + 32 on, the lower half of a byte first. (Hopper makes the latter of other instructions, slowly.)
__device__ __forceinline__ void multiply_s8(uint32 (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_s4(uint32 (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0,
                                            uint32 b1) {
  asm("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// a b + c on the units that multiply, which the compiler would turn into a shift on the busier ones.
__device__ __forceinline__ uint32 multiply_add(uint32 a, uint32 b, uint32 c) {
  uint32 d;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

}  // namespace crelle
