// y [M, N] = x [M, K] W.T + bias + residual for up to 8 tokens and mixed 2/4-bit weights with second-order scales and
// outliers (mixed_layout.py has the layout, mixed_encode.cu makes x).
//
// Codes go into the tensor core instruction as they lie: a code at bit 2i of a half, all others masked off, is the fp16
// denormal q 4^i 2^-24, and x in that place is stored times 4^-i. So a pair of weights costs one AND. The instruction's
// 8 columns are 4 groups of 2 tokens: lane t multiplies inputs of group t only, all other x in its rows of the right
// operand are zeros, and lane (g, t) then has sum(q x) of group t for rows g and g + 8. So each scale is decoded in one
// lane and multiplied once, in f32. Zeros are one more step: the zero's code times -sum(x) / 2, which are two fp16
// values. 4-bit groups share a scale and a zero along the row, so there columns are 8 tokens and nothing is to be done
// until the end.
//
// A thread block takes tiles of 16 rows, one after the other (grid: as many thread blocks as run at once); its warps
// take turns at the units of a tile, each through its own load pipeline, which runs on into the next tile. x stays in
// shared memory for all tiles. Sums are added in a fixed order.
//
// ASYNC: the scales of a warp's next unit are decoded beside the multiplication of this one; otherwise where they are
// used.
#include "dsmem.cuh"
#include "mixed_codes.cuh"
#include "pipeline.cuh"

namespace crelle {

// 8 or 16 bytes of shared memory, or what `to` was.
__device__ __forceinline__ void load_if(bool there, uint2 &to, uint32 from) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n @p ld.shared.v2.u32 {%0, %1}, [%2];\n}"
               : "+r"(to.x), "+r"(to.y)
               : "r"(from), "r"((uint32)there));
}
__device__ __forceinline__ void load_if(bool there, uint4 &to, uint32 from) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
               : "r"(from), "r"((uint32)there));
}

// What a lane multiplies by codes of 2 bits, of a pair of tokens; zeros where its column is of another group.
struct MixedIn {
  uint4 x[2] = {};
  uint2 sums = {};
};

// Sums of a lane, and what it multiplies.
template <int SUBS, int M>
struct MixedTile {
  static constexpr int PAIRS = (M + 1) / 2;
  float two[PAIRS][4];  // [pair of tokens][row g: token, next; row g + 8: the same], of the groups of lane t
  float four[2][4];     // [step][row g: tokens 2t, 2t + 1; row g + 8]: two, so that steps need not wait for each other

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < PAIRS * 4; i++) two[i / 4][i % 4] = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) four[i / 4][i % 4] = 0;
  }

  // A unit of 256 inputs; x, sums: what the lane reads of the first pair of tokens; stride: bytes to the next pair.
  __device__ __forceinline__ void add2(uint4 first, uint4 second, const Scales<SUBS> &s, uint32 x, uint32 sums,
                                       int stride, const bool (&reads)[PAIRS], MixedIn (&in)[PAIRS]) {
    set2bit<0>(first.x, first.z, s, x, sums, stride, reads, in);
    set2bit<1>(first.y, first.w, s, x, sums, stride, reads, in);
    set2bit<2>(second.x, second.z, s, x, sums, stride, reads, in);
    set2bit<3>(second.y, second.w, s, x, sums, stride, reads, in);
  }
  template <int S>
  __device__ __forceinline__ void set2bit(uint32 low, uint32 high, const Scales<SUBS> &s, uint32 x, uint32 sums,
                                          int stride, const bool (&reads)[PAIRS], MixedIn (&in)[PAIRS]) {
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
      load_if(reads[p], in[p].x[0], x + p * stride + S * 128);
      load_if(reads[p], in[p].x[1], x + p * stride + S * 128 + 16);
    }
    const uint32 low10 = low >> 10, high10 = high >> 10;
