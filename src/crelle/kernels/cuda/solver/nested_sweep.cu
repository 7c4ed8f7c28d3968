// Passes over the columns of a weight that has one code for several precisions (crelle.quantizers.solvers.nested_sweep,
// which is the reference): precision p of P stands for  low_p + scale_p (code >> (P - 1 - p)),  and the code minimises
//   sum_p (root_p (low_p + scale_p (code >> (P - 1 - p)) - want_p))^2      root_p^2 = the weight of precision p
// A thread has all precisions of a row. It compares all codes: codes that begin alike share the terms of the coarser
// precisions, so that 4 bits with 2 and 3 in them have 28 terms, and a pass is mostly its matrix products anyway.
#include "solver/sweep_block.cuh"

namespace crelle {

struct CodeCost {
  float code, cost;
};

// The best of the codes that begin with `prefix` at precision p; `cost`: of the precisions before. Of equals the lower.
template <int P, int p = 0>
__device__ __forceinline__ CodeCost best_below(const float (&step)[P], const float (&want)[P], float prefix,
                                               float cost) {
  const float off = fmaf(step[p], prefix, -want[p]);
  const float sum = fmaf(off, off, cost);
  if constexpr (p == P - 1) {
    return {prefix, sum};
  } else {
    const CodeCost low = best_below<P, p + 1>(step, want, 2 * prefix, sum);
    const CodeCost high = best_below<P, p + 1>(step, want, 2 * prefix + 1, sum);
    return high.cost < low.cost ? high : low;
  }
}

// The common code; coarse: how many levels the coarsest precision has.
template <int P>
__device__ __forceinline__ int best_code(const float (&scale)[P], const float (&low)[P], const float (&root)[P],
                                         const float (&want)[P], int coarse) {
  float step[P], wanted[P];
#pragma unroll
  for (int p = 0; p < P; p++) step[p] = root[p] * scale[p], wanted[p] = root[p] * (want[p] - low[p]);
  CodeCost best = best_below<P>(step, wanted, 0, 0);
#pragma unroll(P < 4 ? 4 : 1)
  for (int j = 1; j < coarse; j++) {
    const CodeCost other = best_below<P>(step, wanted, j, 0);
    best = other.cost < best.cost ? other : best;
  }
  return best.code;
}

template <int PRECISIONS>
struct NestedLevels {
  static constexpr int P = PRECISIONS, COLUMNS = P > 4 ? 4 : 8, FLOATS = 2 * P;
  const float *grids;    // [groups, P, 2, N]: scale and low
  const int *group;      // [BLOCK], in shared memory
  unsigned char *found;  // [B, N]
  float root[P];
  int coarse, N, row;

  __device__ __forceinline__ void prefetch(uint32 to, int column) const {
    const float *const from = grids + (size_t)group[column] * FLOATS * N + row;
#pragma unroll
    for (int i = 0; i < FLOATS; i++) copy_4(to + i * ROWS * 4, from + (size_t)i * N);
  }
  __device__ __forceinline__ int nearest(const float *near, int, const float (&want)[P], float (&value)[P]) const {
    float scale[P], low[P];
#pragma unroll
    for (int p = 0; p < P; p++) scale[p] = near[2 * p * ROWS], low[p] = near[(2 * p + 1) * ROWS];
    const int code = best_code(scale, low, root, want, coarse);
#pragma unroll
    for (int p = 0; p < P; p++) value[p] = fmaf(scale[p], (float)(code >> (P - 1 - p)), low[p]);
    return code;
  }
  __device__ __forceinline__ void store(const int (&code)[COLUMNS], int begin, int end) const {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
      if (begin + c < end) found[(size_t)(begin + c) * N + row] = code[c];
  }
};

// A block of columns: see sweep_row. group [B]: of each column; roots [P]. Grid: ceil(N / 32).
template <int P, bool DESCENT>
__global__ void __launch_bounds__(32, 2)
    nested_sweep(const float *__restrict__ want, const float *__restrict__ target, const float *__restrict__ mix,
                 const float *__restrict__ grids, const int *group, const float *roots, float *error, float *change,
                 unsigned char *found, int coarse, int N, int K, int B) {
  extern __shared__ __align__(128) char shared[];
  float *const memory = reinterpret_cast<float *>(shared);
  using Levels = NestedLevels<P>;
  int *const of = reinterpret_cast<int *>(memory + sweep_floats<Levels>());
  const int row = blockIdx.x * ROWS + threadIdx.x, clamped = min(row, N - 1);
  for (int i = threadIdx.x; i < B; i += 32) of[i] = group[i];
  __syncwarp();
  Levels levels{grids, of, found, {}, coarse, N, clamped};
#pragma unroll
  for (int p = 0; p < P; p++) levels.root[p] = roots[p];
  sweep_row<DESCENT, false>(levels, memory, want, target, mix, nullptr, error, change, nullptr, N, K, B, clamped,
                            row < N);
}

// The best codes of weights [K, N] without error propagation, groups of G columns. Grid: ceil(N / 32), groups.
template <int P>
__global__ void __launch_bounds__(32)
    nested_nearest(const float *__restrict__ weight, const float *__restrict__ grids, const float *roots,
                   unsigned char *found, int coarse, int N, int K, int G) {
  const int row = blockIdx.x * 32 + threadIdx.x;
  if (row >= N) return;
  const float *const grid = grids + (size_t)blockIdx.y * 2 * P * N + row;
  float scale[P], low[P], root[P], want[P];
#pragma unroll
  for (int p = 0; p < P; p++)
    scale[p] = grid[(size_t)(2 * p) * N], low[p] = grid[(size_t)(2 * p + 1) * N], root[p] = roots[p];
  const int begin = blockIdx.y * G, end = min(begin + G, K);
  for (int k = begin; k < end; k++) {
    const float w = weight[(size_t)k * N + row];
#pragma unroll
    for (int p = 0; p < P; p++) want[p] = w;
    found[(size_t)k * N + row] = best_code(scale, low, root, want, coarse);
  }
}

}  // namespace crelle
