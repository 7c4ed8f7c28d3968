// Products of 16 rows of bit-planes and 256 inputs on the binary tensor cores.
//
//   w = z + sum_p alpha_p b_p      and      x = s * sum_i r_i x_i,   i = 0 ... 7,   s per 128 inputs
//
// The instruction mma.b1.and.popc takes 16 rows of a plane, straight from memory, and 8 columns of bits of x, and
// counts where both are set. A digit x_i is two bits, and the instruction adds up what each of them counts: sum_k b_k
// x_ik is one value per row and column. Nothing is unpacked, and the counts are exact. What is left is to weigh them,
// two per lane, row, plane and group; a count c, read as a float, is c * 2^-149, so that this needs no
// conversion (but floats must not be flushed to zero).
//
// A lane of the instruction's result holds two columns of 16 rows. `Block` is one of two ways to fill them:
//
//   OneToken    columns 0 ... 3 are pairs of digits of the block's first 128 inputs, columns 4 ... 7 of the second: the
//               instruction's 256 inputs meet zeros in the half that is not theirs. Every count is worth something
//               and has one scale, so least is left to weigh. Digits are 0 ... 3 in base -4, which needs no sign: r_i =
//               (-4)^i; their high bits are counted twice. One token, groups of 128 inputs or more.
//   FewTokens   columns are digits of 1, 2 or 4 tokens (2 columns of a lane: two digits of a token, with four tokens
//               all eight of it in four instructions), half a block at a time: the instruction takes 128 inputs of a
//               plane twice, once for either bit of the digits, so none of it is idle. Digits are 0, 1, 2 in base 3,
//               as many bits set, the last of them below 0 (as in two's complement): r_i = 3^i, r_7 = -3^7.
//
// Layouts: crelle/kernels/cuda/planes/weight_layout.py (words, scales), bitserial.cuh (x).
#pragma once
#include "planes/scales.cuh"
#include "ptx/mma_b1.cuh"
#include "ptx/pipeline.cuh"

namespace crelle {

// Two values, of row r and row r + 8.
template <typename S>
struct Pair;
template <>
struct Pair<half> {
  static constexpr int WORDS = 1;
  static __device__ __forceinline__ float2 of(const uint32 *w) {
    return __half22float2(*reinterpret_cast<const __half2 *>(w));
  }
};
template <>
struct Pair<bfloat16> {
  static constexpr int WORDS = 1;
  static __device__ __forceinline__ float2 of(const uint32 *w) {
    return make_float2(__uint_as_float(*w << 16), __uint_as_float(*w & 0xffff0000u));
  }
};
template <>
struct Pair<float> {
  static constexpr int WORDS = 2;
  static __device__ __forceinline__ float2 of(const uint32 *w) {
    return make_float2(__uint_as_float(w[0]), __uint_as_float(w[1]));
  }
};

// What both ways know of a group: how its scales lie, and what they make of weighed counts. GROUPS: groups of scales in
// a block: 1 (256 or more inputs a group), 2, 4, 8.
template <int P, ScaleKind KIND, int GROUPS, typename S>
struct Form {
  static constexpr int SW = scales_per_group(KIND, P) * Pair<S>::WORDS;  // of a group, for two rows
  static constexpr int PLANE_BYTES = P * 512, SCALE_BYTES = GROUPS * SW * 32;
  static constexpr int GROUPED = GROUPS, PARTS = GROUPS > 2 ? GROUPS / 2 : 1;  // groups in half a block
  static constexpr bool CODES = KIND == UNIFORM || KIND == UNIFORM_SYMMETRIC || KIND == AFFINE;

  // b is +-1/2, or 0 and 1 in a code: what is added to a weighed count, given the sum of x.
  static __device__ __forceinline__ float start(float sum) { return CODES ? 0 : -0.5f * sum; }

