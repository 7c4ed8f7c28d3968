// What goes with the tensor core instruction (mma.cuh): pairs of values, and matrices of 8 x 8 values from shared
// memory in the order that it wants.
#pragma once
#include "ptx/mma.cuh"

namespace crelle {

// Two values as the instruction takes them: the first in the low half.
template <typename T>
__device__ __forceinline__ uint32 pair(float first, float second) {
  const T v[2] = {from_float<T>(first), from_float<T>(second)};
  return *reinterpret_cast<const uint32 *>(v);
}

// v & mask | exponent, in one instruction.
__device__ __forceinline__ uint32 masked(uint32 v, uint32 mask, uint32 exponent) {
  uint32 to;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(to) : "r"(v), "r"(mask), "r"(exponent));
  return to;
}

// ~v & mask | exponent.
__device__ __forceinline__ uint32 masked_not(uint32 v, uint32 mask, uint32 exponent) {
  uint32 to;
  asm("lop3.b32 %0, %1, %2, %3, 0xae;" : "=r"(to) : "r"(v), "r"(mask), "r"(exponent));
  return to;
}

// 8 values in 16 bytes.
template <typename T>
__device__ __forceinline__ void open(float (&v)[8], uint4 from) {
  const T *p = reinterpret_cast<const T *>(&from);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = to_float(p[i]);
}
template <typename T>
__device__ __forceinline__ uint4 closed(const float (&v)[8]) {
  return make_uint4(pair<T>(v[0], v[1]), pair<T>(v[2], v[3]), pair<T>(v[4], v[5]), pair<T>(v[6], v[7]));
}

// Matrices of 8 x 8; lane l gives the address of row l % 8 of matrix l / 8. A lane gets the pair (g, 2t) of each, or of
// its transpose.
__device__ __forceinline__ void matrices(uint32 (&to)[2], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(to[0]), "=r"(to[1])
               : "r"(static_cast<uint32>(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ __forceinline__ void matrices(uint32 (&to)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<uint32>(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ __forceinline__ void transposed(uint32 (&to)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<uint32>(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ __forceinline__ uint32 transposed(uint32 matrix) {
  uint32 to;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(matrix));
  return to;
}

// `grid_dependency_wait` behind loads that were issued: a loop that is never repeated (`positive` is), which the
// assembler does not move them into. Otherwise it waits first and asks then.
__device__ __forceinline__ void grid_dependency_wait_late(int positive) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .pred p;\n again: griddepcontrol.wait;\n setp.lt.s32 p, %0, 0;\n @p bra again;\n}" ::"r"(positive)
      : "memory");
#endif
}

}  // namespace crelle
