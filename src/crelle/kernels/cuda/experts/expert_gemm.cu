// Grouped products for many tokens: slots (a token at one of its experts) sorted by expert, up to NT at a time.
//
//   GATED    inner[i] = act(gate_e x[token of i]) * (up_e x[token of i])         i: a slot in sorted order
//   else     y[slot of i] = down_e inner[i] + bias_e
//
// sort_slots (routing.cu) makes the list of passes: an expert and up to NT of its slots. Each pass has the same pieces
// of work, sets of rows, and a thread block takes a G-th of all pieces, one after the other: an expert's weights are
// read once per NT of its slots, x of a pass is mostly in L1, and the host need not know how many passes there are.
//
// As in skinny_gemm.cu weights are dequantized in registers for the warp's mma (codes of up to 4 bits without their
// scale: offset_codes.cuh) and x is read as it lies; a row of x is found through the order of the slots. A warp's load
// pipeline goes on from one piece of work to the next, and what a piece needs to know (addresses, rows) is loaded one
// piece before. Where a warp has one block of 256 inputs (KEEPS), x stays in its registers for a whole pass. WARPS_K
// warps split K and add up in a fixed order: a slot's bits do not depend on the others, nor on
// NT.
#include "experts/choice.cuh"
#include "experts/offset_codes.cuh"
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
template <bool GATED, int P, ScaleKind KIND, int GROUPS, int NT, Activation ACT, bool KEEPS, int TILES, int WARPS_N,
          int WARPS_K, int STAGES, int OCCUPANCY, typename S, typename X>
__global__ void __launch_bounds__(WARPS_N * WARPS_K * 32, OCCUPANCY)
    expert_gemm(const Address *passes, const int *pass_count, const int *order, const X *x, X *y, int N, int K,
                int blocks, int planes, int blocks_per_scale, int x_pitch, int stride, int top) {
  constexpr bool OFFSET = HAS_OFFSET_CODES<P, KIND, GROUPS>;
  using Codes = OffsetCodes<P, KIND, GROUPS, S, X>;
  using W = typename Conditional<OFFSET, Codes, Weights<P, KIND, GROUPS, S, X>>::type;
  constexpr int MATRICES = GATED ? 2 : 1, WARPS = WARPS_N * WARPS_K, ROWS = WARPS_N * TILES * 16;
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
  const long long total = (long long)__ldcg(pass_count) * sets;
  const int stop = (int)(total * (blockIdx.x + 1) / gridDim.x), start = (int)(total * blockIdx.x / gridDim.x);

  // --- loads of weights: the current pass's addresses and those of the next one
  if (start >= stop) return;
  const int first_pass = start / sets, first_set = start % sets, last_pass = (stop - 1) / sets;
  const auto pass_of = [&](int pass) { return passes + (size_t)min(pass, last_pass) * PASS; };
  Address at[MATRICES][2], peek[MATRICES][2];
  const auto look = [&](Address(&to)[MATRICES][2], int pass) {
#pragma unroll
    for (int m = 0; m < MATRICES; m++)
#pragma unroll
      for (int p = 0; p < 2; p++) to[m][p] = __ldcg(pass_of(pass) + 1 + (GATED ? m : DOWN) * 3 + p);
  };
  struct {
    int left, pass, set, block;
  } wanted = {begin < end ? stop - start : 0, first_pass, first_set, begin};
  const auto issue_load = [&](int slot, int j, int zero) {
    if (wanted.left == 0) {
      queue.issue_nothing();
      return;
    }
    const int b = wanted.block + zero, tile = min(((wanted.set * WARPS_N + warp_n) * TILES + j) / MATRICES, last);
    const int scales = GROUPS > 1 ? tile * blocks + b
                                  : tile * ((blocks + blocks_per_scale - 1) / blocks_per_scale) + b / blocks_per_scale;
    const int m = j % MATRICES;
    queue.issue_load(
        slot * TILES + j, reinterpret_cast<const char *>(at[m][0]) + (size_t)(tile * blocks + b) * (planes * 512),
        W::PLANE_BYTES, reinterpret_cast<const char *>(at[m][1]) + (size_t)scales * W::SCALE_BYTES, W::SCALE_BYTES);
    if (j == TILES - 1 && ++wanted.block == end) {
      wanted.block = begin, wanted.left--;
      if (++wanted.set == sets) {
        wanted.set = 0, wanted.pass++;
#pragma unroll
        for (int i = 0; i < 2 * MATRICES; i++) at[i / 2][i % 2] = peek[i / 2][i % 2];
        look(peek, wanted.pass + 1);
      }
    }
  };
  look(at, first_pass), look(peek, first_pass + 1);
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
  const int mine = begin < end ? K - begin * 256 : 0;  // inputs from this warp's first on
  int left = mine;                                     // inputs from those on that are in registers
  using In = Tokens<NT, OFFSET>;
  In in[KEEPS ? 2 : 1];  // half a block, or (KEEPS) all that this warp needs for a pass
  float offsets[KEEPS ? 2 : 1][COUNT][4];
  const auto load_half = [&](In &to) {
    to.template load<0>(rows, left >= 128, left - t * 32), to.template load<1>(rows, left >= 128, left - t * 32);
  };
  const auto next_rows = [&] {
    left -= 128;
#pragma unroll
    for (int c = 0; c < COUNT; c++) rows[c] += 128;
  };
  const auto clear = [](float (&v)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < COUNT * 4; i++) v[i / 4][i % 4] = 0;
  };
  const auto eight_steps = [&](auto use, auto between) {
    use.template operator()<0>(), use.template operator()<1>(), use.template operator()<2>();
    use.template operator()<3>(), between(), use.template operator()<4>(), use.template operator()<5>();
    use.template operator()<6>(), use.template operator()<7>();
  };
  const auto load_x = [&] {  // of a pass; KEEPS: all, ready for the instruction
    left = mine;
    load_half(in[0]);
    if constexpr (KEEPS) {
      next_rows(), load_half(in[1]);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        in[h].template pair<0>(), in[h].template pair<1>(), clear(offsets[h]);
        const auto add = [&]<int STEP>() {
          skinny_gemm_step<STEP, NT, X>(offsets[h], typename Codes::Offsets(), in[h]);
        };
        if constexpr (OFFSET) eight_steps(add, [] {});
      }
    }
  };
  Slots now(__ldcg(pass_of(first_pass)));
  int places[COUNT];
  find(places, now), point(places), load_x();

  int slot = 0, phase = 0, page = 0, pass = first_pass, set = first_set;
