// GEMM for a few dozen tokens, y [M, N] = x [M, K] W.T: too many to count bits for each, too few for large tiles.
//
// As in gemm.cu weights are dequantized to 16 bits in registers, but the mma is a warp's (16 rows, 16 inputs, 8
// tokens), x is taken as it lies in memory, and the warps of a thread block split K and add up in shared memory in a
// fixed order: one launch, nothing that thread blocks have to wait for.
//
// A warp takes TILES tiles of 16 rows and its split of the blocks of 256 inputs, through its own load pipeline, whose
// first stages are issued before the previous kernel is done (PDL). Lane 4g + t has inputs 32t ... 32t+31 of rows g and
// g + 8 (dequant.cuh), so of a token g it needs just these: 64 contiguous bytes. They are loaded where the last tile
// has used the ones before, so they need no registers of their own and come in time. WARPS_N warps with neighbouring
// rows take the same inputs at about the same time: all but the first find them in L1.
#include "planes/skinny_tokens.cuh"
#include "ptx/pipeline.cuh"

namespace crelle {

#if __CUDA_ARCH__ >= 900
// words [tiles, blocks, planes, 32, uint4]; scales [tiles, ceil(blocks / blocks_per_scale), SCALE_BYTES]; x [M, K], K a
// multiple of 8; bias [N] and residual [M, N] may be null; y [M, N]. Grid (ceil(N / (16 TILES WARPS_N)), ceil(M / NT)).
template <int P, ScaleKind KIND, int GROUPS, int NT, int TILES, int WARPS_N, int WARPS_K, int STAGES, int OCCUPANCY,
          typename S, typename X>
__global__ void __launch_bounds__(WARPS_N * WARPS_K * 32, OCCUPANCY)
    skinny_gemm(const char *__restrict__ words, const char *__restrict__ scales, const X *x, const X *__restrict__ bias,
                const X *residual, X *y, int N, int M, int K, int blocks, int planes, int blocks_per_scale) {
  using W = Weights<P, KIND, GROUPS, S, X>;
  using Queue = Pipeline<STAGES * TILES, W::BYTES>;
  constexpr int WARPS = WARPS_N * WARPS_K, ROWS = WARPS_N * TILES * 16, STRIDE = ROWS + 4;
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), g = lane / 4, t = lane % 4;
  const int warp_k = warp / WARPS_N, warp_n = warp % WARPS_N, row = blockIdx.x * ROWS, token = blockIdx.y * NT;
  const int begin = warp_k * blocks / WARPS_K, end = (warp_k + 1) * blocks / WARPS_K;

  launch_dependents();
  Queue queue(shared + warp * Queue::SIZE, lane);
  const auto issue_load = [&](int slot, int j, int b) {
    const int tile = min(row / 16 + warp_n * TILES + j, (N - 1) / 16);
    const int set = GROUPS > 1 ? tile * blocks + b
                               : tile * ((blocks + blocks_per_scale - 1) / blocks_per_scale) + b / blocks_per_scale;
    queue.issue_load(slot * TILES + j, words + (size_t)(tile * blocks + b) * (planes * 512), W::PLANE_BYTES,
                     scales + (size_t)set * W::SCALE_BYTES, W::SCALE_BYTES);
  };
#pragma unroll
  for (int s = 0; s < STAGES; s++)
    if (begin + s < end)
#pragma unroll
      for (int j = 0; j < TILES; j++) issue_load(s, j, begin + s);
  grid_dependency_wait();

  const X *rows[NT / 8];
#pragma unroll
  for (int c = 0; c < NT / 8; c++) rows[c] = x + (size_t)min(token + c * 8 + g, M - 1) * K + begin * 256 + t * 32;
  float d[TILES][NT / 8][4];
#pragma unroll
  for (int j = 0; j < TILES; j++)
#pragma unroll
    for (int i = 0; i < NT / 2; i++) d[j][i / 4][i % 4] = 0;
  Tokens<NT> in;
  int slot = 0, phase = 0, left = begin < end ? K - begin * 256 : 0;  // inputs from here on
  in.template load<0>(rows, left >= 128, left - t * 32), in.template load<1>(rows, left >= 128, left - t * 32);
#pragma unroll 1
  for (int half = 2 * begin; half < 2 * end; half++) {
    const bool second = half & 1;
    in.template pair<0>();
    left = half + 1 < 2 * end ? left - 128 : 0;
#pragma unroll
    for (int c = 0; c < NT / 8; c++) rows[c] += 128;
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      const char *piece = second ? queue.piece(slot * TILES + j) : queue.wait(slot * TILES + j, phase);
      W w;
      w.load(piece, second, lane);
      if (second) {
        const int next = half / 2 + STAGES + w.nothing(blocks);
        __syncwarp();
        if (half / 2 + STAGES < end) issue_load(slot, j, next);
      }
      skinny_gemm_step<0, NT, X>(d[j], w, in), skinny_gemm_step<1, NT, X>(d[j], w, in);
      skinny_gemm_step<2, NT, X>(d[j], w, in), skinny_gemm_step<3, NT, X>(d[j], w, in);
      if (j == TILES - 1) in.template load<0>(rows, left >= 128, left - t * 32);
      w.next_half();
      if (j == 0) in.template pair<1>();
      skinny_gemm_step<4, NT, X>(d[j], w, in), skinny_gemm_step<5, NT, X>(d[j], w, in);
      skinny_gemm_step<6, NT, X>(d[j], w, in), skinny_gemm_step<7, NT, X>(d[j], w, in);
      if (j == TILES - 1) in.template load<1>(rows, left >= 128, left - t * 32);
    }
    if (second && ++slot == STAGES) slot = 0, phase ^= 1;
  }

  float *const sums = reinterpret_cast<float *>(shared + WARPS * Queue::SIZE);  // [share][token][row]
#pragma unroll
  for (int j = 0; j < TILES; j++)
#pragma unroll
    for (int c = 0; c < NT / 8; c++) {
      float *const to = sums + (warp_k * NT + c * 8 + 2 * t) * STRIDE + (warp_n * TILES + j) * 16 + g;
      to[0] = d[j][c][0], to[STRIDE] = d[j][c][1], to[8] = d[j][c][2], to[STRIDE + 8] = d[j][c][3];
    }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < NT * ROWS; i += WARPS * 32) {
    const int m = i / ROWS, n = row + i % ROWS;
    if (token + m >= M || n >= N) continue;
    float sum = bias ? to_float(bias[n]) : 0;
    if (residual) sum += to_float(residual[(size_t)(token + m) * N + n]);
#pragma unroll
    for (int k = 0; k < WARPS_K; k++) sum += sums[(k * NT + m) * STRIDE + i % ROWS];
    y[(size_t)(token + m) * N + n] = from_float<X>(sum);
  }
}
#endif

// x [M, K] as rows that `skinny_gemm` can take: [M, 256 blocks], in the weight's order, zeros where there is no input.
// Grid (blocks, M), 256 threads.
template <typename X>
__global__ void __launch_bounds__(256) permute_x(const X *x, const int *__restrict__ perm, X *to, int K) {
  launch_dependents();
  grid_dependency_wait();
  const int at = blockIdx.x * 256 + threadIdx.x, k = perm ? perm[at] : at < K ? at : -1;
  to[(size_t)blockIdx.y * gridDim.x * 256 + at] = k >= 0 ? x[(size_t)blockIdx.y * K + k] : from_float<X>(0);
}

}  // namespace crelle
