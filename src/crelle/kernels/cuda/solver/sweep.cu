// Passes over the columns of a weight, 64 at a time (sweep_block.cuh), on levels from a table and on uniform grids.
#include "solver/sweep_block.cuh"

namespace crelle {

// Up to L levels a column from a table [levels, N], ascending: `count` rows from `first` on. With L = 16 a column may
// have more; those are searched where they lie.
template <int L>
struct TableLevels {
  static constexpr int P = 1, COLUMNS = 8, FLOATS = L;
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

  // By a binary search in registers; `near`: the column's levels in shared memory, ROWS apart.
  __device__ __forceinline__ int nearest(const float *near, int column, const float (&wants)[1],
                                         float (&value)[1]) const {
    const float want = wants[0];
    if (L == 16 && count[column] > L) return search(column, want, value[0]);
    float v[L];
#pragma unroll
    for (int l = 0; l < L; l++) v[l] = near[l * ROWS];
    int place = 0;
    halve<L / 2>(v, want, place);
    value[0] = v[0];
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
  static constexpr int P = 1, COLUMNS = 8, FLOATS = 2;
  const float *scale, *low;  // [B, N]
  float top;
  int N, row;

  __device__ __forceinline__ void prefetch(uint32 to, int column) const {
    const size_t at = (size_t)column * N + row;
    copy_4(to, scale + at), copy_4(to + ROWS * 4, low + at);
  }
  __device__ __forceinline__ int nearest(const float *near, int, const float (&want)[1], float (&value)[1]) const {
    const float q = fminf(fmaxf(rintf(__fdiv_rn(want[0] - near[ROWS], near[0])), 0.0f), top);
    value[0] = fmaf(near[0], q, near[ROWS]);
    return 0;
  }
  __device__ __forceinline__ void store(const int (&)[COLUMNS], int, int) const {}
};

// first, count [B]: which rows of `values` [levels, N] are the levels of each column; found [B, N] gets the codes.
// Grid: ceil(N / 32).
template <int L, bool DESCENT, bool OUTLIERS>
__global__ void __launch_bounds__(32, 4)
    sweep_table(const float *__restrict__ want, const float *__restrict__ target, const float *__restrict__ mix,
                const float *__restrict__ values, const unsigned char *__restrict__ codes, const int *first,
                const int *count, const unsigned char *__restrict__ outliers, float *error, float *change,
                unsigned char *found, float *kept, int N, int K, int B) {
  extern __shared__ __align__(128) char shared[];
  float *const memory = reinterpret_cast<float *>(shared);
  int *const of = reinterpret_cast<int *>(memory + sweep_floats<TableLevels<L>>());
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
