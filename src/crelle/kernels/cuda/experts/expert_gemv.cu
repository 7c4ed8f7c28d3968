// GEMV with the chosen experts of a token, on the binary tensor cores (bmma_block.cuh): few tokens, each by itself.
//
//   expert_up     inner[slot] = act(gate_e x) * (up_e x)      slot: a token at one of its experts e
//   expert_down   y = residual + sum over a token's slots of w_e down_e inner[slot] (+ sigmoid(s) shared)
//
// No launch is needed to route: a warp finds the largest of a few hundred logits in less time than it waits for memory,
// so in both kernels a warp of each thread block does (`choose`). For `expert_down` the experts of a token are one
// matrix, their inputs one after the other: an expert's weight w_e is part of the scale of its inputs, so that the sum
// over experts is the sum over inputs, in one order.
//
// For one token these kernels are a chain of waits and not a stream of bytes, so the chain is short, and a thread block
// asks for all its weights at once: warps split the blocks of 256 inputs, in `expert_up` one half of the warps takes
// gate and the other one up, and each has its own load pipeline over all sets of rows. x becomes bit-serial in every
// thread block of `expert_up`, and in each cluster of those of `expert_down`, which share the slots and exchange sums
// (where x is long, in a launch before it). Both start early (PDL), with registers and shared memory for both on a
// multiprocessor: `expert_up` waits for the logits and only then lets the next kernel start, so `expert_down` may read
// them, and load weights, before it waits for `inner`.
#include "experts/choice.cuh"
#include "planes/bitserial.cuh"
#include "planes/bmma_block.cuh"
#include "ptx/dsmem.cuh"

namespace crelle {

template <int P, ScaleKind KIND, int GROUPS, typename S>
using OneRow = Block<P, KIND, GROUPS, 1, 1, S>;

// Multiplies the scales of what was loaded of x.
__device__ __forceinline__ void scale_by(float &scale, float by) { scale *= by; }
template <int H>
__device__ __forceinline__ void scale_by(float (&scale)[H], float by) {
#pragma unroll
  for (int h = 0; h < H; h++) scale[h] *= by;
}

// The bytes before block b of tile n: of planes, and of scales.
template <int GROUPS, int SCALE_BYTES>
__device__ __forceinline__ size_t planes_before(int n, int b, int blocks, int planes) {
  return (size_t)(n * blocks + b) * (planes * 512);
}
template <int GROUPS, int SCALE_BYTES>
__device__ __forceinline__ size_t scales_before(int n, int b, int blocks, int blocks_per_scale) {
  const int set =
      GROUPS > 1 ? n * blocks + b : n * ((blocks + blocks_per_scale - 1) / blocks_per_scale) + b / blocks_per_scale;
  return (size_t)set * SCALE_BYTES;
}

// What a token's slots are: as `choose` found them, for the other warps.
struct Chosen {
  int expert[32];
  float weight[32];
};

// table: see choice.cuh; logits f32 [tokens, pitch]; x [tokens, K], norm and norm_bias [K] of OP (PLAIN, RMS_NORM,
// LAYER_NORM); inner [tokens, top, inner_pitch], zeros from N on. Matrices [N, K] as in bmma_gemv.cu. Grid (G, tokens):
// a thread block takes a G-th of the sets of 16 outputs of its token's slots; 2 SPLITS warps: SPLITS of a matrix share
// K. Shared: pipelines, x bit-serial, then addresses of planes and scales of gate and up of all experts.
template <int P, ScaleKind KIND, int GROUPS, int E, Prologue OP, Activation ACT, int SPLITS, int STAGES, int OCCUPANCY,
          typename S, typename X>
__global__ void __launch_bounds__(SPLITS * 64, OCCUPANCY)
    expert_up(const Address *table, const float *logits, const X *x, const X *__restrict__ norm,
              const X *__restrict__ norm_bias, X *inner, int N, int K, int blocks, int planes, int blocks_per_scale,
              int count, int pitch, int top, int normalize, int inner_pitch, float eps) {
  using B = OneRow<P, KIND, GROUPS, S>;
  constexpr int WARPS = 2 * SPLITS, PARTS = B::PARTS, STEP = B::STEP;
  using Queue = Pipeline<STAGES, B::PLANE_BYTES + B::SCALE_BYTES>;
  extern __shared__ __align__(128) char shared[];
  __shared__ float partial[2][2][SPLITS][16];
  __shared__ Chosen slots;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), token = blockIdx.y;
  const int tiles = (N + 15) / 16, sets = top * tiles, split = warp % SPLITS;
  const int start = blockIdx.x * sets / gridDim.x, stop = (blockIdx.x + 1) * sets / gridDim.x;
  const int begin = split * blocks / SPLITS, end = (split + 1) * blocks / SPLITS;
  const Matrix matrix = warp < SPLITS ? GATE : UP;

