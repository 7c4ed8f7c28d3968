// y [N] = f(x) [K] W.T + bias + residual for one token and up to three mixed 2/4-bit matrices of groups of 16 and more,
// which may differ in the groups that have 4 bits: f and the encoding of x are the prologue (mixed_digits.cuh), while
// the first weights are on their way (mixed_layout.py has their layout).
//
// Codes go into the 8-bit tensor core instruction, four at a time by one AND: a code at bit 2 of a byte is 4 q there,
// and x in that place is stored over 4. The instruction's 8 columns are the two digits of 4 groups: lane t multiplies
// inputs of group t only, all other x in its rows of the right operand are zeros, and lane (g, t) then has both digits
// of sum(q x) of group t for rows g and g + 8. Low digits are summed from INT_AS_FLOAT on: 256 high + low are the bits
// of a float. Zeros and scales are multiplied there, in f32. That is two matrix instructions for 64 inputs and 16 rows
// where mixed_gemv.cu has five, and half its ANDs.
//
// A thread block has some consecutive tiles of one matrix, and takes TILES of 16 rows at a time; its warps take turns
// at the units of inputs, each through its own load pipeline, which runs on into the next tiles. Sums are added in a
// fixed order.
#include "mixed/mixed_digits.cuh"
#include "mixed/mixed_imma.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/pipeline.cuh"
#include "ptx/shared_loads.cuh"
#include "ptx/warp.cuh"

