// Grouped products for many tokens: slots (a token at one of its experts) sorted by expert, up to NT at a time.
//
//   GATED    inner[i] = act(gate_e x[token of i]) * (up_e x[token of i])         i: a slot in sorted order
//   else     y[slot of i] = down_e inner[i] + bias_e
//
// sort_slots (routing.cu) makes the list of passes: an expert and up to NT of its slots. A thread block takes every
// G-th pair of a pass and some rows of its matrices, so that an expert's weights are read once per NT of its slots, and
// the host need not know how many there are: the grid is as large as the device, and ends where the list does.
//
// As in skinny_gemm.cu weights are dequantized in registers for the warp's mma and x is read as it lies; a row of x is
// found through the order of the slots. A warp's load pipeline goes on from one piece of work to the next, and what a
// piece needs to know (addresses, rows) is loaded one piece before. WARPS_K warps split K and add up in a fixed order:
// a slot's bits do not depend on the others, nor on NT.
#include "experts/choice.cuh"
#include "planes/skinny_tokens.cuh"
#include "ptx/pipeline.cuh"

namespace crelle {

constexpr int PASS = 10;  // words of a pass: count and first slot, then the addresses of its expert

struct Slots {
  int first, count;
  __device__ __forceinline__ Slots(Address word) : first((int)word), count((int)(word >> 32)) {}
};

// passes u64 [.., PASS] and how many; order [slots]: the slot at each place; x [.., x_pitch], K inputs, a multiple of
// 8, of token order / top (GATED) or place; y [.., stride] of N outputs: by place (GATED; zeros from N on) or by slot.
// Matrices [N, K] as in bmma_gemv.cu. Grid (G). Shared: pipelines, then 2 WARPS_K NT (32 WARPS_N + 4) floats.
template <bool GATED, int P, ScaleKind KIND, int GROUPS, int NT, Activation ACT, int WARPS_N, int WARPS_K, int STAGES,
          int OCCUPANCY, typename S, typename X>
__global__ void __launch_bounds__(WARPS_N * WARPS_K * 32, OCCUPANCY)
    expert_gemm(const Address *passes, const int *pass_count, const int *order, const X *x, X *y, int N, int K,
                int blocks, int planes, int blocks_per_scale, int x_pitch, int stride, int top) {
  using W = Weights<P, KIND, GROUPS, S, X>;
  constexpr int TILES = 2, MATRICES = GATED ? 2 : 1, WARPS = WARPS_N * WARPS_K, ROWS = WARPS_N * TILES * 16;
  constexpr int OUTPUTS = GATED ? ROWS / 2 : ROWS, SUMS = ROWS + 4;  // outputs of a piece of work; pitch of sums
  using Queue = Pipeline<STAGES * TILES, W::BYTES, TILES>;
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), g = lane / 4, t = lane % 4;
  const int warp_k = warp / WARPS_N, warp_n = warp % WARPS_N;
  const int begin = warp_k * blocks / WARPS_K, end = (warp_k + 1) * blocks / WARPS_K;
  const int last = (N - 1) / 16, sets = (N + OUTPUTS - 1) / OUTPUTS;

  Queue queue(shared + warp * Queue::SIZE, lane);
  float *const pages = reinterpret_cast<float *>(shared + WARPS * Queue::SIZE);
  launch_dependents();
  grid_dependency_wait_late(N);
  const int total = __ldcg(pass_count) * sets;

  // --- loads of weights: the current piece of work and the addresses of the next one
  Address at[MATRICES][2], peek[MATRICES][2];
  const auto look = [&](Address(&to)[MATRICES][2], int item) {
    const Address *pass = passes + (size_t)(min(item, total - 1) / sets) * PASS + 1;
#pragma unroll
    for (int m = 0; m < MATRICES; m++)
#pragma unroll
      for (int p = 0; p < 2; p++) to[m][p] = __ldcg(pass + (GATED ? m : DOWN) * 3 + p);
  };
  struct {
    int item, block;
  } wanted = {static_cast<int>(blockIdx.x), begin};
  const auto issue_load = [&](int slot, int j, int zero) {
    if (wanted.item >= total || begin == end) {
      queue.issue_nothing();
      return;
    }
    const int set = wanted.item % sets, b = wanted.block + zero;
    const int tile = min(GATED ? set * WARPS_N + warp_n : (set * WARPS_N + warp_n) * TILES + j, last);
    const int scales = GROUPS > 1 ? tile * blocks + b
                                  : tile * ((blocks + blocks_per_scale - 1) / blocks_per_scale) + b / blocks_per_scale;
    const int m = GATED ? j : 0;
    queue.issue_load(
        slot * TILES + j, reinterpret_cast<const char *>(at[m][0]) + (size_t)(tile * blocks + b) * (planes * 512),
        W::PLANE_BYTES, reinterpret_cast<const char *>(at[m][1]) + (size_t)scales * W::SCALE_BYTES, W::SCALE_BYTES);
    if (j == TILES - 1 && ++wanted.block == end) {
      wanted.block = begin, wanted.item += gridDim.x;
#pragma unroll
      for (int i = 0; i < 2 * MATRICES; i++) at[i / 2][i % 2] = peek[i / 2][i % 2];
      look(peek, wanted.item + gridDim.x);
    }
  };
  if (static_cast<int>(blockIdx.x) >= total) return;
  look(at, blockIdx.x), look(peek, blockIdx.x + gridDim.x);
#pragma unroll
  for (int s = 0; s < STAGES; s++)
#pragma unroll
    for (int j = 0; j < TILES; j++) issue_load(s, j, 0);

