// An outlier of a mixed matrix in 32 bits: an f16 value in the high half; in the low one 16 times its span of 16 places
// plus the byte of that span's digits where mixed_decode.cu finds its x (`outlier_words` in mixed_layout.py). Where
// those digits are of x / 4, the value is stored times 4.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

struct Outlier {
  bool two;  // in a 2-bit group
  int pair;  // of the span
  int place;

  __device__ __forceinline__ Outlier(uint32 word, int U2) {
    const int byte = word & 15;
    two = (word & 0xfff0) < 256u * U2;
    pair = two ? byte / 4 + byte % 2 * 4 : byte / 8 * 4 + byte / 4 % 2 + byte % 2 * 2;
    place = (word & 0xfff0) + 2 * pair + byte / 2 % 2;
  }
  // As it is.
  __device__ __forceinline__ float value(uint32 word) const {
    return __half2float(__ushort_as_half(word >> 16)) * (two && pair % 2 ? 0.25f : 1.0f);
  }
  // Over what x is stored times in its place (pair_scale in mixed_layout.py).
  __device__ __forceinline__ float scaled_value(uint32 word) const {
    const int bits = (int)((two ? 0x440a6622u : 0x62626262u) >> 4 * pair & 15) - 2;  // 4 for each pair
    return __half2float(__ushort_as_half(word >> 16)) * __uint_as_float((127 + bits) << 23);
  }
};

}  // namespace crelle
