// y [M, N] = f(x) [M, K] W.T + bias + residual for up to 8 tokens and weights of four-bit floats (fp4_layout.py), as
// fast as W is read.
//
// A thread block takes TILES tiles of 16 rows, its warps share the blocks of 256 inputs: each has its own load pipeline
// for the weights, first issued before the previous kernel is done, and its own inputs of x in shared memory, where f,
// an operation of the model (`Prologue`), is applied to them. Weights become 16-bit operands of m16n8k16
// (fp4_codes.cuh) and lose nothing; tokens are the instruction's columns, so that eight cost what one costs, and sums
// are f32. Sums of the warps are added in one order, whatever the number of tokens.
//
// What bounds it: at 4.4 TB/s and 1.83 GHz an H200 reads 32 weights of each lane in 119 (MXFP4) or 126 cycles (NVFP4)
// of a quarter of a multiprocessor. For them the loop issues 75 to 80 instructions, two tiles or one (disassembly), 44
// of them for the integer units, which take one every other cycle; for bf16 85 to 89, and 52. Scales multiplied into
// the sums instead would be fewer instructions for one token and more from four on; x as digits of 8 bits would need
// tables of 16 bytes or a correction of signs, and a launch that encodes x.
#include "fp4/fp4_multiply.cuh"
#include "ptx/run_pipeline.cuh"
#include "step/prologue.cuh"

namespace crelle {

// What the kernels get.
template <typename T, typename Y>
struct Fp4Product {
  const char *weight;  // [tiles, Fp4Block::tile_bytes]
  const T *x;          // [tokens, K] (gated: [tokens, 2K], gate then up)
  const T *norm;       // [K], or null
  const T *shift;      // [K], or null
  const T *bias;       // [N], or null
  const T *residual;   // [tokens, N], or null; may be y
  Y *y;                // [tokens, N]
  int N, K, tokens, blocks;
  float eps;
};

// Shared memory: barriers; the warps' pipelines; x of each warp and token, behind a row 16 bytes that keep tokens in
// different banks; the warps' sums.
template <Fp4Kind KIND, int M, int TILES, int WARPS, int STAGES>
struct Fp4Shared {
  static constexpr int FIRST = (WARPS * STAGES * 8 + 127) / 128 * 128, QUEUE = STAGES * TILES * Fp4Block<KIND>::BYTES;
  static constexpr int X = FIRST + WARPS * QUEUE, ROWS = 16 * TILES;
  static __device__ __forceinline__ int stride(int share) { return share * 512 + 16; }  // share: a warp's blocks
  static __device__ __forceinline__ int sums(int share) { return X + WARPS * M * stride(share); }
};

template <Fp4Kind KIND, Prologue OP, int M, int TILES, int WARPS, int STAGES, bool ALIGNED,
          template <int, int, int> class Runs, typename T, typename Y>
__device__ __forceinline__ void fp4_product(const Fp4Product<T, Y> &p, char *shared) {
  using Block = Fp4Block<KIND>;
  using Room = Fp4Shared<KIND, M, TILES, WARPS, STAGES>;
  constexpr bool NORM = OP == RMS_NORM || OP == LAYER_NORM;
  constexpr int WIDE = is_gated(OP) ? 2 : 1, ROWS = Room::ROWS;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), g = lane / 4, t = lane % 4;
  const int begin = p.blocks * warp / WARPS, end = p.blocks * (warp + 1) / WARPS;
  const int share = (p.blocks + WARPS - 1) / WARPS, tile = blockIdx.x * TILES, last = (p.N + 15) / 16 - 1 - tile;
  launch_dependents();

  Runs<STAGES, Block::BYTES, TILES> queue(shared + Room::FIRST + warp * Room::QUEUE,
                                          shared_address(shared) + warp * STAGES * 8, lane, p.K);
  const size_t tile_bytes = Block::tile_bytes(p.blocks);
  const char *const weight = p.weight + tile * tile_bytes;
  const auto refill = [&](int stage, int block, uint32 seen) {
    queue.refill(stage, weight + (size_t)block * Block::BYTES, block < end, seen, tile_bytes, last);
  };
#pragma unroll
  for (int s = 0; s < STAGES; s++) refill(s, begin + s, 0);
  grid_dependency_wait();