  // --- rows of x
  constexpr int COUNT = NT / 8;
  const X *rows[COUNT];
  const auto find = [&](int (&places)[COUNT], Slots slots) {
#pragma unroll
    for (int c = 0; c < COUNT; c++) {
      const int place = slots.first + min(c * 8 + g, slots.count - 1);
      places[c] = GATED ? __ldcg(order + place) / top : place;
    }
  };
  const auto point = [&](const int (&places)[COUNT]) {
#pragma unroll
    for (int c = 0; c < COUNT; c++) rows[c] = x + (size_t)places[c] * x_pitch + begin * 256 + t * 32;
  };
  const auto pass_of = [&](int item) { return passes + (size_t)(min(item, total - 1) / sets) * PASS; };
  const int mine = begin < end ? K - begin * 256 : 0;  // inputs from this warp's first on
  Slots now(__ldcg(pass_of(blockIdx.x)));
  Tokens<NT> in;
  {
    int places[COUNT];
    find(places, now), point(places);
    in.template load<0>(rows, mine >= 128, mine - t * 32), in.template load<1>(rows, mine >= 128, mine - t * 32);
  }

  int slot = 0, phase = 0, page = 0;
#pragma unroll 1
  for (int item = blockIdx.x; item < total; item += gridDim.x, page ^= 1) {
    const Address next_slots = __ldcg(pass_of(item + gridDim.x));
    float d[TILES][COUNT][4];
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int i = 0; i < NT / 2; i++) d[j][i / 4][i % 4] = 0;
    int left = mine;
    const char *piece[TILES];
#pragma unroll 1
    for (int half = 2 * begin; half < 2 * end; half++) {
      const bool second = half & 1;
      in.template pair<0>();
      left = half + 1 < 2 * end ? left - 128 : 0;
#pragma unroll
      for (int c = 0; c < COUNT; c++) rows[c] += 128;
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        if (!second) piece[j] = queue.wait(slot * TILES + j, phase);
        W w;
        w.load(piece[j], second, lane);
        if (second) {
          const int zero = w.nothing(blocks);
          __syncwarp();
          issue_load(slot, j, zero);
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

    const Slots next(next_slots);
    int places[COUNT];
    find(places, next);
    float *const sums = pages + page * (WARPS_K * NT * SUMS);  // [warp along K][token][row]
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int c = 0; c < COUNT; c++) {
        float *const to = sums + (warp_k * NT + c * 8 + 2 * t) * SUMS + (warp_n * TILES + j) * 16 + g;
        to[0] = d[j][c][0], to[SUMS] = d[j][c][1], to[8] = d[j][c][2], to[SUMS + 8] = d[j][c][3];
      }
    __syncthreads();  // two pages: no warp is two pieces of work ahead
    point(places);
    in.template load<0>(rows, mine >= 128, mine - t * 32), in.template load<1>(rows, mine >= 128, mine - t * 32);
    const int set = item % sets;
    const X *bias[MATRICES];
#pragma unroll
    for (int m = 0; m < MATRICES; m++)
      bias[m] = reinterpret_cast<const X *>(__ldcg(pass_of(item) + 1 + (GATED ? m : DOWN) * 3 + BIAS));
#pragma unroll 1
    for (int i = threadIdx.x; i < NT * OUTPUTS; i += WARPS * 32) {
      const int m = i / OUTPUTS, o = i % OUTPUTS, n = set * OUTPUTS + o;
      if (m >= now.count || n >= N) continue;
      const int row = GATED ? o / 16 * 32 + o % 16 : o;
      float v[MATRICES];
#pragma unroll
      for (int k = 0; k < MATRICES; k++) v[k] = bias[k] ? to_float(bias[k][n]) : 0;
#pragma unroll
      for (int w = 0; w < WARPS_K; w++)
#pragma unroll
        for (int k = 0; k < MATRICES; k++) v[k] += sums[(w * NT + m) * SUMS + row + 16 * k];
      if constexpr (GATED)
        y[(size_t)(now.first + m) * stride + n] = from_float<X>(activated<ACT>(v[0], v[1]));
      else
        y[(size_t)__ldcg(order + now.first + m) * stride + n] = from_float<X>(v[0]);
    }
    if (GATED && set == sets - 1)
      for (int i = threadIdx.x; i < now.count * (stride - N); i += WARPS * 32)
        y[(size_t)(now.first + i / (stride - N)) * stride + N + i % (stride - N)] = from_float<X>(0);
    now = next;
  }
}

}  // namespace crelle
