// Half a block of weights in the registers of a warp, and how they become pairs of 16-bit numbers for a matrix
// instruction.
//
// Lane 4g + t holds inputs 32t ... 32t+31 of rows g and g + 8. Which input stands at which place of the instruction's k
// is free as long as x agrees, so a lane multiplies only by inputs whose bits it has itself: step s = 0 ... 7 of 16
// inputs takes inputs 32t + 2s, +16 (a pair, one register), and 32t + 2s + 1, +16. Both bits of a pair reach the sign
// bits of a register with one shift, and -alpha ^ sign is one term of a binary-coded weight: three instructions a plane
// and pair. Codes are cheaper: the planes of four inputs are interleaved into nibbles (1.5 instructions a pair at 4
// bits), and 0x6400 | q is the number 1024 + q. Those are exact until the scale is multiplied in.
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
  static __device__ __forceinline__ uint32 bits(__nv_bfloat162 v) { return *reinterpret_cast<uint32 *>(&v); }
  static __device__ __forceinline__ __nv_bfloat162 two(uint32 v) { return *reinterpret_cast<__nv_bfloat162 *>(&v); }
  static __device__ __forceinline__ uint32 add(uint32 a, uint32 b) { return bits(__hadd2_rn(two(a), two(b))); }
  static __device__ __forceinline__ uint32 mul(uint32 a, uint32 b) { return bits(__hmul2_rn(two(a), two(b))); }
  static __device__ __forceinline__ uint32 fma(uint32 a, uint32 b, uint32 c) {
    return bits(__hfma2(two(a), two(b), two(c)));
  }
};

// A stored scale of type S, of row g (ROW 0) or g + 8, as two numbers of type X.
template <typename S, typename X>
struct Scale {
  static constexpr int WORDS = sizeof(S) / 2;
  template <int ROW>
  static __device__ __forceinline__ float value(const uint32 *w) {
    if constexpr (sizeof(S) == 4) return __uint_as_float(w[ROW]);
    const unsigned short bits = ROW ? *w >> 16 : *w & 0xffff;
    return number(*reinterpret_cast<const S *>(&bits));
  }
  template <int ROW>
  static __device__ __forceinline__ uint32 two(const uint32 *w) {
    if constexpr (sizeof(S) == 2 && alike(S(), X())) return __byte_perm(*w, 0, ROW ? 0x3232 : 0x1010);
    return Two<X>::of(value<ROW>(w));
  }
  static __device__ constexpr bool alike(half, half) { return true; }
  static __device__ constexpr bool alike(bfloat16, bfloat16) { return true; }
  template <typename A, typename B>
  static __device__ constexpr bool alike(A, B) {
    return false;
  }
};

// Bits of `a` where the mask is set, of `b` elsewhere.
__device__ __forceinline__ uint32 either(uint32 mask, uint32 a, uint32 b) { return (a & mask) | (b & ~mask); }
template <int BY>
__device__ __forceinline__ uint32 shifted(uint32 v) {
  return BY >= 0 ? v << (BY & 31) : v >> (-BY & 31);
}

// 32 inputs of one row, a lane's share, as binary-coded weights.
template <int P, Kind KIND, typename S, typename X, bool CODES = KIND != BCQ && KIND != BCQ_SYMMETRIC>
struct Row {
  uint32 plane[P], alpha[P], z;

  template <int ROW>
  __device__ __forceinline__ void load(const uint32 (&words)[P][2], const uint32 *scale) {
#pragma unroll
    for (int p = 0; p < P; p++) {
      plane[p] = words[p][ROW];
      alpha[p] = Scale<S, X>::template two<ROW>(scale + p * Scale<S, X>::WORDS) ^ 0x80008000u;
    }
    z = KIND == BCQ ? Scale<S, X>::template two<ROW>(scale + P * Scale<S, X>::WORDS) : 0;
  }
  // The weights of inputs J and J + 16.
  template <int J>
  __device__ __forceinline__ uint32 pair() const {
    uint32 v = z;
#pragma unroll
    for (int p = 0; p < P; p++) {
      const uint32 term = ((plane[p] << (15 - J)) & 0x80008000u) ^ alpha[p];
      v = p == 0 && KIND == BCQ_SYMMETRIC ? term : Two<X>::add(v, term);
    }
    return v;
  }
};

// The same for codes: w = s (q - z), or low + s q.
template <int P, Kind KIND, typename S, typename X>
struct Row<P, KIND, S, X, true> {
  static constexpr int LOW = P < 4 ? P : 4, HIGH = P - LOW;  // planes of the low nibble, and of the high one
  uint32 low[4], high[4], scale, start;

