// A lane's part of mixed_decode.cu: products of 2- and 4-bit codes with the digits of x (mixed_digits.cuh) by the 8-bit
// tensor core instruction, and the scales and zeros of a unit (mixed_layout.py).
#pragma once
#include "mixed/mixed_codes.cuh"
#include "mixed/mixed_digits.cuh"

namespace crelle {

// What does not change: the accumulators' first values and the weight of a high digit, in registers.
struct DecodeConstants {
  uint32 first[4], radix, one;
};

// Both digits of a row: INT_AS_FLOAT plus the sum, as a float.
__device__ __forceinline__ float joined_digits(uint32 high, uint32 low, uint32 radix) {
  return __uint_as_float(multiply_add(high, radix, low));
}

// 16 inputs of each of 4 groups, rows a and b.
__device__ __forceinline__ void add_set2(float (&sum)[2], uint32 a, uint32 b, const uint4 &x, const float4 &terms,
                                         const float (&scale)[2], const float (&zero)[2], const DecodeConstants &c) {
  const uint32 a4 = a >> 4, b4 = b >> 4;
  uint32 d[4] = {c.first[0], c.first[1], c.first[2], c.first[3]};
  multiply_u8(d, a & 0x03030303u, b & 0x03030303u, a & 0x0c0c0c0cu, b & 0x0c0c0c0cu, x.x, x.y);
  multiply_u8(d, a4 & 0x03030303u, b4 & 0x03030303u, a4 & 0x0c0c0c0cu, b4 & 0x0c0c0c0cu, x.z, x.w);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float products = joined_digits(d[2 * r], d[2 * r + 1], c.radix) + terms.y;
    sum[r] = fmaf(scale[r], fmaf(zero[r], terms.x, products), sum[r]);
  }
}
__device__ __forceinline__ void add_span4(float (&sum)[2], uint2 a, uint2 b, const uint4 &x, float xs,
                                          const DecodeConstants &c) {
  uint32 d[4] = {c.first[0], c.first[1], c.first[2], c.first[3]};
  multiply_u8(d, a.x & 0x0f0f0f0fu, b.x & 0x0f0f0f0fu, a.x >> 4 & 0x0f0f0f0fu, b.x >> 4 & 0x0f0f0f0fu, x.x, x.y);
  multiply_u8(d, a.y & 0x0f0f0f0fu, b.y & 0x0f0f0f0fu, a.y >> 4 & 0x0f0f0f0fu, b.y >> 4 & 0x0f0f0f0fu, x.z, x.w);
#pragma unroll
  for (int r = 0; r < 2; r++)
    sum[r] = fmaf(joined_digits(d[2 * r], d[2 * r + 1], c.radix) - INT_AS_FLOAT_VALUE, xs, sum[r]);
}

// The scales and zeros of a unit's groups of lane t, rows g and g + 8, as they lie.
struct ScaleWords {
  uint32 scales, zeros, offsets;
  uint2 second;

  __device__ __forceinline__ void load(const char *unit, int lane) {
    scales = reinterpret_cast<const uint32 *>(unit + 1024)[lane];
    zeros = (uint32) reinterpret_cast<const unsigned short *>(unit + 1152)[lane] << 7;
    second = reinterpret_cast<const uint2 *>(unit + 1216)[lane % 4];
    offsets = reinterpret_cast<const uint32 *>(unit + 1248)[lane % 4];
  }
  // Of a set, a constant where it is called: xs second (code + offset), and 1 + code 2^(2 set - 8).
  __device__ __forceinline__ void decode(int set, float xs, uint32 one, float (&scale)[2], float (&zero)[2]) const {
    const float2 factors = __half22float2(*reinterpret_cast<const __half2 *>(set < 2 ? &second.x : &second.y));
    const float factor = (set % 2 ? factors.y : factors.x) * xs;
    const float offset =
        __uint_as_float(__byte_perm(offsets, 0x4b000000u, 0x7650 + set)) - (power(23) + power(23 - 4 * set));
    scale[0] = fmaf(field(scales, 15u << 4 * set, one), power(23 - 4 * set), offset) * factor;
    scale[1] = fmaf(field(scales >> 16, 15u << 4 * set, one), power(23 - 4 * set), offset) * factor;
    zero[0] = field(zeros << 8, 3u << (15 + 2 * set), one), zero[1] = field(zeros, 3u << (15 + 2 * set), one);
  }
};

}  // namespace crelle