namespace crelle {

struct MixedMatrix {
  const char *tiles;                  // [tile_count, U2 1264 + U4 1024]
  const __half2 *grid_rows;           // [16 tile_count]: scale and zero of 4-bit groups
  const uint4 *outliers;              // runs of 4 of a row n, or null
  const unsigned char *outlier_rows;  // (n + 16 tile_base) mod 256
  const int *starts;                  // [tile_count + 1]: runs of the tiles
  const int *places;
  const void *bias;  // T [N], or null
  int N, tile_count, tile_base, U2, U4;
  float outlier_scale;
  int column;       // of its first output in y
  int last_block;   // one behind its thread blocks
  int share, rest;  // tiles of each of them; how many have one more
  int runs;         // of outliers of every tile; 0: see starts
};
struct MixedMatrices {
  MixedMatrix of[3];
};

// Sums of a lane for rows g and g + 8 of a tile, of its groups of 2 and of 4 bits.
struct DecodeTile {
  float two[2], four[2];
};

// paired: y [N] = silu(f(x) W.T) f(x) V.T of the first two matrices, which have the same sizes; in turns.
// x [K] (gated: [2K], gate then up); norm, shift [K] may be null; residual [all outputs] may be null, or y. All are 16
// bytes aligned, K is a multiple of 8. Shared: the token, WARPS pipelines, 2 WARPS TILES 32 sums, WARPS and 4
// floats.
template <bool OTHERS, int TILES, int WARPS, int STAGES, int OCCUPANCY, typename T, typename Y>
__global__ void __launch_bounds__(WARPS * 32, OCCUPANCY)
    mixed_decode(const __grid_constant__ MixedMatrices matrices, const T *x, const T *__restrict__ norm,
                 const T *__restrict__ shift, const T *residual, Y *y, int K, int op, int paired, float eps) {
  constexpr int UNIT2 = 1264;
  using Queue = Pipeline<STAGES, TILES * UNIT2>;
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), g = lane / 4, t = lane % 4;
  const int which = ((int)blockIdx.x >= matrices.of[0].last_block) + ((int)blockIdx.x >= matrices.of[1].last_block);
  const auto matrix = [&](int i) -> const MixedMatrix & { return matrices.of[paired ? i & 1 : which]; };
  const MixedMatrix &w = matrices.of[which];
  const int U2 = w.U2, U4 = w.U4, units = U2 + U4, tile_bytes = U2 * UNIT2 + U4 * 1024;
  const int block = blockIdx.x - (which ? matrices.of[which - 1].last_block : 0);
  const int begin = block * w.share + min(block, w.rest), end_tile = begin + w.share + (block < w.rest);
  const int mine = (end_tile - begin + TILES - 1) / TILES << paired;  // sets of tiles; of a pair in turns
  char *const after_x = shared + (TokenDigits::bytes(U2, U4) << paired);
  float *const sums = reinterpret_cast<float *>(after_x + WARPS * Queue::SIZE);         // [2][warp][TILES][lane]
  float *const squares = sums + 2 * WARPS * TILES * 32, *const sum4 = squares + WARPS;  // [2]
  launch_dependents();
  using Encoder = TokenEncoder<OTHERS, WARPS, T>;
  const int spans = 16 * U2 + 8 * U4;
  const Encoder encode = {(Prologue)op,          x, norm,    shift, w.places,
                          matrices.of[1].places, K, 16 * U2, spans, spans << paired};
  typename Encoder::Span first, second;
  encode.find(first, threadIdx.x), encode.find(second, threadIdx.x + WARPS * 32);
  // The outliers that the warp takes first are loaded a set of tiles ahead, where they begin and end two sets ahead.
  int run = 0, end = 0, next_run = 0, next_end = 0, row = 0;
  uint4 extra = make_uint4(0, 0, 0, 0);
  const auto find_outliers = [&](int i) {
    const int tile = begin + (i >> paired) * TILES;
    const MixedMatrix &m = matrix(i);
    const int last = min(tile + TILES, end_tile);
    next_run = next_end = 0;
    if (!m.outliers || i >= mine) return;
    if (m.runs)
      next_run = (tile + m.tile_base) * m.runs, next_end = (last + m.tile_base) * m.runs;
    else
      next_run = m.starts[tile], next_end = m.starts[last];
  };
  const auto load_outliers = [&](const MixedMatrix &m) {
    extra = make_uint4(0, 0, 0, 0);
    if (run + lane < end) extra = __ldg(m.outliers + run + lane), row = m.outlier_rows[run + lane];
  };
  const auto take_outliers = [&] {
    run = next_run + warp * 32, end = next_end;
    load_outliers(w);
    find_outliers(1);
  };
  find_outliers(0);
  if (w.runs) take_outliers();
  encode.prefetch(first);
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
    const int unit = wanted.unit, behind = unit - U2, tile = begin + (wanted.set >> paired) * TILES,
              there = end_tile - tile;
    const int at = behind < 0 ? unit * UNIT2 : U2 * UNIT2 + behind * 1024, bytes = behind < 0 ? UNIT2 : 1024;
    const char *const from = matrix(wanted.set).tiles + (size_t)tile * tile_bytes + at + zero;
#if __CUDA_ARCH__ >= 900
    if (elected()) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(queue.barrier(stage)),
                   "r"(min(TILES, there) * bytes)
                   : "memory");
#pragma unroll
      for (int j = 0; j < TILES; j++)
        if (j < there) queue.copy(stage, j * UNIT2, from + j * tile_bytes, bytes);
    }
#else
#pragma unroll
    for (int j = 0; j < TILES; j++)
      if (j < there) queue.copy(queue.base + (stage * TILES + j) * UNIT2, from + j * tile_bytes, bytes);
    queue.issue_nothing();
#endif
    wanted.unit += WARPS;
    settle();
  };
  settle();
