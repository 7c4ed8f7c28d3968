// Planes as 16-bit floats: pairs of them in a register, and tables of what a few planes can mean.
//
// Planes are interleaved into nibbles: word i of four has in nibble n the bits of input 4n + i. Four of them are what a
// byte permutation takes to look up 4 low bytes, and again 4 high bytes, in a table of the 8 values that three planes
// can mean: with the interleaving and the making of the table about four instructions a pair, whatever the values. A
// fourth plane is the sign of the sum of all (Signed), two instructions for two pairs; one left over is added with its
// sign: -alpha ^ bit.
#pragma once
#include "ptx/pack2.cuh"

namespace crelle {

// A stored scale of type S, of rows g and g + 8.
template <typename S, typename X>
struct Scale {
  static constexpr int WORDS = sizeof(S) / 2;
  static __device__ __forceinline__ float2 values(const uint32 *w) {
    if constexpr (sizeof(S) == 4)
      return make_float2(__uint_as_float(w[0]), __uint_as_float(w[1]));
    else
      return Pack2<S>::values(*w);
  }
  static __device__ __forceinline__ uint32 both(const uint32 *w) {
    if constexpr (alike(S(), X())) return *w;
    const float2 v = values(w);
    return Pack2<X>::of(v.x, v.y);
  }
  static __device__ constexpr bool alike(half, half) { return true; }
  static __device__ constexpr bool alike(bfloat16, bfloat16) { return true; }
  template <typename A, typename B>
  static __device__ constexpr bool alike(A, B) {
    return false;
  }
};

__device__ __forceinline__ uint32 twice(uint32 rows, int row) { return __byte_perm(rows, 0, row ? 0x3232 : 0x1010); }

// Planes of one row as nibbles; the last plane is the lowest bit. Two planes become pairs of bits first, of the even
// and the odd inputs, then two such pairs a nibble.
template <int COUNT>
__device__ __forceinline__ void interleave(uint32 (&nibbles)[4], const uint32 (&planes)[COUNT]) {
  constexpr uint32 TWO = 0x55555555, FOUR = 0x33333333;
  if constexpr (COUNT == 1) {
#pragma unroll
    for (int i = 0; i < 4; i++) nibbles[i] = (planes[0] >> i) & 0x11111111;
    return;
  }
  const uint32 one = planes[COUNT - 1], two = planes[COUNT > 1 ? COUNT - 2 : 0];
  const uint32 even = mixed(TWO, one, two << 1), odd = mixed(TWO, one >> 1, two);
  if constexpr (COUNT == 2) {
    nibbles[0] = even & FOUR, nibbles[1] = odd & FOUR, nibbles[2] = (even >> 2) & FOUR, nibbles[3] = (odd >> 2) & FOUR;
    return;
  }
  uint32 upper, lower;  // of the even inputs, of the odd ones
  if constexpr (COUNT == 3)
    upper = planes[0] & TWO, lower = (planes[0] >> 1) & TWO;
  else
    upper = mixed(TWO, planes[1], planes[0] << 1), lower = mixed(TWO, planes[1] >> 1, planes[0]);
  nibbles[0] = mixed(FOUR, even, upper << 2), nibbles[1] = mixed(FOUR, odd, lower << 2);
  nibbles[2] = mixed(FOUR, even >> 2, upper), nibbles[3] = mixed(FOUR, odd >> 2, lower);
}
template <int FIRST, int COUNT, int P>
__device__ __forceinline__ void interleave(uint32 (&nibbles)[2][4], const uint32 (&words)[P][2]) {
#pragma unroll
  for (int row = 0; row < 2; row++) {
    uint32 planes[COUNT];
#pragma unroll
    for (int p = 0; p < COUNT; p++) planes[p] = words[FIRST + p][row];
    interleave<COUNT>(nibbles[row], planes);
  }
}

template <int BITS = 16>
__device__ __forceinline__ void upper_half(uint32 (&words)[2][4]) {
#pragma unroll
  for (int i = 0; i < 8; i++) words[i / 4][i % 4] >>= BITS;
}

// The 2^COUNT values that planes FIRST ... can mean, of both rows.
template <int FIRST, int COUNT, int P>
struct Table {
  static constexpr int ENTRIES = 1 << COUNT, REGISTERS = COUNT == 3 ? 2 : 1;
  uint32 low[2][REGISTERS], high[2][REGISTERS], nibbles[2][4];  // [row]