  // sums += xscale * (what the group is, from f = sum of alpha * weighed count).
  static __device__ __forceinline__ void add(float2 &sums, float2 f, const uint32 *scale, float xscale, float sum) {
    if constexpr (KIND == UNIFORM_SYMMETRIC)
      f.x = fmaf(-(1 << (P - 1)), sum, f.x), f.y = fmaf(-(1 << (P - 1)), sum, f.y);
    if constexpr (KIND == UNIFORM) {
      const float2 zero = Pair<S>::of(scale + Pair<S>::WORDS);
      f.x = fmaf(-zero.x, sum, f.x), f.y = fmaf(-zero.y, sum, f.y);
    }
    if constexpr (CODES) {
      const float2 step = Pair<S>::of(scale);
      f.x *= step.x, f.y *= step.y;
    }
    if constexpr (KIND == AFFINE || KIND == BCQ) {
      const float2 low = Pair<S>::of(scale + (KIND == BCQ ? P : 1) * Pair<S>::WORDS);
      const float times = KIND == BCQ ? -start(sum) : sum;
      f.x = fmaf(low.x, times, f.x), f.y = fmaf(low.y, times, f.y);
    }
    sums.x = fmaf(xscale, f.x, sums.x);
    sums.y = fmaf(xscale, f.y, sums.y);
  }
};

// A count c, read as a float, times the weight of its digit, in units of 2^-42: that is 2^107 for the digit 1.
__device__ __forceinline__ float weigh(int c, float weight, float v) {
  return fmaf(__int_as_float(c), 0x1p107f * weight, v);
}

template <int P, ScaleKind KIND, int GROUPS, typename S>
struct OneToken : Form<P, KIND, GROUPS, S> {
  using F = Form<P, KIND, GROUPS, S>;
  static constexpr int STEP = 2, LANES = 4, SCALES = F::SW;  // halves at a time; lanes of a token; words of a lane

  static __device__ __forceinline__ int token(int) { return 0; }
  static __device__ __forceinline__ bool first(int lane) { return (lane & 3) == 0; }
  // Undoes the unit of `weigh`; odd lanes have the upper digits; +-1/2 becomes +-1.
  static __device__ __forceinline__ float place(int lane) {
    return (F::CODES ? 0x1p42f : 0x1p43f) * (lane & 1 ? 256 : 1);
  }
  static __device__ __forceinline__ int scales_at(int lane) {
    return ((lane >> 2) * GROUPS + (GROUPS == 2 ? lane >> 1 & 1 : 0)) * SCALES;
  }

  struct Inputs {
    uint32 bits[4];    // of a column: low and high bit of a digit, then of the next
    float scale, sum;  // of the half whose counts this lane has; the sum counts once

    __device__ __forceinline__ Inputs(const uint32 *xbits, const float *xscale, int half, int lane) {
      uint32 v[2];
      take(bits, xbits + half * 64 + lane * 4);
      take(v, reinterpret_cast<const uint32 *>(xscale) + 2 * (half + (lane >> 1 & 1)));
      scale = __uint_as_float(v[0]), sum = lane & 1 ? 0 : __uint_as_float(v[1]);
    }
  };

  static __device__ __forceinline__ void multiply(float2 &sums, const char *words, const uint32 (&scales)[SCALES],
                                                  const Inputs &x, int, int lane) {
    const bool upper = lane & 16;  // columns 4 ... 7
    uint32 b[4][2];
#pragma unroll
    for (int i = 0; i < 4; i++) b[i][0] = upper ? 0 : x.bits[i], b[i][1] = upper ? x.bits[i] : 0;
    const float start = F::start(x.sum);
    float2 f = make_float2(0, 0);
#pragma unroll
    for (int p = 0; p < P; p++) {
      const uint4 plane = *reinterpret_cast<const uint4 *>(words + (p * 32 + lane) * 16);
      int c[4] = {}, d[4] = {};  // of the even digits, of the odd ones
      count(c, plane, b[0][0], b[0][1]), count(d, plane, b[2][0], b[2][1]);
#pragma unroll
      for (int twice = 0; twice < 2; twice++) count(c, plane, b[1][0], b[1][1]), count(d, plane, b[3][0], b[3][1]);
      const auto weighed = [&](int row, float times, float v) {
        return weigh(d[2 * row + 1], -64 * times,
                     weigh(c[2 * row + 1], 16 * times, weigh(d[2 * row], -4 * times, weigh(c[2 * row], times, v))));
      };
      if constexpr (F::CODES) {
        f = make_float2(weighed(0, 1 << (P - 1 - p), f.x), weighed(1, 1 << (P - 1 - p), f.y));
      } else {
        const float2 alpha = Pair<S>::of(scales + p * Pair<S>::WORDS);
        f = make_float2(fmaf(alpha.x, weighed(0, 1, start), f.x), fmaf(alpha.y, weighed(1, 1, start), f.y));
      }
    }
    F::add(sums, f, scales, x.scale, x.sum);
  }
};

// HALVES: of a block of x that are fetched at a time.
template <int P, ScaleKind KIND, int GROUPS, int M, int HALVES, typename S>
struct FewTokens : Form<P, KIND, GROUPS, S> {
  using F = Form<P, KIND, GROUPS, S>;
  static constexpr int STEP = HALVES, LANES = 4 / M, SCALES = GROUPS * F::SW, PARTS = F::PARTS;