#pragma unroll 1
  for (int s = 0; s < STAGES; s++) issue_load(s, 0);

  if (!w.runs) take_outliers();
  grid_dependency_wait_late(K);
  encode.load(first);
  encode.store(first, second, eps, shared, U2, U4, squares);
  __syncthreads();

  // The sum of the 4-bit inputs; read behind the first barrier.
  if (warp <= paired) {
    float sum = 0;
#pragma unroll 1
    for (int i = lane; i < 8 * U4; i += 32)
      sum += TokenDigits(shared + warp * TokenDigits::bytes(U2, U4), U2, U4).terms4[i].y;
    sum = warp_sum(sum);
    if (lane == 0) sum4[warp] = sum;
  }

  // Where the lane's x is: the digit g % 2 of group t, if its column is that group's.
  const bool has_x = g / 2 == t;
  const uint32 x2 = shared_address(shared) + t * 32 + (g & 1) * 16;
  const uint32 x4 = shared_address(shared) + U2 * 512 + t * 64 + (g & 1) * 16;
  const DecodeConstants c = {
      {kept(0), kept(INT_AS_FLOAT), (uint32)K >> 31, INT_AS_FLOAT + ((uint32)K >> 31)}, kept(256), kept(0x3f800000u)};

  // The first warps write results: they wait for all sums of a page, the others only arrive. The others wait before
  // they use the page again, two sets of tiles later, until it has been read.
  constexpr bool SPLIT = NAMED_BARRIERS && TILES < WARPS;
  static_assert(TILES <= WARPS, "a warp writes a tile");
  const auto wait_until_added = [&](int i) {
    if constexpr (!SPLIT)
      __syncthreads();
    else if (warp < TILES)
      sync_barrier<WARPS * 32>(1 + (i & 1));
    else
      arrive_barrier<WARPS * 32>(1 + (i & 1));
  };
  const auto wait_until_read = [&](int i) {
    if constexpr (SPLIT)
      if (warp >= TILES) sync_barrier<WARPS * 32>(3 + (i & 1));
  };
  const auto tell_read = [&](int i) {
    if constexpr (SPLIT)
      if (warp < TILES) arrive_barrier<WARPS * 32>(3 + (i & 1));
  };

  const float factor = warp < TILES ? encode.factor(squares, eps) : 1;
  int stage = 0, phase = 0, unit = warp;
  float gate = 0;      // of a pair: the first one's output
  uint4 held[2] = {};  // x of two sets; zeros where the lane's column is another group's
#pragma unroll 1
  for (int i = 0; i < mine; i++) {
    const int tile = begin + (i >> paired) * TILES, other = paired & i, token_at = other * TokenDigits::bytes(U2, U4);
    const MixedMatrix &m = matrix(i);
    const TokenDigits token(shared + token_at, U2, U4);
    const int n = (tile + warp) * 16 + g + t / 2 * 8;  // what the lane will write
    const bool writes = warp < TILES && tile + warp < end_tile && t % 2 == 0 && n < m.N;
    __half2 grid_row = {};
    T added_bias = from_float<T>(0), added = from_float<T>(0);
    if (writes) {
      grid_row = m.grid_rows[n];
      if (m.bias) added_bias = static_cast<const T *>(m.bias)[n];
      if (residual) added = residual[m.column + n];
    }
    DecodeTile sum[TILES];
#pragma unroll
    for (int j = 0; j < TILES; j++) sum[j] = {};

    // The warp's sums over t: lane (g, t) gets those of row g + 8 (t / 2), of 2 bits where t is even, else of 4. Two
    // pages: who only adds to them goes on with the next tiles. Outliers come first: runs of them lie in the order of
    // rows, the lanes of a row add up, its last one adds that to the sums.
    if (i >= 2) wait_until_read(i);
    float *const page = sums + (i & 1) * WARPS * TILES * 32, *const my = page + warp * TILES * 32;
#pragma unroll
    for (int j = 0; j < TILES; j++) my[j * 32 + lane] = 0;
    __syncwarp();
#pragma unroll 1
    while (run < end) {
      const int where = run + lane < end ? (row - (tile + m.tile_base) * 16) & 255 : -1;
      const uint32 word[4] = {extra.x, extra.y, extra.z, extra.w};
      run += WARPS * 32;
      load_outliers(m);
      float out = 0;
#pragma unroll
      for (int k = 0; k < 4; k++) out = fmaf(__half2float(__ushort_as_half(word[k] >> 16)), token.at(word[k]), out);
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const bool same = __shfl_up_sync(~0u, where, d) == where && lane >= d;
        const float before = __shfl_up_sync(~0u, out, d);
        out += same ? before : 0;
      }
      const int next = __shfl_down_sync(~0u, where, 1);
      if (where >= 0 && (lane == 31 || next != where)) {
        float *const to = my + where / 16 * 32 + where % 8 * 4 + where % 16 / 8 * 2;
        *to = fmaf(out, m.outlier_scale, *to);
      }
      __syncwarp();
    }
