// y [M, N] = x [M, K] W.T + bias + residual for up to 8 tokens and mixed 2/4-bit weights with second-order scales and
// outliers (mixed_layout.py has the layout, mixed_encode.cu makes x). One token takes mixed_decode.cu where that can.
//
// Codes go into the tensor core instruction as they lie: a code at bit 2i of a half, all others masked off, is the fp16
// denormal q 4^i 2^-24, and x in that place is stored times 4^-i. So a pair of weights costs one AND. The instruction's
// 8 columns are 4 groups of 2 tokens: lane t multiplies inputs of group t only, all other x in its rows of the right
// operand are zeros, and lane (g, t) then has sum(q x) of group t for rows g and g + 8. So each scale is decoded in one
// lane and multiplied once, in f32. Zeros are one more step: the zero's code times -sum(x) / 2, which are two fp16
// values. 4-bit groups share a scale and a zero along the row, so there columns are 8 tokens and nothing is to be done
// until the end.
//
// A thread block takes TILES tiles of 16 rows at a time (grid: as many thread blocks as run at once); its warps take
// turns at the units of inputs, each through its own load pipeline, which runs on into the next tiles. x stays in
// shared memory, and what a warp has loaded of it serves all tiles. Sums are added in a fixed order.
//
// STAGES = 1 is the synchronous way: a warp loads a unit, waits, decodes, multiplies, and only then loads the next one.
// ASYNC: the scales of a warp's next unit are decoded beside the multiplication of this one; otherwise where they are
// used. With one tile at a time ASYNC took 1.03 to 1.09 times as long (H200, 4096 x 4096 to 49152 x 12288, one token):
// every load is a bulk copy in flight anyway, scales come with their codes, and decoding them is about 40 of the 260
// instructions of a unit, beside those of other warps. That version took 2.4 instructions a weight and issued one in
// 57% of the cycles (ncu, 16384 x 12288: ALU 48%, tensor cores 21%, DRAM 46%). Several tiles at a time take about 1.5
// instructions a weight, counted in the disassembly; times are in docs/notes/cuda-kernels.md.
#include "ptx/dsmem.cuh"
#include "mixed/mixed_codes.cuh"
#include "mixed/mixed_outliers.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/pipeline.cuh"
#include "ptx/shared_loads.cuh"
#include "ptx/warp.cuh"

namespace crelle {

// What a lane multiplies by codes of 2 bits, of a set and a pair of tokens; zeros where its column is another group's.
template <int SUBS>
struct MixedIn {
  uint4 x[2] = {};
  uint2 sums[SUBS] = {};

