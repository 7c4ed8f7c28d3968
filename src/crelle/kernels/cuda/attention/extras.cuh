// What only some models' attention has: soft caps and sinks.
#pragma once
#include "attention/softmax.cuh"

namespace crelle {

constexpr float LOG2_E = 1.4426950408889634f;  // logits are base 2 here: exp(x) = 2^(x log2 e)

// What a model's attention has in addition (`EXTRAS` of the kernels, a sum of these).
enum Extra { SOFTCAP = 1, SINKS = 2 };

// cap * tanh(v / cap), tanh(y) being 1 - 2 / (1 + exp(2 y)): off by some 1e-7 of the cap.
__device__ __forceinline__ float soft_capped(float v, float cap) {
  return cap - __fdividef(2 * cap, 1 + exp2_approx(2 * LOG2_E / cap * v));
}

// A sink is one more score, without a value: adds it to the sum `total` of 2^(score - top), which may raise the top.
// Returns what all that was summed before is to be multiplied by.
__device__ __forceinline__ float add_sink(float sink, float &top, float &total) {
  const float now = fmaxf(top, sink * LOG2_E), factor = exp2_approx(top - now);
  total = fmaf(total, factor, exp2_approx(sink * LOG2_E - now)), top = now;
  return factor;
}

}  // namespace crelle
