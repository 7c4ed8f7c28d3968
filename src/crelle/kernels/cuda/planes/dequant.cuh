// Half a block of weights in the registers of a warp, and how they become pairs of 16-bit floats for a matrix
// instruction.
//
// Lane 4g + t holds inputs 32t ... 32t+31 of rows g and g + 8. Which input stands at which place of the instruction's k
// is free as long as x agrees (x_layout.cuh), so a lane multiplies only by inputs whose bits it has itself: step s = 0
// ... 7 of 16 inputs takes inputs 32t + 16 (s/4) + s%4 + 0, 4, 8, 12, the first two and the last two a pair (one
// register); if pairs are STRIDE16, 32t + 8 (s/4) + s%4 + 0, 16, 4, 20.
//
// Binary-coded planes and codes of up to three bits are looked up (dequant_lut.cuh). Codes of four and more bits are
// cheaper without: 0x6400 | q is 1024 + q as f16, 0x5400 | q << 4 is 64 + q, exact until the scale is multiplied
// in.
#pragma once
#include "planes/scales.cuh"
#include "planes/dequant_lut.cuh"
#include "ptx/shared_loads.cuh"

namespace crelle {

// Whether gemm.cu takes x with the inputs of a pair 16 apart; as in weight_layout.py.
__host__ __device__ constexpr bool uses_stride16(ScaleKind kind, int planes) {
  return kind != BCQ && kind != BCQ_SYMMETRIC && planes > 3;
}

struct Nothing {};

// The weights of binary-coded planes and of codes of up to three bits: the sum of what tables of up to four planes say.
template <int P, ScaleKind KIND, typename S, typename X, bool STRIDE16, bool LARGE = uses_stride16(KIND, P)>
struct Dequantizer {
  static constexpr bool CODES = KIND != BCQ && KIND != BCQ_SYMMETRIC;
  static constexpr int A = P < 4 ? P : 4, B = P - A;
  static constexpr bool OFFSET = KIND == BCQ && A == 4 && (B < 2 || B == 4);  // no table has room for z
  template <int FIRST, int COUNT>
  struct PickTable {
    using Type = Table<FIRST, COUNT, P>;
  };
  template <int FIRST>
  struct PickTable<FIRST, 4> {
    using Type = Signed<FIRST, P>;
  };
  template <int FIRST>
  struct PickTable<FIRST, 1> {
    using Type = Sign;
  };
  template <int FIRST>
  struct PickTable<FIRST, 0> {
    using Type = Nothing;
  };
  struct First {  // a single plane has a table, too: its values may be any two
    using Type = Table<0, 1, P>;
  };
  typename Conditional<A == 1, First, PickTable<0, A>>::type::Type first;
  typename PickTable<A, B>::Type second;
  uint32 offset[OFFSET ? 2 : 1];

  // values[c] = start + sum of +-alpha, the first plane's sign is the highest bit of c
  template <int FIRST, int COUNT>
  static __device__ __forceinline__ void sums(uint32 (&values)[1 << COUNT], const uint32 *scale, const uint32 *start) {
    if constexpr (sizeof(X) == 2 && Scale<half, X>::alike(half(), X())) {
      values[0] = start ? Scale<S, X>::both(start) : 0;
#pragma unroll
      for (int p = 0; p < COUNT; p++) {
        const uint32 alpha = Scale<S, X>::both(scale + (FIRST + p) * Scale<S, X>::WORDS);
#pragma unroll
        for (int c = (1 << p) - 1; c >= 0; c--) {  // in place, from the top
          const uint32 v = values[c];
          values[2 * c + 1] = Pack2<X>::add(v, alpha), values[2 * c] = Pack2<X>::add(v, alpha ^ 0x80008000u);
        }
      }
    } else {  // eight bits are too few to round more than once
      float2 f[1 << COUNT];
      f[0] = start ? Scale<S, X>::values(start) : make_float2(0, 0);
#pragma unroll
      for (int p = 0; p < COUNT; p++) {
        const float2 alpha = Scale<S, X>::values(scale + (FIRST + p) * Scale<S, X>::WORDS);
#pragma unroll
        for (int c = (1 << p) - 1; c >= 0; c--) {
          const float2 v = f[c];
          f[2 * c + 1] = make_float2(v.x + alpha.x, v.y + alpha.y),
                    f[2 * c] = make_float2(v.x - alpha.x, v.y - alpha.y);
        }
      }
#pragma unroll
      for (int c = 0; c < 1 << COUNT; c++) values[c] = Pack2<X>::of(f[c].x, f[c].y);
    }
  }
  static __device__ __forceinline__ void grid(uint32 (&values)[1 << P], const uint32 *scale) {
    const uint32 s = Scale<S, X>::both(scale);
    const uint32 offset = KIND == UNIFORM_SYMMETRIC ? 0 : Scale<S, X>::both(scale + Scale<S, X>::WORDS);
#pragma unroll
    for (int q = 0; q < 1 << P; q++) {
      if constexpr (KIND == AFFINE) values[q] = Pack2<X>::fma(Pack2<X>::of(q), s, offset);
      if constexpr (KIND == UNIFORM) values[q] = Pack2<X>::mul(Pack2<X>::add(Pack2<X>::of(q), offset ^ 0x80008000u), s);
      if constexpr (KIND == UNIFORM_SYMMETRIC) values[q] = Pack2<X>::mul(Pack2<X>::of(q - (1 << (P - 1))), s);
    }
  }

