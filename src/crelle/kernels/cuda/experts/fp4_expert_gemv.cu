// GEMV with the chosen experts of a token, their weights four-bit floats (fp4_layout.py): few tokens, each by itself.
//
//   fp4_expert_up     inner[slot] = act(gate_e x + bias) * (up_e x + bias)      slot: a token at one of its experts e
//   fp4_expert_down   y = residual + sum over a token's slots of w_e (down_e inner[slot] + bias) (+ sigmoid(s) shared)
//
// As in expert_gemv.cu every warp finds the experts of its token itself (`choose`) and loads weights from the addresses
// in the table; for `fp4_expert_down` the experts of a token are one matrix, their inputs one after the other. The
// weights become operands of m16n8k16 as in fp4_gemv.cu, of whose eight columns one is used: reading them takes longer.
//
// Warps of a thread block split the blocks of 256 inputs, each with its own load pipeline, which goes on from one set
// of outputs to the next. Sums of the warps are added in one order. A row's scale belongs to an expert, so that
// `fp4_expert_down` adds up each slot by itself; scales and biases are loaded where a set begins.
//
// H is what the products take x and `inner` as: X, or, for a model in bf16, half, whose operands are made in a sixth
// fewer instructions, where neither can be too large for it (SWIGLUOAI's output is at most 56; a norm's, its weight
// times the root of K). What is too large all the same becomes infinite, not wrong.
//
// Both start early (PDL): `fp4_expert_up` waits for the logits and only then lets the next kernel start, so
// `fp4_expert_down` may read them, and load weights, before it waits for `inner`.
#include "experts/choice.cuh"
#include "fp4/fp4_multiply.cuh"
#include "ptx/pipeline.cuh"
#include "ptx/shared_loads.cuh"
#include "step/prologue.cuh"

namespace crelle {

// The sum of a row is in columns of x that are all the same; lane 4g has those of rows g and g + 8.
__device__ __forceinline__ void store_rows(float *to, const float (&d)[2][4], int lane) {
  if (lane % 4 == 0) to[lane / 4] = d[0][0] + d[1][0], to[lane / 4 + 8] = d[0][2] + d[1][2];
}

// Eight values of type X as H.
template <typename H, typename X>
__device__ __forceinline__ uint4 eight_as(uint4 v) {
  float f[8];
  open<X>(f, v);
  return closed<H>(f);
}
template <>
__device__ __forceinline__ uint4 eight_as<half, half>(uint4 v) {
  return v;
}
template <>
__device__ __forceinline__ uint4 eight_as<bfloat16, bfloat16>(uint4 v) {
  return v;
}

template <int TILES>
__device__ __forceinline__ void clear(float (&d)[TILES][2][4]) {
#pragma unroll
  for (int i = 0; i < TILES * 8; i++) d[i / 8][i / 4 % 2][i % 4] = 0;
}

// table: see choice.cuh; logits f32 [tokens, pitch]; x [tokens, K], K a multiple of 8, norm and shift [K] of OP (PLAIN,
// RMS_NORM, LAYER_NORM); inner [tokens, top, inner_pitch], zeros from N on. Matrices [N, K], Fp4Block. Grid (G,
// tokens): a thread block takes every G-th set of 16 outputs of its token's slots. Shared: pipelines, then x, 512 bytes
// a block.
template <Fp4Kind KIND, int E, Prologue OP, Activation ACT, int WARPS, int STAGES, int OCCUPANCY, typename X,
          typename H>
__global__ void __launch_bounds__(WARPS * 32, OCCUPANCY)
    fp4_expert_up(const Address *table, const float *logits, const X *x, const X *__restrict__ norm,
                  const X *__restrict__ shift, H *inner, int N, int K, int blocks, int count, int pitch, int top,
                  int normalize, int inner_pitch, float eps) {
  using Block = Fp4Block<KIND>;
  using Queue = Pipeline<STAGES, 2 * Block::BYTES>;
  constexpr bool NORM = OP == RMS_NORM || OP == LAYER_NORM;
  constexpr int EARLY = 2;  // loads of x that are issued before the experts are known
  extern __shared__ __align__(128) char shared[];
  __shared__ float partial[2][WARPS][32];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), token = blockIdx.y;
  const int tiles = (N + 15) / 16, sets = top * tiles;
  const int begin = warp * blocks / WARPS, end = (warp + 1) * blocks / WARPS;
  const size_t tile_bytes = Block::tile_bytes(blocks);

