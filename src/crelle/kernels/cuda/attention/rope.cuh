// qk-norm and rotary position embedding of single heads.
#pragma once
#include "ptx/warp.cuh"

namespace crelle {

// cos and sin for the pairs of dimensions that a lane rotates.
template <int D>
struct Rope {
  static constexpr int PAIRS = (D / 2 + 31) / 32;
  float cos[PAIRS], sin[PAIRS];

  __device__ __forceinline__ Rope(const float *c, const float *s, int at, int lane) {
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const int i = lane + 32 * j;
      const bool rotates = c && i < D / 2;
      cos[j] = rotates ? c[(size_t)at * (D / 2) + i] : 1, sin[j] = rotates ? s[(size_t)at * (D / 2) + i] : 0;
    }
  }

  // A warp norms (where there is a weight) and rotates a head; `to` gets it, and `also` unless it is null.
  template <typename T>
  __device__ __forceinline__ void head(const T *from, const T *weight, float eps, int lane, T *to, T *also) const {
    float a[PAIRS], b[PAIRS], squares = 0;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const int i = lane + 32 * j;
      a[j] = i < D / 2 ? to_float(from[i]) : 0, b[j] = i < D / 2 ? to_float(from[i + D / 2]) : 0;
      squares = fmaf(a[j], a[j], fmaf(b[j], b[j], squares));
    }
    if (weight) {
      const float scale = rsqrtf(warp_sum(squares) / D + eps);
#pragma unroll
      for (int j = 0; j < PAIRS; j++) {
        const int i = lane + 32 * j;
        if (i >= D / 2) continue;
        a[j] = to_float(from_float<T>(to_float(from_float<T>(a[j] * scale)) * to_float(weight[i])));
        b[j] = to_float(from_float<T>(to_float(from_float<T>(b[j] * scale)) * to_float(weight[i + D / 2])));
      }
    }
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const int i = lane + 32 * j;
      if (i >= D / 2) continue;
      const T low = from_float<T>(a[j] * cos[j] - b[j] * sin[j]), high = from_float<T>(b[j] * cos[j] + a[j] * sin[j]);
      to[i] = low, to[i + D / 2] = high;
      if (also) also[i] = low, also[i + D / 2] = high;
    }
  }
};

}  // namespace crelle