  // nibbles[i], nibble n: bits FIRST ... FIRST + COUNT - 1 of the code of input 4n + i, the last of them lowest
  template <int FIRST, int COUNT, int ROW>
  static __device__ __forceinline__ void interleave(uint32 (&nibbles)[4], const uint32 (&words)[P][2]) {
    gather<FIRST, COUNT, ROW, 0>(nibbles, words);
    gather<FIRST, COUNT, ROW, 1>(nibbles, words);
    gather<FIRST, COUNT, ROW, 2>(nibbles, words);
    gather<FIRST, COUNT, ROW, 3>(nibbles, words);
  }
  template <int FIRST, int COUNT, int ROW, int I>
  static __device__ __forceinline__ void gather(uint32 (&nibbles)[4], const uint32 (&words)[P][2]) {
    uint32 v = shifted<-I>(words[FIRST + COUNT - 1][ROW]);
    if constexpr (COUNT > 1) v = either(0x22222222, shifted<1 - I>(words[FIRST + COUNT - 2][ROW]), v);
    if constexpr (COUNT > 2) v = either(0x44444444, shifted<2 - I>(words[FIRST + COUNT - 3][ROW]), v);
    if constexpr (COUNT > 3) v = either(0x88888888, shifted<3 - I>(words[FIRST + COUNT - 4][ROW]), v);
    nibbles[I] = v;
  }

  template <int ROW>
  __device__ __forceinline__ void load(const uint32 (&words)[P][2], const uint32 *from) {
    interleave<HIGH, LOW, ROW>(low, words);
    if constexpr (HIGH > 0) interleave<0, HIGH, ROW>(high, words);
    scale = Scale<S, X>::template two<ROW>(from);
    if constexpr (KIND == AFFINE) {
      start = Scale<S, X>::template two<ROW>(from + Scale<S, X>::WORDS);
    } else {
      const float zero =
          KIND == UNIFORM ? Scale<S, X>::template value<ROW>(from + Scale<S, X>::WORDS) : float(1 << (P - 1));
      start = Two<X>::of(HIGH > 0 ? -zero : -Two<X>::ONE - zero);
    }
  }
  template <int J>
  __device__ __forceinline__ uint32 pair() const {
    constexpr uint32 mask = ((1u << LOW) - 1) * 0x00010001u, high_mask = ((1u << HIGH) - 1) * 0x00010001u;
    const uint32 minus_one = Two<X>::ONES | 0x80008000u;
    uint32 q = ((low[J % 4] >> (J & ~3)) & mask) | Two<X>::ONES;
    if constexpr (KIND == AFFINE || HIGH > 0) q = Two<X>::add(q, minus_one);
    if constexpr (KIND != AFFINE) q = Two<X>::add(q, start);
    if constexpr (HIGH > 0) {
      const uint32 h = ((high[J % 4] >> (J & ~3)) & high_mask) | Two<X>::ONES;
      q = Two<X>::fma(Two<X>::add(h, minus_one), Two<X>::of(16), q);
    }
    return KIND == AFFINE ? Two<X>::fma(q, scale, start) : Two<X>::mul(q, scale);
  }
};

// A lane's share of 16 rows and 128 inputs. `words` and `scales` point into shared memory, to a whole block.
template <int P, Kind KIND, int GROUPS, typename S, typename X>
struct Weights {
  static constexpr int SW = scale_words(KIND, P) * Scale<S, X>::WORDS;
  static constexpr int PLANE_BYTES = P * 512, SCALE_BYTES = GROUPS * SW * 32;  // of a block
  static constexpr int BYTES = PLANE_BYTES + SCALE_BYTES;

  Row<P, KIND, S, X> row[2];

  __device__ __forceinline__ void load(const char *block, int h, int lane) {
    uint32 words[P][2], scale[SW];
#pragma unroll
    for (int p = 0; p < P; p++) take(words[p], reinterpret_cast<const uint32 *>(block) + (p * 32 + lane) * 4 + h * 2);
    constexpr int PARTS = GROUPS > 2 ? GROUPS / 2 : 1;  // groups in half a block; this lane's inputs are in one of them
    const int group = GROUPS == 1 ? 0 : h * PARTS + (lane & 3) * PARTS / 4;
    take(scale, reinterpret_cast<const uint32 *>(block + PLANE_BYTES) + ((lane >> 2) * GROUPS + group) * SW);
    row[0].template load<0>(words, scale);
    row[1].template load<1>(words, scale);
  }
  // The lane's part of the left operand (16 rows, 16 inputs) of step STEP.
  template <int STEP>
  __device__ __forceinline__ void step(uint32 (&a)[4]) const {
    a[0] = row[0].template pair<2 * STEP>(), a[1] = row[1].template pair<2 * STEP>();
    a[2] = row[0].template pair<2 * STEP + 1>(), a[3] = row[1].template pair<2 * STEP + 1>();
  }
};

}  // namespace crelle
