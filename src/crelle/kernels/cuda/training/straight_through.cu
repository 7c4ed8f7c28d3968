// Weights of training rounded to the grids of their groups, and the straight-through gradient of that:
//
//   v = (w step - low) / scale     q = clamp(round(v), 0, top)     w^ = low + scale q
//
// A group of G weights has `lanes` neighbouring lanes of a warp, a power of two; each takes VEC weights at a time.
// Groups lie in rows of C, a row every `pitch` weights and every `grid_pitch` grids. Products are rounded as torch's
// are, one by one, so that the forward pass has its bits. OWN: scale and low are in steps, as an affine grid trains
// them, and rounded to f16 here, as it stores them.
#include "ptx/types.cuh"
#include "ptx/vector.cuh"

namespace crelle {

struct Grid {
  float step, scale, low;
  bool clamped;  // the scale is the least one there is, and no longer depends on its parameter
};

constexpr float TINY = 0x1p-24f;  // the smallest positive f16

template <bool OWN>
__device__ __forceinline__ Grid grid_of(const float *step, const float *scale, const float *low, long long at) {
  Grid g{step[at], scale[at], low[at], false};
  if constexpr (OWN) {
    const float wide = __fmul_rn(g.scale, g.step);
    g.clamped = wide < TINY;
    g.scale = __half2float(__float2half_rn(g.clamped ? TINY : wide));
    g.low = __half2float(__float2half_rn(__fmul_rn(g.low, g.step)));
  }
  return g;
}

__device__ __forceinline__ float in_steps(float w, const Grid &g) {
  return __fdiv_rn(__fsub_rn(__fmul_rn(w, g.step), g.low), g.scale);
}

// NaN stays NaN, as in torch.
__device__ __forceinline__ float code(float v, float top) { return min_nan(max_nan(rintf(v), 0), top); }

// What a lane works on.
struct Place {
  long long group, weight, grid, out;
  bool live;
};

__device__ __forceinline__ Place place_of(int lanes, int C, int G, long long groups, long long pitch, int grid_pitch) {
  const long long group = (blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x) / lanes;
  const long long row = group / C, column = group - row * C;
  return {group, row * pitch + column * G, row * grid_pitch + column, group * G, group < groups};
}

template <int VEC, bool OWN, typename T>
__global__ void straight_through(const float *__restrict__ w, const float *__restrict__ step,
                                 const float *__restrict__ scale, const float *__restrict__ low, T *__restrict__ out,
                                 int lanes, int C, int G, long long groups, long long pitch, int grid_pitch,
                                 float top) {
  const Place p = place_of(lanes, C, G, groups, pitch, grid_pitch);
  if (!p.live) return;
  const Grid g = grid_of<OWN>(step, scale, low, p.grid);
  for (int i = threadIdx.x % lanes * VEC; i < G; i += lanes * VEC) {
    const auto x = *reinterpret_cast<const Vector<VEC, float> *>(w + p.weight + i);
    Vector<VEC, T> y;
#pragma unroll
    for (int e = 0; e < VEC; e++)
      y.v[e] = from_float<T>(__fadd_rn(__fmul_rn(code(in_steps(x.v[e], g), top), g.scale), g.low));
    *reinterpret_cast<Vector<VEC, T> *>(out + p.out + i) = y;
  }
}

template <int VEC, bool OWN, typename T>
__global__ void straight_through_backward(const float *__restrict__ w, const float *__restrict__ step,
                                          const float *__restrict__ scale, const float *__restrict__ low,
                                          const T *__restrict__ gradient, float *__restrict__ d_w,
                                          float *__restrict__ d_scale, float *__restrict__ d_low, int lanes, int C,
                                          int G, long long groups, long long pitch, int grid_pitch, float top) {
  const Place p = place_of(lanes, C, G, groups, pitch, grid_pitch);
  float sum_scale = 0, sum_low = 0;
  Grid g{};
  if (p.live) {
    g = grid_of<OWN>(step, scale, low, p.grid);
    for (int i = threadIdx.x % lanes * VEC; i < G; i += lanes * VEC) {
      const auto x = *reinterpret_cast<const Vector<VEC, float> *>(w + p.weight + i);
      const auto y = *reinterpret_cast<const Vector<VEC, T> *>(gradient + p.out + i);
      Vector<VEC, float> d;
#pragma unroll
      for (int e = 0; e < VEC; e++) {
        const float v = in_steps(x.v[e], g), by = to_float(y.v[e]);
        const float through = v > -0.5f && v < top + 0.5f ? by : 0;
        sum_scale += by * code(v, top) - through * v;
        sum_low += by - through;
        d.v[e] = through * g.step;
      }
      *reinterpret_cast<Vector<VEC, float> *>(d_w + p.out + i) = d;
    }
  }
  for (int i = lanes / 2; i; i /= 2) {
    sum_scale += __shfl_xor_sync(~0u, sum_scale, i);
    sum_low += __shfl_xor_sync(~0u, sum_low, i);
  }
  if (!p.live || threadIdx.x % lanes) return;
  d_scale[p.group] = !OWN ? sum_scale : g.clamped ? 0 : sum_scale * g.step;
  d_low[p.group] = OWN ? sum_low * g.step : sum_low;
}

}  // namespace crelle
