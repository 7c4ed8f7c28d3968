// Codes and scales of mixed 2/4-bit weights as they lie in a unit (mixed_layout.py).
#pragma once
#include "ptx/tensorcore.cuh"

namespace crelle {

// The lane's bits `mask` of a word, as a float from 1 to 2; `one`: the bits of 1.0f, in a register.
__device__ __forceinline__ float field(uint32 word, uint32 mask, uint32 one) {
  return __uint_as_float((word & mask) | one);
}
__device__ __forceinline__ float power(int n) {  // 2^n
  return __uint_as_float((127u + n) << 23);
}

// Codes i and i + 8 of a word of 2-bit codes, or i and i + 4 of one of 4-bit codes, as two halves; `high`: the word
// shifted right by 10, or 8.
template <int I>
__device__ __forceinline__ uint32 codes2(uint32 word, uint32 high) {
  return I < 5 ? word & (0x00030003u << 2 * I) : high & (0x00030003u << 2 * (I - 5));
}
template <int I>
__device__ __forceinline__ uint32 codes4(uint32 word, uint32 high) {
  return I < 2 ? word & (0x000f000fu << 4 * I) : high & (0x000f000fu << 4 * (I - 2));
}

// First-order scales of a lane in half a unit, [sub][set][row half], and the codes of its zeros.
template <int SUBS>
struct Scales {
  float scale[SUBS][2][2];
  uint32 zeros[SUBS];  // in both halves: 2 bits at 2 set for row g, at 8 + 2 set for row g + 8, set 0 ... 3 of the unit

  // Of sets 2 half and 2 half + 1, a constant where it is called; `one`: the bits of 1.0f, in a register.
  __device__ __forceinline__ void decode(int half, const char *unit, int lane, uint32 one) {
    const int t = lane % 4;
    const char *at = unit + 1024;
#pragma unroll
    for (int k = 0; k < SUBS; k++) {
      const uint32 scales = reinterpret_cast<const uint32 *>(at)[lane * SUBS + k];
      const uint32 codes = reinterpret_cast<const unsigned short *>(at + 128 * SUBS)[lane * SUBS + k];
      const __half2 second = reinterpret_cast<const __half2 *>(at + 192 * SUBS)[(t * SUBS + k) * 2 + half];
      const uint32 offsets = reinterpret_cast<const unsigned short *>(at + 224 * SUBS)[(t * SUBS + k) * 2 + half];
      zeros[k] = __byte_perm(codes, 0, 0x1010);
      const float2 factor = __half22float2(second);
      of_set(2 * half, k, scales, factor.x, offsets, one), of_set(2 * half + 1, k, scales, factor.y, offsets, one);
    }
  }
  __device__ __forceinline__ float zero(int k, int set, int half) const {
    return ((zeros[k] >> (2 * set + 8 * half) & 3) + 1) * 0.5f;
  }

private:
  // second (code + offset); exact but for the product.
  __device__ __forceinline__ void of_set(int set, int k, uint32 codes, float second, uint32 offsets, uint32 one) {
    const float offset =
        __uint_as_float(__byte_perm(offsets, 0x4b000000u, 0x7650 + set % 2)) - (power(23) + power(23 - 4 * set));
    scale[k][set % 2][0] = fmaf(field(codes, 15u << 4 * set, one), power(23 - 4 * set), offset) * second;
    scale[k][set % 2][1] = fmaf(field(codes >> 16, 15u << 4 * set, one), power(23 - 4 * set), offset) * second;
  }
};

}  // namespace crelle
