// What comes before a trellis product, done by its own thread blocks: a prologue, the rotation
// (crelle.formats.wrappers.rotated), and 16 bits for each input, two digits, 256 high + low, with one scale for each
// segment of the inputs.
//
// SPLIT segments, whole quads of units (64 inputs), as equal as they can be: the share of a thread block in its
// cluster. A warp has 256 inputs at a time, lane l 8 from 8l on; blocks of the rotation of 512 and 1024 inputs are in 2
// and 4 warps, which meet in shared memory. A thread block makes all blocks of the rotation that its share touches. All
// is f32, in the order of crelle.formats.wrappers.hadamard; trellis_encode.cu makes the same bits.
#pragma once
#include "step/prologue.cuh"

namespace crelle {

constexpr float RANGE = 32512;  // 127 * 256: what two digits hold

// The first unit of a segment.
__device__ __forceinline__ int segment_begin(int units, int rank, int split) { return units / 4 * rank / split * 4; }

// The scale of a segment and what multiplies its inputs, from the bits of the largest absolute value. Segments that
// have anything but finite values get the scale NaN. The reciprocal is an approximation, and digits have room for that.
struct DigitScale {
  float scale, inverse;
  __device__ __forceinline__ explicit DigitScale(uint32 most) {
    const float v = __uint_as_float(most);
    const bool finite = most < 0x7f800000u, zero = v < 0x1p-100f;
    inverse = finite && !zero ? __fmul_rn(__fdividef(RANGE, __fmul_rn(v, 0x1p-16f)), 0x1p-16f) : 0;
    scale = finite ? zero ? 0 : __fmul_rn(v, 1 / RANGE) : __int_as_float(0x7fffffff);
  }
};

// Digits of 8 inputs: words of 4 high ones, of 4 low ones; their sum is returned.
__device__ __forceinline__ int digits_of(const float (&f)[8], float inverse, uint2 &high, uint2 &low) {
  uint32 q[8], h[2], l[2];
  int sum = 0;
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const int code = inverse > 0 ? __float2int_rn(__fmul_rn(f[e], inverse)) : 0;
    sum += code, q[e] = code;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32 *const a = q + 4 * i;
    l[i] = __byte_perm(__byte_perm(a[0], a[1], 0x0040), __byte_perm(a[2], a[3], 0x0040), 0x5410);
    h[i] =
        __byte_perm(__byte_perm(a[0] + 128, a[1] + 128, 0x0051), __byte_perm(a[2] + 128, a[3] + 128, 0x0051), 0x5410);
  }
  high = make_uint2(h[0], h[1]), low = make_uint2(l[0], l[1]);
  return sum;
}

__device__ __forceinline__ void butterfly(float &a, float &b) {
  const float sum = __fadd_rn(a, b);
  b = __fsub_rn(a, b), a = sum;
}

// H of the blocks in a warp's 256 inputs, up to 256 of `block`; without the factor.
__device__ __forceinline__ void hadamard_256(float (&f)[8], int block) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    if (step >= block) break;
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (!(i & step)) butterfly(f[i], f[i + step]);
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    if (lanes * 8 >= block) break;
    const bool upper = threadIdx.x & lanes;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float other = __shfl_xor_sync(~0u, f[i], lanes);
      f[i] = __fadd_rn(upper ? -f[i] : f[i], other);
    }
  }
}

// What a product reads that encodes for itself. x [tokens, K] (gated: [tokens, 2K]); norm, shift [K] may be null;
// signs: a bit for each input, 1 where it changes its sign, or null; K: a multiple of 8; root: 1/sqrt(block).
template <typename T>
struct TrellisInput {
  const T *x, *norm, *shift;
  const unsigned char *signs;
  int K, block;
  float root, eps;
};

// Encodes a thread block's share; PASSES * WARPS * 256 inputs hold it and all blocks of the rotation that it touches.
//
// An RMS norm is one factor for all inputs of a token, so it is left to the product's epilogue: only the sum of squares
// is made here, and nothing waits for it.
template <Prologue OP, int M, int WARPS, int PASSES, typename T>
struct ShareEncoder {
  static constexpr bool NORM = OP == RMS_NORM || OP == LAYER_NORM;
  static constexpr int EXCHANGE = PASSES * WARPS * 1024;  // bytes, for blocks in several warps
  static constexpr int SMALL = M * WARPS * 16;            // bytes of what the warps found
  struct Found {
    float2 parts[M][WARPS];  // sums of x and of its squares
    uint32 most[M][WARPS];
    int sums[M][WARPS];
  };

