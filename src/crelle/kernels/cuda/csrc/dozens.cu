// y [M, N] = x [M, K] W.T for a few dozen tokens: too many to count bits for each, too few for large tiles.
//
// As in tiles.cu weights become 16-bit numbers in registers, but the instruction is a warp's (16 rows, 16 inputs, 8
// tokens), x is taken as it lies in memory, and the warps of a thread block share K among them and add up in shared
// memory in a fixed order: one launch, nothing that thread blocks have to wait for.
//
// A warp takes TILES tiles of 16 rows and its share of the blocks of 256 inputs, which come by its own queue, asked for
// before the previous kernel is done. Lane 4g + t has inputs 32t ... 32t+31 of rows g and g + 8 (tiles_weights.cuh), so
// of a token g it needs just these: 64 bytes in a piece. They are loaded where the last tile has used the ones before,
// so they need no registers of their own and come in time. ALONG warps with neighbouring rows take the same inputs at
// about the same time: all but the first find them in L1.
#include "ring.cuh"
#include "tensorcore.cuh"
#include "tiles_weights.cuh"

namespace crelle {

#if __CUDA_ARCH__ >= 900
// Inputs 32t ... 32t+31 of NT / 8 tokens: first as they lie in memory, then as pairs for the instruction.
template <int NT>
struct Tokens {
  static constexpr int COUNT = NT / 8;
  uint32 words[COUNT][2][8];  // [tokens][half of the 32][...]

  // Inputs 16 PART ... of the 32; zeros from the `left`th on (`all`: there is none in the warp's half block).
  template <int PART, typename X>
  __device__ __forceinline__ void load(const X *const (&rows)[COUNT], bool all, int left) {
    if (all) {
#pragma unroll
      for (int i = 0; i < 2 * COUNT; i++) put(words[i / 2][PART] + i % 2 * 4, fetched(at<PART>(rows[i / 2]) + i % 2));
    } else {
#pragma unroll
      for (int i = 0; i < 2 * COUNT; i++)
        put(words[i / 2][PART] + i % 2 * 4,
            PART * 16 + i % 2 * 8 < left ? fetched(at<PART>(rows[i / 2]) + i % 2) : make_uint4(0, 0, 0, 0));
    }
  }
  // As the kernel before this one left it: a plain read, and not before the wait for that kernel.
  static __device__ __forceinline__ uint4 fetched(const uint4 *p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
  }
  template <int PART, typename X>
  static __device__ __forceinline__ const uint4 *at(const X *row) {
    return reinterpret_cast<const uint4 *>(row + PART * 16);
  }
  static __device__ __forceinline__ void put(uint32 *to, uint4 v) {
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
  // Step s = 0 ... 3 takes inputs s, s + 4 and s + 8, s + 12: pairs (0, 1) (4, 5) become (0, 4) (1, 5).
  template <int PART>
  __device__ __forceinline__ void pair() {
#pragma unroll
    for (int i = 0; i < 4 * COUNT; i++) {
      uint32 *const w = words[i / 4][PART] + i / 2 % 2 * 4 + i % 2;
      const uint32 low = __byte_perm(w[0], w[2], 0x5410), high = __byte_perm(w[0], w[2], 0x7632);
      w[0] = low, w[2] = high;
    }
  }
  // Inputs s, s + 4 (q = 0) or s + 8, s + 12 of step s.
  __device__ __forceinline__ uint32 of(int c, int step, int q) const {
    return words[c][step / 4][q * 4 + (step % 4) / 2 + step % 2 * 2];
  }
};

template <int STEP, int NT, typename X, typename W>
__device__ __forceinline__ void dozens_step(float (&d)[NT / 8][4], const W &w, const Tokens<NT> &x) {
  uint32 a[4];
  w.template step<STEP % 4>(a);
#pragma unroll
  for (int c = 0; c < NT / 8; c++) multiply<X>(d[c], a[0], a[1], a[2], a[3], x.of(c, STEP, 0), x.of(c, STEP, 1));
}

// words [tiles, blocks, planes, 32, uint4]; scales [tiles, ceil(blocks / span), SCALE_BYTES]; x [M, K], K a multiple of
// 8; bias [N] and residual [M, N] may be null; y [M, N]. Grid (ceil(N / (16 TILES ALONG)), ceil(M / NT)).
template <int P, Kind KIND, int GROUPS, int NT, int TILES, int ALONG, int SHARES, int AHEAD, int RESIDENT, typename S,
          typename X>
__global__ void __launch_bounds__(ALONG * SHARES * 32, RESIDENT)
    dozens(const char *__restrict__ words, const char *__restrict__ scales, const X *x, const X *__restrict__ bias,
           const X *residual, X *y, int N, int M, int K, int blocks, int planes, int span) {
  using W = Weights<P, KIND, GROUPS, S, X>;
  using Queue = Ring<AHEAD * TILES, W::BYTES>;
  constexpr int WARPS = ALONG * SHARES, ROWS = ALONG * TILES * 16, STRIDE = ROWS + 4;
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), g = lane / 4, t = lane % 4;
  const int share = warp / ALONG, along = warp % ALONG, row = blockIdx.x * ROWS, token = blockIdx.y * NT;
  const int begin = share * blocks / SHARES, end = (share + 1) * blocks / SHARES;