  Queue queue(shared + warp * Queue::SIZE, lane);
  prefetch_table<WARPS * 32>(table, count);
  grid_dependency_wait_late(N);
  launch_dependents();  // not before: the next kernel reads the logits, too

  const X *const row = x + (size_t)token * K;
  uint4 early[EARLY];
#pragma unroll
  for (int i = 0; i < EARLY; i++) {
    const int k = begin * 256 + (i * 32 + lane) * 8;
    early[i] = k < end * 256 ? eight<true>(row, k, K) : make_uint4(0, 0, 0, 0);
  }
  int expert;
  float weight;
  choose<E>(logits + (size_t)token * pitch, count, top, normalize, lane, expert, weight);
  Address gate = 0, up = 0, gate_bias = 0, up_bias = 0;  // of the slot of this lane
  if (lane < top) {
    gate = address_of(table, expert, GATE, PLANES), up = address_of(table, expert, UP, PLANES);
    gate_bias = address_of(table, expert, GATE, BIAS), up_bias = address_of(table, expert, UP, BIAS);
  }
  struct {
    int set, block;
    const char *gate, *up;
  } wanted = {static_cast<int>(blockIdx.x), begin, nullptr, nullptr};
  const auto seek = [&]() {
    const int slot = min(wanted.set, sets - 1) / tiles, n = min(wanted.set, sets - 1) % tiles;
    const size_t at = n * tile_bytes + (size_t)begin * Block::BYTES;
    wanted.gate = reinterpret_cast<const char *>(__shfl_sync(~0u, gate, slot)) + at;
    wanted.up = reinterpret_cast<const char *>(__shfl_sync(~0u, up, slot)) + at;
  };
  const auto issue_load = [&](int stage, uint32 seen) {
    if (wanted.set >= sets || begin == end) {
      queue.issue_nothing();
      return;
    }
    const int zero = nothing(seen, blocks);
    queue.issue_load(stage, wanted.gate + zero, Block::BYTES, wanted.up + zero, Block::BYTES);
    wanted.gate += Block::BYTES, wanted.up += Block::BYTES;
    if (++wanted.block == end) {
      wanted.block = begin, wanted.set += gridDim.x;
      seek();
    }
  };
  seek();
#pragma unroll
  for (int s = 0; s < STAGES; s++) issue_load(s, 0);

  // --- norm(x), as far as this warp needs it
  char *const mine = shared + WARPS * Queue::SIZE + begin * 512;
  const auto at = [&](int k) { return reinterpret_cast<uint4 *>(mine + (k - begin * 256) * 2); };
  float sum[1] = {}, squares[1] = {};
  const auto keep = [&](int k, uint4 v) {
    *at(k) = NORM ? v : eight_as<H, X>(v);
    if constexpr (NORM) {
      float f[8];
      open<X>(f, v);
#pragma unroll
      for (int i = 0; i < 8; i++) sum[0] += f[i], squares[0] = fmaf(f[i], f[i], squares[0]);
    }
  };
#pragma unroll
  for (int i = 0; i < EARLY; i++) {
    const int k = begin * 256 + (i * 32 + lane) * 8;
    if (k < end * 256) keep(k, early[i]);
  }
#pragma unroll 2
  for (int k = begin * 256 + (EARLY * 32 + lane) * 8; k < end * 256; k += 256) keep(k, eight<true>(row, k, K));
  if constexpr (NORM) {
    __shared__ float2 sums[1][WARPS];
    block_sums(sums, sum, squares);
    const Norm norms = norm_of<OP>(make_float2(sum[0], squares[0]), K, eps);
#pragma unroll 2
    for (int k = begin * 256 + lane * 8; k < end * 256; k += 256)
      *at(k) = eight_as<H, X>(applied<OP, true>(*at(k), row, k, K, norms, norm, shift));
  }
  __syncwarp();