  // values[c]: of rows g and g + 8 for code c
  __device__ __forceinline__ void load(const uint32 (&words)[P][2], const uint32 (&values)[ENTRIES]) {
    interleave<FIRST, COUNT>(nibbles, words);
    tabulate(values);
  }
  __device__ __forceinline__ void tabulate(const uint32 (&values)[ENTRIES]) {
#pragma unroll
    for (int i = 0; i < REGISTERS; i++) {
      const uint32 a = values[4 * i], b = values[4 * i + 1], c = values[COUNT > 1 ? 4 * i + 2 : 0],
                   d = values[COUNT > 1 ? 4 * i + 3 : 1];
#pragma unroll
      for (int row = 0; row < 2; row++) {
        const uint32 ab = __byte_perm(a, b, row ? 0x7362 : 0x5140), cd = __byte_perm(c, d, row ? 0x7362 : 0x5140);
        low[row][i] = __byte_perm(ab, cd, 0x5410), high[row][i] = __byte_perm(ab, cd, 0x7632);
      }
    }
  }
  __device__ __forceinline__ void next_half() { upper_half(nibbles); }
  // The two pairs of step STEP.
  template <int STEP>
  __device__ __forceinline__ uint2 look_up(int row, uint32 minus = 0) const {
    const uint32 which = nibbles[row][STEP];
    const uint32 l = bytes_of(low[row][0], low[row][REGISTERS - 1], which),
                 h = bytes_of(high[row][0], high[row][REGISTERS - 1], which) ^ minus;
    return make_uint2(__byte_perm(l, h, 0x5140), __byte_perm(l, h, 0x7362));
  }
};

// Four planes in a table of eight: b_0 (alpha_0 + b_0 b_1 alpha_1 + ...). What the other three say relative to the
// first is looked up, and its sign is put on four high bytes at a time.
template <int FIRST, int P>
struct Signed {
  Table<0, 3, 3> rest;
  uint32 signs[2][2];  // [row][half]: bit 4 + i of byte n is the sign of input 4n + i

  // values[c]: alpha of the first plane, and what the others add if it is positive
  __device__ __forceinline__ void load(const uint32 (&words)[P][2], const uint32 (&values)[8]) {
    uint32 relative[3][2];
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const uint32 minus = ~words[FIRST][row];
#pragma unroll
      for (int p = 0; p < 3; p++) relative[p][row] = words[FIRST + 1 + p][row] ^ minus;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint32 bytes = __byte_perm(minus, 0, h ? 0x3322 : 0x1100);
        signs[row][h] = mixed(0x00ff00ff, bytes << 4, bytes);
      }
    }
    rest.load(relative, values);
  }
  __device__ __forceinline__ void next_half() {
    rest.next_half();
    signs[0][0] = signs[0][1], signs[1][0] = signs[1][1];
  }
  template <int STEP>
  __device__ __forceinline__ uint2 look_up(int row) const {
    return rest.template look_up<STEP>(row, (signs[row][0] << (3 - STEP)) & 0x80808080u);
  }
};

// A plane alone: + or - alpha.
struct Sign {
  uint32 bits[2], alpha[2];  // bits: of pair (n, n + 1) of nibbles, n even, at 4 (n/2) + i and 16 above

  __device__ __forceinline__ void load(const uint32 (&words)[2], uint32 alphas) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const uint32 even = words[row] & 0x0f0f0f0f, odd = (words[row] >> 4) & 0x0f0f0f0f;
      bits[row] = __byte_perm(even | even >> 4, odd | odd >> 4, 0x6420);
      alpha[row] = twice(alphas, row) ^ 0x80008000u;
    }
  }
  __device__ __forceinline__ void next_half() { bits[0] >>= 8, bits[1] >>= 8; }
  template <int STEP>
  __device__ __forceinline__ uint2 look_up(int row) const {
    return make_uint2(((bits[row] << (15 - STEP)) & 0x80008000u) ^ alpha[row],
                      ((bits[row] << (11 - STEP)) & 0x80008000u) ^ alpha[row]);
  }
};

}  // namespace crelle
