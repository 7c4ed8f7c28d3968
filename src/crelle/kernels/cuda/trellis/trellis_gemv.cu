// y [tokens, N] = x [tokens, K] W.T + bias + residual for trellis weights (trellis_layout.py), 1, 2 or 4 tokens at a
// time.
//
// A warp takes units of 256 outputs and 16 inputs: lane (g, t) has the ring of outputs 32g … 32g + 31 and inputs 4t …
// 4t + 3. Step i multiplies outputs 2i and 2i + 1 of all 8 rings, rows g and g + 8 of the instruction m16n8k32. Its
// left operand is the bytes of states as the product leaves them (trellis_states.cuh); its right one has x for each
// byte, the digit in column g of the inputs of lane t: (x0, x1, x0, x1) and (x2, x3, x2, x3) for two weights a state.
// It is loaded once for all steps of a unit. Columns are two digits of each token, 256 high + low.
//
// On Hopper SPLIT thread blocks of a cluster share the inputs, each a segment of x with a scale of its own
// (trellis_prologue.cuh), and a cluster takes every so many tiles of 256 outputs, one after the other: x stays in
// shared memory for all of them, and the load pipeline runs on from tile to tile. x comes encoded from another launch
// (trellis_encode.cu), or a thread block encodes its segment itself (PROLOGUE), while its first weights are on the way:
// then norm, rotation and product are one launch. Before Hopper a thread block takes one tile and all inputs.
//
// The warps of a thread block take turns at runs of RUN units, each through its own load pipeline. Sums of a segment
// are integers, exact in any order; those of the segments are added as f32 in their order. So a row's bits depend on
// the number of segments alone. A warp's sums fit into 32 bits: at most 1020 * 128 an input (mul1), so four warps hold
// 65536 inputs.
//
// Instructions a weight in the loop (sm_90a, RUN 2, counted in the disassembly; in brackets those of the integer units,
// which take one every other cycle): pair 1.59 (0.61) at 2 and 4 bits, 1.85 (0.82) at 3; mul1 3.49 (1.59) at 3 bits,
// 2.89 (1.12) at 4.
#include "trellis/trellis_prologue.cuh"
#include "trellis/trellis_states.cuh"
#include "ptx/run_pipeline.cuh"
#include "ptx/tensorcore.cuh"

