// Half a block of weights in the registers of a warp, and how they become pairs of 16-bit numbers for a matrix
// instruction.
//
// Lane 4g + t holds inputs 32t ... 32t+31 of rows g and g + 8. Which input stands at which place of the instruction's k
// is free as long as x agrees, so a lane multiplies only by inputs whose bits it has itself: step s = 0 ... 7 of 16
// inputs takes inputs 32t + 16 (s/4) + s%4 + 0, 4, 8, 12, the first two and the last two a pair (one register).
//
// Planes are interleaved into nibbles: word i of four has in nibble n the bits of input 4n + i. Four of them are what a
// byte permutation takes to look up 4 low bytes, and again 4 high bytes, in a table of the 8 numbers that three planes
// can mean: with the interleaving and the making of the table about four instructions a pair, whatever the numbers.
// More planes are more tables (a single one left over is added with its sign: -alpha ^ bit). Codes of four and more
// bits are cheaper without: 0x6400 | q is the number 1024 + q, exact until the scale is multiplied in.
#pragma once
#include "numbers.cuh"

namespace crelle {

// What the scale words of a group say about its grid, as in layout.py.
enum Kind { BCQ, BCQ_SYMMETRIC, UNIFORM, UNIFORM_SYMMETRIC, AFFINE };

__host__ __device__ constexpr int scale_words(Kind kind, int planes) {
  return kind == BCQ ? planes + 1 : kind == BCQ_SYMMETRIC ? planes : kind == UNIFORM_SYMMETRIC ? 1 : 2;
}

// Two numbers of type X in a register.
template <typename X>
struct Two;
template <>
struct Two<half> {
  static constexpr uint32 ONES = 0x64006400;  // 1024: integers are added in its last bits
  static constexpr float ONE = 1024;
  static __device__ __forceinline__ uint32 of(float v) { return bits(__float2half2_rn(v)); }
  static __device__ __forceinline__ uint32 of(float a, float b) { return bits(__floats2half2_rn(a, b)); }
  static __device__ __forceinline__ float2 numbers(uint32 v) { return __half22float2(two(v)); }
  static __device__ __forceinline__ uint32 bits(__half2 v) { return *reinterpret_cast<uint32 *>(&v); }
  static __device__ __forceinline__ __half2 two(uint32 v) { return *reinterpret_cast<__half2 *>(&v); }
  static __device__ __forceinline__ uint32 add(uint32 a, uint32 b) { return bits(__hadd2_rn(two(a), two(b))); }
  static __device__ __forceinline__ uint32 mul(uint32 a, uint32 b) { return bits(__hmul2_rn(two(a), two(b))); }
  static __device__ __forceinline__ uint32 fma(uint32 a, uint32 b, uint32 c) {
    return bits(__hfma2(two(a), two(b), two(c)));
  }
};
template <>
struct Two<bfloat16> {
  static constexpr uint32 ONES = 0x43004300;
  static constexpr float ONE = 128;
  static __device__ __forceinline__ uint32 of(float v) { return bits(__float2bfloat162_rn(v)); }
  static __device__ __forceinline__ uint32 of(float a, float b) { return bits(__floats2bfloat162_rn(a, b)); }
  static __device__ __forceinline__ float2 numbers(uint32 v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
  }
  static __device__ __forceinline__ uint32 bits(__nv_bfloat162 v) { return *reinterpret_cast<uint32 *>(&v); }
  static __device__ __forceinline__ __nv_bfloat162 two(uint32 v) { return *reinterpret_cast<__nv_bfloat162 *>(&v); }
  static __device__ __forceinline__ uint32 add(uint32 a, uint32 b) { return bits(__hadd2_rn(two(a), two(b))); }
  static __device__ __forceinline__ uint32 mul(uint32 a, uint32 b) { return bits(__hmul2_rn(two(a), two(b))); }
  static __device__ __forceinline__ uint32 fma(uint32 a, uint32 b, uint32 c) {
    return bits(__hfma2(two(a), two(b), two(c)));
  }
};

// A stored scale of type S, of rows g and g + 8.
template <typename S, typename X>
struct Scale {
  static constexpr int WORDS = sizeof(S) / 2;
  static __device__ __forceinline__ float2 numbers(const uint32 *w) {
    if constexpr (sizeof(S) == 4)
      return make_float2(__uint_as_float(w[0]), __uint_as_float(w[1]));
    else
      return Two<S>::numbers(*w);
  }
  static __device__ __forceinline__ uint32 both(const uint32 *w) {
    if constexpr (alike(S(), X())) return *w;
    const float2 v = numbers(w);
    return Two<X>::of(v.x, v.y);
  }
  static __device__ constexpr bool alike(half, half) { return true; }
  static __device__ constexpr bool alike(bfloat16, bfloat16) { return true; }
  template <typename A, typename B>
  static __device__ constexpr bool alike(A, B) {
    return false;
  }
};

__device__ __forceinline__ uint32 twice(uint32 rows, int row) { return __byte_perm(rows, 0, row ? 0x3232 : 0x1010); }

template <int BY>
__device__ __forceinline__ uint32 shifted(uint32 v) {
  return BY >= 0 ? v << (BY & 31) : v >> (-BY & 31);
}

// Planes FIRST ... FIRST + COUNT - 1 of one row as nibbles; the last plane is the lowest bit.
template <int FIRST, int COUNT, int ROW, int P, int I = 0>
__device__ __forceinline__ void interleave(uint32 (&nibbles)[4], const uint32 (&words)[P][2]) {
  uint32 v = shifted<-I>(words[FIRST + COUNT - 1][ROW]) & 0x11111111;
  if constexpr (COUNT > 1) v |= shifted<1 - I>(words[FIRST + COUNT - 2][ROW]) & 0x22222222;
  if constexpr (COUNT > 2) v |= shifted<2 - I>(words[FIRST + COUNT - 3][ROW]) & 0x44444444;
  if constexpr (COUNT > 3) v |= shifted<3 - I>(words[FIRST + COUNT - 4][ROW]) & 0x88888888;
  nibbles[I] = v;
  if constexpr (I < 3) interleave<FIRST, COUNT, ROW, P, I + 1>(nibbles, words);
}

// The 2^COUNT numbers that planes FIRST ... can mean, of both rows.
template <int FIRST, int COUNT, int P>
struct Table {
  static constexpr int ENTRIES = 1 << COUNT, REGISTERS = COUNT == 3 ? 2 : 1;
  uint32 low[2][REGISTERS], high[2][REGISTERS], nibbles[2][4];  // [row]