#pragma unroll
    for (int k = 0; k < SUBS; k++) {
      const uint32 zeros = s.zeros[k], zeros8 = zeros >> 8;
#pragma unroll
      for (int p = 0; p < PAIRS; p++) {
        float d[4] = {};
        load_if(reads[p], in[p].sums, sums + p * stride + (S * 4 * SUBS + k) * 8);
        multiply<half>(d, zeros & (0x00030003u << 2 * S), zeros8 & (0x00030003u << 2 * S), 0x00010001u, 0x00010001u,
                       in[p].sums.x, in[p].sums.y);
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
          if (2 * p + j % 2 < M) two[p][j] = fmaf(s.scale[k][S][j / 2], d[j], two[p][j]);
      }
    }
  }

  // A unit of 128 inputs with 4 bits; x: those of token g that lane t has.
  __device__ __forceinline__ void add4(const char *unit, int lane, uint32 x, bool reads, uint4 &in) {
    const uint4 a = *reinterpret_cast<const uint4 *>(unit + lane * 16);
    const uint4 b = *reinterpret_cast<const uint4 *>(unit + 512 + lane * 16);
    word4(a.x, b.x, x, reads, in), word4(a.y, b.y, x + 16, reads, in);
    word4(a.z, b.z, x + 32, reads, in), word4(a.w, b.w, x + 48, reads, in);
  }
  __device__ __forceinline__ void word4(uint32 low, uint32 high, uint32 x, bool reads, uint4 &in) {
    load_if(reads, in, x);
    const uint32 low8 = low >> 8, high8 = high >> 8;
    multiply<half>(four[0], codes4<0>(low, low8), codes4<0>(high, high8), codes4<1>(low, low8), codes4<1>(high, high8),
                   in.x, in.y);
    multiply<half>(four[1], codes4<2>(low, low8), codes4<2>(high, high8), codes4<3>(low, low8), codes4<3>(high, high8),
                   in.z, in.w);
  }

  // Zero, but not before all that was loaded is there (see dequant.cuh). `positive` is; the compiler must not know.
  __device__ __forceinline__ int nothing(int positive) const {
    const uint32 seen = __float_as_uint(two[0][0]) | __float_as_uint(two[0][2]) | __float_as_uint(four[0][0]) |
                        __float_as_uint(four[1][0]);
    int zero;
    asm volatile("shr.u32 %0, %1, %2;" : "=r"(zero) : "r"(seen), "r"(positive < 0 ? 31 : 32));
    return zero;
  }
};

// tiles [tile_count, tile bytes]; grid_rows [16 tile_count]: scale and zero of 4-bit groups; outliers [chunks, 32] with
// the tiles' first chunks in `chunks`, or null; x [M, x_bytes]; bias [N] and residual [tokens, N] may be null; y
// [tokens, N], which may be the residual. Shared: M x_bytes, WARPS pipelines, 64 WARPS M sums of 4 bytes, 16 bytes.
template <int SUBS, int M, int WARPS, int STAGES, int OCCUPANCY, bool ASYNC, typename T, typename Y>
__global__ void __launch_bounds__(WARPS * 32, OCCUPANCY)
    mixed_gemv(const char *__restrict__ tiles, const __half2 *__restrict__ grid_rows,
               const uint4 *__restrict__ outliers, const int *__restrict__ chunks, const char *x,
               const T *__restrict__ bias, const T *residual, Y *y, int N, int tokens, int tile_count, int U2, int U4,
               float outlier_scale) {
  constexpr int UNIT2 = 1024 + 240 * SUBS, PAIRS = (M + 1) / 2;
  using Queue = Pipeline<STAGES, UNIT2, ASYNC ? 2 : 1>;  // ASYNC: a unit and the scales of the next
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), g = lane / 4, t = lane % 4;
  const int units = U2 + U4, values = U2 * 512 + U4 * 256, x_bytes = values + U2 * 128 * SUBS + 16;
  const int tile_bytes = U2 * UNIT2 + U4 * 1024;
  const int mine =
      ((int)(tile_count - blockIdx.x) + (int)gridDim.x - 1) / (int)gridDim.x;  // tiles of this thread block
  char *const after_x = shared + M * x_bytes;
  float *const sums = reinterpret_cast<float *>(after_x + WARPS * Queue::SIZE);  // [2][warp][bits][M][16]
  Mbarrier *const x_there = reinterpret_cast<Mbarrier *>(sums + 2 * WARPS * 2 * M * 16);
  launch_dependents();
  Queue queue(after_x + warp * Queue::SIZE, lane);

  struct {
    int tile, unit;
  } wanted = {0, warp};
  const auto settle = [&] {
    while (wanted.unit >= units) wanted.unit -= units, wanted.tile++;
  };
  const auto issue_load = [&](int stage, int zero) {
    if (wanted.tile >= mine) {
      queue.issue_nothing();
      return;
    }
    const int unit = wanted.unit, behind = unit - U2;
    const int at = behind < 0 ? unit * UNIT2 : U2 * UNIT2 + behind * 1024, first = behind < 0 ? 1024 : 512;
    const char *from = tiles + (size_t)(blockIdx.x + wanted.tile * gridDim.x) * tile_bytes + at + zero;
    queue.issue_load(stage, from, first, from + first, behind < 0 ? 240 * SUBS : 512);
    wanted.unit += WARPS;
    settle();
  };
  settle();
#pragma unroll
  for (int s = 0; s < STAGES; s++) issue_load(s, 0);

