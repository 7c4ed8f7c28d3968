// x [tokens, K] for trellis_gemv.cu: what comes before the product (`Prologue`), signs and Hadamard matrices
// (crelle.formats.wrappers.rotated), and 16 bits for each input with one scale for each segment (trellis_prologue.cuh),
// as two digits, 256 high + low.
//
// A warp has 1024 inputs at a time, lane l 8 from 256c + 8l on for c < 4: so any block of the rotation is inside a
// warp. All is f32, in the order of crelle.formats.wrappers.hadamard. Segments that have anything but finite
// values get the scale NaN. A token's bits do not depend on the others.
#include "trellis/trellis_prologue.cuh"

namespace crelle {

// signs: a bit for each input, 1 where it changes its sign, or null; block: of the rotation, at most 1024; root:
// 1/sqrt(block).
struct Rotation {
  const unsigned char *signs;
  int block;
  float root;

  // H (signs f) of a warp's inputs, of which `signs_of` are the bits of each 8.
  __device__ __forceinline__ void apply(float (&f)[4][8], const uint32 (&signs_of)[4]) const {
    if (signs) {
#pragma unroll
      for (int c = 0; c < 4; c++)
#pragma unroll
        for (int e = 0; e < 8; e++) f[c][e] = signs_of[c] >> e & 1 ? -f[c][e] : f[c][e];
    }
    if (block == 1) return;
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
      if (step >= block) break;
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (!(i & step)) butterfly(f[i / 8][i % 8], f[i / 8][i % 8 + step]);
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      if (lanes * 8 >= block) break;
      const bool upper = threadIdx.x & lanes;
#pragma unroll
      for (int i = 0; i < 32; i++) {
        float &v = f[i / 8][i % 8];
        const float other = __shfl_xor_sync(~0u, v, lanes);
        v = __fadd_rn(upper ? -v : v, other);
      }
    }
    if (block > 256) {
#pragma unroll
      for (int e = 0; e < 8; e++) butterfly(f[0][e], f[1][e]), butterfly(f[2][e], f[3][e]);
    }
    if (block > 512) {
#pragma unroll
      for (int e = 0; e < 8; e++) butterfly(f[0][e], f[2][e]), butterfly(f[1][e], f[3][e]);
    }
#pragma unroll
    for (int i = 0; i < 32; i++) f[i / 8][i % 8] = __fmul_rn(f[i / 8][i % 8], root);
  }
  __device__ __forceinline__ void load(uint32 (&to)[4], int k, int K) const {
#pragma unroll
    for (int c = 0; c < 4; c++) to[c] = signs && k + 256 * c < K ? signs[(k + 256 * c) / 8] : 0;
  }
};

// x (gated: [tokens, 2K], gate then up); norm, shift [K] may be null. digits [groups of M tokens][units of 16 inputs]
// [token][high, low][4] words of 4 inputs; scales, sums (of 256 high + low) [tokens, segments], at most 8. Tokens of
// the last group that do not exist are zeros. ALIGNED: K is a multiple of 8. Grid (tokens rounded up to M).
template <Prologue OP, int M, bool ALIGNED, int WARPS, typename T>
__global__ void __launch_bounds__(WARPS * 32)
    trellis_encode(const T *x, const T *__restrict__ norm, const T *__restrict__ shift,
                   const unsigned char *__restrict__ signs, uint2 *digits, float *scales, int *sums, int tokens, int K,
                   int units, int segments, int block, float root, float eps) {
  constexpr bool NORM = OP == RMS_NORM || OP == LAYER_NORM;
  __shared__ float2 parts[1][WARPS];
  __shared__ uint32 maxima[8];
  __shared__ int totals[8];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = blockIdx.x, pieces = (units * 16 + 1023) / 1024;
  const Rotation rotation = {signs, block, root};
  uint2 *const to = digits + ((size_t)(token / M) * units * M + token % M) * 4;  // [units][M][high, low][2]
  launch_dependents();
  if (token >= tokens) {
    grid_dependency_wait();  // what ran before may still read the memory that this is
    for (int i = threadIdx.x; i < units * 4; i += WARPS * 32) to[(size_t)(i / 4) * M * 4 + i % 4] = make_uint2(0, 0);
    return;
  }
  if (threadIdx.x < 8) maxima[threadIdx.x] = totals[threadIdx.x] = 0;
  __syncthreads();
  uint32 signs_of[4];
  rotation.load(signs_of, warp * 1024 + lane * 8, K);
  grid_dependency_wait();

  const auto segment_of = [&](int k) { return ((k / 64 + 1) * segments - 1) / (units / 4); };
  const auto each_segment = [&](int k, auto f) {  // of the 256 inputs that a warp has from its lane 0's k on
    const int own = segment_of(k), last = min(segments - 1, __shfl_sync(~0u, own, 31));
#pragma unroll 1
    for (int s = __shfl_sync(~0u, own, 0); s <= last; s++) f(s, own == s);
  };
  const T *const row = x + (size_t)token * K * (is_gated(OP) ? 2 : 1);
  const auto load = [&](uint4(&v)[4], int piece) {
#pragma unroll
    for (int c = 0; c < 4; c++) v[c] = eight<ALIGNED>(row, piece * 1024 + c * 256 + lane * 8, K);
  };
  uint4 v[4];
  Norm n = {0, 1};
  load(v, warp);
  if constexpr (NORM) {
    float total[1] = {}, squares[1] = {};
    for (int piece = warp; piece < pieces; piece += WARPS) {
      if (piece != warp) load(v, piece);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        float f[8];
        open<T>(f, v[c]);
#pragma unroll
        for (int e = 0; e < 8; e++) total[0] += f[e], squares[0] = fmaf(f[e], f[e], squares[0]);
      }
    }
    block_sums(parts, total, squares);
    n = norm_of<OP>(make_float2(total[0], squares[0]), K, eps);
  }

  // A warp's first piece stays in registers where it is the only one, others are made twice.
  const bool once = pieces <= WARPS;
  float f[4][8];
  const auto make = [&](int piece) {
    if (!once) {
      load(v, piece);
      rotation.load(signs_of, piece * 1024 + lane * 8, K);
    }
#pragma unroll
    for (int c = 0; c < 4; c++)
      open<T>(f[c], applied<OP, ALIGNED>(v[c], row, piece * 1024 + c * 256 + lane * 8, K, n, norm, shift));
    rotation.apply(f, signs_of);
  };
