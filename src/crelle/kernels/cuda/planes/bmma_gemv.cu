// GEMV on the binary tensor cores: y [M, N] = x [M, K] W.T for up to 4 tokens, W in bit-planes, x bit-serial.
// bmma_block.cuh says how 16 rows and 256 inputs are multiplied.
//
// A warp takes TILES * 16 rows and a split of the blocks of 256 inputs, through a load pipeline of STAGES; weights are
// loaded before the previous kernel is done (PDL). The warps of a thread block split K and add up in a fixed order.
// Layouts: crelle/kernels/cuda/planes/weight_layout.py (words, scales), bitserial.cuh (x).
//
// x comes bit-serial from another launch, or (PROLOGUE) every thread block applies the prologue to x and encodes it
// for itself, into shared memory: for short x that costs less than a launch.
//
// The epilogue can encode its output, so that the next GEMV follows without a launch between them (`EpilogueOut`). The
// 128 outputs that share a scale are made by a cluster of thread blocks, which store them into their first one (DSMEM).
//
// A norm between two products is one factor, and a mean to subtract, for all inputs alike, so its division is deferred
// to the second product's epilogue: the first product encodes y * gain and, per 128 of them, the sums of y and of its
// squares (`moments`); the second one makes of its own sums
//   (sum - mean * fold) / deviation + bias,     fold = W gain: null for an RMS norm, which has no mean
#include "planes/bmma_block.cuh"
#include "ptx/dsmem.cuh"
#include "planes/bitserial.cuh"
#include "ptx/tensorcore.cuh"