  static __device__ __forceinline__ int token(int lane) { return (lane & 3) / LANES; }
  static __device__ __forceinline__ bool first(int lane) { return (lane & 3) % LANES == 0; }
  // Undoes the unit of `weigh`; a token's lanes have its digits 0.., 2M.., ...; +-1/2 becomes +-1.
  static __device__ __forceinline__ float place(int lane) {
    float v = F::CODES ? 0x1p42f : 0x1p43f;
    for (int i = 0; i < (lane & 3) % LANES * M; i++) v *= 9;
    return v;
  }
  static __device__ __forceinline__ int scales_at(int lane) { return (lane >> 2) * SCALES; }

  // Some halves of a block of x, as this lane needs them. The sums of x count once per row.
  struct Inputs {
    uint32 bits[HALVES][2 * M];  // of M instructions: first bits, second bits
    float scale[HALVES], sum[HALVES][PARTS];

    __device__ __forceinline__ Inputs(const uint32 *xbits, const float *xscale, int half, int lane) {
      uint32 v[HALVES][1 + PARTS];
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        constexpr int WORDS = M == 1 ? 2 : 4;  // in one load, in which lanes follow each other
#pragma unroll
        for (int i = 0; i < 2 * M; i += WORDS) {
          uint32 some[WORDS];
          take(some, xbits + (half + h) * (64 * M) + i * 32 + lane * WORDS);
#pragma unroll
          for (int k = 0; k < WORDS; k++) bits[h][i + k] = some[k];
        }
        take(v[h], reinterpret_cast<const uint32 *>(xscale) + ((half + h) * M + token(lane)) * (1 + PARTS));
        scale[h] = __uint_as_float(v[h][0]);
#pragma unroll
        for (int i = 0; i < PARTS; i++) sum[h][i] = first(lane) ? __uint_as_float(v[h][1 + i]) : 0;
      }
    }
  };

  // v + a lane's counts of one row, weighed; `last`: what its last digit is worth, as a multiple of the one before.
  static __device__ __forceinline__ float weighed(float v, const int (&c)[M][4], int row, float times, float last) {
#pragma unroll
    for (int i = 0; i < M; i++) {
      v = weigh(c[i][2 * row], times, v);
      v = weigh(c[i][2 * row + 1], times * (i == M - 1 ? last : 3), v);
      times *= 9;
    }
    return v;
  }

  // Halves h ... h + HALVES - 1 of a block; `scales` are those of the whole block.
  static __device__ __forceinline__ void multiply(float2 &sums, const char *words, const uint32 (&scales)[SCALES],
                                                  const Inputs &x, int h, int lane) {
#pragma unroll
    for (int k = 0; k < HALVES; k++) half(sums, words, scales, x.bits[k], x.scale[k], x.sum[k], h + k, lane);
  }
  static __device__ __forceinline__ void half(float2 &sums, const char *words, const uint32 (&scales)[SCALES],
                                              const uint32 (&bits)[2 * M], float xscale, const float (&xsum)[PARTS],
                                              int h, int lane) {
    const float last = (lane & 3) % LANES == LANES - 1 ? -3 : 3;
    uint4 plane[P];
#pragma unroll
    for (int p = 0; p < P; p++) plane[p] = twice(words + ((p * 32 + lane) * 2 + h) * 8);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const uint32 *scale = scales + (GROUPS == 1 ? 0 : h * PARTS + part) * F::SW;
      const bool mine = PARTS == 1 || (lane & 3) / (4 / PARTS) == part;  // of the inputs that this lane brings
      const float start = F::start(xsum[part]);
      float2 f = make_float2(0, 0);
#pragma unroll
      for (int p = 0; p < P; p++) {
        int c[M][4];
#pragma unroll
        for (int i = 0; i < M; i++) {
          c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0;
          count(c[i], plane[p], mine ? bits[2 * i] : 0, mine ? bits[2 * i + 1] : 0);
        }
        if constexpr (F::CODES) {
          f.x = weighed(f.x, c, 0, 1 << (P - 1 - p), last), f.y = weighed(f.y, c, 1, 1 << (P - 1 - p), last);
        } else {
          const float2 alpha = Pair<S>::of(scale + p * Pair<S>::WORDS);
          f.x = fmaf(alpha.x, weighed(start, c, 0, 1, last), f.x);
          f.y = fmaf(alpha.y, weighed(start, c, 1, 1, last), f.y);
        }
      }
      F::add(sums, f, scale, xscale, xsum[part]);
    }
  }
};

template <int P, ScaleKind KIND, int GROUPS, int M, int HALVES, typename S>
using Block = typename Conditional<M == 1 && GROUPS <= 2, OneToken<P, KIND, GROUPS, S>,
                                   FewTokens<P, KIND, GROUPS, M, HALVES, S>>::type;

}  // namespace crelle