  next_may_start();
  Queue queue(shared + warp * Queue::SIZE, lane);
  const auto ask = [&](int slot, int j, int b) {
    const int tile = min(row / 16 + along * TILES + j, (N - 1) / 16);
    const int set = GROUPS > 1 ? tile * blocks + b : tile * ((blocks + span - 1) / span) + b / span;
    queue.ask(slot * TILES + j, words + (size_t)(tile * blocks + b) * (planes * 512), W::PLANE_BYTES,
              scales + (size_t)set * W::SCALE_BYTES, W::SCALE_BYTES);
  };
#pragma unroll
  for (int s = 0; s < AHEAD; s++)
    if (begin + s < end)
#pragma unroll
      for (int j = 0; j < TILES; j++) ask(s, j, begin + s);
  previous_is_done();

  const X *rows[NT / 8];
#pragma unroll
  for (int c = 0; c < NT / 8; c++) rows[c] = x + (size_t)min(token + c * 8 + g, M - 1) * K + begin * 256 + t * 32;
  float d[TILES][NT / 8][4];
#pragma unroll
  for (int j = 0; j < TILES; j++)
#pragma unroll
    for (int i = 0; i < NT / 2; i++) d[j][i / 4][i % 4] = 0;
  Tokens<NT> in;
  int slot = 0, turn = 0, left = begin < end ? K - begin * 256 : 0;  // inputs from here on
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
      const char *piece = second ? queue.piece(slot * TILES + j) : queue.wait(slot * TILES + j, turn);
      W w;
      w.load(piece, second, lane);
      if (second) {
        const int next = half / 2 + AHEAD + w.nothing(blocks);
        __syncwarp();
        if (half / 2 + AHEAD < end) ask(slot, j, next);
      }
      dozens_step<0, NT, X>(d[j], w, in), dozens_step<1, NT, X>(d[j], w, in);
      dozens_step<2, NT, X>(d[j], w, in), dozens_step<3, NT, X>(d[j], w, in);
      if (j == TILES - 1) in.template load<0>(rows, left >= 128, left - t * 32);
      w.turn();
      if (j == 0) in.template pair<1>();
      dozens_step<4, NT, X>(d[j], w, in), dozens_step<5, NT, X>(d[j], w, in);
      dozens_step<6, NT, X>(d[j], w, in), dozens_step<7, NT, X>(d[j], w, in);
      if (j == TILES - 1) in.template load<1>(rows, left >= 128, left - t * 32);
    }
    if (second && ++slot == AHEAD) slot = 0, turn ^= 1;
  }

  float *const sums = reinterpret_cast<float *>(shared + WARPS * Queue::SIZE);  // [share][token][row]
#pragma unroll
  for (int j = 0; j < TILES; j++)
#pragma unroll
    for (int c = 0; c < NT / 8; c++) {
      float *const to = sums + (share * NT + c * 8 + 2 * t) * STRIDE + (along * TILES + j) * 16 + g;
      to[0] = d[j][c][0], to[STRIDE] = d[j][c][1], to[8] = d[j][c][2], to[STRIDE + 8] = d[j][c][3];
    }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < NT * ROWS; i += WARPS * 32) {
    const int m = i / ROWS, n = row + i % ROWS;
    if (token + m >= M || n >= N) continue;
    float sum = bias ? number(bias[n]) : 0;
    if (residual) sum += number(residual[(size_t)(token + m) * N + n]);
#pragma unroll
    for (int k = 0; k < SHARES; k++) sum += sums[(k * NT + m) * STRIDE + i % ROWS];
    y[(size_t)(token + m) * N + n] = rounded<X>(sum);
  }
}
#endif

// x [M, K] as rows that `dozens` can take: [M, 256 blocks], in the weight's order, zeros where there is no input.
// Grid (blocks, M), 256 threads.
template <typename X>
__global__ void __launch_bounds__(256) gather(const X *x, const int *__restrict__ order, X *to, int K) {
  next_may_start();
  previous_is_done();
  const int at = blockIdx.x * 256 + threadIdx.x, k = order ? order[at] : at < K ? at : -1;
  to[(size_t)blockIdx.y * gridDim.x * 256 + at] = k >= 0 ? x[(size_t)blockIdx.y * K + k] : rounded<X>(0);
}

}  // namespace crelle
