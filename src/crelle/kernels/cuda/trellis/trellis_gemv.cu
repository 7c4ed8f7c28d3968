// y [tokens, N] = x [tokens, K] W.T + bias + residual for trellis weights (trellis_layout.py; trellis_encode.cu makes
// x), 1, 2 or 4 tokens at a time.
//
// A warp takes units of 256 outputs and 16 inputs: lane (g, t) has the ring of outputs 32g … 32g + 31 and inputs 4t …
// 4t + 3. Step i multiplies outputs 2i and 2i + 1 of all 8 rings, rows g and g + 8 of the instruction m16n8k32. Its
// left operand is the bytes of states as the product leaves them (trellis_states.cuh); its right one has x for each
// byte, the digit in column g of the inputs of lane t: (x0, x1, x0, x1) and (x2, x3, x2, x3) for two weights a state.
// It is loaded once for all steps of a unit. Columns are two digits of each token, 256 high + low.
//
// The warps of a thread block take turns at runs of RUN units, each through its own load pipeline; on Hopper SPLIT
// thread blocks of a cluster share the inputs of the same outputs. Sums are integers, joined as 64 bits: they are exact
// in any order, for any K. A warp's own sums fit into 32 bits: at most 1020 * 128 an input (mul1), so four warps hold
// 65536 inputs.
//
// Instructions a weight in the loop (sm_90a, RUN 2, counted in the disassembly; of them, in brackets, those of the
// integer units, which take one every other cycle): pair 1.52 (0.67) at 1, 2 and 4 bits, 1.80 (0.74) at 3, 1.85 to 1.89
// at the others; mul1 2.83 (1.34) at 1, 2 and 4 bits, 3.44 (1.51) at 3. The least for pair at 2 bits would be 1.29: 64
// products, 64 masks, 21 shifts and 16 IMMA for 128 weights. RUN 4 takes 1.41.
#include "trellis/trellis_states.cuh"
#include "ptx/run_pipeline.cuh"
#include "ptx/tensorcore.cuh"

namespace crelle {

// What the kernels get.
template <typename T>
struct TrellisProduct {
  const char *weight;     // [tiles, units, W::UNIT]; units: a multiple of RUN
  const half *row_scale;  // [N]
  const uint32 *x;        // [groups of M tokens, units, digits of tokens 0 … M - 1, high first, 4]
  const float *x_scale;   // [tokens]
  const int *x_sum;       // [tokens] of 256 high + low
  const T *bias;          // [N], or null
  const T *residual;      // [tokens, N], or null; may be y
  T *y;                   // [tokens, stride]
  int N, tokens, units, stride, residual_stride;

  // sum: of products of x and the bytes.
  template <int ZERO>
  __device__ __forceinline__ void store(int n, int token, long long sum) const {
    if (n >= N || token >= tokens) return;
    const float v = (float)(sum - (long long)ZERO * x_sum[token]);
    float out = v * (x_scale[token] * (to_float(row_scale[n]) * 0x1p-7f));
    if (bias) out += to_float(bias[n]);
    if (residual) out += to_float(residual[(size_t)token * residual_stride + n]);
    y[(size_t)token * stride + n] = from_float<T>(out);
  }
};

// Shared memory: barriers; for each warp its pipeline, later its sums; what other thread blocks of the cluster send.
template <typename W, int M, int WARPS, int STAGES, int RUN, int SPLIT>
struct TrellisShared {
  static constexpr int RUN_BYTES = RUN * W::UNIT;
  static constexpr int BLOCK = 32 * 2 * M + (M == 4 ? 8 : 4);  // sums of a ring's outputs, and banks between rings
  static constexpr int WARP = STAGES * RUN_BYTES > 8 * BLOCK * 4 ? STAGES * RUN_BYTES : 8 * BLOCK * 4;
  static constexpr int PAIRS = (128 + SPLIT - 1) / SPLIT;  // of outputs that a thread block of the cluster stores
  static constexpr int BARRIERS = (WARPS * STAGES + 1) * 8, FIRST = (BARRIERS + 127) / 128 * 128;
  static constexpr int RECEIVED = FIRST + WARPS * WARP;
};

template <typename W, int M, int WARPS, int STAGES, int RUN, int SPLIT, template <int, int, int> class Runs, typename T>
__device__ __forceinline__ void trellis_product(const TrellisProduct<T> &p, char *shared) {
  using Room = TrellisShared<W, M, WARPS, STAGES, RUN, SPLIT>;
  constexpr int WORDS = W::WORDS, THREADS = WARPS * 32;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), g = lane / 4, t = lane % 4;
  const int tile = blockIdx.x / SPLIT, rank = blockIdx.x % SPLIT, token = blockIdx.y * M;
  const int runs = p.units / RUN, end = runs * (rank + 1) / SPLIT, first = runs * rank / SPLIT + warp;
  launch_dependents();