namespace crelle {

constexpr int ENCODED = -1;  // PROLOGUE: x comes as digits

// What the kernels get.
template <typename T>
struct TrellisProduct {
  const char *weight;     // [tiles, units, W::UNIT]; units: a multiple of 4
  const half *row_scale;  // [N]
  const uint32 *digits;   // [groups of M tokens, units, digits of tokens 0 … M - 1, high first, 4]; where x is ENCODED
  const float *x_scale;   // [tokens, SPLIT]
  const int *x_sum;       // [tokens, SPLIT] of 256 high + low
  const T *bias;          // [N], or null
  const T *residual;      // [tokens, N], or null; may be y
  T *y;                   // [tokens, stride]
  int N, tokens, units, tiles, stride, residual_stride;
};

// Shared memory: barriers; for each warp its pipeline; the warps' sums; what other thread blocks of the cluster send;
// x of the segment, where it is encoded here.
template <typename W, int M, int WARPS, int STAGES, int RUN, int SPLIT>
struct TrellisShared {
  static constexpr int RUN_BYTES = RUN * W::UNIT;
  static constexpr int BLOCK = 32 * 2 * M + (M == 4 ? 8 : 4);  // sums of a ring's outputs, and banks between rings
  static constexpr int OUTPUTS = 256 / SPLIT;                  // of a tile that a thread block of the cluster stores
  static constexpr int BARRIERS = (WARPS * STAGES + 3) * 8, FIRST = (BARRIERS + 127) / 128 * 128;
  static constexpr int SUMS = FIRST + WARPS * STAGES * RUN_BYTES, SUMS_WARP = 8 * BLOCK * 4;
  static constexpr int RECEIVED = SUMS + WARPS * SUMS_WARP;  // [2 tiles][ranks][M][OUTPUTS]
  static constexpr int INPUT = RECEIVED + (SPLIT > 1 ? 2 * 256 * M * 4 : 0);
};

template <typename W, int PROLOGUE, int M, int WARPS, int STAGES, int RUN, int SPLIT, int PASSES,
          template <int, int, int> class Runs, typename T>
__device__ __forceinline__ void trellis_product(const TrellisProduct<T> &p, const TrellisInput<T> &in, char *shared) {
  using Room = TrellisShared<W, M, WARPS, STAGES, RUN, SPLIT>;
  constexpr bool ENCODES = PROLOGUE != ENCODED;
  constexpr int WORDS = W::WORDS, THREADS = WARPS * 32, OUTPUTS = Room::OUTPUTS;
  constexpr int MINE = (OUTPUTS * M + THREADS - 1) / THREADS;  // outputs that a thread stores
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % SPLIT, first_tile = blockIdx.x / SPLIT, clusters = gridDim.x / SPLIT;
  const int token = blockIdx.y * M;
  const int from = segment_begin(p.units, rank, SPLIT), to = segment_begin(p.units, rank + 1, SPLIT);  // units
  const int begin = from / RUN + warp, end = to / RUN;                                                 // runs
  launch_dependents();

  Runs<STAGES, Room::RUN_BYTES, 1> queue(shared + Room::FIRST + warp * STAGES * Room::RUN_BYTES,
                                         shared_address(shared) + warp * STAGES * 8, lane, p.units);
  int ahead_tile = begin < end ? first_tile : p.tiles, ahead_run = begin;  // what is loaded next
  const auto refill = [&](int stage, uint32 seen) {
    const char *const next = p.weight + ((size_t)ahead_tile * (p.units / RUN) + ahead_run) * Room::RUN_BYTES;
    queue.refill(stage, next, ahead_tile < p.tiles, seen);
    ahead_run += WARPS;
    if (ahead_run >= end) ahead_run = begin, ahead_tile += clusters;
  };
#pragma unroll
  for (int s = 0; s < STAGES; s++) refill(s, 0);

  // What no kernel writes of a thread's outputs, and the residual.
  struct Added {
    float scale[MINE], bias[MINE], residual[MINE];
  } coming, stored;
  const auto output_of = [&](int i) {  // output of the tile that a thread stores, or -1
    const int o = threadIdx.x + i * THREADS;
    return o < OUTPUTS * M ? rank * OUTPUTS + o / M : -1;
  };
  const int my_token = token + threadIdx.x % M;
  const auto fetch = [&](int tile, bool residual) {
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const int n = tile * 256 + output_of(i);
      const bool there = output_of(i) >= 0 && n < p.N && my_token < p.tokens;
      if (!residual) {
        coming.scale[i] = there ? to_float(p.row_scale[n]) : 0;
        coming.bias[i] = there && p.bias ? to_float(p.bias[n]) : 0;
      } else {
        coming.residual[i] = there && p.residual ? to_float(p.residual[(size_t)my_token * p.residual_stride + n]) : 0;
      }
    }
  };
  fetch(first_tile, false);

#if __CUDA_ARCH__ == 900
  // Barriers: what the thread blocks of the cluster send for even and for odd tiles, and that sums have been read.
  const uint32 sent = shared_address(shared) + WARPS * STAGES * 8, consumed = sent + 16;
  if constexpr (SPLIT > 1) {
    if (threadIdx.x == 0) {
      init_barrier(sent, 1), init_barrier(sent + 8, 1), init_barrier(consumed, WARPS);
      fence_barriers();
      arrive_expecting(sent, 256 * M * 4), arrive_expecting(sent + 8, 256 * M * 4);
    }
    __syncthreads();
    cluster_arrive();
  }
#endif

