// y [M, N] = x [M, K] W.T for up to 4 tokens, W in bit-planes, by looking sums up: the papers' kernel.
//
//   w = z + sum_p alpha_p b_p,  b = +-1      (codes: alpha_p = 2^(P-2-p) scale, z = what is left)
//
// A byte of a plane is 8 signs; the sum of 8 inputs with these signs stands in a table (lut_table.cuh), so a byte costs
// one read of shared memory instead of 8 additions. A thread block makes the tables of SLICES * 256 inputs once and
// walks over many rows with them. Lane l of a warp takes inputs 8l ... of each slice for 16 rows at a time: 16 bytes of
// weights for 16 reads of its own table. Lanes that own inputs rather than rows are what makes tables free of bank
// conflicts possible (PRIVATE); the price is one sum over the lanes per 16 rows, a shuffle and an addition a row, which
// SLICES and P share. Weights are loaded STAGES planes early, the first ones before the tables are built and before
// the previous kernel is done.
//
// The thread blocks of some rows each leave partial sums, and the last one to finish adds them up in order: which one
// that is differs between runs, the sums do not. Layouts: crelle/kernels/cuda/lut/lut.py.
//
// On an H200, one token, group 128: PRIVATE reads weights at up to 3.5 TB/s and is 1.2 (4096 x 4096, 2 bits) to 1.8
// times (49152 x 12288, 4-bit codes) as fast as SHARED, which stays below 2.1 TB/s; the more planes, the more it gains,
// for then the look-ups are all that counts. Half entries gain nothing for one token: an entry is read in the same
// time, and must be converted. For several tokens they halve what is read, but the sum over lanes grows with the
// tokens.
#include "lut/lut_table.cuh"
#include "planes/scales.cuh"