  char *const mine = shared + Room::FIRST + warp * Room::WARP;
  Runs<STAGES, Room::RUN_BYTES, 1> queue(mine, shared_address(shared) + warp * STAGES * 8, lane, p.units);
  const char *const weight = p.weight + (size_t)tile * p.units * W::UNIT;
  const auto refill = [&](int stage, int run, uint32 seen) {
    queue.refill(stage, weight + (size_t)run * Room::RUN_BYTES, run < end, seen);
  };
#pragma unroll
  for (int s = 0; s < STAGES; s++) refill(s, first + s * WARPS, 0);

#if __CUDA_ARCH__ == 900
  const uint32 sent = shared_address(shared) + WARPS * STAGES * 8;
  if constexpr (SPLIT > 1) {
    if (threadIdx.x == 0) {
      init_barrier(sent, 1);
      fence_barriers();
      const int pairs = min(Room::PAIRS, max(0, 128 - rank * Room::PAIRS));
      arrive_expecting(sent, SPLIT * pairs * M * 16);
    }
    __syncthreads();
    cluster_arrive();
  }
#endif
  grid_dependency_wait();

  // x of a run, in the columns that have digits; loaded while the run before is multiplied.
  const uint32 *x = p.x + ((size_t)blockIdx.y * p.units + first * RUN) * (8 * M) + g * 4 + t;
  uint32 now[RUN] = {}, next[RUN] = {};
  const auto load_x = [&](bool there) {
#pragma unroll
    for (int j = 0; j < RUN; j++)
      if (there && g < 2 * M) next[j] = x[j * 8 * M];
    x += WARPS * RUN * 8 * M;
  };
  load_x(first < end);
  uint32 acc[16][4];
#pragma unroll
  for (int i = 0; i < 16; i++) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0;
  int stage = 0, phase = 0;
#pragma unroll 1
  for (int run = first; run < end; run += WARPS) {
#pragma unroll
    for (int j = 0; j < RUN; j++) now[j] = next[j];
    load_x(run + WARPS < end);
    const char *const piece = queue.wait(stage, phase);
#pragma unroll
    for (int j = 0; j < RUN; j++) {
      uint32 ring[WORDS];
      W::load(ring, piece + j * W::UNIT, lane);
      if (j == RUN - 1) refill(stage, run + STAGES * WARPS, W::seen(ring));
      if constexpr (W::WEIGHTS == 2) {
        const uint32 b[2] = {__byte_perm(now[j], 0, 0x1010), __byte_perm(now[j], 0, 0x3232)};
#pragma unroll
        for (int r = 0; r < 16; r++)
          multiply_u8(acc[r], W::bytes(ring, 4 * r), W::bytes(ring, 4 * r + 2), W::bytes(ring, 4 * r + 1),
                      W::bytes(ring, 4 * r + 3), b[0], b[1]);
      } else {
        const uint32 b[4] = {__byte_perm(now[j], 0, 0x0000), __byte_perm(now[j], 0, 0x1111),
                             __byte_perm(now[j], 0, 0x2222), __byte_perm(now[j], 0, 0x3333)};
#pragma unroll
        for (int r = 0; r < 16; r++)
#pragma unroll
          for (int h = 0; h < 4; h += 2)
            multiply_u8(acc[r], W::bytes(ring, 8 * r + h), W::bytes(ring, 8 * r + 4 + h), W::bytes(ring, 8 * r + h + 1),
                        W::bytes(ring, 8 * r + 5 + h), b[h], b[h + 1]);
      }
    }
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }

