// Rounds a block of up to 64 columns of a weight in order, each to the level nearest to  want_i + sum_j change_j
// mix[j][i]  over the columns j of the block before it: the inner loop of GPTQ's error feedback and of coordinate
// descent (crelle.quantizers.sweep, which is the reference). What other blocks contribute is in `want` already, by one
// matrix product.
//
// Rows are independent of one another: a thread has one, a thread block is one warp, and matrices are [columns, rows],
// so that a warp reads 32 neighbours. A column waits for the one before it, so latency is what counts. Therefore:
//   - 8 columns at a time are in registers; what the block's earlier columns contribute to them is summed first, in 8
//     independent chains, and only the 28 terms among the 8 are on the critical path
//   - the levels of the next 8 columns are on their way to shared memory meanwhile (in the order of the pass
//     neighbours are of different groups), and a binary search in registers finds the nearest
//   - codes are looked up and stored after the 8 columns, not between them
#include "copy_4.cuh"

namespace crelle {

constexpr int BLOCK = 64, COLUMNS = 8, ROWS = 32;

// Up to L levels a column from a table [levels, N], ascending: `count` rows from `first` on. With L = 16 a column may
// have more; those are searched where they lie.
template <int L>
struct TableLevels {
  static constexpr int FLOATS = L;
  const float *values;
  const unsigned char *codes;  // [levels, N], or null: the code of a level is its place in its group
  const int *first, *count;    // [BLOCK], in shared memory
  unsigned char *found;        // [B, N]
  int N, row;

  // Where level l of a column is; a table has less than 2^32 entries.
  __device__ __forceinline__ uint32 at(int column, int l) const { return (uint32)(first[column] + l) * N + row; }

  __device__ __forceinline__ void prefetch(uint32 to, int column) const {
    const int last = count[column] - 1;
    const uint32 begin = at(column, 0);
#pragma unroll
    for (int l = 0; l < L; l++) copy_4(to + l * ROWS * 4, values + (begin + (uint32)min(l, last) * N));
  }

  // Return the place of the nearest level; `near`: the column's levels in shared memory, ROWS apart.
  __device__ __forceinline__ int nearest(const float *near, int column, float want, float &value) const {
    if (L == 16 && count[column] > L) return search(column, want, value);
    float v[L];
#pragma unroll
    for (int l = 0; l < L; l++) v[l] = near[l * ROWS];
    int place = 0;
    halve<L / 2>(v, want, place);
    value = v[0];
    return min(place, count[column] - 1);  // places behind the last level repeat it
  }

  // One step of a binary search in registers: keep the upper or the lower of two halves.
  template <int HALF>
  static __device__ __forceinline__ void halve(float (&v)[L], float want, int &place) {
    const bool above = 2 * want > v[HALF - 1] + v[HALF];
    place += above ? HALF : 0;
#pragma unroll
    for (int l = 0; l < HALF; l++) v[l] = above ? v[HALF + l] : v[l];
    if constexpr (HALF > 1) halve<HALF / 2>(v, want, place);
  }

  __device__ __forceinline__ int search(int column, float want, float &value) const {
    int low = 0, high = count[column] - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (2 * want > values[at(column, middle)] + values[at(column, middle + 1)])
        low = middle + 1;
      else
        high = middle;
    }
    value = values[at(column, low)];
    return low;
  }

  // Store the codes of COLUMNS columns from `begin` on; `end`: behind the last one there is.
  __device__ __forceinline__ void store(const int (&place)[COLUMNS], int begin, int end) const {
    unsigned char code[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      code[c] = place[c];
      if (codes) code[c] = codes[at(min(begin + c, end - 1), place[c])];
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
      if (begin + c < end) found[(size_t)(begin + c) * N + row] = code[c];
  }
};

// The levels  low + scale q,  q = 0 … top, of each weight; codes are not stored.
struct UniformLevels {
  static constexpr int FLOATS = 2;
  const float *scale, *low;  // [B, N]
  float top;
  int N, row;