namespace crelle {

// 16 bytes that are read once.
__device__ __forceinline__ uint4 stream(const void *p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Scales of 16 rows, rows 8 ... 15 first in the upper lanes.
template <typename S>
struct Scales {
  static constexpr int LOADS = sizeof(S);
  uint4 v[LOADS];
  // `from`: this lane's first eight rows; the others are `other` bytes away
  __device__ __forceinline__ void load(const char *from, int other) {
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      v[i] = __ldg(reinterpret_cast<const uint4 *>(from + (i < LOADS / 2 ? 0 : other)) + i % (LOADS / 2));
  }
  __device__ __forceinline__ float operator[](int r) const {
    constexpr int PER = 16 / LOADS;  // rows of a load
    const uint4 q = v[r / PER];
    const int i = r % PER * LOADS / 4;
    const uint32 w = i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w;
    if constexpr (LOADS == 4) {
      return __uint_as_float(w);
    } else {
      const unsigned short h = r % 2 ? w >> 16 : w & 0xffff;
      return to_float(*reinterpret_cast<const S *>(&h));
    }
  }
};

// One step of the sum over lanes: a lane and the one that differs in bit MASK exchange halves of their values.
template <int MASK, int M>
__device__ __forceinline__ void exchange(float (&v)[16 * M], int lane) {
  constexpr int KEPT = 16 * M * MASK / 32;
  if constexpr (KEPT == 0) v[0] += __shfl_xor_sync(~0u, v[0], MASK);
#pragma unroll
  for (int i = 0; i < KEPT; i++) {
    const bool upper = MASK < 16 && lane & MASK;  // for 16 the halves already lie as they should
    const float keep = upper ? v[i + KEPT] : v[i], give = upper ? v[i] : v[i + KEPT];
    v[i] = keep + __shfl_xor_sync(~0u, give, MASK);
  }
}

// v of every lane, index row * M + token: sum over the lanes, and leave to lane l what belongs to it: row l / 2, with
// M = 4 tokens 2 (l % 2) and the next, with M = 2 token l % 2, with M = 1 the same sum in both lanes of a row.
template <int M>
__device__ __forceinline__ void sum_lanes(float (&v)[16 * M], int lane) {
  exchange<16, M>(v, lane);
  exchange<8, M>(v, lane);
  exchange<4, M>(v, lane);
  exchange<2, M>(v, lane);
  exchange<1, M>(v, lane);
}

// words [tiles, units, planes, 4, 32, uint4], scales [tiles, sets, scale words, GROUPS, 16]; order, bias [N] and
// residual [tokens, N] may be null; partial [splits, M, 16 tiles] and semaphores [gridDim.x] are room to work in,
// semaphores 0 before and after; y [tokens, N]. Grid (any number of row blocks, splits = 4 units / SLICES).
template <int P, ScaleKind KIND, int GROUPS, int M, Placement PLACE, int SLICES, int WARPS, int OCCUPANCY, int STAGES,
          typename T, typename S, typename X>
__global__ void __launch_bounds__(WARPS * 32, OCCUPANCY)
    lut(const char *__restrict__ words, const char *__restrict__ scales, const X *x, const int *__restrict__ perm,
        const X *__restrict__ bias, const X *residual, float *partial, int *semaphores, X *y, int N, int K, int tokens,
        int units, int planes, int blocks_per_scale) {
  using Table = Tables<T, M, PLACE, SLICES>;
  constexpr bool CODES = KIND == UNIFORM || KIND == UNIFORM_SYMMETRIC || KIND == AFFINE;
  constexpr int SW = scales_per_group(KIND, P), SCALE_STEP = GROUPS * 16 * sizeof(S);
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), upper = lane >> 4;
  const int tiles = (N + 15) / 16, sets = (units + blocks_per_scale - 1) / blocks_per_scale;
  const int unit = blockIdx.y * SLICES / 4, slice = blockIdx.y * SLICES % 4;
  const int begin = (int)((long long)tiles * blockIdx.x / gridDim.x);
  const int end = (int)((long long)tiles * (blockIdx.x + 1) / gridDim.x);

  launch_dependents();
  const size_t tile_bytes = (size_t)units * planes * 2048, tile_scales = (size_t)sets * GROUPS * SW * 16 * sizeof(S);
  const int eight = 8 * sizeof(S), other = upper ? -eight : eight;
  const char *at = words + (size_t)(begin + warp) * tile_bytes + unit * (planes * 2048) + slice * 512 + lane * 16;
  const char *scale = scales + (size_t)(begin + warp) * tile_scales + upper * eight +
                      (unit / blocks_per_scale * SW * GROUPS + lane * GROUPS / 32) * (16 * (int)sizeof(S));
  // Weights and alphas under way: each is loaded as soon as the one that was STAGES planes before it is used up.
  uint4 next[STAGES][SLICES];
  Scales<S> alpha[STAGES];
  if (begin + warp < end) {
#pragma unroll
    for (int p = 0; p < STAGES; p++) {
#pragma unroll
      for (int s = 0; s < SLICES; s++) next[p][s] = stream(at + (p * 4 + s) * 512);
      if constexpr (!CODES) alpha[p].load(scale + p * SCALE_STEP, other);
    }
  }
  grid_dependency_wait();

  Table tables(shared, lane);
  float undo[M];
  float *staged = reinterpret_cast<float *>(shared + Table::BYTES);
  stage<M, SLICES, WARPS>(staged, x, perm, tokens, K, unit * 1024 + slice * 8);
  __syncthreads();
  build<T, M, PLACE, SLICES, WARPS>(tables, staged + lane, warp, undo);
  __syncthreads();
  // The sum of this lane's inputs, from the inputs: it enters every row, so that errors of half entries would add up.
  float all[M];
#pragma unroll
  for (int m = 0; m < M; m++) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < SLICES * 8; i++) sum += staged[(m * SLICES * 8 + i) * PITCH + lane];
    all[m] = sum / undo[m];
  }