  // x, sums: of the unit and the first pair of tokens; stride: bytes from a pair to the next.
  __device__ __forceinline__ void load(bool there, uint32 x_at, uint32 sums_at, int set) {
    load_if(there, x[0], x_at + set * 128), load_if(there, x[1], x_at + set * 128 + 16);
#pragma unroll
    for (int k = 0; k < SUBS; k++) load_if(there, sums[k], sums_at + (set * 4 * SUBS + k) * 8);
  }
};

// Sums of a lane for 16 rows.
template <int SUBS, int M>
struct MixedTile {
  static constexpr int PAIRS = (M + 1) / 2;
  float two[PAIRS][4];  // [pair of tokens][row g: token, next; row g + 8: the same], of the groups of lane t
  float four[4];        // [row g: tokens 2t, 2t + 1; row g + 8]

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < PAIRS * 4; i++) two[i / 4][i % 4] = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) four[i] = 0;
  }

  // A set of a unit of 2 bits, a constant where it is called: 16 inputs of rows g and g + 8.
  __device__ __forceinline__ void add2(int set, uint32 low, uint32 high, const Scales<SUBS> &s,
                                       const MixedIn<SUBS> (&in)[PAIRS]) {
    const uint32 low10 = low >> 10, high10 = high >> 10;
#pragma unroll
    for (int k = 0; k < SUBS; k++) {
      const uint32 zeros = s.zeros[k], zeros8 = zeros >> 8;
#pragma unroll
      for (int p = 0; p < PAIRS; p++) {
        float d[4] = {};
        multiply<half>(d, zeros & (0x00030003u << 2 * set), zeros8 & (0x00030003u << 2 * set), 0x00010001u, 0x00010001u,
                       in[p].sums[k].x, in[p].sums[k].y);
        if (k == 0) {
          const uint4 &b = in[p].x[0];
          multiply<half>(d, codes2<0>(low, low10), codes2<0>(high, high10), codes2<1>(low, low10),
                         codes2<1>(high, high10), b.x, b.y);
          multiply<half>(d, codes2<2>(low, low10), codes2<2>(high, high10), codes2<3>(low, low10),
                         codes2<3>(high, high10), b.z, b.w);
        }
        if (k == SUBS - 1) {
          const uint4 &b = in[p].x[1];
          multiply<half>(d, codes2<4>(low, low10), codes2<4>(high, high10), codes2<5>(low, low10),
                         codes2<5>(high, high10), b.x, b.y);
          multiply<half>(d, codes2<6>(low, low10), codes2<6>(high, high10), codes2<7>(low, low10),
                         codes2<7>(high, high10), b.z, b.w);
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (2 * p + j % 2 < M) two[p][j] = fmaf(s.scale[k][set % 2][j / 2], d[j], two[p][j]);
      }
    }
  }

  // A unit of 4 bits; in: the 32 inputs of token g that lane t has.
  __device__ __forceinline__ void add4(uint4 low, uint4 high, const uint4 (&in)[4]) {
    word4(low.x, high.x, in[0]), word4(low.y, high.y, in[1]), word4(low.z, high.z, in[2]), word4(low.w, high.w, in[3]);
  }
  __device__ __forceinline__ void word4(uint32 low, uint32 high, const uint4 &in) {
    const uint32 low8 = low >> 8, high8 = high >> 8;
    multiply<half>(four, codes4<0>(low, low8), codes4<0>(high, high8), codes4<1>(low, low8), codes4<1>(high, high8),
                   in.x, in.y);
    multiply<half>(four, codes4<2>(low, low8), codes4<2>(high, high8), codes4<3>(low, low8), codes4<3>(high, high8),
                   in.z, in.w);
  }
  __device__ __forceinline__ uint32 seen() const {
    return __float_as_uint(two[0][0]) | __float_as_uint(two[0][2]) | __float_as_uint(four[0]);
  }
};

// tiles [tile_count, tile bytes]; grid_rows [16 tile_count]: scale and zero of 4-bit groups; outliers: runs of 4 of a
// row n, (n + 16 tile_base) mod 256 in outlier_rows, those of tile i from starts[i] on, or null; x [M, x_bytes]; bias
// [N] and residual [tokens, N] may be null; y [tokens, N], which may be the residual. Shared: M x_bytes, WARPS
// pipelines, 64 WARPS TILES M sums of 4 bytes, 64 zeros, 16 bytes.
template <int SUBS, int M, int TILES, int WARPS, int STAGES, int OCCUPANCY, bool ASYNC, typename T, typename Y>
__global__ void __launch_bounds__(WARPS * 32, OCCUPANCY)
    mixed_gemv(const char *__restrict__ tiles, const __half2 *__restrict__ grid_rows,
               const uint4 *__restrict__ outliers, const unsigned char *__restrict__ outlier_rows,
               const int *__restrict__ starts, const char *x, const T *__restrict__ bias, const T *residual, Y *y,
               int N, int tokens, int tile_count, int tile_base, int U2, int U4, int x_bytes, float outlier_scale) {
  constexpr int UNIT2 = 1024 + 240 * SUBS, PAIRS = (M + 1) / 2;
  using Queue = Pipeline<STAGES, TILES * UNIT2, ASYNC ? 2 : 1>;  // ASYNC: a unit and the scales of the next
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), g = lane / 4, t = lane % 4;
  const int units = U2 + U4, values = U2 * 512 + U4 * 256;
  const int tile_bytes = U2 * UNIT2 + U4 * 1024, sets = (tile_count + TILES - 1) / TILES;
  const int mine = ((int)(sets - blockIdx.x) + (int)gridDim.x - 1) / (int)gridDim.x;  // sets of this thread block
  char *const after_x = shared + M * x_bytes;
  float *const sums = reinterpret_cast<float *>(after_x + WARPS * Queue::SIZE);  // [2][warp][TILES][bits][M][16]
  uint4 *const nulls = reinterpret_cast<uint4 *>(sums + 2 * WARPS * TILES * 2 * M * 16);
  launch_dependents();
  Queue queue(after_x + warp * Queue::SIZE, lane);

  struct {
    int set, unit;
  } wanted = {0, warp};
  const auto settle = [&] {
    while (wanted.unit >= units) wanted.unit -= units, wanted.set++;
  };
  const auto issue_load = [&](int stage, int zero) {
    if (wanted.set >= mine) {
      queue.issue_nothing();
      return;
    }
    const int unit = wanted.unit, behind = unit - U2, tile = (blockIdx.x + wanted.set * gridDim.x) * TILES;
    const int at = behind < 0 ? unit * UNIT2 : U2 * UNIT2 + behind * 1024, bytes = behind < 0 ? UNIT2 : 1024;
    const char *const from = tiles + (size_t)tile * tile_bytes + at + zero;
#if __CUDA_ARCH__ >= 900
    if (elected()) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(queue.barrier(stage)), "r"(TILES * bytes)
                   : "memory");