#pragma unroll 1
    for (; unit < units; unit += WARPS) {
      const char *const piece = queue.wait(stage, phase);
      if (unit < U2) {
        ScaleWords words[TILES];
#pragma unroll
        for (int j = 0; j < TILES; j++) words[j].load(piece + j * UNIT2, lane);
#pragma unroll
        for (int H = 0; H < 2; H++) {
          float4 terms[2];
#pragma unroll
          for (int k = 0; k < 2; k++) {
            load_if(has_x, held[k], x2 + token_at + unit * 512 + (2 * H + k) * 128);
            terms[k] = token.terms2[unit * 16 + (2 * H + k) * 4 + t];
          }
#pragma unroll
          for (int j = 0; j < TILES; j++) {
            const uint4 codes = *reinterpret_cast<const uint4 *>(piece + j * UNIT2 + H * 512 + lane * 16);
#pragma unroll
            for (int k = 0; k < 2; k++) {
              float scale[2], zero[2];
              words[j].decode(2 * H + k, terms[k].z, c.one, scale, zero);
              add_set2(sum[j].two, k ? codes.y : codes.x, k ? codes.w : codes.z, held[k], terms[k], scale, zero, c);
            }
          }
        }
      } else {
        const int behind = unit - U2;
        const float4 xs = reinterpret_cast<const float4 *>(token.terms4)[behind * 4 + t];
        load_if(has_x, held[0], x4 + token_at + behind * 256);
        load_if(has_x, held[1], x4 + token_at + behind * 256 + 32);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
          const uint4 *const at = reinterpret_cast<const uint4 *>(piece + j * UNIT2) + lane;
          const uint4 a = at[0], b = at[32];
          add_span4(sum[j].four, make_uint2(a.x, a.y), make_uint2(b.x, b.y), held[0], xs.x, c);
          add_span4(sum[j].four, make_uint2(a.z, a.w), make_uint2(b.z, b.w), held[1], xs.z, c);
        }
      }
      uint32 seen = 0;
#pragma unroll
      for (int j = 0; j < TILES; j++)
        seen |= __float_as_uint(sum[j].two[0]) | __float_as_uint(sum[j].two[1]) | __float_as_uint(sum[j].four[0]) |
                __float_as_uint(sum[j].four[1]);
      const int zero = nothing(seen, K);
      __syncwarp();
      issue_load(stage, zero);
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    unit -= units;

#pragma unroll
    for (int j = 0; j < TILES; j++) {
      const bool odd = t & 1, upper = t & 2;
      float kept_sum[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float two = sum[j].two[r], four = sum[j].four[r];
        kept_sum[r] = (odd ? four : two) + __shfl_xor_sync(~0u, odd ? two : four, 1);
      }
      my[j * 32 + lane] +=
          (upper ? kept_sum[1] : kept_sum[0]) + __shfl_xor_sync(~0u, upper ? kept_sum[0] : kept_sum[1], 2);
    }
    run = next_run + (warp + i + 1) % WARPS * 32, end = next_end;
    load_outliers(matrix(i + 1));
    find_outliers(i + 2);

    wait_until_added(i);
    if (warp < TILES) {
      float total = 0;
#pragma unroll
      for (int k = 0; k < WARPS; k++) total += page[(k * TILES + warp) * 32 + lane];
      const float four = __shfl_xor_sync(~0u, total, 1);
      if (writes) {
        const float2 grid = __half22float2(grid_row);
        float v = fmaf(grid.x, fmaf(-grid.y, sum4[other], four), total) * factor + to_float(added_bias);
        if (other) v *= __fdividef(gate, 1 + __expf(-gate));
        gate = v;
        if (other == paired) y[m.column + n] = from_float<Y>(v + to_float(added));
      }
    }
    if (i + 2 < mine) tell_read(i);
  }
}

}  // namespace crelle