  Queue queue(shared + warp * Queue::SIZE, lane);
  uint32 *const bits = reinterpret_cast<uint32 *>(shared + WARPS * Queue::SIZE);
  float *const xscale = reinterpret_cast<float *>(bits + 2 * blocks * 64);
  Address *const staged = reinterpret_cast<Address *>(xscale + 2 * blocks * (1 + PARTS));  // [count, gate or up, 2]

  struct Place {  // of a set
    int slot, tile;
    __device__ __forceinline__ void next(int tiles) {
      if (++tile == tiles) tile = 0, slot++;
    }
  } const here = {start / tiles, start % tiles};
  struct {
    int left, block;
    Place at;
  } wanted = {begin < end ? stop - start : 0, begin, here};  // what to load next: sets, a set's blocks
  Quarter<OP, X> quarter;
  quarter.place(norm, norm_bias, nullptr, warp, K, blocks, lane);
#pragma unroll 2
  for (int i = threadIdx.x; i < count * 4; i += WARPS * 32)
    staged[i] = address_of(table, i / 4, static_cast<Matrix>(i / 2 % 2), static_cast<Part>(i % 2));
  grid_dependency_wait_late(N);
  launch_dependents();  // not before: the next kernel reads the logits, too

  const X *const row = x + (size_t)token * K;
  if (warp < 2 * blocks) quarter.read(row, K);
  if (warp == WARPS - 1) {  // where K is short, statistics need nothing of this warp
    int expert;
    float weight;
    choose<E>(logits + (size_t)token * pitch, count, top, normalize, lane, expert, weight);
    slots.expert[lane] = expert;
  }
  const float2 stats = statistics<OP, WARPS>(row, K, eps);
  if constexpr (OP == PLAIN) __syncthreads();  // otherwise it has been done
  const int expert = slots.expert[lane];
  const Address planes_at = staged[expert * 4 + matrix * 2], scales_at = staged[expert * 4 + matrix * 2 + 1];
  const auto issue_load = [&](int stage) {
    if (wanted.left == 0) {
      queue.issue_nothing();
      return;
    }
    const int slot = wanted.at.slot, n = wanted.at.tile, b = wanted.block;
    queue.issue_load(stage,
                     reinterpret_cast<const char *>(__shfl_sync(~0u, planes_at, slot)) +
                         planes_before<GROUPS, B::SCALE_BYTES>(n, b, blocks, planes),
                     B::PLANE_BYTES,
                     reinterpret_cast<const char *>(__shfl_sync(~0u, scales_at, slot)) +
                         scales_before<GROUPS, B::SCALE_BYTES>(n, b, blocks, blocks_per_scale),
                     B::SCALE_BYTES);
    if (++wanted.block == end) wanted.block = begin, wanted.left--, wanted.at.next(tiles);
  };
#pragma unroll
  for (int s = 0; s < STAGES; s++) issue_load(s);

#pragma unroll 1
  for (int half = warp; half < 2 * blocks; half += WARPS) {
    if (half != warp) {
      quarter.place(norm, norm_bias, nullptr, half, K, blocks, lane);
      quarter.read(row, K);
    }
    quarter.apply(stats);
    write_bitserial<PARTS, 1>(quarter.v, bits, xscale, half, 0, lane);
  }
  const Address biases[2] = {warp == 0 && lane < top ? address_of(table, expert, GATE, BIAS) : 0,
                             warp == 0 && lane < top ? address_of(table, expert, UP, BIAS) : 0};
  __syncthreads();

