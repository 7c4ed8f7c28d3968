// x [tokens, K] for trellis_gemv.cu: what comes before the product (`Prologue`), signs and Hadamard matrices
// (crelle.formats.wrappers.rotated), and 16 bits for each input with one scale for the token, as two digits, 256 high +
// low.
//
// A warp has 1024 inputs at a time, lane l 8 from 256c + 8l on for c < 4: so any block of the rotation is inside a
// warp. All is f32, in the order of crelle.formats.wrappers.hadamard. A token that has anything but finite values gets
// the scale NaN. A token's bits do not depend on the others.
#include "step/prologue.cuh"

namespace crelle {

constexpr float RANGE = 32512;  // 127 * 256: what two digits hold

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
        if (!(i & step)) both(f[i / 8][i % 8], f[i / 8][i % 8 + step]);
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
      for (int e = 0; e < 8; e++) both(f[0][e], f[1][e]), both(f[2][e], f[3][e]);
    }
    if (block > 512) {
#pragma unroll
      for (int e = 0; e < 8; e++) both(f[0][e], f[2][e]), both(f[1][e], f[3][e]);
    }
#pragma unroll
    for (int i = 0; i < 32; i++) f[i / 8][i % 8] = __fmul_rn(f[i / 8][i % 8], root);
  }
  static __device__ __forceinline__ void both(float &a, float &b) {
    const float sum = __fadd_rn(a, b);
    b = __fsub_rn(a, b), a = sum;
  }
  __device__ __forceinline__ void load(uint32 (&to)[4], int k, int K) const {
#pragma unroll
    for (int c = 0; c < 4; c++) to[c] = signs && k + 256 * c < K ? signs[(k + 256 * c) / 8] : 0;
  }
};

// x (gated: [tokens, 2K], gate then up); norm, shift [K] may be null. digits [groups of M tokens][units of 16 inputs]
// [token][high, low][4] words of 4 inputs; scales, sums (of 256 high + low) [tokens]. Tokens of the last group that do
// not exist are zeros. ALIGNED: K is a multiple of 8. Grid (tokens rounded up to M).
template <Prologue OP, int M, bool ALIGNED, int WARPS, typename T>
__global__ void __launch_bounds__(WARPS * 32)
    trellis_encode(const T *x, const T *__restrict__ norm, const T *__restrict__ shift,
                   const unsigned char *__restrict__ signs, uint2 *digits, float *scales, int *sums, int tokens, int K,
                   int units, int block, float root, float eps) {
  constexpr bool NORM = OP == RMS_NORM || OP == LAYER_NORM;
  __shared__ float2 parts[1][WARPS];
  __shared__ float maxima[WARPS];
  __shared__ int totals[WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = blockIdx.x, pieces = (units * 16 + 1023) / 1024;
  const Rotation rotation = {signs, block, root};
  uint2 *const to = digits + ((size_t)(token / M) * units * M + token % M) * 4;  // [units][M][high, low][2]
  launch_dependents();
  if (token >= tokens) {
    grid_dependency_wait();  // what ran before may still read the memory that this is
    for (int i = threadIdx.x; i < units * 4; i += WARPS * 32) to[(size_t)(i / 4) * M * 4 + i % 4] = make_uint2(0, 0);
    return;
  }
  uint32 signs_of[4];
  rotation.load(signs_of, warp * 1024 + lane * 8, K);
  grid_dependency_wait();

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
  float most = 0;
#pragma unroll 1
  for (int piece = warp; piece < pieces; piece += WARPS) {
    make(piece);
#pragma unroll
    for (int i = 0; i < 32; i++) most = max_nan(most, fabsf(f[i / 8][i % 8]));
  }
#pragma unroll
  for (int i = 16; i; i /= 2) most = max_nan(most, __shfl_xor_sync(~0u, most, i));
  if (lane == 0) maxima[warp] = most;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; w++) most = max_nan(most, maxima[w]);
  const bool finite = most <= 3.4028234e38f, zero = most < 0x1p-100f;
  const float inverse = finite && !zero ? __fdiv_rn(RANGE, most) : 0;

  int sum = 0;
#pragma unroll 1
  for (int piece = warp; piece < pieces; piece += WARPS) {
    if (!once) make(piece);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int k = piece * 1024 + c * 256 + lane * 8;
      uint32 q[8], high[2], low[2];
#pragma unroll
      for (int e = 0; e < 8; e++) {
        const int code = inverse > 0 ? __float2int_rn(__fmul_rn(f[c][e], inverse)) : 0;
        sum += code, q[e] = code;
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32 *const a = q + 4 * i;
        low[i] = __byte_perm(__byte_perm(a[0], a[1], 0x0040), __byte_perm(a[2], a[3], 0x0040), 0x5410);
        high[i] = __byte_perm(__byte_perm(a[0] + 128, a[1] + 128, 0x0051), __byte_perm(a[2] + 128, a[3] + 128, 0x0051),
                              0x5410);
      }
      if (k >= units * 16) continue;
      uint2 *const at = to + (size_t)(k / 16) * M * 4 + k % 16 / 8;
      at[0] = make_uint2(high[0], high[1]), at[2] = make_uint2(low[0], low[1]);
    }
  }
#pragma unroll
  for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  if (lane == 0) totals[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    int total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += totals[w];
    sums[token] = total;
    scales[token] = finite ? zero ? 0 : __fdiv_rn(most, RANGE) : __int_as_float(0x7fffffff);
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
