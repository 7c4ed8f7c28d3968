// What all kernels of a mixture of experts share: where an expert's matrices are, which experts a token takes, and the
// gated activations.
//
// Addresses stand in a table, u64 [experts, COLUMNS], and not at a fixed stride: an expert's bytes may lie anywhere
// that the device can read, in its own memory or in pinned memory of the host. The table does not change during a step,
// so kernels read it before they wait for the previous one.
#pragma once
#include "ptx/global_loads.cuh"
#include "ptx/tensorcore.cuh"
#include "ptx/warp.cuh"

namespace crelle {

using Address = unsigned long long;
enum Matrix { GATE, UP, DOWN };
constexpr int COLUMNS = 9;  // of a matrix: planes, scales, bias (null where it has none)
enum Part { PLANES, SCALES, BIAS };

__device__ __forceinline__ Address address_of(const Address *table, int expert, Matrix matrix, Part part) {
  return __ldcg(table + expert * COLUMNS + matrix * 3 + part);
}

// The table's lines come to L2 while the kernel waits: what stands in them may still change.
template <int THREADS>
__device__ __forceinline__ void prefetch_table(const Address *table, int count) {
  const char *const from = reinterpret_cast<const char *>(table);
  for (int i = threadIdx.x * 128; i < count * COLUMNS * 8; i += THREADS * 128) prefetch_line(from + i);
}

// A value as an integer that is larger for larger values, above 0; NaN is the largest. And back.
__device__ __forceinline__ uint32 ordered(float v) {
  const uint32 bits = __float_as_uint(v + 0.0f);  // makes -0 the same as 0
  return v != v ? ~0u : bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// The `top` largest of `count` logits (f32, at most 32 E of them), and their softmax over all or, `normalize`, over
// those alone: lane i gets the i-th of them. Of equal logits the first is taken. A logit that is NaN or +inf makes all
// weights NaN, as a softmax does. All lanes of a warp must come, and all warps that do get the same bits.
template <int E>
__device__ __forceinline__ void choose(const float *logits, int count, int top, bool normalize, int lane, int &expert,
                                       float &weight) {
  uint32 keys[E];
  float values[E];
  bool broken = false;
#pragma unroll
  for (int i = 0; i < E; i++) {
    const int e = i * 32 + lane;
    values[i] = e < count ? __ldcg(logits + e) : 0;
    keys[i] = e < count ? ordered(values[i]) : 0;
    broken |= !(values[i] <= 3.4028234e38f);
  }
  broken = __any_sync(~0u, broken);
  expert = 0;
  uint32 mine = 0, first = 0;
#pragma unroll 1
  for (int k = 0; k < top; k++) {
    uint32 largest = 0;  // of this lane, and whose it is
    int own = lane;
#pragma unroll
    for (int i = 0; i < E; i++)
      if (keys[i] > largest) largest = keys[i], own = i * 32 + lane;
    const uint32 best = __reduce_max_sync(~0u, largest);
    const unsigned equal = __ballot_sync(~0u, largest == best);
    int at = __shfl_sync(~0u, own, __ffs(equal) - 1);
    if (equal & (equal - 1)) at = 0x10000 - __reduce_max_sync(~0u, largest == best ? 0x10000u - own : 0);  // the first
    if (k == 0) first = best;
    if (lane == k) expert = at, mine = best;
#pragma unroll
    for (int i = 0; i < E; i++)
      if (i * 32 + lane == at) keys[i] = 0;
  }
  const float most = value_of(first);
  const float share = lane < top ? __expf(value_of(mine) - most) : 0;
  float sum = share;
  if (!normalize) {
    sum = 0;
#pragma unroll
    for (int i = 0; i < E; i++) sum += i * 32 + lane < count ? __expf(values[i] - most) : 0;
  }
  sum = warp_sum(sum);
  weight = broken ? __uint_as_float(0x7fc00000u) : share / sum;
}

// What a gated feed-forward's last product reads. SWIGLUOAI: both are bounded by 7, and up gets 1 more.
enum Activation { SILU_GATE, GELU_GATE, GELU_TANH_GATE, SWIGLUOAI_GATE };

template <Activation ACT>
__device__ __forceinline__ float activated(float gate, float up) {
  if constexpr (ACT == SILU_GATE) return gate / (1 + __expf(-gate)) * up;
  if constexpr (ACT == GELU_GATE) return gelu_of<GELU>(gate) * up;
  if constexpr (ACT == GELU_TANH_GATE) return gelu_of<GELU_TANH>(gate) * up;
  const float g = gate > 7 ? 7 : gate, u = up > 7 ? 7 : up < -7 ? -7 : up;  // a NaN stays
  return g / (1 + __expf(-1.702f * g)) * (u + 1);
}

}  // namespace crelle
