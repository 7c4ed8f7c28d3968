// y [M, N] = x [M, K] W.T for up to 4 tokens, W in bit-planes, by looking sums up: the papers' kernel.
//
//   w = z + sum_p alpha_p b_p,  b = +-1      (codes: alpha_p = 2^(P-2-p) scale, z = what is left)
//
// A byte of a plane is 8 signs; the sum of 8 inputs with these signs stands in a table (lut_table.cuh), so a byte costs
// one read of shared memory instead of 8 additions. A thread block makes the tables of SLICES * 256 inputs once and
// walks over many rows with them. Lane l of a warp takes inputs 8l ... of each slice for 16 rows at a time: 16 bytes of
// weights for 16 reads of its own table. Lanes that own inputs rather than rows are what makes tables free of bank
// conflicts possible (PRIVATE); the price is one sum over the lanes per 16 rows, a shuffle and an addition a row, which
// SLICES and P share. Weights are asked for one plane ahead, the first ones before the tables are built and before the
// previous kernel is done.
//
// The thread blocks of some rows each leave partial sums, and the last one to finish adds them up in order: which one
// that is differs between runs, the sums do not. Layouts: crelle/kernels/cuda/lut.py.
#include "lut_table.cuh"

namespace crelle {

// What the scale words of a group say about its grid.
enum Kind { BCQ, BCQ_SYMMETRIC, UNIFORM, UNIFORM_SYMMETRIC, AFFINE };

__host__ __device__ constexpr int scale_words(Kind kind, int planes) {
  return kind == BCQ ? planes + 1 : kind == BCQ_SYMMETRIC ? planes : kind == UNIFORM_SYMMETRIC ? 1 : 2;
}

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
  __device__ __forceinline__ void load(const S *from, int upper) {
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      v[i] = __ldg(reinterpret_cast<const uint4 *>(from) + (i ^ upper * (LOADS / 2)));
  }
  __device__ __forceinline__ void copy(const Scales &o) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) v[i] = o.v[i];
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
      return number(*reinterpret_cast<const S *>(&h));
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

// words [tiles, units, 4, planes, 32, uint4], scales [tiles, sets, scale words, groups, 16]; order, bias [N] and
// residual [tokens, N] may be null; partial [splits, M, 16 tiles] and tickets [gridDim.x] are room to work in, tickets 0
// before and after; y [tokens, N]. Grid (any number of row blocks, splits = 4 units / SLICES).
template <int P, Kind KIND, int M, Placement PLACE, int SLICES, int WARPS, int RESIDENT, typename T, typename S,
          typename X>
__global__ void __launch_bounds__(WARPS * 32, RESIDENT)
    lut(const char *__restrict__ words, const S *__restrict__ scales, const X *x, const int *__restrict__ order,
        const X *__restrict__ bias, const X *residual, float *partial, int *tickets, X *y, int N, int K, int tokens,
        int units, int planes, int groups, int span) {
  using Table = Tables<T, M, PLACE, SLICES>;
  constexpr bool CODES = KIND == UNIFORM || KIND == UNIFORM_SYMMETRIC || KIND == AFFINE;
  constexpr int SW = scale_words(KIND, P);
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), upper = lane >> 4;
  const int tiles = (N + 15) / 16, sets = (units + span - 1) / span;
  const int unit = blockIdx.y * SLICES / 4, slice = blockIdx.y * SLICES % 4;
  const int begin = (int)((long long)tiles * blockIdx.x / gridDim.x);
  const int end = (int)((long long)tiles * (blockIdx.x + 1) / gridDim.x);

  next_may_start();
  const char *mine = words + (size_t)(unit * 4 + slice) * planes * 512 + lane * 16;
  const size_t tile_bytes = (size_t)units * 4 * planes * 512;
  const S *my_scales = scales + ((size_t)(unit / span) * SW * groups + (lane * groups >> 5)) * 16;
  const int tile_scales = sets * SW * groups * 16;
  uint4 next[SLICES];
  Scales<S> next_alpha;
  const auto ask = [&](int tile, int p) {
    const char *from = mine + tile * tile_bytes + p * 512;
#pragma unroll
    for (int s = 0; s < SLICES; s++) next[s] = stream(from + s * planes * 512);
    if constexpr (!CODES) next_alpha.load(my_scales + (size_t)tile * tile_scales + p * groups * 16, upper);
  };
  if (begin + warp < end) ask(begin + warp, 0);
  previous_is_done();

  Table tables(shared, lane);
  float undo[M];
  float *staged = reinterpret_cast<float *>(shared + Table::BYTES);
  stage<M, SLICES, WARPS>(staged, x, order, tokens, K, unit * 1024 + slice * 8);
  __syncthreads();
  build<T, M, PLACE, SLICES, WARPS>(tables, staged + lane, warp, undo);
  __syncthreads();
  float all[M];  // sum of this lane's inputs
  {
    typename Table::E e = tables.look_up(0, 255, 0);
#pragma unroll
    for (int s = 1; s < SLICES; s++) e.add(tables.look_up(s, 255, 0));
    e.get(all);
  }

