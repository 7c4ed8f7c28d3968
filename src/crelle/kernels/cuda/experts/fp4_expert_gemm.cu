// Grouped products for many tokens, weights of four-bit floats: slots sorted by expert, up to NT at a time.
//
//   GATED    inner[i] = act(gate_e x[token of i] + bias) * (up_e x[token of i] + bias)      i: a slot in sorted order
//   else     y[slot of i] = down_e inner[i] + bias_e
//
// The work is shared out as in expert_gemm.cu, over the passes that sort_slots (routing.cu) made: a thread block takes
// every G-th pair of a pass and some rows of its matrices. Weights become operands of m16n8k16 in registers
// (fp4_codes.cuh), the slots are its columns, and x is read as it lies: lane 4g + t takes 32 bytes of a token's 128 of
// each chunk, two chunks ahead. The warps of the same inputs (WARPS_N) find them in L1. WARPS_K warps split K and add
// up in a fixed order: a slot's bits do not depend on the others, nor on NT.
#include "experts/choice.cuh"
#include "fp4/fp4_codes.cuh"
#include "ptx/global_loads.cuh"
#include "ptx/pipeline.cuh"
#include "ptx/shared_loads.cuh"

namespace crelle {

constexpr int PASS = 10;  // words of a pass: count and first slot, then the addresses of its expert

struct Slots {
  int first, count;
  __device__ __forceinline__ Slots(Address word) : first((int)word), count((int)(word >> 32)) {}
};

// passes u64 [.., PASS] and how many; order [slots]: the slot at each place; x [.., x_pitch], K inputs, a multiple of
// 8, of token order / top (GATED) or place; y [.., stride] of N outputs: by place (GATED; zeros from N on) or by slot.
// H: what x and inner are, see fp4_expert_gemv.cu. Matrices [N, K], Fp4Block. Grid (G). Shared: pipelines, then 2
// WARPS_K NT (32 WARPS_N + 4) floats.
template <bool GATED, Fp4Kind KIND, int NT, Activation ACT, int WARPS_N, int WARPS_K, int STAGES, int OCCUPANCY,
          typename X, typename H>
__global__ void __launch_bounds__(WARPS_N * WARPS_K * 32, OCCUPANCY)
    fp4_expert_gemm(const Address *passes, const int *pass_count, const int *order, const H *x,
                    typename Conditional<GATED, H, X>::type *y, int N, int K, int blocks, int x_pitch, int stride,
                    int top) {
  using Block = Fp4Block<KIND>;
  constexpr int TILES = 2, MATRICES = GATED ? 2 : 1, WARPS = WARPS_N * WARPS_K, ROWS = WARPS_N * TILES * 16;
  constexpr int OUTPUTS = GATED ? ROWS / 2 : ROWS, SUMS = ROWS + 4;  // outputs of a piece of work; pitch of sums
  constexpr int COUNT = NT / 8, AHEAD = 2;                           // chunks of x that are under way
  using Queue = Pipeline<STAGES, TILES * Block::BYTES>;
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), g = lane / 4, t = lane % 4;
  const int warp_k = warp / WARPS_N, warp_n = warp % WARPS_N;
  const int begin = warp_k * blocks / WARPS_K, end = (warp_k + 1) * blocks / WARPS_K;
  const int last = (N - 1) / 16, sets = (N + OUTPUTS - 1) / OUTPUTS;
  const size_t tile_bytes = Block::tile_bytes(blocks);

  Queue queue(shared + warp * Queue::SIZE, lane);
  float *const pages = reinterpret_cast<float *>(shared + WARPS * Queue::SIZE);
  launch_dependents();
  grid_dependency_wait_late(N);
  const int total = __ldcg(pass_count) * sets;
  if (static_cast<int>(blockIdx.x) >= total) return;
  const auto pass_of = [&](int item) { return passes + (size_t)(min(item, total - 1) / sets) * PASS; };