  Fp4Operands<H> operands;
  int stage = 0, phase = 0, round = 0;
#pragma unroll 1
  for (int set = blockIdx.x; set < sets; set += gridDim.x, round++) {
    const int page = round & 1, slot = set / tiles, n = set % tiles * 16 + lane % 16;
    const bool finishes = warp == round % WARPS;
    float row_scale = 0;        // of row lane % 16, of gate for lanes below 16
    X bias = from_float<X>(0);  // kept as it is: a conversion would wait for it here
    if (finishes) {
      const Address gate_at = __shfl_sync(~0u, gate, slot), up_at = __shfl_sync(~0u, up, slot);
      const Address gate_to = __shfl_sync(~0u, gate_bias, slot), up_to = __shfl_sync(~0u, up_bias, slot);
      const char *const from = reinterpret_cast<const char *>(lane < 16 ? gate_at : up_at) + set % tiles * tile_bytes;
      const X *const biases = reinterpret_cast<const X *>(lane < 16 ? gate_to : up_to);
      row_scale = Block::row_scale(from, blocks, lane % 16);
      if (biases && n < N) bias = biases[n];
    }
    float d[2][2][4];
    clear(d);
    const char *from = mine + lane % 4 * 32;
#pragma unroll 1
    for (int b = begin; b < end; b++, from += 512) {
      const char *const piece = queue.wait(stage, phase);
      fp4_multiply<KIND, 2>(d, piece, from, operands, lane, [&](uint32 seen) {
        __syncwarp();
        issue_load(stage, seen);
      });
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    store_rows(partial[page][warp], d[0], lane), store_rows(partial[page][warp] + 16, d[1], lane);
    __syncthreads();  // two pages: no warp is two sets ahead
    H *const to = inner + ((size_t)token * top + slot) * inner_pitch;
    if (finishes) {
      float v = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) v += partial[page][w][lane];
      v = fmaf(v, row_scale, to_float(bias));
      const float other = __shfl_sync(~0u, v, lane | 16);
      if (lane < 16 && n < N) to[n] = from_float<H>(activated<ACT>(v, other));
    }
    if (set % tiles == tiles - 1)  // what the weights of `fp4_expert_down` are padded with meets zeros
      for (int i = N + threadIdx.x; i < inner_pitch; i += WARPS * 32) to[i] = from_float<H>(0);
  }
}

// x: inner [tokens, top, 256 blocks]; residual and y [tokens, N], one may be the other; more [tokens, N] (null: none)
// counts by the sigmoid of the logit behind those of the experts. Grid (G, tokens). Shared: pipelines, then x, 512
// bytes a block of each slot, then floats: 2 (WARPS + top) 16 sums of a warp and a slot, 2 top 16 of slots.
template <Fp4Kind KIND, int E, int WARPS, int STAGES, int OCCUPANCY, typename X, typename H>
__global__ void __launch_bounds__(WARPS * 32, OCCUPANCY)
    fp4_expert_down(const Address *table, const float *logits, const H *x, const X *residual, const X *more, X *y,
                    int N, int blocks, int count, int pitch, int top, int normalize) {
  using Block = Fp4Block<KIND>;
  using Queue = Pipeline<STAGES, Block::BYTES>;
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), token = blockIdx.y;
  const int sets = (N + 15) / 16, units = top * blocks;  // blocks of 256 inputs of all slots
  const int begin = warp * units / WARPS, end = (warp + 1) * units / WARPS;
  const size_t tile_bytes = Block::tile_bytes(blocks);

  launch_dependents();
  Queue queue(shared + warp * Queue::SIZE, lane);
  int expert;
  float weight;
  logits += (size_t)token * pitch;
  choose<E>(logits, count, top, normalize, lane, expert, weight);
  Address weights_at = 0, bias_at = 0;  // of the slot of this lane
  if (lane < top) weights_at = address_of(table, expert, DOWN, PLANES), bias_at = address_of(table, expert, DOWN, BIAS);
  struct {
    int set, slot, block;
    const char *at;
  } wanted = {static_cast<int>(blockIdx.x), begin / blocks, begin % blocks, nullptr};
  const auto seek = [&]() {
    wanted.at = reinterpret_cast<const char *>(__shfl_sync(~0u, weights_at, wanted.slot)) + wanted.set * tile_bytes +
                (size_t)wanted.block * Block::BYTES;
  };
  const auto issue_load = [&](int stage, uint32 seen) {
    if (wanted.set >= sets || begin == end) {
      queue.issue_nothing();
      return;
    }
    const char *const from = wanted.at + nothing(seen, blocks);
    queue.issue_load(stage, from, Block::BYTES);
    wanted.at += Block::BYTES;
    const bool last = wanted.slot * blocks + wanted.block + 1 == end;
    if (++wanted.block == blocks || last) {
      if (last)
        wanted.slot = begin / blocks, wanted.block = begin % blocks, wanted.set += gridDim.x;
      else
        wanted.slot++, wanted.block = 0;
      seek();
    }
  };
  seek();