#pragma unroll 1
  for (int piece = warp; piece < pieces; piece += WARPS) {
    make(piece);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      uint32 most = 0;
#pragma unroll
      for (int e = 0; e < 8; e++) most = max(most, __float_as_uint(fabsf(f[c][e])));
      each_segment(piece * 1024 + c * 256 + lane * 8, [&](int s, bool mine) {
        const uint32 all = __reduce_max_sync(~0u, mine ? most : 0);
        if (lane == 0) atomicMax(maxima + s, all);
      });
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int piece = warp; piece < pieces; piece += WARPS) {
    if (!once) make(piece);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int k = piece * 1024 + c * 256 + lane * 8;
      int sum = 0;
      if (k < units * 16) {
        uint2 high, low;
        sum = digits_of(f[c], DigitScale(maxima[segment_of(k)]).inverse, high, low);
        uint2 *const at = to + (size_t)(k / 16) * M * 4 + k % 16 / 8;
        at[0] = high, at[2] = low;
      }
      each_segment(k, [&](int s, bool mine) {
        const int all = __reduce_add_sync(~0u, mine ? sum : 0);
        if (lane == 0) atomicAdd(totals + s, all);
      });
    }
  }
  __syncthreads();
  if (threadIdx.x < segments) {
    sums[token * segments + threadIdx.x] = totals[threadIdx.x];
    scales[token * segments + threadIdx.x] = DigitScale(maxima[threadIdx.x]).scale;
  }
}

// H (signs x) [tokens, K], rounded to T: for products with the dequantized weight. Grid (pieces of 1024 inputs over
// WARPS, tokens).
template <bool ALIGNED, int WARPS, typename T>
__global__ void __launch_bounds__(WARPS * 32)
    trellis_rotate(const T *x, const unsigned char *__restrict__ signs, T *y, int K, int block, float root) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first = (blockIdx.x * WARPS + warp) * 1024 + lane * 8;
  const Rotation rotation = {signs, block, root};
  const T *const row = x + (size_t)blockIdx.y * K;
  T *const to = y + (size_t)blockIdx.y * K;
  uint32 signs_of[4];
  float f[4][8];
  launch_dependents();
  rotation.load(signs_of, first, K);
  grid_dependency_wait();
#pragma unroll
  for (int c = 0; c < 4; c++) open<T>(f[c], eight<ALIGNED>(row, first + 256 * c, K));
  rotation.apply(f, signs_of);
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const int k = first + 256 * c;
    if constexpr (ALIGNED) {
      if (k < K) *reinterpret_cast<uint4 *>(to + k) = closed<T>(f[c]);
    } else {
#pragma unroll
      for (int e = 0; e < 8; e++)
        if (k + e < K) to[k + e] = from_float<T>(f[c][e]);
    }
  }
}

}  // namespace crelle