  const bool first = B::first(lane);
  const float place = B::place(lane);
  typename B::Inputs next(bits, xscale, min(2 * begin, 2 * blocks - STEP), lane);
  int taken = 0, page = 0;
  Place at = here;
#pragma unroll 1
  for (int set = start; set < stop; set++, page ^= 1) {
    float2 sums = make_float2(0, 0);
#pragma unroll 1
    for (int b = begin; b < end; b++, taken++) {
      const char *piece = queue.wait(taken % STAGES, taken / STAGES);
      uint32 scale[B::SCALES];
      take(scale, reinterpret_cast<const uint32 *>(piece + B::PLANE_BYTES) + B::scales_at(lane));
#pragma unroll
      for (int h = 0; h < 2; h += STEP) {
        const typename B::Inputs now = next;
        const int half = 2 * b + h + STEP;
        next = typename B::Inputs(bits, xscale, half < 2 * end ? half : 2 * begin, lane);
        B::multiply(sums, piece, scale, now, h, lane);
      }
      __syncwarp();
      issue_load(taken % STAGES);
    }
    // The warps' sums, in order. Two pages, so that one barrier is enough: no warp is two sets ahead.
    float a = sums.x * place, c = sums.y * place;
#pragma unroll
    for (int i = 1; i < B::LANES; i *= 2) a += __shfl_xor_sync(~0u, a, i), c += __shfl_xor_sync(~0u, c, i);
    float *const to = &partial[page][matrix][split][lane >> 2];
    if (first) to[0] = a, to[8] = c;
    __syncthreads();
    const int slot = at.slot, n = at.tile * 16 + (lane & 15);
    X *const made = inner + ((size_t)token * top + slot) * inner_pitch;
    if (warp == 0) {  // lanes 0 ... 15 have gate's outputs, the others up's
      const Address of_gate = __shfl_sync(~0u, biases[0], slot), of_up = __shfl_sync(~0u, biases[1], slot);
      const X *const bias = reinterpret_cast<const X *>(lane < 16 ? of_gate : of_up);
      float v = bias && n < N ? to_float(bias[n]) : 0;
#pragma unroll
      for (int w = 0; w < SPLITS; w++) v += partial[page][lane >> 4][w][lane & 15];
      const float up = __shfl_down_sync(~0u, v, 16);
      if (lane < 16 && n < N) made[n] = from_float<X>(activated<ACT>(v, up));
    }
    if (at.tile == tiles - 1)  // what the weights of `expert_down` are padded with meets zeros
      for (int i = N + threadIdx.x; i < inner_pitch; i += WARPS * 32) made[i] = from_float<X>(0);
    at.next(tiles);
  }
}

// x: inner [tokens, top, 256 blocks], or null where bits and xscale have it bit-serial, a token's slots one after the
// other; residual and y [tokens, N], one may be the other; shared [tokens, N] (null: none) counts by the sigmoid of the
// logit behind those of the experts. Grid (G, tokens), clusters of CLUSTER thread blocks, which share the slots of G /
// CLUSTER sets of 16 outputs. Shared: pipelines, x bit-serial, then a Page for every set of a thread block.
template <int P, ScaleKind KIND, int GROUPS, int E, int CLUSTER, int WARPS, int STAGES, int OCCUPANCY, bool ENCODES,
          typename S, typename X>