namespace crelle {

// What the epilogue writes. STORE: y. NORM_ENCODE: y, and y * gain encoded. RELU_ENCODE, GELU_ENCODE, ...: only act(y),
// encoded. Gated (..._MUL_ENCODE): W is gate, then up, a thread block takes the same rows of both, and only act(gate) *
// up is written, encoded.
constexpr int ENCODED = -1;  // PROLOGUE: x is bit-serial already

enum EpilogueOut {
  STORE,
  NORM_ENCODE,
  SILU_MUL_ENCODE,
  RELU_ENCODE,
  GELU_ENCODE,
  GELU_TANH_ENCODE,
  GELU_MUL_ENCODE,
  GELU_TANH_MUL_ENCODE
};

__host__ __device__ constexpr bool is_gated(EpilogueOut e) {
  return e == SILU_MUL_ENCODE || e == GELU_MUL_ENCODE || e == GELU_TANH_MUL_ENCODE;
}
template <EpilogueOut E>
__device__ __forceinline__ float epilogue_gelu(float v) {
  return gelu < E == GELU_TANH_ENCODE || E == GELU_TANH_MUL_ENCODE > (v);
}

// words [tiles, blocks, planes, 32, uint4]; scales [tiles, ceil(blocks / blocks_per_scale), 8, SCALES]; bits and xscale
// as in bitserial.cuh, moments [2 blocks, M] where x is still to be DIVIDED by its deviation; bias, gain and fold [N],
// residual and y [tokens, N] may be null. A thread block takes TILES tiles at a time and every gridDim.x-th such set;
// its warps share the blocks of 256 inputs, consecutive ones each, and fetch RUN of them at a time (1 where more planes
// are stored than used, or scales shared). The grid should fit the device at once: then the kernels behind this one
// start, and fetch their own weights, early. HALVES: of a block of x that are fetched at a time. OCCUPANCY: warps that
// a multiprocessor can hold, which bounds the registers. What the previous kernel writes is not __restrict__: reads of
// such pointers may be moved to before the wait. PROLOGUE: ENCODED, or what is applied to x [tokens, K] (gated: 2K)
// with a norm's weight and bias, in the order of perm (may be null); bits and xscale are null then, eps is the norm's.
template <int P, ScaleKind KIND, int GROUPS, int M, int TILES, int WARPS, int RUN, int STAGES, int HALVES,
          int OCCUPANCY, EpilogueOut EPILOGUE, bool DIVIDED, int PROLOGUE, typename S, typename X, typename Y>
__global__ void __launch_bounds__(WARPS * 32, OCCUPANCY / WARPS)
    bmma_gemv(const char *__restrict__ words, const char *__restrict__ scales, const uint32 *bits, const float *xscale,
              const float2 *moments, const float *__restrict__ fold, const Y *__restrict__ bias, const Y *residual,
              Y *y, const Y *__restrict__ gain, uint32 *out_bits, float *out_scale, float2 *out_moments, const X *x,
              const X *__restrict__ norm, const X *__restrict__ norm_bias, const int *__restrict__ perm, int N,
              int tokens, int K, int blocks, int planes, int blocks_per_scale, float eps) {
  using B = Block<P, KIND, GROUPS, M, HALVES, S>;
  using Queue = Pipeline<STAGES, RUN *(B::PLANE_BYTES + B::SCALE_BYTES), TILES>;
  static_assert(M <= WARPS, "a warp makes a token's digits");
  constexpr bool DIGITS = EPILOGUE != STORE, ENCODES = PROLOGUE != ENCODED;
  constexpr Prologue OP = static_cast<Prologue>(ENCODES ? PROLOGUE : PLAIN);
  static_assert(!(ENCODES && (DIGITS || DIVIDED)), "what it multiplies was encoded by a kernel, or is encoded here");
  constexpr bool TWO = is_gated(EPILOGUE);       // rows of an output
  constexpr int OWN = TWO ? TILES / 2 : TILES;   // tiles of outputs in a set
  constexpr int CLUSTER = DIGITS ? 8 / OWN : 1;  // thread blocks that make 128 outputs
  constexpr int OUTPUTS = (OWN * M * 16 + WARPS * 32 - 1) / (WARPS * 32);
  extern __shared__ __align__(128) char shared[];
  __shared__ float partial[2][WARPS][TILES][M][16];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int last = (N - 1) / 16, sets = TWO ? N / 32 / OWN : last / TILES + 1;
  const int begin = warp * blocks / WARPS, end = (warp + 1) * blocks / WARPS;

  launch_dependents();
  // What the first block of a cluster gets, a page for each of its sets: outputs (times gain, and as they are).
  struct Page {
    float2 outputs[M][DIGITS ? 128 : 1];
    Mbarrier mbarrier;
  } *pages = reinterpret_cast<Page *>(shared + WARPS * Queue::SIZE);
  if constexpr (DIGITS) {
    if (blockIdx.x % CLUSTER == 0 && blockIdx.x + threadIdx.x * gridDim.x < sets)
      init_mbarrier(&pages[threadIdx.x].mbarrier, tokens * 128 * sizeof(float2));
    cluster_arrive();
  }
  Queue queue(shared + warp * Queue::SIZE, lane);
  const auto tile_of = [&](int set, int j) {
    return TWO ? set * OWN + j % OWN + j / OWN * (N / 32) : min(set * TILES + j, last);
  };
  struct {
    int set, block, tile;
  } wanted = {static_cast<int>(blockIdx.x), begin, 0};  // what to load next: run by run, its tiles in order
  const auto issue_load = [&](int stage) {
    if (wanted.set >= sets || begin == end) {
      queue.issue_nothing();
      return;
    }
    const int b = wanted.block, n = tile_of(wanted.set, wanted.tile), run = RUN == 1 ? 1 : min(RUN, end - b);
    const int group =
        GROUPS > 1 ? n * blocks + b : n * ((blocks + blocks_per_scale - 1) / blocks_per_scale) + b / blocks_per_scale;
    queue.issue_load(stage, words + (size_t)(n * blocks + b) * (planes * 512), run * B::PLANE_BYTES,
                     scales + (size_t)group * B::SCALE_BYTES, run * B::SCALE_BYTES);
    if (TILES == 1 || ++wanted.tile == TILES) {
      wanted.tile = 0, wanted.block += RUN;
      if (wanted.block >= end) wanted.block = begin, wanted.set += gridDim.x;
    }
  };
#pragma unroll
  for (int s = 0; s < STAGES; s++) issue_load(s);

  // What else no kernel writes, of a thread's outputs; `place_of` is a row of W, or -1.
  const int m = threadIdx.x / 16 % M;  // their token
  const auto place_of = [&](int set, int k) {
    const int i = threadIdx.x + k % OUTPUTS * WARPS * 32, j = i / (M * 16);
    const int n = (set * OWN + j) * 16 + i % 16;
    return i >= OWN * M * 16 || n >= (TWO ? N / 2 : N) || m >= tokens ? -1 : n + k / OUTPUTS * (N / 2);
  };
  constexpr int SUMS = OUTPUTS * (TWO ? 2 : 1);
  float shift[SUMS], folds[SUMS], gains[OUTPUTS];
  const auto fetch = [&](int set) {
#pragma unroll
    for (int k = 0; k < SUMS; k++) {
      const int n = place_of(set, k);
      shift[k] = bias && n >= 0 ? to_float(bias[n]) : 0;
      folds[k] = DIVIDED && fold && n >= 0 ? fold[n] : 0;
      if (EPILOGUE == NORM_ENCODE) gains[k] = n >= 0 ? to_float(gain[n]) : 0;
    }
  };
  fetch(blockIdx.x);
  if constexpr (DIGITS) cluster_wait();
  Quarter<OP, X> quarter;  // of half block `warp`: what does not depend on the previous kernel
  if constexpr (ENCODES) quarter.place(norm, norm_bias, perm, warp, K, blocks, lane);
  grid_dependency_wait_late(N);
  if constexpr (ENCODES) {
    constexpr int PARTS = B::PARTS;
    uint32 *own_bits = reinterpret_cast<uint32 *>(shared + WARPS * Queue::SIZE);
    float *own_scale = reinterpret_cast<float *>(own_bits + 2 * blocks * 64 * M);
#pragma unroll 1
    for (int token = 0; token < tokens; token++) {
      const X *row = x + (size_t)token * K * (is_gated(OP) ? 2 : 1);
      if (warp < 2 * blocks) quarter.read(row, K);  // under way while the row is summed up
      const float2 stats = statistics<OP, WARPS>(row, K, eps);
#pragma unroll 1
      for (int half = warp; half < 2 * blocks; half += WARPS) {
        if (half != warp) {
          quarter.place(norm, norm_bias, perm, half, K, blocks, lane);
          quarter.read(row, K);
        }
        quarter.apply(stats);
        write_bitserial<PARTS, M>(quarter.v, own_bits, own_scale, half, token, lane);
      }
      if (token + 1 < tokens && 2 * blocks > WARPS) quarter.place(norm, norm_bias, perm, warp, K, blocks, lane);
      __syncthreads();  // all have read the sums of the row, and at last all digits are there
    }
    bits = own_bits, xscale = own_scale;
  }

  using Inputs = typename B::Inputs;
  constexpr int STEP = B::STEP;
  const int token = B::token(lane);
  const bool first = B::first(lane);
  const float place = B::place(lane);
  Inputs next(bits, xscale, min(2 * begin, 2 * blocks - STEP), lane);  // one step ahead
  constexpr int LANES = M == 1 ? 32 : 16;                              // that share a token's moments
  const bool writes = warp * 32 < OWN * M * 16;
  float2 moment = make_float2(0, 0);
  if (DIVIDED && writes) {
    int i = lane % LANES;
    if (i < 2 * blocks) moment = moments[i * M + m];
#pragma unroll 1
    for (i += LANES; i < 2 * blocks; i += LANES) {
      const float2 some = moments[i * M + m];
      moment.x += some.x, moment.y += some.y;
    }
  }
  int taken = 0, round = 0;  // pieces taken from the pipeline, sets

  // The first block of a cluster encodes what all have sent, a warp for each token.
  const auto encode_outputs = [&](int round) {
    if constexpr (DIGITS) {
      if (blockIdx.x % CLUSTER || warp >= tokens || round < 0) return;
      const int half = (blockIdx.x + round * gridDim.x) / CLUSTER;
      wait_mbarrier(&pages[round].mbarrier);
      float v[4], sum = 0, squares = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 one = pages[round].outputs[warp][lane + 32 * i];
        v[i] = one.x, sum += one.y, squares = fmaf(one.y, one.y, squares);
      }
      write_bitserial<1, M>(v, out_bits, out_scale, half, warp, lane);
      if constexpr (EPILOGUE == NORM_ENCODE) {
        sum = warp_sum(sum), squares = warp_sum(squares);
        if (lane == 0) out_moments[half * M + warp] = make_float2(sum, squares);
      }
    }
  };

#pragma unroll 1
  for (int set = blockIdx.x; set < sets; set += gridDim.x, round++) {
    const int page = round & 1;
    float2 sums[TILES];
#pragma unroll
    for (int j = 0; j < TILES; j++) sums[j] = make_float2(0, 0);
    Y more[OUTPUTS];  // what is added to the outputs of this thread, fetched while the products are made
#pragma unroll
    for (int k = 0; k < OUTPUTS; k++) {
      const int n = TWO ? -1 : place_of(set, k);
      more[k] = from_float<Y>(0);
      if (residual && n >= 0) more[k] = residual[(size_t)m * N + n];
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
          const Inputs now = next;
          const int half = 2 * (b + r) + h + STEP;
          next = Inputs(bits, xscale, half < 2 * end ? half : 2 * begin, lane);  // always: a condition costs copies
#pragma unroll
          for (int j = 0; j < TILES; j++) B::multiply(sums[j], piece[j] + r * B::PLANE_BYTES, scale[j], now, h, lane);
        }
      }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < TILES; j++) issue_load((taken + j) % STAGES);
      taken += TILES;
    }

    // The warps' sums, in order. Two pages, so that one barrier is enough: no warp is two sets ahead.
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      float a = sums[j].x * place, c = sums[j].y * place;
#pragma unroll
      for (int i = 1; i < B::LANES; i *= 2) a += __shfl_xor_sync(~0u, a, i), c += __shfl_xor_sync(~0u, c, i);
      if (first) partial[page][warp][j][token][lane >> 2] = a, partial[page][warp][j][token][(lane >> 2) + 8] = c;
    }
    float factor = 1, mean = 0;
    if (DIVIDED && writes) {
      float2 all = moment;
#pragma unroll
      for (int i = LANES / 2; i; i /= 2)
        all.x += __shfl_xor_sync(~0u, all.x, i), all.y += __shfl_xor_sync(~0u, all.y, i);
      mean = fold ? all.x / K : 0;
      factor = rsqrtf(all.y / K - mean * mean + eps);
    }
    __syncthreads();
    const auto total = [&](int i, int k) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += (&partial[page][w][0][0][0])[i];
      return DIVIDED ? fmaf(fmaf(-mean, folds[k], sum), factor, shift[k]) : sum + shift[k];
    };