  // `start`: the scale word of z, if the table should hold it.
  template <int FIRST, int COUNT, typename T>
  static __device__ __forceinline__ void fill(T &table, const uint32 (&words)[P][2], const uint32 *scale,
                                              const uint32 *start) {
    if constexpr (COUNT == 4) {
      uint32 values[8];
      sums<FIRST + 1, 3>(values, scale, scale + FIRST * Scale<S, X>::WORDS);
      table.load(words, values);
    } else if constexpr (COUNT == 1 && FIRST > 0) {
      table.load(words[FIRST], Scale<S, X>::both(scale + FIRST * Scale<S, X>::WORDS));
    } else if constexpr (COUNT > 0) {
      uint32 values[1 << COUNT];
      sums<FIRST, COUNT>(values, scale, start);
      table.load(words, values);
    }
  }
  __device__ __forceinline__ void load(const uint32 (&words)[P][2], const uint32 *scale) {
    if constexpr (CODES) {
      uint32 values[1 << P];
      grid(values, scale);
      first.load(words, values);
    } else {
      const uint32 *z = KIND == BCQ ? scale + P * Scale<S, X>::WORDS : nullptr;
      fill<0, A>(first, words, scale, z), fill<A, B>(second, words, scale, z);
      if constexpr (OFFSET) offset[0] = twice(Scale<S, X>::both(z), 0), offset[1] = twice(Scale<S, X>::both(z), 1);
    }
  }
  __device__ __forceinline__ void next_half() {
    first.next_half();
    if constexpr (B > 0) second.next_half();
  }
  template <int STEP>
  __device__ __forceinline__ uint2 pairs(int row) const {
    uint2 v = first.template look_up<STEP>(row);
    if constexpr (B > 0) v = plus(v, second.template look_up<STEP>(row));
    if constexpr (OFFSET) v = plus(v, make_uint2(offset[row], offset[row]));
    return v;
  }
  static __device__ __forceinline__ uint2 plus(uint2 a, uint2 b) {
    return make_uint2(Pack2<X>::add(a.x, b.x), Pack2<X>::add(a.y, b.y));
  }
};

// Where integers up to 15 are added to floats: those of the first (M = 0) and of the second pair of a step. In an X
// the last bits of 1024 are free, and bits 4 ... 7 of 64; 128 as a bfloat16 has only its seven last ones.
template <typename X, bool STRIDE16, int M>
struct Place {
  static constexpr uint32 MASK = M ? 0x00f000f0 : 0x000f000f, OFFSET = M ? 0x54005400 : 0x64006400;
  static __device__ __forceinline__ uint32 at(uint32 nibbles) { return nibbles; }
};
template <int M>
struct Place<half, false, M> {
  static constexpr uint32 MASK = 0x00f0000f, OFFSET = 0x54006400;
  static __device__ __forceinline__ uint32 at(uint32 nibbles) { return __byte_perm(nibbles, nibbles, M * 0x1111); }
};
template <bool STRIDE16, int M>
struct Place<bfloat16, STRIDE16, M> {
  static constexpr uint32 MASK = 0x000f000f, OFFSET = 0x43004300;
  static __device__ __forceinline__ uint32 at(uint32 nibbles) {
    return STRIDE16 ? nibbles >> 4 * M : __byte_perm(nibbles, nibbles >> 4, M * 0x1111 + 0x4400);
  }
};

// Codes of 4 ... 8 bits: w = s (q - z), or low + s q.
template <int P, ScaleKind KIND, typename S, typename X, bool STRIDE16>
struct Dequantizer<P, KIND, S, X, STRIDE16, true> {
  static constexpr int HIGH = P - 4;  // bits above the lowest four
  static constexpr uint32 MINUS = 0x80008000u;
  uint32 low[2][4], high[2][4], scale[2], start[2][2];  // start: [row][pair]
  const uint32 masks[2] = {kept(Place<X, STRIDE16, 0>::MASK), kept(Place<X, STRIDE16, 1>::MASK)};

