// A group of weights in ascending order with running sums, in shared memory (large groups: in global memory), read and
// written by a team of lanes of one warp.
//
// Weights of importance 0 are padding: they are sorted to the end and counted in nothing. Sums are f64 and are made by
// one lane in ascending order, as on a CPU (group_solver.h).
#pragma once
#include "ptx/types.cuh"

namespace crelle {

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// Lanes that work on one group: one for each of 2^BITS levels, up to a warp; then each lane has several levels.
// All of a warp call these functions together.
template <int BITS>
struct Team {
  static constexpr int LEVELS = 1 << BITS, LANES = LEVELS < 32 ? LEVELS : 32, SLOTS = LEVELS / LANES;

  static __device__ __forceinline__ int lane() { return threadIdx.x % LANES; }
  static __device__ __forceinline__ int index() { return threadIdx.x / LANES; }  // of the team in its thread block

  // The sum over the team's lanes, the same bits in all of them.
  static __device__ __forceinline__ double sum(double v) {
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) v += __shfl_xor_sync(~0u, v, mask);
    return v;
  }
  static __device__ __forceinline__ bool any(bool v) {
    const uint32 all = __ballot_sync(~0u, v), mine = LANES == 32 ? ~0u : (1u << LANES % 32) - 1;
    return all >> threadIdx.x % 32 / LANES * LANES & mine;
  }
  template <typename T>
  static __device__ __forceinline__ T from_first(T v) {
    return __shfl_sync(~0u, v, threadIdx.x % 32 / LANES * LANES);
  }
};

struct SortedGroup {
  float *w;        // [G]
  double *sums;    // [G + 1], of h w
  double *masses;  // [G + 1], of h, where the group is weighted; otherwise h is 1, and the sum of i of them i
  bool weighted;
  int n;           // weights that are not padding
  double squares;  // sum of h w^2

  __device__ __forceinline__ float low() const { return w[0]; }
  __device__ __forceinline__ float high() const { return w[max(n, 1) - 1]; }
  __device__ __forceinline__ double mass_below(int i) const { return weighted ? masses[i] : (double)i; }
  __device__ __forceinline__ double mass() const { return mass_below(n); }
  __device__ __forceinline__ double mass(int a, int b) const { return mass_below(b) - mass_below(a); }
  __device__ __forceinline__ double sum(int a, int b) const { return sums[b] - sums[a]; }

  // The first place in [a, b] whose weight is not below v.
  __device__ __forceinline__ int place(float v, int a, int b) const {
    for (int left = b - a; left > 0;) {
      const int half = (left + 1) / 2;
      a += w[a + half - 1] < v ? half : 0;
      left -= half;
    }
    return a;
  }

  // The same for several values in the whole group, the searches side by side.
  template <int COUNT>
  __device__ __forceinline__ void places(const float (&v)[COUNT], int (&at)[COUNT]) const {
#pragma unroll
    for (int i = 0; i < COUNT; i++) at[i] = 0;
    for (int left = n; left > 0;) {
      const int half = (left + 1) / 2;
#pragma unroll
      for (int i = 0; i < COUNT; i++) at[i] += w[at[i] + half - 1] < v[i] ? half : 0;
      left -= half;
    }
  }

  // sum of h |w - v| in [a, b), m being the place of v.
  __device__ __forceinline__ double distance(double v, int a, int m, int b) const {
    return (sum(m, b) - v * mass(m, b)) - (sum(a, m) - v * mass(a, m));
  }

  // Where the groups of a thread block's `teams` lie in its memory, by kind: sums, masses, weights, with odd strides
  // of weights, so that teams of a warp read different banks. The size is in group_solver.py.
  static __device__ __forceinline__ SortedGroup in(char *memory, int team, int teams, int G, bool weighted) {
    double *const doubles = reinterpret_cast<double *>(memory);
    const size_t kind = (size_t)teams * (G + 1);
    float *const weights = reinterpret_cast<float *>(doubles + (weighted ? 2 : 1) * kind);
    double *const mine = doubles + (size_t)team * (G + 1);
    return {weights + (size_t)team * (G | 1), mine, mine + kind, weighted, 0, 0};
  }

  // Read a group, sort it and sum it up.
  template <class Team>
  __device__ __forceinline__ void set(const float *from, const float *importance, int G) {
    // Importances lie at the end of where masses will, which overwrite them behind the reader.
    float *const h = reinterpret_cast<float *>(masses + G + 1) - G;
    for (int k = Team::lane(); k < G; k += Team::LANES) {
      w[k] = from[k];
      if (!weighted) continue;
      const bool real = importance[k] > 0;
      h[k] = real ? importance[k] : 0.0f;
      if (!real) w[k] = infinity();
    }
    sort<Team>(h, G);
    if (Team::lane() == 0) sum_up(h, G);
    __syncwarp();
    n = Team::from_first(n), squares = Team::from_first(squares);
  }

private:
  // Bitonic, with the first step of each merge mirrored: the smaller value always goes down, so G need not be a power
  // of two; what would lie behind the end is never exchanged.
  template <class Team>
  __device__ __forceinline__ void sort(float *h, int G) {
    for (int half = 1; half < G; half *= 2)
      for (int stride = half; stride > 0; stride /= 2) {
        __syncwarp();
        for (int t = Team::lane();; t += Team::LANES) {
          const int at = t & (stride - 1), a = 2 * (t - at) + at;
          if (a >= G) break;
          const int b = stride == half ? 2 * (t - at) + 2 * stride - 1 - at : a + stride;
          if (b >= G || !(w[a] > w[b])) continue;
          const float v = w[a];
          w[a] = w[b], w[b] = v;
          if (!weighted) continue;
          const float u = h[a];
          h[a] = h[b], h[b] = u;
        }
      }
    __syncwarp();
  }

  __device__ __forceinline__ void sum_up(const float *h, int G) {
    constexpr int AT_ONCE = 8;  // read before any is summed: the loads do not wait for each other
    double mass = 0, sum = 0;
    n = 0, squares = 0, sums[0] = 0;
    if (weighted) masses[0] = 0;
    for (int begin = 0; begin < G; begin += AT_ONCE) {
      float v[AT_ONCE], u[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        const int i = min(begin + k, G - 1);
        v[k] = w[i], u[k] = weighted ? h[i] : 1.0f;
      }
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        if (begin + k >= G || !(u[k] > 0)) continue;  // padding is last
        mass += u[k], sum += (double)u[k] * v[k], squares += (double)u[k] * v[k] * v[k];
        n = begin + k + 1, sums[n] = sum;
        if (weighted) masses[n] = mass;
      }
    }
  }
};

}  // namespace crelle