#pragma unroll
      for (int j = 0; j < TILES; j++)
        queue.copy(stage, j * UNIT2, from + min(j, tile_count - 1 - tile) * tile_bytes, bytes);
    }
#else
#pragma unroll
    for (int j = 0; j < TILES; j++)
      queue.copy(queue.base + (stage * TILES + j) * UNIT2, from + min(j, tile_count - 1 - tile) * tile_bytes, bytes);
    queue.issue_nothing();
#endif
    wanted.unit += WARPS;
    settle();
  };
  settle();
#pragma unroll
  for (int s = 0; s < STAGES; s++) issue_load(s, 0);
  if (threadIdx.x < 4) nulls[threadIdx.x] = make_uint4(0, 0, 0, 0);

  // The outliers that the warp takes first are loaded a set of tiles ahead, where they begin and end two sets ahead.
  int run = 0, end = 0, next_run = 0, next_end = 0, row = 0;
  uint4 extra = make_uint4(0, 0, 0, 0);
  const auto find_outliers = [&](int i) {
    const int tile = (blockIdx.x + i * gridDim.x) * TILES;
    next_run = next_end = 0;
    if (outliers && i < mine) next_run = starts[tile], next_end = starts[min(tile + TILES, tile_count)];
  };
  const auto load_outliers = [&] {
    extra = make_uint4(0, 0, 0, 0);
    if (run + lane < end) extra = __ldg(outliers + run + lane), row = outlier_rows[run + lane];
  };
  find_outliers(0);
  run = next_run + warp * 32, end = next_end;
  load_outliers();
  find_outliers(1);

#if __CUDA_ARCH__ >= 900
  Mbarrier *const x_there = reinterpret_cast<Mbarrier *>(nulls + 4);
  if (threadIdx.x == 0) {
    init_mbarrier(x_there, M * x_bytes);
    grid_dependency_wait();
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(x), "r"(M * x_bytes), "r"(shared_address(x_there))
                 : "memory");
  }
  __syncthreads();
  grid_dependency_wait();
  wait_mbarrier(x_there);
#else
  for (int i = threadIdx.x; i < M * x_bytes / 16; i += WARPS * 32)
    reinterpret_cast<uint4 *>(shared)[i] = reinterpret_cast<const uint4 *>(x)[i];
  __syncthreads();
#endif

  // The sum of a token's 4-bit inputs, beside the factor of its outputs; read behind the first barrier.