  __device__ __forceinline__ void load(const uint32 (&words)[P][2], const uint32 *from) {
    interleave<HIGH, 4>(low, words);
    if constexpr (HIGH > 0) interleave<0, HIGH>(high, words);
    const uint32 s = Scale<S, X>::both(from);
    uint32 second = Pack2<X>::of(1 << (P - 1));
    if constexpr (KIND != UNIFORM_SYMMETRIC) second = Scale<S, X>::both(from + Scale<S, X>::WORDS);
    if constexpr (KIND != AFFINE) second ^= MINUS;
#pragma unroll
    for (int row = 0; row < 2; row++) {
      scale[row] = twice(s, row), start[row][0] = start[row][1] = twice(second, row);
      if constexpr (KIND != AFFINE && HIGH == 0) {  // exact: integers
        start[row][0] = Pack2<X>::add(start[row][0], Place<X, STRIDE16, 0>::OFFSET | MINUS);
        start[row][1] = Pack2<X>::add(start[row][1], Place<X, STRIDE16, 1>::OFFSET | MINUS);
      }
    }
  }
  // Two nibbles as floats, plus Place::OFFSET.
  template <int M>
  __device__ __forceinline__ uint32 values(uint32 nibbles) const {
    const uint32 mask = Place<X, STRIDE16, 0>::MASK == Place<X, STRIDE16, 1>::MASK ? masks[0] : masks[M];
    return (Place<X, STRIDE16, M>::at(nibbles) & mask) | Place<X, STRIDE16, M>::OFFSET;
  }
  template <int M>
  __device__ __forceinline__ uint32 pair(int row, int i) const {
    constexpr uint32 LESS = Place<X, STRIDE16, M>::OFFSET | MINUS;
    uint32 q = values<M>(low[row][i]);
    if constexpr (KIND == AFFINE || HIGH > 0) q = Pack2<X>::add(q, LESS);
    if constexpr (KIND != AFFINE) q = Pack2<X>::add(q, start[row][M]);
    if constexpr (HIGH > 0) q = Pack2<X>::fma(Pack2<X>::add(values<M>(high[row][i]), LESS), Pack2<X>::of(16), q);
    return KIND == AFFINE ? Pack2<X>::fma(q, scale[row], start[row][M]) : Pack2<X>::mul(q, scale[row]);
  }
  __device__ __forceinline__ void next_half() {
    upper_half<STRIDE16 ? 8 : 16>(low);
    if constexpr (HIGH > 0) upper_half<STRIDE16 ? 8 : 16>(high);
  }
  template <int STEP>
  __device__ __forceinline__ uint2 pairs(int row) const {
    return make_uint2(pair<0>(row, STEP), pair<1>(row, STEP));
  }
};

// A lane's share of 16 rows and 128 inputs.
template <int P, ScaleKind KIND, int GROUPS, typename S, typename X, bool STRIDE16 = false>
struct Weights {
  static constexpr int SW = scales_per_group(KIND, P) * Scale<S, X>::WORDS;
  static constexpr int PLANE_BYTES = P * 512, SCALE_BYTES = GROUPS * SW * 32;  // of a block
  static constexpr int BYTES = PLANE_BYTES + SCALE_BYTES;

  Dequantizer<P, KIND, S, X, STRIDE16> dequantizer;
  uint32 seen;  // bits of all that was loaded

  // Half h of a whole block in shared memory, planes and then scales.
  __device__ __forceinline__ void load(const char *block, int h, int lane) {
    uint32 words[P][2], scale[SW];
#pragma unroll
    for (int p = 0; p < P; p++) take(words[p], reinterpret_cast<const uint32 *>(block) + (p * 32 + lane) * 4 + h * 2);
    constexpr int PARTS = GROUPS > 2 ? GROUPS / 2 : 1;  // groups in half a block; this lane's inputs are in one of them
    const int group = GROUPS == 1 ? 0 : h * PARTS + (lane & 3) * PARTS / 4;
    take(scale, reinterpret_cast<const uint32 *>(block + PLANE_BYTES) + ((lane >> 2) * GROUPS + group) * SW);
    seen = 0;
#pragma unroll
    for (int p = 0; p < P; p++) seen |= words[p][0] | words[p][1];
#pragma unroll
    for (int i = 0; i < SW; i++) seen |= scale[i];
    dequantizer.load(words, scale);
  }
  // Zero, but not before all that was loaded is there: the copy engine does not wait for reads that are under way, so
  // what it is asked to write over them has to. `positive` is; the compiler must not know.
  __device__ __forceinline__ int nothing(int positive) const { return crelle::nothing(seen, positive); }
  // Half of the steps are done: the others are 0 ... 3 again.
  __device__ __forceinline__ void next_half() { dequantizer.next_half(); }
  // The lane's part of the left operand (16 rows, 16 inputs) of step STEP = 0 ... 3.
  template <int STEP>
  __device__ __forceinline__ void step(uint32 (&a)[4]) const {
    const uint2 u = dequantizer.template pairs<STEP>(0), v = dequantizer.template pairs<STEP>(1);
    a[0] = u.x, a[1] = v.x, a[2] = u.y, a[3] = v.y;
  }
};

}  // namespace crelle
