// y [M, N] = x [M, K] W.T for up to 4 tokens, W in bit-planes: block.cuh says how 16 rows and 256 inputs are
// multiplied.
//
// A warp takes TILES * 16 rows and a share of the blocks of 256 inputs, which it asks for STAGES ahead; weights are
// asked for before the previous kernel is done. The warps of a thread block share the rows and add up in a fixed order.
// Layouts: crelle/kernels/cuda/layout.py (words, scales), digits.cuh (x).
#include "block.cuh"

namespace crelle {

// words [tiles, blocks, planes, 32, uint4]; scales [tiles, ceil(blocks / span), 8, SCALES]; bits and xscale as in
// bits.cu; bias [N] and residual [tokens, N] may be null; y [tokens, N].
// A thread block takes TILES tiles at a time and every gridDim.x-th such set; its warps share the blocks of 256 inputs,
// consecutive ones each, and fetch RUN of them at a time (1 where more planes are stored than used, or scales shared).
// The grid should fit the device at once: then the kernels behind this one start, and fetch their own weights, early.
// HALVES: of a block of x that are fetched at a time. RESIDENT: warps that a multiprocessor can hold, which bounds the
// registers.
template <int P, Kind KIND, int GROUPS, int M, int TILES, int WARPS, int RUN, int STAGES, int HALVES, int RESIDENT,
          typename S, typename Y>
__global__ void __launch_bounds__(WARPS * 32, RESIDENT / WARPS)
    decode(const char *__restrict__ words, const char *__restrict__ scales, const uint32 *__restrict__ bits,
           const float *__restrict__ xscale, const Y *__restrict__ bias, const Y *residual, Y *y, int N, int tokens,
           int blocks, int planes, int span) {
  using B = Block<P, KIND, GROUPS, M, HALVES, S>;
  using Queue = Ring<STAGES, RUN *(B::PLANE_BYTES + B::SCALE_BYTES)>;
  constexpr int OUTPUTS = (TILES * M * 16 + WARPS * 32 - 1) / (WARPS * 32);
  extern __shared__ __align__(128) char shared[];
  __shared__ float partial[2][WARPS][TILES][M][16];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int last = (N - 1) / 16, sets = last / TILES + 1;
  const int begin = warp * blocks / WARPS, end = (warp + 1) * blocks / WARPS;

  next_may_start();
  Queue queue(shared + warp * Queue::SIZE, lane);
  struct {
    int set, block, tile;
  } wanted = {static_cast<int>(blockIdx.x), begin, 0};  // what to ask for next: run by run, its tiles in turn
  const auto ask = [&](int stage) {
    if (wanted.set >= sets || begin == end) {
      queue.ask_nothing();
      return;
    }
    const int b = wanted.block, n = min(wanted.set * TILES + wanted.tile, last), run = RUN == 1 ? 1 : min(RUN, end - b);
    const int group = GROUPS > 1 ? n * blocks + b : n * ((blocks + span - 1) / span) + b / span;
    queue.ask(stage, words + (size_t)(n * blocks + b) * (planes * 512), run * B::PLANE_BYTES,
              scales + (size_t)group * B::SCALE_BYTES, run * B::SCALE_BYTES);
    if (TILES == 1 || ++wanted.tile == TILES) {
      wanted.tile = 0, wanted.block += RUN;
      if (wanted.block >= end) wanted.block = begin, wanted.set += gridDim.x;
    }
  };
#pragma unroll
  for (int s = 0; s < STAGES; s++) ask(s);
  previous_is_done();

  using Inputs = typename B::Inputs;
  constexpr int STEP = B::STEP;
  const int token = B::token(lane);
  const bool first = B::first(lane);
  const float place = B::place(lane);
  Inputs next(bits, xscale, min(2 * begin, 2 * blocks - STEP), lane);  // one step ahead
  int taken = 0, page = 0;                                             // pieces taken from the queue
#pragma unroll 1
  for (int set = blockIdx.x; set < sets; set += gridDim.x) {
    float2 sums[TILES];
#pragma unroll
    for (int j = 0; j < TILES; j++) sums[j] = make_float2(0, 0);
    float more[OUTPUTS];  // what is added to the outputs of this thread, fetched while the products are made
#pragma unroll
    for (int k = 0; k < OUTPUTS; k++) {
      const int i = threadIdx.x + k * WARPS * 32, m = i / 16 % M, n = (set * TILES + i / (M * 16)) * 16 + i % 16;
      const bool there = i < TILES * M * 16 && n < N && m < tokens;
      more[k] = bias && there ? number(bias[n]) : 0;
      if (residual && there) more[k] += number(residual[(size_t)m * N + n]);
    }
#pragma unroll 1
    for (int b = begin; b < end; b += RUN) {
      const int run = RUN == 1 ? 1 : min(RUN, end - b);
      const char *piece[TILES];
#pragma unroll
      for (int j = 0; j < TILES; j++) piece[j] = queue.wait((taken + j) % STAGES, (taken + j) / STAGES);
#pragma unroll
      for (int r = 0; r < RUN; r++) {
        if (r == run) break;
        uint32 scale[TILES][B::SCALES];
#pragma unroll
        for (int j = 0; j < TILES; j++)
          take(scale[j], reinterpret_cast<const uint32 *>(piece[j] + run * B::PLANE_BYTES + r * B::SCALE_BYTES) +
                             B::scales_at(lane));
#pragma unroll
        for (int h = 0; h < 2; h += STEP) {
          const Inputs x = next;
          const int half = 2 * (b + r) + h + STEP;
          if (half < 2 * end || set + gridDim.x < sets)
            next = Inputs(bits, xscale, half < 2 * end ? half : 2 * begin, lane);
#pragma unroll
          for (int j = 0; j < TILES; j++) B::multiply(sums[j], piece[j] + r * B::PLANE_BYTES, scale[j], x, h, lane);
        }
      }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < TILES; j++) ask((taken + j) % STAGES);
      taken += TILES;
    }

    // The warps' sums, in order. Two pages, so that one barrier is enough: nobody is two sets ahead.
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      float a = sums[j].x * place, c = sums[j].y * place;
#pragma unroll
      for (int i = 1; i < B::LANES; i *= 2) a += __shfl_xor_sync(~0u, a, i), c += __shfl_xor_sync(~0u, c, i);
      if (first) partial[page][warp][j][token][lane >> 2] = a, partial[page][warp][j][token][(lane >> 2) + 8] = c;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < OUTPUTS; k++) {
      const int i = threadIdx.x + k * WARPS * 32, m = i / 16 % M, n = (set * TILES + i / (M * 16)) * 16 + i % 16;
      if (i >= TILES * M * 16 || n >= N || m >= tokens) continue;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += (&partial[page][w][0][0][0])[i];
      y[(size_t)m * N + n] = rounded<Y>(sum + more[k]);
    }
    page ^= 1;
  }
}

}  // namespace crelle