#pragma unroll 1
  for (int k = warp; k < M; k += WARPS) {
    float sum = 0;
    const float *const from = reinterpret_cast<const float *>(shared + k * x_bytes + values + U2 * 128 * SUBS);
#pragma unroll 1
    for (int i = lane; i < 2 * U4; i += 32) sum += from[i];
    sum = warp_sum(sum);
    if (lane == 0) reinterpret_cast<float *>(shared + (k + 1) * x_bytes - 16)[1] = sum;
  }

  // Where the lane's x is: for 2 bits, of group t and token g % 2 of a pair, if its column is that group's; for 4 bits,
  // of token g, or zeros.
  const uint32 x2 = shared_address(shared) + (g & 1) * x_bytes + t * 32;
  const uint32 sums2 = shared_address(shared) + (g & 1) * x_bytes + values + t * 8 * SUBS, one = kept(0x3f800000u);
  const char *const x4 = g < M ? shared + g * x_bytes + U2 * 512 + t * 64 : reinterpret_cast<const char *>(nulls);
  const int step4 = g < M ? 256 : 0;
  constexpr int HELD = PAIRS == 1 ? 2 : 1;  // sets whose x is held for all tiles
  static_assert(TILES * M * 16 <= WARPS * 32, "a thread writes one value");
  static_assert(TILES == 1 || HELD == 2, "more tokens than a pair leave no registers for x");
  MixedIn<SUBS> in[HELD][PAIRS];
  const auto load_set = [&](int set, uint32 x_here, uint32 sums_here) {
#pragma unroll
    for (int p = 0; p < PAIRS; p++)
      in[set % HELD][p].load(g / 2 == t && 2 * p + (g & 1) < M, x_here + p * 2 * x_bytes, sums_here + p * 2 * x_bytes,
                             set);
  };

  // The first warps write results: they wait for all sums of a page, the others only arrive. The others wait before
  // they use the page again, two sets of tiles later, until it has been read.
  constexpr int WRITERS = (TILES * M * 16 + 31) / 32;
  constexpr bool SPLIT = NAMED_BARRIERS && WRITERS < WARPS;
  const auto wait_until_added = [&](int i) {
    if constexpr (!SPLIT)
      __syncthreads();
    else if (warp < WRITERS)
      sync_barrier<WARPS * 32>(1 + (i & 1));
    else
      arrive_barrier<WARPS * 32>(1 + (i & 1));
  };
  const auto wait_until_read = [&](int i) {
    if constexpr (SPLIT)
      if (warp >= WRITERS) sync_barrier<WARPS * 32>(3 + (i & 1));
  };
  const auto tell_read = [&](int i) {
    if constexpr (SPLIT)
      if (warp < WRITERS) arrive_barrier<WARPS * 32>(3 + (i & 1));
  };

  int stage = 0, phase = 0, unit = warp;
  // Whether the warp's unit `u`, counted from set i on, exists and has 2 bits.
  const auto has2 = [&](int i, int u) {
    while (u >= units) u -= units, i++;
    return i < mine && u < U2;
  };
  const auto next_piece = [&] {
    const bool wraps = stage + 1 == STAGES;
    return queue.wait(wraps ? 0 : stage + 1, wraps ? phase ^ 1 : phase);
  };
  Scales<SUBS> ready[ASYNC ? TILES : 1][2];  // ASYNC: of the unit that comes
  const auto decode_ahead = [&](const char *piece, Scales<SUBS>(&to)[ASYNC ? TILES : 1][2]) {
#pragma unroll
    for (int j = 0; j < (ASYNC ? TILES : 1); j++) {
      to[j][0].decode(0, piece + j * UNIT2, lane, one);
      to[j][1].decode(1, piece + j * UNIT2, lane, one);
    }
  };
  if constexpr (ASYNC) {
    if (has2(0, warp)) decode_ahead(queue.wait(0, 0), ready);
  }