#pragma unroll 1
  for (int item = start; item < stop; item++, page ^= 1) {
    const bool ends = set + 1 == sets;  // the pass
    const Address next_slots = __ldcg(pass_of(pass + ends));
    float y_sums[TILES][COUNT][4];  // of this warp's inputs
#pragma unroll
    for (int j = 0; j < TILES; j++) clear(y_sums[j]);
    const char *piece[TILES];
    const auto multiply_half = [&](bool second, In &x, float (&offset)[COUNT][4]) {
      if constexpr (!KEEPS) x.template pair<0>(), clear(offset);
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
        float own[COUNT][4];
        clear(own);
        float (&d)[COUNT][4] = OFFSET ? own : y_sums[j];
        const bool last = j == TILES - 1;
        const auto step = [&]<int STEP>() {
          skinny_gemm_step<STEP, NT, X>(d, w, x);
          if constexpr (OFFSET && !KEEPS)
            if (j == 0) skinny_gemm_step<STEP, NT, X>(offset, typename Codes::Offsets(), x);
        };
        eight_steps(step, [&] {
          w.next_half();
          if constexpr (!KEEPS) {
            if (last) x.template load<0>(rows, left >= 128, left - t * 32);
            if (j == 0) x.template pair<1>();
          }
        });
        if constexpr (!KEEPS)
          if (last) x.template load<1>(rows, left >= 128, left - t * 32);
        if constexpr (OFFSET) w.add(y_sums[j], own, offset);
      }
      if (second && ++slot == STAGES) slot = 0, phase ^= 1;
    };
    if constexpr (KEEPS) {
      if (begin < end) multiply_half(false, in[0], offsets[0]), multiply_half(true, in[1], offsets[1]);
    } else {
#pragma unroll 1
      for (int half = 2 * begin; half < 2 * end; half++) {
        next_rows();
        if (half + 1 == 2 * end) left = 0;
        multiply_half(half & 1, in[0], offsets[0]);
      }
    }

    const Slots next(next_slots);
    if (ends) find(places, next);
    float *const sums = pages + page * (WARPS_K * NT * SUMS);  // [warp along K][token][row]
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int c = 0; c < COUNT; c++) {
        float *const to = sums + (warp_k * NT + c * 8 + 2 * t) * SUMS + (warp_n * TILES + j) * 16 + g;
        const float (&d)[4] = y_sums[j][c];
        to[0] = d[0], to[SUMS] = d[1], to[8] = d[2], to[SUMS + 8] = d[3];
      }
    __syncthreads();  // two pages: no warp is two pieces of work ahead
    if (!KEEPS || ends) point(places), load_x();
    const X *bias[MATRICES];
#pragma unroll
    for (int m = 0; m < MATRICES; m++)
      bias[m] = reinterpret_cast<const X *>(__ldcg(pass_of(pass) + 1 + (GATED ? m : DOWN) * 3 + BIAS));
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
    if (GATED && ends)
      for (int i = threadIdx.x; i < now.count * (stride - N); i += WARPS * 32)
        y[(size_t)(now.first + i / (stride - N)) * stride + N + i % (stride - N)] = from_float<X>(0);
    now = next, set = ends ? 0 : set + 1, pass += ends;
  }
}

}  // namespace crelle