#pragma unroll 1
  for (int tile = begin + warp; tile < end; tile += WARPS) {
    const S *tile_scale = my_scales + (size_t)tile * tile_scales;
    float sums[16 * M];
#pragma unroll
    for (int i = 0; i < 16 * M; i++) sums[i] = 0;
    Scales<S> first, last;  // of a code: scale, then zero or low; z comes last, too
    if constexpr (CODES) first.load(tile_scale, upper);
    if constexpr (KIND == BCQ || KIND == UNIFORM || KIND == AFFINE)
      last.load(tile_scale + (SW - 1) * groups * 16, upper);
#pragma unroll
    for (int p = 0; p < P; p++) {
      uint4 now[SLICES];
      Scales<S> alpha;
      if constexpr (!CODES) alpha.copy(next_alpha);
#pragma unroll
      for (int s = 0; s < SLICES; s++) now[s] = next[s];
      if (p + 1 < P)
        ask(tile, p + 1);
      else if (tile + WARPS < end)
        ask(tile + WARPS, 0);
#pragma unroll
      for (int r = 0; r < 16; r++) {
        const auto word = [&](int s) {
          return r < 4 ? now[s].x : r < 8 ? now[s].y : r < 12 ? now[s].z : now[s].w;
        };
        typename Table::E e = tables.look_up(0, word(0), r % 4);
#pragma unroll
        for (int s = 1; s < SLICES; s++) e.add(tables.look_up(s, word(s), r % 4));
        float f[M];
        e.get(f);
        const float a = CODES ? 0 : alpha[r];
#pragma unroll
        for (int m = 0; m < M; m++) {
          float &sum = sums[r * M + m];
          sum = CODES ? fmaf(2, sum, f[m]) : fmaf(a, f[m], sum);
        }
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
        if constexpr (KIND == AFFINE)
          sum = fmaf(last[r], all[m], first[r] * (0.5f * fmaf((1 << P) - 1, all[m], sum)));
        if constexpr (Table::E::SCALED) sum *= undo[m];
      }
    }
    sum_lanes<M>(sums, lane);
    const size_t rows = 16 * (size_t)tiles;
    float *to = partial + (size_t)blockIdx.y * M * rows + tile * 16 + lane / 2;
    if constexpr (M == 1) {
      if (lane % 2 == 0) to[0] = sums[0];
    } else if constexpr (M == 2) {
      to[lane % 2 * rows] = sums[0];
    } else {
      to[lane % 2 * 2 * rows] = sums[0];
      to[(lane % 2 * 2 + 1) * rows] = sums[1];
    }
  }

  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(tickets + blockIdx.x, 1) == (int)gridDim.y - 1;
    if (is_last) tickets[blockIdx.x] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const int rows = (end - begin) * 16;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * tokens; i += WARPS * 32) {
    const int m = i / rows, n = begin * 16 + i % rows;
    if (n >= N) continue;
    const float *from = partial + (size_t)m * 16 * tiles + n;
    float sum = 0;
#pragma unroll 8
    for (int k = 0; k < (int)gridDim.y; k++) sum += __ldcg(from + (size_t)k * M * 16 * tiles);
    if (bias) sum += number(bias[n]);
    if (residual) sum += number(residual[(size_t)m * N + n]);
    y[(size_t)m * N + n] = rounded<X>(sum);
  }
}

}  // namespace crelle