#pragma unroll 1
  for (int i = 0; i < mine; i++) {
    const int tile = (blockIdx.x + i * gridDim.x) * TILES;
    const int o = threadIdx.x, n = (tile + o / (16 * M)) * 16 + o % 16, m = o / 16 % M;  // what the thread will write
    const bool writes = o < TILES * M * 16 && m < tokens && n < N;
    __half2 grid_row = {};
    T added_bias = from_float<T>(0), added = from_float<T>(0);
    if (writes) {
      grid_row = grid_rows[n];
      if (bias) added_bias = bias[n];
      if (residual) added = residual[(size_t)m * N + n];
    }
    MixedTile<SUBS, M> sum[TILES];
#pragma unroll
    for (int j = 0; j < TILES; j++) sum[j].clear();
#pragma unroll 1
    for (; unit < units; unit += WARPS) {
      const char *const piece = queue.wait(stage, phase);
      if (unit < U2) {
        const uint32 x_here = x2 + unit * 512, sums_here = sums2 + unit * 128 * SUBS;
        Scales<SUBS> coming[ASYNC ? TILES : 1][2];
        if constexpr (ASYNC) decode_ahead(has2(i, unit + WARPS) ? next_piece() : piece, coming);
#pragma unroll
        for (int H = 0; H < 2; H++) {
          if constexpr (HELD == 2) load_set(2 * H, x_here, sums_here), load_set(2 * H + 1, x_here, sums_here);
#pragma unroll
          for (int j = 0; j < TILES; j++) {
            const uint4 w = *reinterpret_cast<const uint4 *>(piece + j * UNIT2 + H * 512 + lane * 16);
            Scales<SUBS> s;
            if constexpr (ASYNC)
              s = ready[j][H];
            else
              s.decode(H, piece + j * UNIT2, lane, one);
            if constexpr (HELD == 1) load_set(2 * H, x_here, sums_here);
            sum[j].add2(2 * H, w.x, w.z, s, in[0]);
            if constexpr (HELD == 1) load_set(2 * H + 1, x_here, sums_here);
            sum[j].add2(2 * H + 1, w.y, w.w, s, in[HELD - 1]);
          }
        }
        if constexpr (ASYNC) {
#pragma unroll
          for (int j = 0; j < TILES; j++) ready[j][0] = coming[j][0], ready[j][1] = coming[j][1];
        }
      } else {
        uint4 x_here[4];
#pragma unroll
        for (int j = 0; j < 4; j++) x_here[j] = reinterpret_cast<const uint4 *>(x4 + (unit - U2) * step4)[j];
#pragma unroll
        for (int j = 0; j < TILES; j++) {
          const uint4 *const at = reinterpret_cast<const uint4 *>(piece + j * UNIT2) + lane;
          sum[j].add4(at[0], at[32], x_here);
        }
        if constexpr (ASYNC) {
          if (has2(i, unit + WARPS)) decode_ahead(next_piece(), ready);
        }
      }
      uint32 seen = 0;
#pragma unroll
      for (int j = 0; j < TILES; j++) seen |= sum[j].seen();
      const int zero = nothing(seen, tile_count);
      __syncwarp();
      issue_load(stage, zero);
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    unit -= units;

    // The warp's sums: of 2 bits and outliers, of 4 bits. Two pages: who only adds to them goes on with the next tiles.
    if (i >= 2) wait_until_read(i);
    float *const page = sums + (i & 1) * WARPS * TILES * 2 * M * 16;
    float *const my = page + warp * TILES * 2 * M * 16;
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      float *const to = my + j * 2 * M * 16;
#pragma unroll
      for (int p = 0; p < PAIRS; p++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
          if (2 * p + c % 2 >= M) continue;
          float &v = sum[j].two[p][c];
          v += __shfl_xor_sync(~0u, v, 1), v += __shfl_xor_sync(~0u, v, 2);
          if (t == p) to[(2 * p + c % 2) * 16 + g + c / 2 * 8] = v;
        }
      }
#pragma unroll
      for (int c = 0; c < 4; c++)
        if (2 * t + c % 2 < M) to[(M + 2 * t + c % 2) * 16 + g + c / 2 * 8] = sum[j].four[c];
    }
    // Runs of outliers lie in the order of rows: the lanes of a row add up, its last one writes.
#pragma unroll 1
    while (run < end) {
      const int where = run + lane < end ? (row - (tile + tile_base) * 16) & 255 : -1;
      const uint32 word[4] = {extra.x, extra.y, extra.z, extra.w};
      run += WARPS * 32;
      load_outliers();
      float out[M] = {};
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const Outlier o(word[c], U2);
        const float v = o.scaled_value(word[c]);
#pragma unroll
        for (int k = 0; k < M; k++)
          out[k] = fmaf(v, __half2float(reinterpret_cast<const half *>(shared + k * x_bytes)[o.place]), out[k]);
      }
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const bool same = __shfl_up_sync(~0u, where, d) == where && lane >= d;
#pragma unroll
        for (int k = 0; k < M; k++) {
          const float before = __shfl_up_sync(~0u, out[k], d);
          out[k] += same ? before : 0;
        }
      }
      const int next = __shfl_down_sync(~0u, where, 1);
      __syncwarp();
      if (where >= 0 && (lane == 31 || next != where)) {
        float *const to = my + where / 16 * 2 * M * 16 + where % 16;
#pragma unroll
        for (int k = 0; k < M; k++) to[k * 16] = fmaf(out[k], outlier_scale, to[k * 16]);
      }
      __syncwarp();
    }
    run = next_run + (warp + i + 1) % WARPS * 32, end = next_end;
    load_outliers();
    find_outliers(i + 2);

    wait_until_added(i);
    if (writes) {
      const float2 meta = *reinterpret_cast<const float2 *>(shared + (m + 1) * x_bytes - 16);  // factor, sum
      const float2 grid = __half22float2(grid_row);
      const float *const from = page + (o / (16 * M) * 2 * M + m) * 16 + o % 16;
      float two = 0, four = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) two += from[w * TILES * 2 * M * 16], four += from[(w * TILES * 2 + 1) * M * 16];
      const float v = fmaf(grid.x, fmaf(-grid.y, meta.y, four), two) * 0x1p24f * meta.x;
      y[(size_t)m * N + n] = from_float<Y>(v + to_float(added_bias) + to_float(added));
    }
    if (i + 2 < mine) tell_read(i);
  }
}

}  // namespace crelle