  // numbers[c]: of rows g and g + 8 for code c
  __device__ __forceinline__ void load(const uint32 (&words)[P][2], const uint32 (&numbers)[ENTRIES]) {
    interleave<FIRST, COUNT, 0>(nibbles[0], words);
    interleave<FIRST, COUNT, 1>(nibbles[1], words);
#pragma unroll
    for (int i = 0; i < REGISTERS; i++) {
      const uint32 a = numbers[4 * i], b = numbers[4 * i + 1], c = numbers[COUNT > 1 ? 4 * i + 2 : 0],
                   d = numbers[COUNT > 1 ? 4 * i + 3 : 1];
#pragma unroll
      for (int row = 0; row < 2; row++) {
        const uint32 ab = __byte_perm(a, b, row ? 0x7362 : 0x5140), cd = __byte_perm(c, d, row ? 0x7362 : 0x5140);
        low[row][i] = __byte_perm(ab, cd, 0x5410), high[row][i] = __byte_perm(ab, cd, 0x7632);
      }
    }
  }
  // The two pairs of step STEP.
  template <int STEP>
  __device__ __forceinline__ uint2 look_up(int row) const {
    const uint32 which = nibbles[row][STEP % 4] >> (STEP / 4 * 16);
    const uint32 l = __byte_perm(low[row][0], low[row][REGISTERS - 1], which),
                 h = __byte_perm(high[row][0], high[row][REGISTERS - 1], which);
    return make_uint2(__byte_perm(l, h, 0x5140), __byte_perm(l, h, 0x7362));
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
  template <int STEP>
  __device__ __forceinline__ uint2 look_up(int row) const {
    constexpr int at = STEP / 4 * 8 + STEP % 4;
    return make_uint2(((bits[row] << (15 - at)) & 0x80008000u) ^ alpha[row],
                      ((bits[row] << (11 - at)) & 0x80008000u) ^ alpha[row]);
  }
};

struct Nothing {};

// The weights of binary-coded planes and of codes of up to three bits: the sum of what tables of three planes say.
template <int P, Kind KIND, typename S, typename X, bool LARGE = (KIND != BCQ && KIND != BCQ_SYMMETRIC && P > 3)>
struct Numbers {
  static constexpr bool CODES = KIND != BCQ && KIND != BCQ_SYMMETRIC;
  static constexpr int A = P < 3 ? P : 3, B = P - A < 3 ? P - A : 3, C = P - A - B;
  template <int FIRST, int COUNT>
  struct Choose {
    using Type = Table<FIRST, COUNT, P>;
  };
  template <int FIRST>
  struct Choose<FIRST, 1> {
    using Type = Sign;
  };
  template <int FIRST>
  struct Choose<FIRST, 0> {
    using Type = Nothing;
  };
  Table<0, A, P> first;
  typename Choose<A, B>::Type second;
  typename Choose<A + B, C>::Type third;