  // Lane (g, t) has token t of outputs 32g + 2r and the next: high and low digit.
  int *const sums = reinterpret_cast<int *>(mine) + g * Room::BLOCK + 2 * t;
  __syncwarp();  // all lanes have read what lay there
  if (t < M) {
#pragma unroll
    for (int r = 0; r < 16; r++) {
      const int4 v = {(int)acc[r][0], (int)acc[r][1], (int)acc[r][2], (int)acc[r][3]};
      if constexpr (M == 1) {
        *reinterpret_cast<int4 *>(sums + 4 * r) = v;
      } else {
        *reinterpret_cast<int2 *>(sums + 4 * M * r) = make_int2(v.x, v.y);
        *reinterpret_cast<int2 *>(sums + 4 * M * r + 2 * M) = make_int2(v.z, v.w);
      }
    }
  }
  __syncthreads();
  const auto sum = [&](int n, int m) {
    const char *from = shared + Room::FIRST + ((n / 32) * Room::BLOCK + (n % 32) * 2 * M + 2 * m) * 4;
    long long total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++, from += Room::WARP) {
      const int2 v = *reinterpret_cast<const int2 *>(from);
      total += 256ll * v.x + v.y;
    }
    return total;
  };
  if constexpr (SPLIT == 1) {
    for (int i = threadIdx.x; i < 256 * M; i += THREADS)
      p.template store<W::ZERO>(tile * 256 + i / M, token + i % M, sum(i / M, i % M));
    return;
  }
#if __CUDA_ARCH__ == 900
  struct Two {
    long long v[2];
  };
  const uint32 received = shared_address(shared) + Room::RECEIVED;  // [ranks][PAIRS][M] of two outputs
  cluster_wait();
  for (int i = threadIdx.x; i < 128 * M; i += THREADS) {
    const int pair = i / M, m = i % M, to = pair / Room::PAIRS;
    const Two two = {sum(2 * pair, m), sum(2 * pair + 1, m)};
    float4 bits;
    memcpy(&bits, &two, 16);
    dsmem_store(received + ((rank * Room::PAIRS + pair % Room::PAIRS) * M + m) * 16, bits, sent, to);
  }
  wait_for_stores(sent);
  const Two *const all = reinterpret_cast<const Two *>(shared + Room::RECEIVED);
  for (int i = threadIdx.x; i < 2 * Room::PAIRS * M; i += THREADS) {
    const int output = i / M, m = i % M, n = rank * Room::PAIRS * 2 + output;
    long long total = 0;
#pragma unroll
    for (int r = 0; r < SPLIT; r++) total += all[(r * Room::PAIRS + output / 2) * M + m].v[output % 2];
    if (n < 256) p.template store<W::ZERO>(tile * 256 + n, token + m, total);
  }
#endif
}

// Grid (tiles, groups of M tokens).
template <int WEIGHTS, int SHIFT, int M, int WARPS, int STAGES, int RUN, int OCCUPANCY, typename T>
__global__ void __launch_bounds__(WARPS * 32, OCCUPANCY)
    trellis_gemv_sm80(const char *__restrict__ weight, const half *__restrict__ row_scale, const uint32 *x,
                      const float *x_scale, const int *x_sum, const T *__restrict__ bias, const T *residual, T *y,
                      int N, int tokens, int units, int stride, int residual_stride) {
  extern __shared__ __align__(128) char shared[];
  const TrellisProduct<T> p = {weight, row_scale, x,      x_scale, x_sum,  bias,           residual,
                               y,      N,         tokens, units,   stride, residual_stride};
  trellis_product<Trellis<WEIGHTS, SHIFT>, M, WARPS, STAGES, RUN, 1, CopiedRuns>(p, shared);
}

#if __CUDA_ARCH__ == 900
// Grid (SPLIT tiles, groups of M tokens), in clusters of SPLIT.
template <int WEIGHTS, int SHIFT, int M, int WARPS, int STAGES, int RUN, int OCCUPANCY, int SPLIT, typename T>
__global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(WARPS * 32, OCCUPANCY)
    trellis_gemv_sm90(const char *__restrict__ weight, const half *__restrict__ row_scale, const uint32 *x,
                      const float *x_scale, const int *x_sum, const T *__restrict__ bias, const T *residual, T *y,
                      int N, int tokens, int units, int stride, int residual_stride) {
  extern __shared__ __align__(128) char shared[];
  const TrellisProduct<T> p = {weight, row_scale, x,      x_scale, x_sum,  bias,           residual,
                               y,      N,         tokens, units,   stride, residual_stride};
  trellis_product<Trellis<WEIGHTS, SHIFT>, M, WARPS, STAGES, RUN, SPLIT, BulkRuns>(p, shared);
}
#endif

}  // namespace crelle
