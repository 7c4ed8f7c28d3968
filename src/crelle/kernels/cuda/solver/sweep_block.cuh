// Rounds a block of up to 64 columns of a weight in order, each to what its `Levels` have nearest to  want_i + sum_j
// change_j mix[j][i]  over the columns j of the block before it: the inner loop of GPTQ's error feedback and of
// coordinate descent (crelle.quantizers.solvers.sweep, which is the reference). What other blocks contribute is in
// `want` already, by one matrix product.
//
// Rows are independent of one another: a thread has one, a thread block is one warp, and matrices are [columns, rows],
// so that a warp reads 32 neighbours. A column waits for the one before it, so latency is what counts. Therefore:
//   - 8 columns at a time are in registers; what the block's earlier columns contribute to them is summed first, in 8
//     independent chains, and only the 28 terms among the 8 are on the critical path
//   - the levels of the next 8 columns are on their way to shared memory meanwhile (in the order of the pass
//     neighbours are of different groups)
//   - codes are looked up and stored after the 8 columns, not between them
// A row may have several precisions, each with a want and an error of its own and one code for all: then matrices of
// wants and errors are [columns, precisions, rows]. With many of them 4 columns are in registers, not 8.
//
// `Levels` has
//   P, COLUMNS, FLOATS               precisions, columns in registers, floats that it wants in shared memory a column
//   prefetch(to, column)             copies those, ROWS apart
//   nearest(near, column, want, v)   returns the place of what is chosen, and its value at each precision
//   store(place, begin, end)         stores the codes of COLUMNS columns from `begin` on, none at `end` or behind it
#pragma once
#include "ptx/copy_4.cuh"

