// Integer weights as integer_sm90.cuh and integer_sm80.cuh read them (integer_layout.py): pieces of 64 rows and 128
// inputs, of 4 or 8 bits, and what a lane makes of its part: the operands of the tensor core instructions for bytes.
//
// A word of 4-bit codes holds four inputs of a row in its low halves of bytes, the four 16 inputs on in its high ones.
//   signed codes   are left in the high half of a byte, that is 16 q: one AND (and a shift) for four weights
//   two levels     v = a q - z: one AND (and a shift), a multiply-add with 128 - z, which never carries into the next
//                  byte, and an XOR that takes the 128 away
#pragma once
#include "ptx/types.cuh"

namespace crelle {

enum IntegerScheme { SIGNED, TWO_LEVEL };

// Of a product, by value. Blocks of 128 inputs: the first `narrow` have 4 bits; outliers begin behind `normal` of them.
// Scales of x [x_groups, padded]: x_subs per block, or one for x_span blocks; those of outliers from x_outlier on.
struct IntegerShape {
  int N, M, blocks, narrow, normal, x_groups, x_subs, x_span, x_outlier;

  __host__ __device__ __forceinline__ int padded() const { return (M + 7) & ~7; }
  __host__ __device__ __forceinline__ int x_row(int block, int sub) const {
    const int behind = block >= normal ? block - normal : block;
    const int row = (block >= normal ? x_outlier : 0) + behind / x_span * x_subs + (x_subs > 1 ? sub : 0);
    return min(row, x_groups - 1);
  }
};

template <int SUBS>
struct Piece {
  static constexpr int SCALES = 128 * SUBS, NARROW = 4096 + SCALES, WIDE = 8192 + SCALES;

  // Where the piece of a block of 64 rows begins, and its bytes.
  static __device__ __forceinline__ size_t start(const IntegerShape &s, int tile, int block) {
    const int narrow = min(block, s.narrow);
    return (size_t)tile * ((size_t)s.narrow * NARROW + (size_t)(s.blocks - s.narrow) * WIDE) + (size_t)narrow * NARROW +
           (size_t)(block - narrow) * WIDE;
  }
  static __device__ __forceinline__ int bytes(const IntegerShape &s, int block) {
    return block < s.narrow ? NARROW : WIDE;
  }
};

// Two values for rows g and g + 8 and each group of a block, as they lie. WARPS: of 16 rows, in the piece.
template <int WARPS = 4, int SUBS>
__device__ __forceinline__ void load_scales(uint32 (&to)[SUBS], const char *piece, bool narrow, int part, int lane) {
  const uint32 *from =
      reinterpret_cast<const uint32 *>(piece + (narrow ? 1024 : 2048) * WARPS) + (part * 8 + lane / 4) * SUBS;
  if constexpr (SUBS == 4) {
    const uint4 v = *reinterpret_cast<const uint4 *>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (SUBS == 2) {
    const uint2 v = *reinterpret_cast<const uint2 *>(from);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = from[0];
  }
}
// The 4-bit codes of 16 rows (`part` of 64), as they lie: words[2 step + row half].
__device__ __forceinline__ void load_words(uint32 (&words)[8], const char *piece, int part, int lane) {
  const uint4 *from = reinterpret_cast<const uint4 *>(piece) + part * 64 + lane;
  const uint4 a = from[0], b = from[32];
  words[0] = a.x, words[1] = a.y, words[2] = a.z, words[3] = a.w;
  words[4] = b.x, words[5] = b.y, words[6] = b.z, words[7] = b.w;
}
// Operands of four steps of 32 inputs: of bytes, and of 4-bit codes.
__device__ __forceinline__ void load_bytes(uint32 (&a)[4][4], const char *piece, int part, int lane) {
  const uint4 *from = reinterpret_cast<const uint4 *>(piece) + part * 128 + lane;
#pragma unroll
  for (int s = 0; s < 4; s++) {
    const uint4 v = from[32 * s];
    a[s][0] = v.x, a[s][1] = v.y, a[s][2] = v.z, a[s][3] = v.w;
  }
}
template <IntegerScheme SCHEME, int SUBS>
__device__ __forceinline__ void unpack_words(uint32 (&a)[4][4], const uint32 (&words)[8],
                                             const uint32 (&scales)[SUBS]) {
  if constexpr (SCHEME == SIGNED) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      a[i / 2][i % 2] = (words[i] << 4) & 0xf0f0f0f0u;
      a[i / 2][2 + i % 2] = words[i] & 0xf0f0f0f0u;
    }
  } else {
    // bytes: a of row g, 128 - z of row g, the same of row g + 8
#pragma unroll
    for (int j = 0; j < SUBS; j++) {
      const uint32 scale[2] = {scales[j] & 255, __byte_perm(scales[j], 0, 0x4442)};
      const uint32 zero[2] = {__byte_perm(scales[j], 0, 0x1111), __byte_perm(scales[j], 0, 0x3333)};
#pragma unroll
      for (int i = 8 / SUBS * j; i < 8 / SUBS * (j + 1); i++) {
        const int r = i % 2;
        a[i / 2][r] = ((words[i] & 0x0f0f0f0fu) * scale[r] + zero[r]) ^ 0x80808080u;
        a[i / 2][2 + r] = ((words[i] >> 4 & 0x0f0f0f0fu) * scale[r] + zero[r]) ^ 0x80808080u;
      }
    }
  }
}

// The scales of rows g and g + 8 for sums of such codes: 16 q of 4 bits. Two levels have one scale for a row, which is
// multiplied at the end.
template <IntegerScheme SCHEME>
__device__ __forceinline__ float2 row_scales(uint32 word, float unit) {
  if constexpr (SCHEME == TWO_LEVEL) return make_float2(1, 1);
  const float2 v = __half22float2(*reinterpret_cast<const __half2 *>(&word));
  return make_float2(v.x * unit, v.y * unit);
}

// sum + scale_x (scale_w v), |v| < 2^22, without a conversion: v is added to the bits of 1.5 2^23, which times a scale
// of 11 bits is exact. `less`: -1.5 2^23 scale_w.
constexpr uint32 INT_BITS = 0x4b400000u;
constexpr float INT_VALUE = 12582912.0f;
__device__ __forceinline__ float add_scaled(uint32 v, float scale_w, float less, float scale_x, float sum) {
  return fmaf(fmaf(__uint_as_float(v + INT_BITS), scale_w, less), scale_x, sum);
}

}  // namespace crelle