  // numbers[c] = start + sum of +-alpha, the first plane's sign is the highest bit of c
  template <int FIRST, int COUNT>
  static __device__ __forceinline__ void sums(uint32 (&numbers)[1 << COUNT], const uint32 *scale, const uint32 *start) {
    if constexpr (sizeof(X) == 2 && Scale<half, X>::alike(half(), X())) {
      numbers[0] = start ? Scale<S, X>::both(start) : 0;
#pragma unroll
      for (int p = 0; p < COUNT; p++) {
        const uint32 alpha = Scale<S, X>::both(scale + (FIRST + p) * Scale<S, X>::WORDS);
#pragma unroll
        for (int c = (1 << p) - 1; c >= 0; c--) {  // in place, from the top
          const uint32 v = numbers[c];
          numbers[2 * c + 1] = Two<X>::add(v, alpha), numbers[2 * c] = Two<X>::add(v, alpha ^ 0x80008000u);
        }
      }
    } else {  // eight bits are too few to round more than once
      float2 f[1 << COUNT];
      f[0] = start ? Scale<S, X>::numbers(start) : make_float2(0, 0);
#pragma unroll
      for (int p = 0; p < COUNT; p++) {
        const float2 alpha = Scale<S, X>::numbers(scale + (FIRST + p) * Scale<S, X>::WORDS);
#pragma unroll
        for (int c = (1 << p) - 1; c >= 0; c--) {
          const float2 v = f[c];
          f[2 * c + 1] = make_float2(v.x + alpha.x, v.y + alpha.y),
                    f[2 * c] = make_float2(v.x - alpha.x, v.y - alpha.y);
        }
      }
#pragma unroll
      for (int c = 0; c < 1 << COUNT; c++) numbers[c] = Two<X>::of(f[c].x, f[c].y);
    }
  }
  static __device__ __forceinline__ void grid(uint32 (&numbers)[1 << A], const uint32 *scale) {
    const uint32 s = Scale<S, X>::both(scale);
    const uint32 offset = KIND == UNIFORM_SYMMETRIC ? 0 : Scale<S, X>::both(scale + Scale<S, X>::WORDS);
#pragma unroll
    for (int q = 0; q < 1 << A; q++) {
      if constexpr (KIND == AFFINE) numbers[q] = Two<X>::fma(Two<X>::of(q), s, offset);
      if constexpr (KIND == UNIFORM) numbers[q] = Two<X>::mul(Two<X>::add(Two<X>::of(q), offset ^ 0x80008000u), s);
      if constexpr (KIND == UNIFORM_SYMMETRIC) numbers[q] = Two<X>::mul(Two<X>::of(q - (1 << (P - 1))), s);
    }
  }

  template <int FIRST, int COUNT, typename T>
  static __device__ __forceinline__ void more(T &table, const uint32 (&words)[P][2], const uint32 *scale) {
    if constexpr (COUNT == 1) {
      table.load(words[FIRST], Scale<S, X>::both(scale + FIRST * Scale<S, X>::WORDS));
    } else if constexpr (COUNT > 1) {
      uint32 numbers[1 << COUNT];
      sums<FIRST, COUNT>(numbers, scale, nullptr);
      table.load(words, numbers);
    }
  }
  __device__ __forceinline__ void load(const uint32 (&words)[P][2], const uint32 *scale) {
    uint32 numbers[1 << A];
    if constexpr (CODES)
      grid(numbers, scale);
    else
      sums<0, A>(numbers, scale, KIND == BCQ ? scale + P * Scale<S, X>::WORDS : nullptr);
    first.load(words, numbers);
    more<A, B>(second, words, scale), more<A + B, C>(third, words, scale);
  }
  template <int STEP>
  __device__ __forceinline__ uint2 pairs(int row) const {
    uint2 v = first.template look_up<STEP>(row);
    if constexpr (B > 0) v = plus(v, second.template look_up<STEP>(row));
    if constexpr (C > 0) v = plus(v, third.template look_up<STEP>(row));
    return v;
  }
  static __device__ __forceinline__ uint2 plus(uint2 a, uint2 b) {
    return make_uint2(Two<X>::add(a.x, b.x), Two<X>::add(a.y, b.y));
  }
};

// Codes of 4 ... 8 bits: w = s (q - z), or low + s q.
template <int P, Kind KIND, typename S, typename X>
struct Numbers<P, KIND, S, X, true> {
  static constexpr int HIGH = P - 4;  // bits above the lowest four
  uint32 low[2][4], high[2][4], scale[2], start[2];

