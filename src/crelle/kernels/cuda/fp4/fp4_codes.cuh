// Four-bit floats (fp4_layout.py) as operands of a 16-bit matrix instruction, exactly.
//
// A word has the codes of one instruction's lane: 4 inputs of row g in its lower half, of row g + 8 in its upper one.
// The low three bits of each half byte, a magnitude, select a byte of a table, four in one byte permutation: all that
// an f16 of 0, 0.5, 1, 1.5, 2, 3, 4 or 6 has is its upper byte. The fourth bits are signs, stored where a mask moves
// them onto these bytes: those of row g in the odd half bytes, those of row g + 8 in the even ones. A bfloat16 needs
// two tables. Then a multiplication by the scale, which rounds nothing: at most six bits of a product are not zero.
//
// Instructions for 8 weights: f16 11 and 4 multiplications, bf16 13 and 4; all but one for the integer units.
#pragma once
#include "ptx/pack2.cuh"

namespace crelle {

enum Fp4Kind { MXFP4, NVFP4 };

// A block: 16 rows and 256 inputs, four chunks of 64. Lane 4g + t has inputs 16t ... 16t + 15 of each chunk, four for
// each of its four steps.
template <Fp4Kind KIND>
struct Fp4Block {
  static constexpr int CODES = 2048, SCALES = KIND == MXFP4 ? 128 : 256, BYTES = CODES + SCALES;
  static constexpr int ROW_SCALES = 128;  // behind the blocks of a tile: f32 [16], and nothing
  static constexpr uint32 MASK = KIND == MXFP4 ? 0x7f007f00u : 0x3f803f80u;

  // The lane's codes of a chunk, a word for each step.
  static __device__ __forceinline__ uint4 codes(const char *block, int chunk, int lane) {
    return *reinterpret_cast<const uint4 *>(block + chunk * 512 + lane * 16);
  }
  // Its scales of chunks 2h and 2h + 1, h = 0 and 1.
  static __device__ __forceinline__ uint2 scales(const char *block, int lane) {
    const int at = KIND == MXFP4 ? lane / 2 : lane;
    return *reinterpret_cast<const uint2 *>(block + CODES + at * 8);
  }
  // Those of a chunk as two f16: row g in the lower half, row g + 8 in the upper one.
  static __device__ __forceinline__ uint32 pair(uint32 scales, int chunk) {
    return (chunk % 2 ? scales << 7 : scales) & MASK;
  }
  static __host__ __device__ constexpr size_t tile_bytes(int blocks) { return (size_t)blocks * BYTES + ROW_SCALES; }
  // Of row r of a tile: what its sums are multiplied by.
  static __device__ __forceinline__ float row_scale(const char *tile, int blocks, int r) {
    return reinterpret_cast<const float *>(tile + (size_t)blocks * BYTES)[r];
  }
};

// What makes operands of type X of words; one for a warp's whole loop, its tables stay in registers.
template <typename X>
struct Fp4Operands;

template <>
struct Fp4Operands<half> {
  const uint32 small = kept(0x3e3c3800u), large = kept(0x46444240u);
  uint32 low, high;  // scales of row g, of row g + 8

  __device__ __forceinline__ void scale(uint32 pair) {
    low = Pack2<half>::low_twice(pair), high = Pack2<half>::high_twice(pair);
  }
  // a: the first two inputs of rows g and g + 8, then the other two.
  __device__ __forceinline__ void unpack(uint32 (&a)[4], uint32 word) const {
    const uint32 select = word & 0x77777777u;
    const uint32 g = bytes_of(small, large, select) | (word & 0x80808080u);
    const uint32 h = bytes_of(small, large, select >> 16) | (word << 4 & 0x80808080u);
    a[0] = Pack2<half>::mul(__byte_perm(g, 0, 0x1404), low), a[1] = Pack2<half>::mul(__byte_perm(h, 0, 0x1404), high);
    a[2] = Pack2<half>::mul(__byte_perm(g, 0, 0x3424), low), a[3] = Pack2<half>::mul(__byte_perm(h, 0, 0x3424), high);
  }
};

template <>
struct Fp4Operands<bfloat16> {
  using P = Pack2<bfloat16>;
  const uint32 upper[2] = {kept(0x3f3f3f00u), kept(0x40404040u)}, lower[2] = {kept(0xc0800000u), kept(0xc0804000u)};
  uint32 low, high;

  // An f16 shifted by 3 bits is, as a bfloat16, 2^-112 of it.
  __device__ __forceinline__ void scale(uint32 pair) {
    const uint32 both = P::mul(pair >> 3, 0x77807780u);
    low = P::low_twice(both), high = P::high_twice(both);
  }
  __device__ __forceinline__ void unpack(uint32 (&a)[4], uint32 word) const {
    const uint32 select = word & 0x77777777u, other = select >> 16;
    const uint32 g = bytes_of(upper[0], upper[1], select) | (word & 0x80808080u);
    const uint32 h = bytes_of(upper[0], upper[1], other) | (word << 4 & 0x80808080u);
    const uint32 g_low = bytes_of(lower[0], lower[1], select), h_low = bytes_of(lower[0], lower[1], other);
    a[0] = P::mul(__byte_perm(g_low, g, 0x5140), low), a[1] = P::mul(__byte_perm(h_low, h, 0x5140), high);
    a[2] = P::mul(__byte_perm(g_low, g, 0x7362), low), a[3] = P::mul(__byte_perm(h_low, h, 0x7362), high);
  }
};

}  // namespace crelle