#pragma unroll 1
  for (int tile = begin + warp; tile < end; tile += WARPS) {
    const bool more = tile + WARPS < end;
    const char *next_at = at + WARPS * tile_bytes, *next_scale = scale + WARPS * tile_scales;
    float sums[16 * M];
#pragma unroll
    for (int i = 0; i < 16 * M; i++) sums[i] = 0;
    Scales<S> first, last;  // of a code: scale, then zero or low; z comes last, too
    if constexpr (CODES) first.load(scale, other);
    if constexpr (KIND == BCQ || KIND == UNIFORM || KIND == AFFINE) last.load(scale + (SW - 1) * SCALE_STEP, other);
#pragma unroll
    for (int p = 0; p < P; p++) {
      typename Table::E found[16];
#pragma unroll
      for (int s = 0; s < SLICES; s++) {
        const uint4 now = next[p % STAGES][s];
        uint32 where[16];
#pragma unroll
        for (int r = 0; r < 16; r++)
          where[r] = tables.at(r < 4 ? now.x : r < 8 ? now.y : r < 12 ? now.z : now.w, r % 4);
        if (p + STAGES < P)
          next[p % STAGES][s] = stream(at + ((p + STAGES) * 4 + s) * 512);
        else if (more)
          next[p % STAGES][s] = stream(next_at + (p % STAGES * 4 + s) * 512);
#pragma unroll
        for (int r = 0; r < 16; r++) {
          const typename Table::E e = tables.look_up(s, where[r]);
          if (s == 0)
            found[r] = e;
          else
            found[r].add(e);
        }
      }
#pragma unroll
      for (int r = 0; r < 16; r++) {
        float f[M];
        found[r].get(f);
        const float a = CODES ? 0 : alpha[p % STAGES][r];
#pragma unroll
        for (int m = 0; m < M; m++) {
          float &sum = sums[r * M + m];
          sum = CODES ? fmaf(2, sum, f[m]) : fmaf(a, f[m], sum);
        }
      }
      if constexpr (!CODES) {
        if (p + STAGES < P)
          alpha[p % STAGES].load(scale + (p + STAGES) * SCALE_STEP, other);
        else if (more)
          alpha[p % STAGES].load(next_scale + p % STAGES * SCALE_STEP, other);
      }
    }
#pragma unroll
    for (int r = 0; r < 16; r++) {
#pragma unroll
      for (int m = 0; m < M; m++) {
        float &sum = sums[r * M + m];
        if constexpr (KIND == BCQ) sum = fmaf(last[r], all[m], sum);
        if constexpr (KIND == UNIFORM) sum = first[r] * fmaf(0.5f * ((1 << P) - 1) - last[r], all[m], 0.5f * sum);
        if constexpr (KIND == UNIFORM_SYMMETRIC) sum = first[r] * (0.5f * (sum - all[m]));
        if constexpr (KIND == AFFINE) sum = fmaf(last[r], all[m], first[r] * (0.5f * fmaf((1 << P) - 1, all[m], sum)));
      }
    }
    sum_lanes<M>(sums, lane);
    const size_t rows = 16 * (size_t)tiles;
    float *to = partial + (size_t)blockIdx.y * M * rows + tile * 16 + lane / 2;
    if constexpr (M == 1) {
      if (lane % 2 == 0) to[0] = sums[0] * undo[0];
    } else {
#pragma unroll
      for (int i = 0; i < M / 2; i++) {
        const float by = lane % 2 ? undo[M / 2 + i] : undo[i];
        to[(lane % 2 * (M / 2) + i) * rows] = sums[i] * by;
      }
    }
    at = next_at, scale = next_scale;
  }

  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(semaphores + blockIdx.x, 1) == (int)gridDim.y - 1;
    if (is_last) {
      semaphores[blockIdx.x] = 0;
      __threadfence();
    }
  }
  __syncthreads();
  if (!is_last) return;
  const int rows = (end - begin) * 16;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * tokens; i += WARPS * 32) {
    const int m = i / rows, n = begin * 16 + i % rows;
    if (n >= N) continue;
    const float *from = partial + (size_t)m * 16 * tiles + n;
    float sum = 0;
#pragma unroll 8
    for (int k = 0; k < (int)gridDim.y; k++) sum += __ldcg(from + (size_t)k * M * 16 * tiles);
    if (bias) sum += to_float(bias[n]);
    if (residual) sum += to_float(residual[(size_t)m * N + n]);
    y[(size_t)m * N + n] = from_float<X>(sum);
  }
}

}  // namespace crelle