#pragma unroll
  for (int s = 0; s < STAGES; s++) issue_load(s, 0);
  grid_dependency_wait_late(N);

  char *const mine = shared + WARPS * Queue::SIZE + begin * 512;  // no other warp's
  const H *const row = x + ((size_t)token * units + begin) * 256;
#pragma unroll 4
  for (int k = lane * 8; k < (end - begin) * 256; k += 256)
    *reinterpret_cast<uint4 *>(mine + k * 2) = __ldcg(reinterpret_cast<const uint4 *>(row + k));
  __syncwarp();

  float *const runs = reinterpret_cast<float *>(shared + WARPS * Queue::SIZE + units * 512), *const slots =
                                                                                                 runs +
                                                                                                 2 * (WARPS + top) * 16;
  Fp4Operands<H> operands;
  int stage = 0, phase = 0, page = 0;
#pragma unroll 1
  for (int set = blockIdx.x; set < sets; set += gridDim.x, page ^= 1) {
    // A thread has a row of a slot; more slots than threads / 16 are read at the end.
    const int n = set * 16 + threadIdx.x % 16;
    const X zero = from_float<X>(0);
    float row_scale = 0, share = 0;
    X bias = zero;                  // kept as it is, as the residual: a conversion would wait for it here
    const auto look = [&](int s) {  // all lanes of a warp
      const int of = min(s, top - 1);
      const char *const tile = reinterpret_cast<const char *>(__shfl_sync(~0u, weights_at, of)) + set * tile_bytes;
      const X *const biases = reinterpret_cast<const X *>(__shfl_sync(~0u, bias_at, of));
      share = __shfl_sync(~0u, weight, of);
      row_scale = Block::row_scale(tile, blocks, threadIdx.x % 16);
      bias = biases && n < N ? biases[n] : zero;
    };
    look(threadIdx.x / 16);
    const bool writes = threadIdx.x < 16 && n < N;
    const X before = writes && residual ? residual[(size_t)token * N + n] : zero;

    float d[1][2][4];
    clear(d);
    const char *from = mine + lane % 4 * 32;
    float *const own = runs + page * (WARPS + top) * 16;  // warp w and slot s: place w + s, which no other pair has
    int slot = begin / blocks, left = blocks - begin % blocks;
#pragma unroll 1
    for (int u = begin; u < end; u++, from += 512) {
      const char *const piece = queue.wait(stage, phase);
      fp4_multiply<KIND, 1>(d, piece, from, operands, lane, [&](uint32 seen) {
        __syncwarp();
        issue_load(stage, seen);
      });
      if (++stage == STAGES) stage = 0, phase ^= 1;
      if (--left == 0 || u + 1 == end) {
        store_rows(own + (warp + slot) * 16, d[0], lane);
        clear(d);
        slot++, left = blocks;
      }
    }
    __syncthreads();  // two pages: no warp is two sets ahead
    float *const sums = slots + page * top * 16;
    for (int i = threadIdx.x; i < (top * 16 + 31) / 32 * 32; i += WARPS * 32) {
      const int s = i / 16;
      if (i >= WARPS * 32) look(s);
      if (s >= top) continue;
      float v = 0;
      for (int w = ((s * blocks + 1) * WARPS - 1) / units; w <= ((s + 1) * blocks * WARPS - 1) / units; w++)
        if (w * units / WARPS < (w + 1) * units / WARPS) v += own[(w + s) * 16 + i % 16];
      sums[i] = share * fmaf(v, row_scale, to_float(bias));
    }
    __syncthreads();
    if (writes) {
      float total = to_float(before);
      if (more) total += to_float(more[(size_t)token * N + n]) / (1 + __expf(-__ldcg(logits + count)));
      for (int s = 0; s < top; s++) total += sums[s * 16 + threadIdx.x];
      y[(size_t)token * N + n] = from_float<X>(total);
    }
  }
}

}  // namespace crelle