__global__ void __launch_bounds__(WARPS * 32, OCCUPANCY)
    expert_down(const Address *table, const float *logits, const X *x, const uint32 *bits, const float *xscale,
                const X *residual, const X *more, X *y, int N, int blocks, int planes, int blocks_per_scale, int count,
                int pitch, int top, int normalize) {
  using B = OneRow<P, KIND, GROUPS, S>;
  constexpr int PARTS = B::PARTS, STEP = B::STEP;
  using Queue = Pipeline<STAGES, B::PLANE_BYTES + B::SCALE_BYTES>;
  extern __shared__ __align__(128) char shared[];
  __shared__ float partial[2][WARPS][16];
  __shared__ Chosen slots;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), token = blockIdx.y;
  const int sets = (N + 15) / 16, units = top * blocks;  // blocks of 256 inputs of all slots
  const int rank = blockIdx.x % CLUSTER, group = blockIdx.x / CLUSTER, groups = gridDim.x / CLUSTER;
  const int base = rank * units / CLUSTER, share = (rank + 1) * units / CLUSTER - base;  // of this thread block
  const int begin = base + warp * share / WARPS, end = base + (warp + 1) * share / WARPS;
  constexpr int OWN = 16 / CLUSTER;  // outputs of a set that a thread block of the cluster writes

  launch_dependents();
  uint32 *const own_bits = reinterpret_cast<uint32 *>(shared + WARPS * Queue::SIZE);
  const int halves = ENCODES ? 2 * ((units + CLUSTER - 1) / CLUSTER) : 0;
  float *const own_scale = reinterpret_cast<float *>(own_bits + halves * 64);
  struct Page {  // what the cluster sends
    float sums[CLUSTER][OWN];
    Mbarrier mbarrier;
  } *const pages = reinterpret_cast<Page *>(own_scale + halves * (1 + PARTS));
  if constexpr (CLUSTER > 1) {
    for (int i = threadIdx.x; group + i * groups < sets; i += WARPS * 32)
      init_mbarrier(&pages[i].mbarrier, 16 * sizeof(float));
    cluster_arrive();
  }
  Queue queue(shared + warp * Queue::SIZE, lane);
  struct Place {  // of a unit
    int slot, block;
    __device__ __forceinline__ void next(int blocks) {
      if (++block == blocks) block = 0, slot++;
    }
  } const here = {begin / blocks, begin % blocks};
  logits += (size_t)token * pitch;
  if (warp == 0) {
    int expert;
    float weight;
    choose<E>(logits, count, top, normalize, lane, expert, weight);
    slots.expert[lane] = expert, slots.weight[lane] = weight;
  }
  __syncthreads();
  const int expert = slots.expert[lane];
  const float weight = slots.weight[lane];
  const Address planes_at = lane < top ? address_of(table, expert, DOWN, PLANES) : 0;
  const Address scales_at = lane < top ? address_of(table, expert, DOWN, SCALES) : 0;
  const Address bias_at = lane < top ? address_of(table, expert, DOWN, BIAS) : 0;
  const bool biased = __any_sync(~0u, bias_at != 0);
  struct {
    int set, unit;
    Place at;
  } wanted = {group, begin, here};
  const auto issue_load = [&](int stage) {
    if (wanted.set >= sets || begin == end) {
      queue.issue_nothing();
      return;
    }
    const int slot = wanted.at.slot, b = wanted.at.block, n = wanted.set;
    queue.issue_load(stage,
                     reinterpret_cast<const char *>(__shfl_sync(~0u, planes_at, slot)) +
                         planes_before<GROUPS, B::SCALE_BYTES>(n, b, blocks, planes),
                     B::PLANE_BYTES,
                     reinterpret_cast<const char *>(__shfl_sync(~0u, scales_at, slot)) +
                         scales_before<GROUPS, B::SCALE_BYTES>(n, b, blocks, blocks_per_scale),
                     B::SCALE_BYTES);
    wanted.at.next(blocks);
    if (++wanted.unit == end) wanted.unit = begin, wanted.set += groups, wanted.at = here;
  };
