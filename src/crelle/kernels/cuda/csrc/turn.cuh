// What attention does to single heads: norms, rotary positions.
#pragma once
#include "warp.cuh"

namespace crelle {

// cos and sin for the pairs of dimensions that a lane turns.
template <int D>
struct Turn {
  static constexpr int PAIRS = (D / 2 + 31) / 32;
  float cos[PAIRS], sin[PAIRS];

  __device__ __forceinline__ Turn(const float *c, const float *s, int at, int lane) {
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const int i = lane + 32 * j;
      const bool turns = c && i < D / 2;
      cos[j] = turns ? c[(size_t)at * (D / 2) + i] : 1, sin[j] = turns ? s[(size_t)at * (D / 2) + i] : 0;
    }
  }

  // A warp norms (where there is a weight) and turns a head; `to` gets it, and `also` unless it is null.
  template <typename T>
  __device__ __forceinline__ void head(const T *from, const T *weight, float eps, int lane, T *to, T *also) const {
    float a[PAIRS], b[PAIRS], squares = 0;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const int i = lane + 32 * j;
      a[j] = i < D / 2 ? number(from[i]) : 0, b[j] = i < D / 2 ? number(from[i + D / 2]) : 0;
      squares = fmaf(a[j], a[j], fmaf(b[j], b[j], squares));
    }
    if (weight) {
      const float scale = rsqrtf(warp_sum(squares) / D + eps);
#pragma unroll
      for (int j = 0; j < PAIRS; j++) {
        const int i = lane + 32 * j;
        if (i >= D / 2) continue;
        a[j] = number(rounded<T>(number(rounded<T>(a[j] * scale)) * number(weight[i])));
        b[j] = number(rounded<T>(number(rounded<T>(b[j] * scale)) * number(weight[i + D / 2])));
      }
    }
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const int i = lane + 32 * j;
      if (i >= D / 2) continue;
      const T low = rounded<T>(a[j] * cos[j] - b[j] * sin[j]), high = rounded<T>(b[j] * cos[j] + a[j] * sin[j]);
      to[i] = low, to[i + D / 2] = high;
      if (also) also[i] = low, also[i + D / 2] = high;
    }
  }
};

}  // namespace crelle