  __device__ __forceinline__ void load(const uint32 (&words)[P][2], const uint32 *from) {
    interleave<HIGH, 4, 0>(low[0], words), interleave<HIGH, 4, 1>(low[1], words);
    if constexpr (HIGH > 0) interleave<0, HIGH, 0>(high[0], words), interleave<0, HIGH, 1>(high[1], words);
    const uint32 s = Scale<S, X>::both(from);
    uint32 second = Two<X>::of(1 << (P - 1));
    if constexpr (KIND != UNIFORM_SYMMETRIC) second = Scale<S, X>::both(from + Scale<S, X>::WORDS);
    if constexpr (KIND != AFFINE) {  // exact: integers
      second ^= 0x80008000u;
      if constexpr (HIGH == 0) second = Two<X>::add(second, Two<X>::ONES | 0x80008000u);
    }
#pragma unroll
    for (int row = 0; row < 2; row++) scale[row] = twice(s, row), start[row] = twice(second, row);
  }
  // Byte M of two registers as two integers.
  template <int M>
  static __device__ __forceinline__ uint32 integers(uint32 nibbles) {
    return (__byte_perm(nibbles, nibbles >> 4, M * 0x1111 + 0x4400) & 0x000f000f) | Two<X>::ONES;
  }
  template <int M>
  __device__ __forceinline__ uint32 pair(int row, int i) const {
    const uint32 minus_one = Two<X>::ONES | 0x80008000u;
    uint32 q = integers<M>(low[row][i]);
    if constexpr (KIND == AFFINE || HIGH > 0) q = Two<X>::add(q, minus_one);
    if constexpr (KIND != AFFINE) q = Two<X>::add(q, start[row]);
    if constexpr (HIGH > 0) q = Two<X>::fma(Two<X>::add(integers<M>(high[row][i]), minus_one), Two<X>::of(16), q);
    return KIND == AFFINE ? Two<X>::fma(q, scale[row], start[row]) : Two<X>::mul(q, scale[row]);
  }
  template <int STEP>
  __device__ __forceinline__ uint2 pairs(int row) const {
    return make_uint2(pair<STEP / 4 * 2>(row, STEP % 4), pair<STEP / 4 * 2 + 1>(row, STEP % 4));
  }
};

// A lane's share of 16 rows and 128 inputs.
template <int P, Kind KIND, int GROUPS, typename S, typename X>
struct Weights {
  static constexpr int SW = scale_words(KIND, P) * Scale<S, X>::WORDS;
  static constexpr int PLANE_BYTES = P * 512, SCALE_BYTES = GROUPS * SW * 32;  // of a block
  static constexpr int BYTES = PLANE_BYTES + SCALE_BYTES;

  Numbers<P, KIND, S, X> numbers;

  // Half h of a whole block in shared memory, planes and then scales.
  __device__ __forceinline__ void load(const char *block, int h, int lane) {
    uint32 words[P][2], scale[SW];
#pragma unroll
    for (int p = 0; p < P; p++) take(words[p], reinterpret_cast<const uint32 *>(block) + (p * 32 + lane) * 4 + h * 2);
    constexpr int PARTS = GROUPS > 2 ? GROUPS / 2 : 1;  // groups in half a block; this lane's inputs are in one of them
    const int group = GROUPS == 1 ? 0 : h * PARTS + (lane & 3) * PARTS / 4;
    take(scale, reinterpret_cast<const uint32 *>(block + PLANE_BYTES) + ((lane >> 2) * GROUPS + group) * SW);
    numbers.load(words, scale);
  }
  // The lane's part of the left operand (16 rows, 16 inputs) of step STEP.
  template <int STEP>
  __device__ __forceinline__ void step(uint32 (&a)[4]) const {
    const uint2 u = numbers.template pairs<STEP>(0), v = numbers.template pairs<STEP>(1);
    a[0] = u.x, a[1] = v.x, a[2] = u.y, a[3] = v.y;
  }
};

}  // namespace crelle