  // --- f(x), as far as this warp needs it
  char *const mine = shared + Room::X + warp * M * Room::stride(share);
  const auto at = [&](int m, int c) { return reinterpret_cast<uint4 *>(mine + m * Room::stride(share) + c * 2); };
  __shared__ float2 parts[M][WARPS];
  float sum[M] = {}, squares[M] = {};
#pragma unroll 2
  for (int c = lane * 8; c < (end - begin) * 256; c += 256) {
    uint4 v[M];
#pragma unroll
    for (int m = 0; m < M; m++)
      v[m] = eight<ALIGNED>(p.x + (size_t)min(m, p.tokens - 1) * p.K * WIDE, begin * 256 + c, p.K);
#pragma unroll
    for (int m = 0; m < M; m++) {
      if constexpr (NORM) {
        float f[8];
        open<T>(f, v[m]);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[m] += f[i], squares[m] = fmaf(f[i], f[i], squares[m]);
      } else {
        v[m] = applied<OP, ALIGNED>(v[m], p.x + (size_t)min(m, p.tokens - 1) * p.K * WIDE, begin * 256 + c, p.K, Norm{},
                                    p.norm, p.shift);
      }
      *at(m, c) = v[m];
    }
  }
  if constexpr (NORM) {
    block_sums(parts, sum, squares);
#pragma unroll 2
    for (int c = lane * 8; c < (end - begin) * 256; c += 256) {
#pragma unroll
      for (int m = 0; m < M; m++) {
        const Norm norms = norm_of<OP>(make_float2(sum[m], squares[m]), p.K, p.eps);
        *at(m, c) = applied<OP, ALIGNED>(*at(m, c), p.x, begin * 256 + c, p.K, norms, p.norm, p.shift);
      }
    }
  }
  __syncwarp();

  // --- the product; columns that have no token repeat the last one
  float d[TILES][2][4];
#pragma unroll
  for (int i = 0; i < TILES * 8; i++) d[i / 8][i / 4 % 2][i % 4] = 0;
  const char *x = mine + min(g, M - 1) * Room::stride(share) + t * 32;
  Fp4Operands<T> operands;
  int stage = 0, phase = 0;
#pragma unroll 1
  for (int block = begin; block < end; block++, x += 512) {
    const char *const piece = queue.wait(stage, phase);
    fp4_multiply<KIND, TILES>(d, piece, x, operands, lane, [&](uint32 seen) { refill(stage, block + STAGES, seen); });
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }

  float *const sums = reinterpret_cast<float *>(shared + Room::sums(share));  // [warp][token][row]
#pragma unroll
  for (int j = 0; j < TILES; j++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (2 * t + i % 2 < M) sums[(warp * M + 2 * t + i % 2) * ROWS + j * 16 + g + i / 2 * 8] = d[j][0][i] + d[j][1][i];
  __syncthreads();
  for (int i = threadIdx.x; i < M * ROWS; i += WARPS * 32) {
    const int m = i / ROWS, r = i % ROWS, n = tile * 16 + r;
    if (m >= p.tokens || n >= p.N) continue;
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += sums[(w * M + m) * ROWS + r];
    total *= Block::row_scale(weight + r / 16 * tile_bytes, p.blocks, r % 16);
    if (p.bias) total += to_float(p.bias[n]);
    if (p.residual) total += to_float(p.residual[(size_t)m * p.N + n]);
    p.y[(size_t)m * p.N + n] = from_float<Y>(total);
  }
}

// Grid: ceil(tiles / TILES).
template <Fp4Kind KIND, Prologue OP, int M, int TILES, int WARPS, int STAGES, int OCCUPANCY, bool ALIGNED, typename T,
          typename Y>
__global__ void __launch_bounds__(WARPS * 32, OCCUPANCY)
    fp4_gemv_sm80(const char *__restrict__ weight, const T *x, const T *__restrict__ norm, const T *__restrict__ shift,
                  const T *__restrict__ bias, const T *residual, Y *y, int N, int K, int tokens, int blocks,
                  float eps) {
  extern __shared__ __align__(128) char shared[];
  const Fp4Product<T, Y> p = {weight, x, norm, shift, bias, residual, y, N, K, tokens, blocks, eps};
  fp4_product<KIND, OP, M, TILES, WARPS, STAGES, ALIGNED, CopiedRuns>(p, shared);
}

#if __CUDA_ARCH__ == 900
template <Fp4Kind KIND, Prologue OP, int M, int TILES, int WARPS, int STAGES, int OCCUPANCY, bool ALIGNED, typename T,
          typename Y>
__global__ void __launch_bounds__(WARPS * 32, OCCUPANCY)
    fp4_gemv_sm90(const char *__restrict__ weight, const T *x, const T *__restrict__ norm, const T *__restrict__ shift,
                  const T *__restrict__ bias, const T *residual, Y *y, int N, int K, int tokens, int blocks,
                  float eps) {
  extern __shared__ __align__(128) char shared[];
  const Fp4Product<T, Y> p = {weight, x, norm, shift, bias, residual, y, N, K, tokens, blocks, eps};
  fp4_product<KIND, OP, M, TILES, WARPS, STAGES, ALIGNED, BulkRuns>(p, shared);
}
#endif

}  // namespace crelle