#pragma unroll
    for (int k = 0; k < OUTPUTS; k++) {
      const int i = threadIdx.x + k * WARPS * 32, n = place_of(set, k);
      if (n < 0) continue;
      float v = total(i, k) + to_float(more[k]);
      if constexpr (EPILOGUE == SILU_MUL_ENCODE) v = v / (1 + __expf(-v)) * total(OWN * M * 16 + i, OUTPUTS + k);
      if constexpr (EPILOGUE == RELU_ENCODE) v = relu(v);
      if constexpr (EPILOGUE == GELU_ENCODE || EPILOGUE == GELU_TANH_ENCODE) v = epilogue_gelu<EPILOGUE>(v);
      if constexpr (EPILOGUE == GELU_MUL_ENCODE || EPILOGUE == GELU_TANH_MUL_ENCODE)
        v = epilogue_gelu<EPILOGUE>(v) * total(OWN * M * 16 + i, OUTPUTS + k);
      if constexpr (!DIGITS || EPILOGUE == NORM_ENCODE) {
        const Y out = from_float<Y>(v);
        y[(size_t)m * N + n] = out, v = to_float(out);
      }
      if constexpr (DIGITS)
        dsmem_store(&pages[round].outputs[m][n % 128], make_float2(EPILOGUE == NORM_ENCODE ? v * gains[k] : v, v),
                    &pages[round].mbarrier, 0);
    }
    encode_outputs(round - 1);  // by now the others have sent theirs, too
    fetch(min(set + static_cast<int>(gridDim.x), sets));
  }
  encode_outputs(round - 1);
}

}  // namespace crelle