  const TrellisInput<T> &in;
  const int lane, warp, begin, end, base;  // inputs: of the share, and where the first pass begins
  Found &found;
  uint32 signs[PASSES];
  uint4 norm[PASSES], shift[PASSES];

  __device__ __forceinline__ int place(int pass) const { return base + (pass * WARPS + warp) * 256 + lane * 8; }

  // Loads what no kernel writes. [begin, end): inputs, whole units; small: SMALL bytes of shared memory.
  __device__ __forceinline__ ShareEncoder(const TrellisInput<T> &in, int begin, int end, char *small)
      : in(in),
        lane(threadIdx.x & 31),
        warp(threadIdx.x >> 5),
        begin(begin),
        end(end),
        base(begin / max(256, in.block) * max(256, in.block)),
        found(*reinterpret_cast<Found *>(small)) {
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
      const int k = place(i);
      signs[i] = in.signs && k < in.K ? in.signs[k / 8] : 0;
      norm[i] = shift[i] = make_uint4(0, 0, 0, 0);
      if (NORM && in.norm) norm[i] = eight<true>(in.norm, k, in.K);
      if (OP == LAYER_NORM && in.shift) shift[i] = eight<true>(in.shift, k, in.K);
    }
  }

  // digits [units of the share][M][high, low][4] words in shared memory, of token `token + m` for m < M (those that do
  // not exist are not written); exchange: EXCHANGE bytes. All threads must come.
  __device__ __forceinline__ void encode(int token, int tokens, uint32 *digits, float4 *exchange) {
#pragma unroll 1
    for (int m = 0; m < M && token + m < tokens; m++) {
      const T *const row = in.x + (size_t)(token + m) * in.K * (is_gated(OP) ? 2 : 1);
      uint4 v[PASSES], up[PASSES];
#pragma unroll
      for (int i = 0; i < PASSES; i++) {
        v[i] = eight<true>(row, place(i), in.K);
        if constexpr (is_gated(OP)) up[i] = eight<true>(row + in.K, place(i), in.K);
      }
      uint4 first[2];  // of the whole row, for the sums
      if constexpr (NORM) {
#pragma unroll
        for (int i = 0; i < 2; i++) first[i] = eight<true>(row, (threadIdx.x + i * WARPS * 32) * 8, in.K);
      }
      Norm n = {0, 1};
      if constexpr (OP == LAYER_NORM) {
        sum_up(row, first, m);
        __syncthreads();
        n = norm_of_token(in, found, m);
      }
      float f[PASSES][8];
#pragma unroll
      for (int i = 0; i < PASSES; i++) {
        apply(f[i], v[i], up[i], i, n);
#pragma unroll
        for (int e = 0; e < 8; e++) f[i][e] = signs[i] >> e & 1 ? -f[i][e] : f[i][e];
        if (in.block > 1) hadamard_256(f[i], in.block);
      }
      if (in.block > 256) meet(f, exchange);
      uint32 most = 0;
#pragma unroll
      for (int i = 0; i < PASSES; i++) {
        if (in.block > 1) {
#pragma unroll
          for (int e = 0; e < 8; e++) f[i][e] = __fmul_rn(f[i][e], in.root);
        }
        if (place(i) < begin || place(i) >= end) continue;
#pragma unroll
        for (int e = 0; e < 8; e++) most = max(most, __float_as_uint(fabsf(f[i][e])));
      }
      most = __reduce_max_sync(~0u, most);
      if (lane == 0) found.most[m][warp] = most;
      __syncthreads();
      const float inverse = DigitScale(most_of(found, m)).inverse;
      int sum = 0;
#pragma unroll
      for (int i = 0; i < PASSES; i++) {
        const int k = place(i);
        if (k < begin || k >= end) continue;
        uint2 high, low;
        sum += digits_of(f[i], inverse, high, low);
        uint2 *const to = reinterpret_cast<uint2 *>(digits) + ((k - begin) / 16 * M + m) * 4 + k % 16 / 8;
        to[0] = high, to[2] = low;
      }
      sum = __reduce_add_sync(~0u, sum);
      if (lane == 0) found.sums[m][warp] = sum;
      if constexpr (OP == RMS_NORM) sum_up(row, first, m);
    }
    __syncthreads();
  }

  // What `encode` found: the scale of token m, with its norm, and its sum of 256 high + low.
  static __device__ __forceinline__ float scale(const TrellisInput<T> &in, const char *small, int m) {
    const Found &found = *reinterpret_cast<const Found *>(small);
    const float scale = DigitScale(most_of(found, m)).scale;
    return OP == RMS_NORM ? scale * norm_of_token(in, found, m).scale : scale;
  }
  static __device__ __forceinline__ int sum(const char *small, int m) {
    int total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += reinterpret_cast<const Found *>(small)->sums[m][w];
    return total;
  }

