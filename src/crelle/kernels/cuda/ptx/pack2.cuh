// Pairs of 16-bit floats in a register, and bytes of registers.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

// Two values of type X in a register.
template <typename X>
struct Pack2;
template <>
struct Pack2<half> {
  static __device__ __forceinline__ half of_half(uint32 bits) { return __ushort_as_half(bits); }
  static __device__ __forceinline__ uint32 of(float v) { return bits(__float2half2_rn(v)); }
  static __device__ __forceinline__ uint32 of(float a, float b) { return bits(__floats2half2_rn(a, b)); }
  static __device__ __forceinline__ float2 values(uint32 v) { return __half22float2(two(v)); }
  static __device__ __forceinline__ uint32 bits(__half2 v) { return *reinterpret_cast<uint32 *>(&v); }
  static __device__ __forceinline__ __half2 two(uint32 v) { return *reinterpret_cast<__half2 *>(&v); }
  static __device__ __forceinline__ uint32 add(uint32 a, uint32 b) { return bits(__hadd2_rn(two(a), two(b))); }
  static __device__ __forceinline__ uint32 mul(uint32 a, uint32 b) { return bits(__hmul2_rn(two(a), two(b))); }
  static __device__ __forceinline__ uint32 fma(uint32 a, uint32 b, uint32 c) {
    return bits(__hfma2(two(a), two(b), two(c)));
  }
  // One of them twice: how an operand is read, no instruction.
  static __device__ __forceinline__ uint32 low_twice(uint32 v) { return bits(__low2half2(two(v))); }
  static __device__ __forceinline__ uint32 high_twice(uint32 v) { return bits(__high2half2(two(v))); }
};
template <>
struct Pack2<bfloat16> {
  static __device__ __forceinline__ bfloat16 of_half(uint32 bits) {
    return __float2bfloat16_rn(__half2float(__ushort_as_half(bits)));
  }
  static __device__ __forceinline__ uint32 of(float v) { return bits(__float2bfloat162_rn(v)); }
  static __device__ __forceinline__ uint32 of(float a, float b) { return bits(__floats2bfloat162_rn(a, b)); }
  static __device__ __forceinline__ float2 values(uint32 v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
  }
  static __device__ __forceinline__ uint32 bits(__nv_bfloat162 v) { return *reinterpret_cast<uint32 *>(&v); }
  static __device__ __forceinline__ __nv_bfloat162 two(uint32 v) { return *reinterpret_cast<__nv_bfloat162 *>(&v); }
  static __device__ __forceinline__ uint32 add(uint32 a, uint32 b) { return bits(__hadd2_rn(two(a), two(b))); }
  static __device__ __forceinline__ uint32 mul(uint32 a, uint32 b) { return bits(__hmul2_rn(two(a), two(b))); }
  static __device__ __forceinline__ uint32 fma(uint32 a, uint32 b, uint32 c) {
    return bits(__hfma2(two(a), two(b), two(c)));
  }
  // One of them twice: how an operand is read, no instruction.
  static __device__ __forceinline__ uint32 low_twice(uint32 v) { return bits(__low2bfloat162(two(v))); }
  static __device__ __forceinline__ uint32 high_twice(uint32 v) { return bits(__high2bfloat162(two(v))); }
};

// Bytes of b:a by a selector that has no sign bits, which __byte_perm would clear first.
__device__ __forceinline__ uint32 bytes_of(uint32 a, uint32 b, uint32 selector) {
  uint32 v;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector));
  return v;
}

// Bits of `a` where the mask has ones, of `b` elsewhere.
__device__ __forceinline__ uint32 mixed(uint32 mask, uint32 a, uint32 b) {
  uint32 v;  // the compiler would make two instructions of it
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(v) : "r"(mask), "r"(a), "r"(b));
  return v;
}

}  // namespace crelle