  // --- loads of weights: the current piece of work and the addresses of the next one
  Address coming[MATRICES];
  const auto look = [&](int item) {
#pragma unroll
    for (int m = 0; m < MATRICES; m++) coming[m] = __ldcg(pass_of(item) + 1 + (GATED ? m : DOWN) * 3);
  };
  struct {
    int item, block;
    const char *at[TILES];
  } wanted = {static_cast<int>(blockIdx.x), begin};
  const auto seek = [&]() {
    const int set = wanted.item % sets;
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      const int tile = min(GATED ? set * WARPS_N + warp_n : (set * WARPS_N + warp_n) * TILES + j, last);
      wanted.at[j] =
          reinterpret_cast<const char *>(coming[GATED ? j : 0]) + tile * tile_bytes + (size_t)begin * Block::BYTES;
    }
    look(wanted.item + gridDim.x);
  };
  const auto issue_load = [&](int stage, uint32 seen) {
    if (wanted.item >= total || begin == end) {
      queue.issue_nothing();
      return;
    }
    const int zero = nothing(seen, blocks);
    queue.issue_load(stage, wanted.at[0] + zero, Block::BYTES, wanted.at[1] + zero, Block::BYTES);
    wanted.at[0] += Block::BYTES, wanted.at[1] += Block::BYTES;
    if (++wanted.block == end) {
      wanted.block = begin, wanted.item += gridDim.x;
      seek();
    }
  };
  look(blockIdx.x);
  seek();