namespace crelle {

constexpr int BLOCK = 64, ROWS = 32;
constexpr int MIX = BLOCK * BLOCK;  // floats of shared memory

// The part of `mix` [.., K] that counts: its first B columns and rows, or only what is above the diagonal.
template <bool WHOLE = false>
__device__ __forceinline__ void copy_mix(const float *to, const float *mix, int K, int B, int lane) {
  const uint32 at = shared_address(to);
  if (((size_t)mix | (size_t)K * 4 | (size_t)B * 4) % 16 == 0) {
    const int column = lane % 16 * 4;
    for (int j = lane / 16; j < B; j += 2)
      if ((WHOLE || column + 3 > j) && column < B) copy_16(at + (j * BLOCK + column) * 4, mix + (size_t)j * K + column);
  } else {
    for (int j = 0; j < B; j++)
      for (int column = lane; column < B; column += 32)
        if (WHOLE || column > j) copy_4(at + (j * BLOCK + column) * 4, mix + (size_t)j * K + column);
  }
}

// sum[c][p] += sum_j by[j][c] x[j][p]  for j in [first, last); rows of `by` are BLOCK apart, an x of `x` ROWS.
template <int C, int P>
__device__ __forceinline__ void add_contributions(float (&sum)[C][P], const float *by, const float *x, int first,
                                                  int last) {
#pragma unroll 4
  for (int j = first; j < last; j++) {
    float moved[P], factor[C];
#pragma unroll
    for (int p = 0; p < P; p++) moved[p] = x[(j * P + p) * ROWS];
#pragma unroll
    for (int c = 0; c < C; c += 4) {
      const float4 four = *reinterpret_cast<const float4 *>(by + j * BLOCK + c);
      factor[c] = four.x, factor[c + 1] = four.y, factor[c + 2] = four.z, factor[c + 3] = four.w;
    }
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
      for (int p = 0; p < P; p++) sum[c][p] = fmaf(factor[c], moved[p], sum[c][p]);
  }
}

// Floats of shared memory of a thread block.
template <class Levels>
__device__ constexpr int sweep_floats() {
  return MIX + BLOCK * Levels::P * ROWS + 2 * Levels::COLUMNS * Levels::FLOATS * ROWS;
}

// One row. want [B, P, N], target [B, N]; error [B, P, N]: what is left of each weight, written (DESCENT: read before,
// and `change` [B, P, N] gets the difference); outliers [B, N] or null: not 0 where a weight takes what it wants, as
// f16, which then goes to `kept` [B, N]. `mix`: the block's first diagonal element in a matrix with rows of K.
template <bool DESCENT, bool OUTLIERS, class Levels>
__device__ __forceinline__ void sweep_row(const Levels &levels, float *memory, const float *want, const float *target,
                                          const float *mix, const unsigned char *outliers, float *error, float *change,
                                          float *kept, int N, int K, int B, int row, bool real) {
  constexpr int P = Levels::P, COLUMNS = Levels::COLUMNS, NEAR = COLUMNS * Levels::FLOATS * ROWS;
  static_assert(P == 1 || !OUTLIERS);
  const int lane = threadIdx.x;
  const float *const by = memory;                                    // [BLOCK][BLOCK]
  float *const changes = memory + MIX + lane;                        // [BLOCK][P][ROWS]
  const float *const near = memory + MIX + BLOCK * P * ROWS + lane;  // [2][COLUMNS][FLOATS][ROWS]
  const auto prefetch = [&](int begin) {
    const float *to = near + begin / COLUMNS % 2 * NEAR;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
      levels.prefetch(shared_address(to + c * Levels::FLOATS * ROWS), min(begin + c, B - 1));
  };
  copy_mix(by, mix, K, B, lane);
  prefetch(0);
  commit_copies();
  unsigned long long outlier = 0;
  if constexpr (OUTLIERS) {
#pragma unroll 16
    for (int i = 0; i < B; i++) outlier |= (unsigned long long)(outliers[(size_t)i * N + row] != 0) << i;
  }
  for (int begin = 0; begin < B; begin += COLUMNS) {
    float w[COLUMNS][P], t[COLUMNS], before[COLUMNS][P], sum[COLUMNS][P] = {};
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const size_t column = min(begin + c, B - 1), at = column * P * N + row;
#pragma unroll
      for (int p = 0; p < P; p++) w[c][p] = want[at + (size_t)p * N];
      t[c] = target[column * N + row];
#pragma unroll
      for (int p = 0; DESCENT && p < P; p++) before[c][p] = error[at + (size_t)p * N];
    }
    if (begin + COLUMNS < B) prefetch(begin + COLUMNS);
    commit_copies();
    wait_for_copies<1>();
    if (begin == 0) __syncwarp();  // each lane copied a part of `mix`; levels are its own
    add_contributions(sum, by + begin, changes, 0, begin);
    float left[COLUMNS][P], moved[COLUMNS][P], exact[COLUMNS];
    int place[COLUMNS];
    const float *const here = near + begin / COLUMNS % 2 * NEAR;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
      for (int p = 0; p < P; p++) w[c][p] += sum[c][p];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const int i = begin + c;
      float value[P];
      place[c] = levels.nearest(here + c * Levels::FLOATS * ROWS, min(i, B - 1), w[c], value);
      if constexpr (OUTLIERS) {
        const bool any = outlier >> i & 1;
        exact[c] = any ? to_float(from_float<half>(w[c][0])) : 0.0f;
        value[0] = any ? exact[c] : value[0];
      }
#pragma unroll
      for (int p = 0; p < P; p++) {
        left[c][p] = t[c] - value[p];
        moved[c][p] = DESCENT ? left[c][p] - before[c][p] : left[c][p];
        changes[(i * P + p) * ROWS] = moved[c][p];
#pragma unroll
        for (int d = c + 1; d < COLUMNS; d++) w[d][p] = fmaf(by[i * BLOCK + begin + d], moved[c][p], w[d][p]);
      }
    }
    if (!real) continue;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      if (begin + c >= B) continue;
      const size_t at = (size_t)(begin + c) * P * N + row;
#pragma unroll
      for (int p = 0; p < P; p++) {
        error[at + (size_t)p * N] = left[c][p];
        if constexpr (DESCENT) change[at + (size_t)p * N] = moved[c][p];
      }
      if constexpr (OUTLIERS) kept[at] = exact[c];
    }
    levels.store(place, begin, B);
  }
}

}  // namespace crelle