  __device__ __forceinline__ void prefetch(uint32 to, int column) const {
    const size_t at = (size_t)column * N + row;
    copy_4(to, scale + at), copy_4(to + ROWS * 4, low + at);
  }
  __device__ __forceinline__ int nearest(const float *near, int, float want, float &value) const {
    const float q = fminf(fmaxf(rintf(__fdiv_rn(want - near[ROWS], near[0])), 0.0f), top);
    value = fmaf(near[0], q, near[ROWS]);
    return 0;
  }
  __device__ __forceinline__ void store(const int (&)[COLUMNS], int, int) const {}
};

// Shared memory of a thread block, in floats; the ints of TableLevels come behind.
constexpr int MIX = BLOCK * BLOCK, CHANGES = BLOCK * ROWS;

// The part of `mix` [.., K] that counts, above the diagonal of its first B rows and columns.
__device__ __forceinline__ void copy_mix(const float *to, const float *mix, int K, int B, int lane) {
  const uint32 at = shared_address(to);
  if (((size_t)mix | (size_t)K * 4 | (size_t)B * 4) % 16 == 0) {
    const int column = lane % 16 * 4;
    for (int j = lane / 16; j < B; j += 2)
      if (column + 3 > j && column < B) copy_16(at + (j * BLOCK + column) * 4, mix + (size_t)j * K + column);
  } else {
    for (int j = 0; j < B; j++)
      for (int column = lane; column < B; column += 32)
        if (column > j) copy_4(at + (j * BLOCK + column) * 4, mix + (size_t)j * K + column);
  }
}

// One row. want, target [B, N]; error [B, N]: what is left of each weight, written (DESCENT: read before, and `change`
// [B, N] gets the difference); outliers [B, N] or null: not 0 where a weight takes what it wants, as f16, which then
// goes to `kept` [B, N].
template <bool DESCENT, bool OUTLIERS, class Levels>
__device__ __forceinline__ void sweep_row(const Levels &levels, float *memory, const float *want, const float *target,
                                          const float *mix, const unsigned char *outliers, float *error, float *change,
                                          float *kept, int N, int K, int B, int row, bool real) {
  const int lane = threadIdx.x;
  const float *const by = memory;                           // [BLOCK][BLOCK]
  float *const changes = memory + MIX + lane;               // [BLOCK][ROWS]
  const float *const near = memory + MIX + CHANGES + lane;  // [2][COLUMNS][FLOATS][ROWS]
  const auto prefetch = [&](int begin) {
    const float *to = near + begin / COLUMNS % 2 * (COLUMNS * Levels::FLOATS * ROWS);
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
    float w[COLUMNS], t[COLUMNS], before[COLUMNS], sum[COLUMNS] = {};
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const size_t at = (size_t)min(begin + c, B - 1) * N + row;
      w[c] = want[at], t[c] = target[at];
      if constexpr (DESCENT) before[c] = error[at];
    }
    if (begin + COLUMNS < B) prefetch(begin + COLUMNS);
    commit_copies();
    wait_for_copies<1>();
    if (begin == 0) __syncwarp();  // each lane copied a part of `mix`; levels are its own
#pragma unroll 4
    for (int j = 0; j < begin; j++) {
      const float moved = changes[j * ROWS];
      const float4 *const from = reinterpret_cast<const float4 *>(by + j * BLOCK + begin);
      const float4 a = from[0], b = from[1];
      sum[0] = fmaf(a.x, moved, sum[0]), sum[1] = fmaf(a.y, moved, sum[1]);
      sum[2] = fmaf(a.z, moved, sum[2]), sum[3] = fmaf(a.w, moved, sum[3]);
      sum[4] = fmaf(b.x, moved, sum[4]), sum[5] = fmaf(b.y, moved, sum[5]);
      sum[6] = fmaf(b.z, moved, sum[6]), sum[7] = fmaf(b.w, moved, sum[7]);
    }
    float left[COLUMNS], moved[COLUMNS], exact[COLUMNS];
    int place[COLUMNS];
    const float *const here = near + begin / COLUMNS % 2 * (COLUMNS * Levels::FLOATS * ROWS);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) w[c] += sum[c];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const int i = begin + c;
      float value;
      place[c] = levels.nearest(here + c * Levels::FLOATS * ROWS, min(i, B - 1), w[c], value);
      if constexpr (OUTLIERS) {
        const bool any = outlier >> i & 1;
        exact[c] = any ? to_float(from_float<half>(w[c])) : 0.0f;
        value = any ? exact[c] : value;
      }
      left[c] = t[c] - value;
      moved[c] = DESCENT ? left[c] - before[c] : left[c];
      changes[i * ROWS] = moved[c];
#pragma unroll
      for (int d = c + 1; d < COLUMNS; d++) w[d] = fmaf(by[i * BLOCK + begin + d], moved[c], w[d]);
    }
    if (!real) continue;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      if (begin + c >= B) continue;
      const size_t at = (size_t)(begin + c) * N + row;
      error[at] = left[c];
      if constexpr (DESCENT) change[at] = moved[c];
      if constexpr (OUTLIERS) kept[at] = exact[c];
    }
    levels.store(place, begin, B);
  }
}

// first, count [B]: which rows of `values` [levels, N] are the levels of each column; found [B, N] gets the codes.
// `mix` points to the block's first diagonal element in a matrix with rows of K. Grid: ceil(N / 32).
template <int L, bool DESCENT, bool OUTLIERS>
__global__ void __launch_bounds__(32, 4)
    sweep_table(const float *__restrict__ want, const float *__restrict__ target, const float *__restrict__ mix,
                const float *__restrict__ values, const unsigned char *__restrict__ codes, const int *first,
                const int *count, const unsigned char *__restrict__ outliers, float *error, float *change,
                unsigned char *found, float *kept, int N, int K, int B) {
  extern __shared__ __align__(128) char shared[];
  float *const memory = reinterpret_cast<float *>(shared);
  int *const of = reinterpret_cast<int *>(memory + MIX + CHANGES + 2 * COLUMNS * L * ROWS);
  const int row = blockIdx.x * ROWS + threadIdx.x, clamped = min(row, N - 1);
  for (int i = threadIdx.x; i < B; i += 32) of[i] = first[i], of[BLOCK + i] = count[i];
  __syncwarp();
  const TableLevels<L> levels{values, codes, of, of + BLOCK, found, N, clamped};
  sweep_row<DESCENT, OUTLIERS>(levels, memory, want, target, mix, outliers, error, change, kept, N, K, B, clamped,
                               row < N);
}

// Error feedback on grids scale, low [B, N] with the highest code `top` [N].
__global__ void __launch_bounds__(32, 4)
    sweep_uniform(const float *__restrict__ want, const float *__restrict__ target, const float *__restrict__ mix,
                  const float *__restrict__ scale, const float *__restrict__ low, const float *__restrict__ top,
                  float *error, int N, int K, int B) {
  extern __shared__ __align__(128) char shared[];
  const int row = blockIdx.x * ROWS + threadIdx.x, clamped = min(row, N - 1);
  const UniformLevels levels{scale, low, top[clamped], N, clamped};
  sweep_row<false, false>(levels, reinterpret_cast<float *>(shared), want, target, mix, nullptr, error, nullptr,
                          nullptr, N, K, B, clamped, row < N);
}

}  // namespace crelle