#pragma unroll
  for (int s = 0; s < STAGES; s++) issue_load(s, 0);

  // --- rows of x
  const H *rows[COUNT];
  int k = 0;  // of the lane's inputs in the chunk that is loaded next
  uint4 in[AHEAD][COUNT][2];
  int found[COUNT];  // places, or what stands in `order` there: a division would wait for it
  const auto find = [&](Slots slots) {
#pragma unroll
    for (int c = 0; c < COUNT; c++) {
      const int place = slots.first + min(c * 8 + g, slots.count - 1);
      found[c] = GATED ? __ldcg(order + place) : place;
    }
  };
  const auto load = [&](uint4(&to)[COUNT][2]) {
#pragma unroll
    for (int c = 0; c < COUNT; c++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        to[c][i] =
            k + i * 8 < K ? read_now(reinterpret_cast<const uint4 *>(rows[c] + k + i * 8)) : make_uint4(0, 0, 0, 0);
    k += 64;
  };
  const auto start = [&]() {
#pragma unroll
    for (int c = 0; c < COUNT; c++) rows[c] = x + (size_t)(GATED ? found[c] / top : found[c]) * x_pitch;
    k = begin < end ? begin * 256 + t * 16 : K;
#pragma unroll
    for (int a = 0; a < AHEAD; a++) load(in[a]);
  };
  Slots now(__ldcg(pass_of(blockIdx.x))), next(__ldcg(pass_of(blockIdx.x + gridDim.x)));
  find(now), start();

  // --- what a thread stores: an output, of every STEP-th slot, and what it needs for that
  constexpr int STEP = WARPS * 32 / OUTPUTS;
  const int o = threadIdx.x % OUTPUTS, first = threadIdx.x / OUTPUTS, place = GATED ? o / 16 * 32 + o % 16 : o;
  Address weights_at[MATRICES], bias_at[MATRICES];
  const auto peek = [&](int item) {
#pragma unroll
    for (int m = 0; m < MATRICES; m++) {
      const Address *const from = pass_of(item) + 1 + (GATED ? m : DOWN) * 3;
      weights_at[m] = __ldcg(from), bias_at[m] = __ldcg(from + BIAS);
    }
  };
  float row_scale[MATRICES];
  X bias[MATRICES];  // kept as they are: a conversion would wait for them
  const auto fetch = [&](int item) {
    const int n = item % sets * OUTPUTS + o;
#pragma unroll
    for (int m = 0; m < MATRICES; m++) {
      const X *const biases = reinterpret_cast<const X *>(bias_at[m]);
      row_scale[m] = 0, bias[m] = from_float<X>(0);
      if (n < N) {
        const char *const tile = reinterpret_cast<const char *>(weights_at[m]) + n / 16 * tile_bytes;
        row_scale[m] = Block::row_scale(tile, blocks, n % 16);
        if (biases) bias[m] = biases[n];
      }
    }
  };
  peek(blockIdx.x), fetch(blockIdx.x);

  __shared__ int targets[2][NT];  // slots of the pass
  Fp4Operands<H> operands;
  int stage = 0, phase = 0, page = 0;
#pragma unroll 1
  for (int item = blockIdx.x; item < total; item += gridDim.x, page ^= 1) {
    const int set = item % sets, n = set * OUTPUTS + o;
    find(next);
    const Address after_next = __ldcg(pass_of(item + 2 * gridDim.x));
    int target = 0;
    if (!GATED && threadIdx.x < NT) target = __ldcg(order + now.first + min((int)threadIdx.x, now.count - 1));
    float d[TILES][COUNT][4];
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int i = 0; i < NT / 2; i++) d[j][i / 4][i % 4] = 0;
#pragma unroll 1
    for (int b = begin; b < end; b++) {
      const char *const piece = queue.wait(stage, phase);
      uint2 scales[TILES];
      uint32 seen = 0;
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        scales[j] = Block::scales(piece + j * Block::BYTES, lane);
        seen |= scales[j].x | scales[j].y;
      }
#pragma unroll
      for (int chunk = 0; chunk < 4; chunk++) {
        uint4 codes[TILES];
#pragma unroll
        for (int j = 0; j < TILES; j++) {
          codes[j] = Block::codes(piece + j * Block::BYTES, chunk, lane);
          seen |= codes[j].x | codes[j].y | codes[j].z | codes[j].w;
        }
        if (chunk == 3) {
          __syncwarp();
          issue_load(stage, seen);
        }
        const uint4(&v)[COUNT][2] = in[chunk % AHEAD];
#pragma unroll
        for (int j = 0; j < TILES; j++) {
          operands.scale(Block::pair(chunk < 2 ? scales[j].x : scales[j].y, chunk));
          uint32 a[4];
          operands.unpack(a, codes[j].x);
#pragma unroll
          for (int c = 0; c < COUNT; c++) multiply<H>(d[j][c], a[0], a[1], a[2], a[3], v[c][0].x, v[c][0].y);
          operands.unpack(a, codes[j].y);
#pragma unroll
          for (int c = 0; c < COUNT; c++) multiply<H>(d[j][c], a[0], a[1], a[2], a[3], v[c][0].z, v[c][0].w);
          operands.unpack(a, codes[j].z);
#pragma unroll
          for (int c = 0; c < COUNT; c++) multiply<H>(d[j][c], a[0], a[1], a[2], a[3], v[c][1].x, v[c][1].y);
          operands.unpack(a, codes[j].w);
#pragma unroll
          for (int c = 0; c < COUNT; c++) multiply<H>(d[j][c], a[0], a[1], a[2], a[3], v[c][1].z, v[c][1].w);
        }
        if (b + 1 < end || chunk + AHEAD < 4) load(in[chunk % AHEAD]);
      }
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }

    start();
    if (!GATED && threadIdx.x < NT) targets[page][threadIdx.x] = target;
    float *const sums = pages + page * (WARPS_K * NT * SUMS);  // [warp along K][token][row]
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int c = 0; c < COUNT; c++) {
        float *const to = sums + (warp_k * NT + c * 8 + 2 * t) * SUMS + (warp_n * TILES + j) * 16 + g;
        to[0] = d[j][c][0], to[SUMS] = d[j][c][1], to[8] = d[j][c][2], to[SUMS + 8] = d[j][c][3];
      }
    __syncthreads();  // two pages: no warp is two pieces of work ahead
    peek(item + gridDim.x);
    if (n < N) {
#pragma unroll 1
      for (int m = first; m < now.count; m += STEP) {
        float v[MATRICES];
#pragma unroll
        for (int i = 0; i < MATRICES; i++) {
          float sum = 0;
#pragma unroll
          for (int w = 0; w < WARPS_K; w++) sum += sums[(w * NT + m) * SUMS + place + 16 * i];
          v[i] = fmaf(sum, row_scale[i], to_float(bias[i]));
        }
        if constexpr (GATED)
          y[(size_t)(now.first + m) * stride + n] = from_float<H>(activated<ACT>(v[0], v[1]));
        else
          y[(size_t)targets[page][m] * stride + n] = from_float<X>(v[0]);
      }
    }
    if constexpr (GATED)
      for (int i = threadIdx.x; set == sets - 1 && i < now.count * (stride - N); i += WARPS * 32)
        y[(size_t)(now.first + i / (stride - N)) * stride + N + i % (stride - N)] = from_float<H>(0);
    fetch(item + gridDim.x);
    now = next, next = Slots(after_next);
  }
}

}  // namespace crelle