private:
  static __device__ __forceinline__ uint32 most_of(const Found &found, int m) {
    uint32 most = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) most = max(most, found.most[m][w]);
    return most;
  }
  // The warps' sums of a token; first: 8 values of each thread, and of its second turn.
  __device__ __forceinline__ void sum_up(const T *row, const uint4 (&first)[2], int m) const {
    float total = 0, squares = 0;
    const auto add = [&](uint4 v) {
      float f[8];
      open<T>(f, v);
#pragma unroll
      for (int e = 0; e < 8; e++) total += f[e], squares = fmaf(f[e], f[e], squares);
    };
    add(first[0]), add(first[1]);
    for (int k = (threadIdx.x + WARPS * 64) * 8; k < in.K; k += WARPS * 256) add(eight<true>(row, k, in.K));
#pragma unroll
    for (int i = 16; i; i /= 2) {
      if (OP == LAYER_NORM) total += __shfl_xor_sync(~0u, total, i);
      squares += __shfl_xor_sync(~0u, squares, i);
    }
    if (lane == 0) found.parts[m][warp] = make_float2(total, squares);
  }
  static __device__ __forceinline__ Norm norm_of_token(const TrellisInput<T> &in, const Found &found, int m) {
    float2 all = make_float2(0, 0);
#pragma unroll
    for (int w = 0; w < WARPS; w++) all.x += found.parts[m][w].x, all.y += found.parts[m][w].y;
    return norm_of<OP>(all, in.K, in.eps);
  }

  // As `applied` has it, of what has been loaded, but for the factor of an RMS norm.
  __device__ __forceinline__ void apply(float (&f)[8], uint4 v, uint4 up, int i, Norm n) const {
    open<T>(f, v);
    if constexpr (OP == PLAIN) return;
    if constexpr (NORM) {
      float g[8];
#pragma unroll
      for (int e = 0; e < 8; e++) f[e] = OP == LAYER_NORM ? (f[e] - n.mean) * n.scale : f[e];
      if (in.norm) {
        open<T>(g, norm[i]);
#pragma unroll
        for (int e = 0; e < 8; e++) f[e] *= g[e];
      }
      if (OP == LAYER_NORM && in.shift) {
        open<T>(g, shift[i]);
#pragma unroll
        for (int e = 0; e < 8; e++) f[e] += g[e];
      }
      if (OP == LAYER_NORM && place(i) >= in.K) {
#pragma unroll
        for (int e = 0; e < 8; e++) f[e] = 0;
      }
      if (OP == RMS_NORM) return;
    } else {
      activate<OP, T>(f, up);
    }
    open<T>(f, closed<T>(f));
  }

  // The last steps of blocks of 512 and 1024 inputs, which 2 and 4 warps hold.
  __device__ __forceinline__ void meet(float (&f)[PASSES][8], float4 *exchange) const {
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
      float4 *const to = exchange + (i * WARPS + warp) * 64 + lane;
      to[0] = make_float4(f[i][0], f[i][1], f[i][2], f[i][3]);
      to[32] = make_float4(f[i][4], f[i][5], f[i][6], f[i][7]);
    }
    __syncthreads();
    const int of = warp & 1, half = warp >> 1 & 1;
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
      const float4 *const from = exchange + (i * WARPS + (in.block > 512 ? warp & ~3 : warp & ~1)) * 64 + lane;
      const auto combined = [&](int pair, float (&to)[8]) {  // of warps 2 * pair and the next: sum, or difference
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const float4 a = from[pair * 128 + j * 32], b = from[pair * 128 + 64 + j * 32];
          to[4 * j] = __fadd_rn(a.x, of ? -b.x : b.x), to[4 * j + 1] = __fadd_rn(a.y, of ? -b.y : b.y);
          to[4 * j + 2] = __fadd_rn(a.z, of ? -b.z : b.z), to[4 * j + 3] = __fadd_rn(a.w, of ? -b.w : b.w);
        }
      };
      combined(0, f[i]);
      if (in.block > 512) {
        float other[8];
        combined(1, other);
#pragma unroll
        for (int e = 0; e < 8; e++) f[i][e] = __fadd_rn(f[i][e], half ? -other[e] : other[e]);
      }
    }
  }
};

}  // namespace crelle