  // x: digits of the segment's units in the columns of the lane's group. Its scale and its sum, of token threadIdx.x %
  // M.
  const uint32 *x;
  float x_scale = 0;
  int x_sum = 0;
  using Encoder = ShareEncoder<static_cast<Prologue>(ENCODES ? PROLOGUE : PLAIN), M, WARPS, PASSES, T>;
  char *const small = shared + Room::INPUT;
  if constexpr (ENCODES) {
    float4 *const exchange = reinterpret_cast<float4 *>(small + Encoder::SMALL);
    uint32 *const digits = reinterpret_cast<uint32 *>(exchange + (in.block > 256 ? Encoder::EXCHANGE / 16 : 0));
    Encoder encoder(in, from * 16, to * 16, small);
    grid_dependency_wait_late(p.units);
    fetch(first_tile, true);
    encoder.encode(token, p.tokens, digits, exchange);
    x = digits + g % (2 * M) * 4 + t;
  } else {
    grid_dependency_wait();
    fetch(first_tile, true);
    x = p.digits + ((size_t)blockIdx.y * p.units + from) * (8 * M) + g % (2 * M) * 4 + t;
    if (my_token < p.tokens) x_scale = p.x_scale[my_token * SPLIT + rank], x_sum = p.x_sum[my_token * SPLIT + rank];
  }
#if __CUDA_ARCH__ == 900
  if constexpr (SPLIT > 1) cluster_wait();
#endif

  const auto store = [&](int tile, int i, float sum) {
    const int n = tile * 256 + output_of(i);
    if (n >= p.N || my_token >= p.tokens) return;
    float out = sum * (stored.scale[i] * 0x1p-7f);
    if (p.bias) out += stored.bias[i];
    if (p.residual) out += stored.residual[i];
    p.y[(size_t)my_token * p.stride + n] = from_float<T>(out);
  };
  const auto finish = [&](int tile, int round) {  // store what the cluster has sent for a tile
#if __CUDA_ARCH__ == 900
    if constexpr (SPLIT > 1) {
      if (threadIdx.x >= OUTPUTS * M) return;
      const uint32 barrier = sent + round % 2 * 8;
      wait_for_stores(barrier, round / 2);
      if (threadIdx.x == 0) arrive_expecting(barrier, 256 * M * 4);  // of the tile after the next one
      const float *const all = reinterpret_cast<const float *>(shared + Room::RECEIVED) + round % 2 * 256 * M;
#pragma unroll
      for (int i = 0; i < MINE; i++) {
        const int o = threadIdx.x + i * THREADS;
        if (o >= OUTPUTS * M) break;
        float total = 0;
#pragma unroll
        for (int r = 0; r < SPLIT; r++) total += all[(r * M + o % M) * OUTPUTS + o / M];
        store(tile, i, total);
      }
    }
#endif
  };

  int stage = 0, phase = 0, round = 0;
#pragma unroll 1
  for (int tile = first_tile; tile < p.tiles; tile += clusters, round++) {
    uint32 acc[16][4];
#pragma unroll
    for (int i = 0; i < 16; i++) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0;
    // x of a run is loaded while the run before is multiplied.
    uint32 now[RUN] = {}, next[RUN] = {};
    const auto load_x = [&](int run) {
#pragma unroll
      for (int j = 0; j < RUN; j++)
        if (run < end) next[j] = x[(run * RUN - from + j) * (8 * M)];
    };
    load_x(begin);
#pragma unroll 1
    for (int run = begin; run < end; run += WARPS) {
#pragma unroll
      for (int j = 0; j < RUN; j++) now[j] = next[j];
      load_x(run + WARPS);
      const char *const piece = queue.wait(stage, phase);
#pragma unroll
      for (int j = 0; j < RUN; j++) {
        uint32 ring[WORDS];
        W::load(ring, piece + j * W::UNIT, lane);
        if (j == RUN - 1) refill(stage, W::seen(ring));
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
              multiply_u8(acc[r], W::bytes(ring, 8 * r + h), W::bytes(ring, 8 * r + 4 + h),
                          W::bytes(ring, 8 * r + h + 1), W::bytes(ring, 8 * r + 5 + h), b[h], b[h + 1]);
        }
      }
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }

