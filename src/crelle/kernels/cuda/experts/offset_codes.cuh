// Codes of up to 4 bits as operands of the tensor core instruction, before scale and zero point.
//
//   sum_k w_k x_k = s (sum_k (o_k + q_k) x_k - sum_k o_k x_k - z sum_k x_k)         over the inputs k of a group
//
// A code becomes a float in one instruction where an offset o_k stays in it: 0x6400 | q is 1024 + q as f16. Subtracting
// the offset and multiplying by the scale, two more for each pair, are left to the sums: the instruction makes
// sum_k o_k x_k and sum_k x_k, too, once for all tiles that meet this x, with offsets and ones for weights. Sums are
// f32, so that what offsets take of their precision (1024 to a code of 8) is less than the rounding of x.
//
// Inputs stand as in dequant.cuh with STRIDE16. For groups of at least 128 inputs: those of a half block are one sum.
#pragma once
#include "planes/dequant.cuh"

namespace crelle {

template <int P, ScaleKind KIND, int GROUPS>
constexpr bool HAS_OFFSET_CODES = P <= 4 && GROUPS <= 2 && KIND != BCQ && KIND != BCQ_SYMMETRIC;

template <int P, ScaleKind KIND, int GROUPS, typename S, typename X>
struct OffsetCodes {
  static constexpr int SW = scales_per_group(KIND, P) * Scale<S, X>::WORDS;
  static constexpr int PLANE_BYTES = P * 512, SCALE_BYTES = GROUPS * SW * 32;  // of a block
  static constexpr int BYTES = PLANE_BYTES + SCALE_BYTES;
  template <int M>
  using At = Place<X, true, M>;

  uint32 codes[2][4];
  float2 scale, second;  // of rows g and g + 8; second: zero point, or the grid's lowest value
  uint32 seen;           // bits of all that was loaded
  const uint32 masks[2] = {kept(At<0>::MASK), kept(At<1>::MASK)};

  // Half h of a whole block in shared memory, planes and then scales.
  __device__ __forceinline__ void load(const char *block, int h, int lane) {
    uint32 words[P][2], scales[SW];
#pragma unroll
    for (int p = 0; p < P; p++) take(words[p], reinterpret_cast<const uint32 *>(block) + (p * 32 + lane) * 4 + h * 2);
    const int group = GROUPS == 1 ? 0 : h;
    take(scales, reinterpret_cast<const uint32 *>(block + PLANE_BYTES) + ((lane >> 2) * GROUPS + group) * SW);
    seen = 0;
#pragma unroll
    for (int p = 0; p < P; p++) seen |= words[p][0] | words[p][1];
#pragma unroll
    for (int i = 0; i < SW; i++) seen |= scales[i];
    interleave<0, P>(codes, words);
    scale = Scale<S, X>::values(scales);
    second = make_float2(1 << (P - 1), 1 << (P - 1));
    if constexpr (KIND != UNIFORM_SYMMETRIC) second = Scale<S, X>::values(scales + Scale<S, X>::WORDS);
  }
  __device__ __forceinline__ int nothing(int positive) const { return crelle::nothing(seen, positive); }
  __device__ __forceinline__ void next_half() { upper_half<8>(codes); }

  template <int M>
  __device__ __forceinline__ uint32 pair(int row, int i) const {
    const uint32 mask = At<0>::MASK == At<1>::MASK ? masks[0] : masks[M];
    return masked(At<M>::at(codes[row][i]), mask, At<M>::OFFSET);
  }
  template <int STEP>
  __device__ __forceinline__ void step(uint32 (&a)[4]) const {
    a[0] = pair<0>(0, STEP), a[1] = pair<0>(1, STEP), a[2] = pair<1>(0, STEP), a[3] = pair<1>(1, STEP);
  }

  // Offsets in rows 0 ... 7 and ones in the others: in place of weights, at every step.
  struct Offsets {
    template <int STEP>
    __device__ __forceinline__ void step(uint32 (&a)[4]) const {
      a[0] = At<0>::OFFSET, a[2] = At<1>::OFFSET, a[1] = a[3] = Pack2<X>::of(1.0f);
    }
  };

  // y += what a half block's sums mean, given those that `Offsets` made.
  template <int COUNT>
  __device__ __forceinline__ void add(float (&y)[COUNT][4], const float (&sums)[COUNT][4],
                                      const float (&offsets)[COUNT][4]) const {
#pragma unroll
    for (int c = 0; c < COUNT; c++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float s = i < 2 ? scale.x : scale.y, z = i < 2 ? second.x : second.y;
        const float v = sums[c][i] - offsets[c][i % 2], x = offsets[c][2 + i % 2];
        if constexpr (KIND == AFFINE)
          y[c][i] = fmaf(z, x, fmaf(s, v, y[c][i]));
        else
          y[c][i] = fmaf(s, fmaf(-z, x, v), y[c][i]);
      }
  }
};

}  // namespace crelle