#if __CUDA_ARCH__ >= 900
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

  // Where the lane's x is: for 2 bits, of group t and token g % 2 of a pair, if its column is that group's.
  const uint32 x2 = shared_address(shared) + (g & 1) * x_bytes + t * 32;
  const uint32 sums2 = shared_address(shared) + (g & 1) * x_bytes + values + t * 8 * SUBS;
  const uint32 x4 = shared_address(shared) + g * x_bytes + U2 * 512 + t * 64, one = kept(0x3f800000u);
  bool reads[PAIRS];
  MixedIn in2[PAIRS];
  uint4 in4 = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int p = 0; p < PAIRS; p++) reads[p] = g / 2 == t && 2 * p + (g & 1) < M;

  int stage = 0, phase = 0, unit = warp;
  // Whether the warp's unit `u`, counted from tile i on, exists and has 2 bits.
  const auto has2 = [&](int i, int u) {
    while (u >= units) u -= units, i++;
    return i < mine && u < U2;
  };
  const auto next_piece = [&] {
    const bool wraps = stage + 1 == STAGES;
    return queue.wait(wraps ? 0 : stage + 1, wraps ? phase ^ 1 : phase);
  };
  Scales<SUBS> scales;
  if constexpr (ASYNC) {
    if (has2(0, warp)) scales.decode(queue.wait(0, 0), lane, one);
  }
#pragma unroll 1
  for (int i = 0; i < mine; i++) {
    const int tile = blockIdx.x + i * gridDim.x;
    int chunk = 0, last = 0;
    uint4 extra = make_uint4(0, 0, 0, 0);  // the warp's first outliers
    if (outliers) {
      chunk = chunks[tile] + (warp + i) % WARPS, last = chunks[tile + 1];
      if (chunk < last) extra = __ldg(outliers + (size_t)chunk * 32 + lane);
    }
    MixedTile<SUBS, M> sum;
    sum.clear();
#pragma unroll 1
    for (; unit < units; unit += WARPS) {
      const char *piece = queue.wait(stage, phase);
      if (unit < U2) {
        const uint4 first = *reinterpret_cast<const uint4 *>(piece + lane * 16);
        const uint4 second = *reinterpret_cast<const uint4 *>(piece + 512 + lane * 16);
        const uint32 x_here = x2 + unit * 512;
        const uint32 sums_here = sums2 + unit * 128 * SUBS;
        if constexpr (ASYNC) {
          Scales<SUBS> coming;
          coming.decode(has2(i, unit + WARPS) ? next_piece() : piece, lane, one);
          sum.add2(first, second, scales, x_here, sums_here, 2 * x_bytes, reads, in2);
          scales = coming;
        } else {
          scales.decode(piece, lane, one);
          sum.add2(first, second, scales, x_here, sums_here, 2 * x_bytes, reads, in2);
        }
      } else {
        sum.add4(piece, lane, x4 + (unit - U2) * 256, g < M, in4);
        if constexpr (ASYNC) {
          if (has2(i, unit + WARPS)) scales.decode(next_piece(), lane, one);
        }
      }
      const int zero = sum.nothing(tile_count);
      __syncwarp();
      issue_load(stage, zero);
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    unit -= units;

    // The warp's sums: of 2 bits and outliers, of 4 bits. Two pages, so that one barrier is enough.
    float *const page = sums + (i & 1) * WARPS * 2 * M * 16;
    float *const my = page + warp * 2 * M * 16;
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float &v = sum.two[p][j];
        v += __shfl_xor_sync(~0u, v, 1), v += __shfl_xor_sync(~0u, v, 2);
        if (t == p && 2 * p + j % 2 < M) my[(2 * p + j % 2) * 16 + g + j / 2 * 8] = v;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (2 * t + j % 2 < M) my[(M + 2 * t + j % 2) * 16 + g + j / 2 * 8] = sum.four[0][j] + sum.four[1][j];
    if (chunk < last) {
      float out[M] = {};
#pragma unroll 1
      while (true) {
        const uint32 word[4] = {extra.x, extra.y, extra.z, extra.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float v = __half2float(__ushort_as_half(word[j] >> 16));
#pragma unroll
          for (int m = 0; m < M; m++)
            out[m] =
                fmaf(v, __half2float(reinterpret_cast<const half *>(shared + m * x_bytes)[word[j] & 0xffff]), out[m]);
        }
        if ((chunk += WARPS) >= last) break;
        extra = __ldg(outliers + (size_t)chunk * 32 + lane);
      }
      __syncwarp();
#pragma unroll
      for (int m = 0; m < M; m++) {
        out[m] += __shfl_xor_sync(~0u, out[m], 16);
        if (lane < 16) my[m * 16 + lane] = fmaf(out[m], outlier_scale, my[m * 16 + lane]);
      }
    }
    __syncthreads();
    const int row = threadIdx.x % 16, m = threadIdx.x / 16, n = tile * 16 + row;
    if (m < min(M, tokens) && n < N) {
      const float2 meta = *reinterpret_cast<const float2 *>(shared + (m + 1) * x_bytes - 16);  // factor, sum
      const float2 grid = __half22float2(grid_rows[n]);
      float two = 0, four = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++)
        two += page[(w * 2 * M + m) * 16 + row], four += page[(w * 2 * M + M + m) * 16 + row];
      float v = fmaf(grid.x, fmaf(-grid.y, meta.y, four), two) * 0x1p24f * meta.x;
      if (bias) v += to_float(bias[n]);
      if (residual) v += to_float(residual[(size_t)m * N + n]);
      y[(size_t)m * N + n] = from_float<Y>(v);
    }
  }
}

}  // namespace crelle
