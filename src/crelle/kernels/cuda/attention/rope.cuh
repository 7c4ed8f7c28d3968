// qk-norm and rotary position embedding of single heads.
#pragma once
#include "ptx/warp.cuh"

namespace crelle {

// cos and sin for the pairs of dimensions that a lane rotates. Of a head's D channels the first R are rotated, in pairs
// R / 2 apart; pairs of the others are (D - R) / 2 apart and only normed.
template <int D, int R = D>
struct Rope {
  static_assert(R % 2 == 0 && R <= D);
  static constexpr int PAIRS = (D / 2 + 31) / 32;
  float cos[PAIRS], sin[PAIRS];

  static __device__ __forceinline__ int low(int i) { return R == D || i < R / 2 ? i : i + R / 2; }
  static __device__ __forceinline__ int high(int i) { return R == D || i >= R / 2 ? i + D / 2 : i + R / 2; }

  __device__ __forceinline__ Rope(const float *c, const float *s, int at, int lane) {
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const int i = lane + 32 * j;
      const bool rotates = c && i < R / 2;
      cos[j] = rotates ? c[(size_t)at * (R / 2) + i] : 1, sin[j] = rotates ? s[(size_t)at * (R / 2) + i] : 0;
    }
  }

  // A warp norms (where there is a weight) and rotates a head; `to` gets it, and `also` unless it is null.
  template <typename T>
  __device__ __forceinline__ void head(const T *from, const T *weight, float eps, int lane, T *to, T *also) const {
    float a[PAIRS], b[PAIRS], squares = 0;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const int i = lane + 32 * j;
      a[j] = i < D / 2 ? to_float(from[low(i)]) : 0, b[j] = i < D / 2 ? to_float(from[high(i)]) : 0;
      squares = fmaf(a[j], a[j], fmaf(b[j], b[j], squares));
    }
    if (weight) {
      const float scale = rsqrtf(warp_sum(squares) / D + eps);
#pragma unroll
      for (int j = 0; j < PAIRS; j++) {
        const int i = lane + 32 * j;
        if (i >= D / 2) continue;
        a[j] = to_float(from_float<T>(to_float(from_float<T>(a[j] * scale)) * to_float(weight[low(i)])));
        b[j] = to_float(from_float<T>(to_float(from_float<T>(b[j] * scale)) * to_float(weight[high(i)])));
      }
    }
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const int i = lane + 32 * j;
      if (i >= D / 2) continue;
      const T first = from_float<T>(a[j] * cos[j] - b[j] * sin[j]),
              second = from_float<T>(b[j] * cos[j] + a[j] * sin[j]);
      to[low(i)] = first, to[high(i)] = second;
      if (also) also[low(i)] = first, also[high(i)] = second;
    }
  }
};

}  // namespace crelle
