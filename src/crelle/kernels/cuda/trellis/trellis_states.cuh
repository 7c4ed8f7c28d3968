// The states of a ring (crelle/formats/trellis.py) and their products, in a lane's registers.
//
// A state is 16 bits at a constant place of the ring. One product makes its four bytes, which are the u8 operand of the
// tensor core instruction as they are: with x repeated to match, the instruction adds them up. So what a weight costs
// is finding the 16 bits: a shift across two words where they cross them, and a mask (PRMT, LOP3, or a shift right,
// which is one as well). Where states are 1, 2, 4 or 8 bits apart, one shift across words serves three states, 8 bits
// from one another. A state inside a word at another place takes a shift left, which the multipliers do, and one right:
// the integer units, which do the rest, are the busier ones.
#pragma once
#include "ptx/tensorcore.cuh"

namespace crelle {

// WEIGHTS of a state, bits from a state to the next.
template <int WEIGHTS_, int SHIFT_>
struct Trellis {
  static constexpr int WEIGHTS = WEIGHTS_, SHIFT = SHIFT_;
  static constexpr int STATES = 128 / WEIGHTS, WORDS = STATES * SHIFT / 32;  // of a ring
  static constexpr uint32 MULTIPLIER = WEIGHTS == 2 ? 0xd2c2d6c9u : 0x83dcd12du;
  static constexpr int ZERO = WEIGHTS == 2 ? 255 : 510;
  static constexpr int PIECE = WORDS % 4 == 0 ? 4 : 2;  // words that a lane loads at a time
  static constexpr int UNIT = WORDS * 128;              // bytes of the rings of a warp

  // A lane's ring of a unit [pieces][32 lanes][PIECE words].
  static __device__ __forceinline__ void load(uint32 (&ring)[WORDS], const char *unit, int lane) {
#pragma unroll
    for (int i = 0; i < WORDS; i += PIECE) {
      const char *const from = unit + (i * 32 + lane * PIECE) * 4;
      if constexpr (PIECE == 4) {
        const uint4 v = *reinterpret_cast<const uint4 *>(from);
        ring[i] = v.x, ring[i + 1] = v.y, ring[i + 2] = v.z, ring[i + 3] = v.w;
      } else {
        const uint2 v = *reinterpret_cast<const uint2 *>(from);
        ring[i] = v.x, ring[i + 1] = v.y;
      }
    }
  }

  // Something that is known only when all of `load` is.
  static __device__ __forceinline__ uint32 seen(const uint32 (&ring)[WORDS]) {
    uint32 any = 0;
#pragma unroll
    for (int i = 0; i < WORDS; i += PIECE) any |= ring[i];
    return any;
  }

  // 32 bits of the ring from `bit` on; those are constants where this is called.
  static __device__ __forceinline__ uint32 window(const uint32 (&ring)[WORDS], int bit) {
    const uint32 low = ring[bit / 32 % WORDS], high = ring[(bit / 32 + 1) % WORDS];
    return bit % 32 == 0 ? low : __funnelshift_r(low, high, bit % 32);
  }

  // The bytes of state i, a constant where this is called.
  static __device__ __forceinline__ uint32 bytes(const uint32 (&ring)[WORDS], int i) {
    const int bit = i * SHIFT, word = bit / 32 * 32;
    int from = bit % 32 <= 16 ? word : bit;                            // where a window begins that holds the state
    if (8 % SHIFT == 0 && bit % 8) from = bit / 8 / 3 * 24 + bit % 8;  // the same one for three states
    const uint32 bits = window(ring, from);
    const int at = bit - from;
    const uint32 state = at == 16  ? bits >> 16
                         : at == 8 ? __byte_perm(bits, 0, 0x4421)
                         : at == 0 ? __byte_perm(bits, 0, 0x4410)
                                   : multiply_add(bits, 1u << (16 - at & 15), 0) >> 16;
    return state * MULTIPLIER;
  }
};

}  // namespace crelle