    if (SPLIT > 1 && round > 0) finish(tile - clusters, round - 1);
    stored = coming;
    if (tile + clusters < p.tiles) fetch(tile + clusters, false), fetch(tile + clusters, true);
#if __CUDA_ARCH__ == 900
    if (SPLIT > 1 && round > 0) wait_barrier(consumed, round - 1);
#endif
    // Lane (g, t) has token t of outputs 32g + 2r and the next: high and low digit.
    int *const sums = reinterpret_cast<int *>(shared + Room::SUMS + warp * Room::SUMS_WARP) + g * Room::BLOCK + 2 * t;
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
    if (ENCODES && round == 0 && my_token < p.tokens)
      x_scale = Encoder::scale(in, small, threadIdx.x % M), x_sum = Encoder::sum(small, threadIdx.x % M);
    const auto sum = [&](int n) {  // of the token threadIdx.x % M
      const char *at = shared + Room::SUMS + ((n / 32) * Room::BLOCK + (n % 32) * 2 * M + 2 * (threadIdx.x % M)) * 4;
      typename Conditional<(SPLIT == 8), int, long long>::type high = 0, low = 0;  // 8192 inputs, or all
#pragma unroll
      for (int w = 0; w < WARPS; w++, at += Room::SUMS_WARP) {
        const int2 v = *reinterpret_cast<const int2 *>(at);
        high += v.x, low += v.y;
      }
      return (float)(256ll * high + low - (long long)W::ZERO * x_sum) * x_scale;
    };
    if constexpr (SPLIT == 1) {
#pragma unroll
      for (int i = 0; i < MINE; i++)
        if (output_of(i) >= 0) store(tile, i, sum(output_of(i)));
      __syncthreads();
    } else {
#if __CUDA_ARCH__ == 900
      const uint32 received = shared_address(shared) + Room::RECEIVED + (round % 2 * SPLIT + rank) * (M * OUTPUTS * 4);
      for (int i = threadIdx.x; i < 128 * M; i += THREADS) {
        const int n = i / M * 2;
        dsmem_store(received + (i % M * OUTPUTS + n % OUTPUTS) * 4, make_float2(sum(n), sum(n + 1)),
                    sent + round % 2 * 8, n / OUTPUTS);
      }
      __syncwarp();
      if (lane == 0) arrive(consumed);
#endif
    }
  }
  if (SPLIT > 1 && round > 0) finish(first_tile + (round - 1) * clusters, round - 1);
}

// Grid (tiles, groups of M tokens).
template <int WEIGHTS, int SHIFT, int M, int WARPS, int STAGES, int RUN, int OCCUPANCY, typename T>
__global__ void __launch_bounds__(WARPS * 32, OCCUPANCY)
    trellis_gemv_sm80(const char *__restrict__ weight, const half *__restrict__ row_scale, const uint32 *digits,
                      const float *x_scale, const int *x_sum, const T *__restrict__ bias, const T *residual, T *y,
                      int N, int tokens, int units, int tiles, int stride, int residual_stride) {
  extern __shared__ __align__(128) char shared[];
  const TrellisProduct<T> p = {weight, row_scale, digits, x_scale, x_sum, bias,   residual,
                               y,      N,         tokens, units,   tiles, stride, residual_stride};
  trellis_product<Trellis<WEIGHTS, SHIFT>, ENCODED, M, WARPS, STAGES, RUN, 1, 1, CopiedRuns>(p, {}, shared);
}

#if __CUDA_ARCH__ == 900
// Grid (SPLIT clusters, groups of M tokens), in clusters of SPLIT.
template <int WEIGHTS, int SHIFT, int PROLOGUE, int PASSES, int M, int WARPS, int STAGES, int RUN, int OCCUPANCY,
          int SPLIT, typename T>
__global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(WARPS * 32, OCCUPANCY)
    trellis_gemv_sm90(const char *__restrict__ weight, const half *__restrict__ row_scale, const uint32 *digits,
                      const float *x_scale, const int *x_sum, const T *x, const T *__restrict__ norm,
                      const T *__restrict__ shift, const unsigned char *__restrict__ signs, const T *__restrict__ bias,
                      const T *residual, T *y, int N, int tokens, int units, int tiles, int stride, int residual_stride,
                      int K, int block, float root, float eps) {
  extern __shared__ __align__(128) char shared[];
  const TrellisProduct<T> p = {weight, row_scale, digits, x_scale, x_sum, bias,   residual,
                               y,      N,         tokens, units,   tiles, stride, residual_stride};
  const TrellisInput<T> in = {x, norm, shift, signs, K, block, root, eps};
  trellis_product<Trellis<WEIGHTS, SHIFT>, PROLOGUE, M, WARPS, STAGES, RUN, SPLIT, PASSES, BulkRuns>(p, in, shared);
}
#endif

}  // namespace crelle