#pragma unroll
  for (int s = 0; s < STAGES; s++) issue_load(s);
  grid_dependency_wait_late(N);

  if constexpr (ENCODES) {  // a warp needs what it multiplies, and nothing else
    const X *row = x + (size_t)token * units * 256;
    constexpr int AT_ONCE = 4;
#pragma unroll 1
    for (int half = 2 * begin; half < 2 * end; half += AT_ONCE) {
      float v[AT_ONCE][4];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
        for (int k = 0; k < 4; k++)
          v[i][k] = half + i < 2 * end ? to_float(__ldcg(row + (half + i) * 128 + 32 * k + lane)) : 0;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (half + i < 2 * end) write_bitserial<PARTS, 1>(v[i], own_bits, own_scale, half + i - 2 * base, 0, lane);
    }
    __syncwarp();
    bits = own_bits, xscale = own_scale;
  } else {
    bits += (size_t)token * 2 * units * 64, xscale += (size_t)token * 2 * units * (1 + PARTS);
  }

  const bool first = B::first(lane);
  const float place = B::place(lane);
  const int skip = ENCODES ? 2 * base : 0;  // halves of x that are not there
  typename B::Inputs next(bits, xscale, begin < end ? 2 * begin - skip : 0, lane);
  if constexpr (CLUSTER > 1) cluster_wait();
  int taken = 0, round = 0;
#pragma unroll 1
  for (int set = group; set < sets; set += groups, round++) {
    const int page = round & 1, n = set * 16 + rank * OWN + lane;
    const bool mine = warp == 0 && lane < OWN && n < N;
    X before = from_float<X>(0);
    if (mine && residual) before = residual[(size_t)token * N + n];
    float2 sums = make_float2(0, 0);
    Place at = here;
#pragma unroll 1
    for (int u = begin; u < end; u++, taken++) {
      const char *piece = queue.wait(taken % STAGES, taken / STAGES);
      const float by = __shfl_sync(~0u, weight, at.slot);
      uint32 scale[B::SCALES];
      take(scale, reinterpret_cast<const uint32 *>(piece + B::PLANE_BYTES) + B::scales_at(lane));
#pragma unroll
      for (int h = 0; h < 2; h += STEP) {
        typename B::Inputs now = next;
        const int half = 2 * u + h + STEP;
        next = typename B::Inputs(bits, xscale, (half < 2 * end ? half : 2 * begin) - skip, lane);
        scale_by(now.scale, by);
        B::multiply(sums, piece, scale, now, h, lane);
      }
      __syncwarp();
      issue_load(taken % STAGES);
      at.next(blocks);
    }
    float a = sums.x * place, c = sums.y * place;
#pragma unroll
    for (int i = 1; i < B::LANES; i *= 2) a += __shfl_xor_sync(~0u, a, i), c += __shfl_xor_sync(~0u, c, i);
    if (first) partial[page][warp][lane >> 2] = a, partial[page][warp][(lane >> 2) + 8] = c;
    __syncthreads();
    if (warp > 0) continue;
    float v = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) v += partial[page][w][lane & 15];
    if constexpr (CLUSTER > 1) {
      Page &own = pages[round];
      if (lane < 16) dsmem_store(&own.sums[rank][lane % OWN], v, &own.mbarrier, lane / OWN);
      wait_mbarrier(&own.mbarrier);
      v = 0;
#pragma unroll
      for (int r = 0; r < CLUSTER; r++) v += own.sums[r][lane % OWN];
    }
    v += to_float(before);
    if (mine) {
      if (more) v += to_float(more[(size_t)token * N + n]) / (1 + __expf(-__ldcg(logits + count)));
    }
    for (int slot = 0; biased && slot < top; slot++) {
      const float by = __shfl_sync(~0u, weight, slot);
      const X *const bias = reinterpret_cast<const X *>(__shfl_sync(~0u, bias_at, slot));
      if (bias && mine) v = fmaf(by, to_float(bias[n]), v);
    }
    if (mine) y[(size_t)token * N + n] = from_float<X>(v);
  }
}

}  // namespace crelle
