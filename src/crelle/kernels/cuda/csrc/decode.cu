// y [M, N] = x [M, K] W.T for up to 4 tokens, W in bit-planes, on the binary tensor cores.
//
//   w = z + sum_p alpha_p b_p      and      x = s * sum_i (-4)^i x_i,   i = 0 ... 7, x_i = 0 ... 3,   s per 128 inputs
//
// (base -4 needs no sign). The instruction mma.b1.and.popc takes 16 rows of a plane, straight from memory, and 8
// columns of bits of x, and counts where both are set: sum_k b_k x_ik is the count for the low bits of the digits plus
// twice that for the high ones, which the instruction adds up itself. Nothing is unpacked, and the counts are exact.
// What is left is to weigh two counts per lane, row, plane and group; a count c, read as a float, is the number c *
// 2^-149, so that this needs no conversion (but floats must not be flushed to zero).
//
// A lane of the instruction's result holds two columns: with one token it weighs two digits of it, with four tokens all
// eight digits of one of them. A warp takes TILES * 16 rows and a share of the blocks of 256 inputs, which it asks for
// STAGES ahead; weights are asked for before the previous kernel is done. The warps of a thread block share the rows
// and add up in a fixed order. Layouts: crelle/kernels/cuda/layout.py (words, scales), bits.cu (x).
#include "ring.cuh"

namespace crelle {

// What the scale words of a group say about its grid; b is 0 or 1 here, +-1 in the format.
enum Kind { BCQ, BCQ_SYMMETRIC, UNIFORM, UNIFORM_SYMMETRIC, AFFINE };

__host__ __device__ constexpr int scale_words(Kind kind, int planes) {
  return kind == BCQ ? planes + 1 : kind == BCQ_SYMMETRIC ? planes : kind == UNIFORM_SYMMETRIC ? 1 : 2;
}

// c = per row and column, how often a bit of the plane meets a low bit of a digit, plus twice how often it meets a high
// one. `plane` holds the same words twice.
__device__ __forceinline__ void count(int (&c)[4], uint4 plane, uint32 low, uint32 high) {
  asm("{\n .reg .b32 z;\n mov.b32 z, 0;\n"
      "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {z, z, "
      "z, z};\n}"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(plane.x), "r"(plane.y), "r"(plane.z), "r"(plane.w), "r"(low), "r"(high));
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(plane.x), "r"(plane.y), "r"(high));
}

// Two words of shared memory, twice: loading them again is cheaper than copying registers into place.
__device__ __forceinline__ uint4 twice(const void *p) {
  uint4 v;
  asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared_address(p)) : "memory");
  asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.z), "=r"(v.w) : "r"(shared_address(p)) : "memory");
  return v;
}

// Two numbers, of row r and row r + 8.
template <typename S>
struct Pair;
template <>
struct Pair<half> {
  static constexpr int WORDS = 1;
  static __device__ __forceinline__ float2 of(const uint32 *w) {
    return __half22float2(*reinterpret_cast<const __half2 *>(w));
  }
};
template <>
struct Pair<bfloat16> {
  static constexpr int WORDS = 1;
  static __device__ __forceinline__ float2 of(const uint32 *w) {
    return make_float2(__uint_as_float(*w << 16), __uint_as_float(*w & 0xffff0000u));
  }
};
template <>
struct Pair<float> {
  static constexpr int WORDS = 2;
  static __device__ __forceinline__ float2 of(const uint32 *w) {
    return make_float2(__uint_as_float(w[0]), __uint_as_float(w[1]));
  }
};

// The product of 16 rows and a block of 256 inputs, half a block at a time. GROUPS: groups of scales in a block: 1 (256
// or more inputs a group), 2, 4, 8.
template <int P, Kind KIND, int GROUPS, int M, typename S>
struct Block {
  static constexpr int SW = scale_words(KIND, P) * Pair<S>::WORDS, SCALES = GROUPS * SW;  // of a group; of a lane
  static constexpr int PLANE_BYTES = P * 512, SCALE_BYTES = SCALES * 32;
  static constexpr int PARTS = GROUPS > 2 ? GROUPS / 2 : 1;  // groups in half a block
  static constexpr int LANES = 4 / M;                        // lanes that share a token
  static constexpr bool CODES = KIND == UNIFORM || KIND == UNIFORM_SYMMETRIC || KIND == AFFINE;

  // Some halves of a block of x, as this lane needs them. The sums of x count once per row; they come in the unit of
  // `weighed`.
  template <int HALVES>
  struct Inputs {
    uint32 bits[HALVES][2 * M];  // of M instructions: low bits, high bits
    float scale[HALVES], sum[HALVES][PARTS];

    __device__ __forceinline__ Inputs(const uint32 *xbits, const float *xscale, int half, bool first) {
      uint32 v[HALVES][1 + PARTS];
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        take(bits[h], xbits + half * (64 * M) + h * (64 * M));
        take(v[h], reinterpret_cast<const uint32 *>(xscale) + half * (M * (1 + PARTS)) + h * (M * (1 + PARTS)));
        scale[h] = __uint_as_float(v[h][0]);
#pragma unroll
        for (int i = 0; i < PARTS; i++) sum[h][i] = first ? __uint_as_float(v[h][1 + i]) : 0;
      }
    }
  };

  // start + a lane's counts of one row, weighed, in units of 2^-39: that is 2^110 for a count that is read as a float.
  static __device__ __forceinline__ float weighed(float start, const int (&c)[M][4], int row) {
    float v = start;
#pragma unroll
    for (int i = 0; i < M; i++) {
      v = fmaf(__int_as_float(c[i][2 * row]), 0x1p110f * (1 << 4 * i), v);
      v = fmaf(__int_as_float(c[i][2 * row + 1]), -0x1p112f * (1 << 4 * i), v);
    }
    return v;
  }

  // Half h of a block; `scales` are those of the whole block.
  static __device__ __forceinline__ void multiply(float2 &sums, const char *words, const uint32 (&scales)[SCALES],
                                                  const uint32 (&bits)[2 * M], float xscale, const float (&xsum)[PARTS],
                                                  int h, int lane) {
    uint4 plane[P];
#pragma unroll
    for (int p = 0; p < P; p++) plane[p] = twice(words + ((p * 32 + lane) * 2 + h) * 8);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const uint32 *scale = scales + (GROUPS == 1 ? 0 : h * PARTS + part) * SW;
      const bool mine = PARTS == 1 || (lane & 3) / (4 / PARTS) == part;  // of the inputs that this lane brings
      const float sum = xsum[part], start = CODES ? 0 : -0.5f * sum;     // b is +-1/2, or 0 and 1 in a code
      float2 f = make_float2(0, 0);
#pragma unroll
      for (int p = 0; p < P; p++) {
        const float2 alpha =
            CODES ? make_float2(1 << (P - 1 - p), 1 << (P - 1 - p)) : Pair<S>::of(scale + p * Pair<S>::WORDS);
        int c[M][4];
#pragma unroll
        for (int i = 0; i < M; i++) count(c[i], plane[p], mine ? bits[2 * i] : 0, mine ? bits[2 * i + 1] : 0);
        f.x = fmaf(alpha.x, weighed(start, c, 0), f.x);
        f.y = fmaf(alpha.y, weighed(start, c, 1), f.y);
      }
      if constexpr (KIND == UNIFORM_SYMMETRIC)
        f.x = fmaf(-(1 << (P - 1)), sum, f.x), f.y = fmaf(-(1 << (P - 1)), sum, f.y);
      if constexpr (KIND == UNIFORM) {
        const float2 zero = Pair<S>::of(scale + Pair<S>::WORDS);
        f.x = fmaf(-zero.x, sum, f.x), f.y = fmaf(-zero.y, sum, f.y);
      }
      if constexpr (CODES) {
        const float2 step = Pair<S>::of(scale);
        f.x *= step.x, f.y *= step.y;
      }
      if constexpr (KIND == AFFINE || KIND == BCQ) {
        const float2 low = Pair<S>::of(scale + (KIND == BCQ ? P : 1) * Pair<S>::WORDS);
        const float times = KIND == BCQ ? -start : sum;
        f.x = fmaf(low.x, times, f.x), f.y = fmaf(low.y, times, f.y);
      }
      sums.x = fmaf(xscale, f.x, sums.x);
      sums.y = fmaf(xscale, f.y, sums.y);
    }
  }
};

// words [tiles, blocks, planes, 32, uint4]; scales [tiles, ceil(blocks / span), 8, SCALES]; bits and xscale as in
// bits.cu; bias [N] and residual [tokens, N] may be null; y [tokens, N].
// A thread block takes TILES tiles at a time and every gridDim.x-th such set; its warps share the blocks of 256 inputs,
// consecutive ones each, and fetch RUN of them at a time (1 where more planes are stored than used, or scales shared).
// The grid should fit the device at once: then the kernels behind this one start, and fetch their own weights, early.
// HALVES: of a block of x that are fetched at a time. RESIDENT: warps that a multiprocessor can hold, which bounds the
// registers.
template <int P, Kind KIND, int GROUPS, int M, int TILES, int WARPS, int RUN, int STAGES, int HALVES, int RESIDENT,
          typename S, typename Y>
__global__ void __launch_bounds__(WARPS * 32, RESIDENT / WARPS)
    decode(const char *__restrict__ words, const char *__restrict__ scales, const uint32 *__restrict__ bits,
           const float *__restrict__ xscale, const Y *__restrict__ bias, const Y *residual, Y *y, int N, int tokens,
           int blocks, int planes, int span) {
  using B = Block<P, KIND, GROUPS, M, S>;
  using Queue = Ring<STAGES, RUN *(B::PLANE_BYTES + B::SCALE_BYTES)>;
  constexpr int OUTPUTS = (TILES * M * 16 + WARPS * 32 - 1) / (WARPS * 32);
  extern __shared__ __align__(128) char shared[];
  __shared__ float partial[2][WARPS][TILES][M][16];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), t = lane & 3;
  const int last = (N - 1) / 16, sets = last / TILES + 1;
  const int begin = warp * blocks / WARPS, end = (warp + 1) * blocks / WARPS;

  next_may_start();
  Queue queue(shared + warp * Queue::SIZE, lane);
  struct {
    int set, block, tile;
  } wanted = {static_cast<int>(blockIdx.x), begin, 0};  // what to ask for next: run by run, its tiles in turn
  const auto ask = [&](int stage) {
    if (wanted.set >= sets || begin == end) {
      queue.ask_nothing();
      return;
    }
    const int b = wanted.block, n = min(wanted.set * TILES + wanted.tile, last), run = RUN == 1 ? 1 : min(RUN, end - b);
    const int group = GROUPS > 1 ? n * blocks + b : n * ((blocks + span - 1) / span) + b / span;
    queue.ask(stage, words + (size_t)(n * blocks + b) * (planes * 512), run * B::PLANE_BYTES,
              scales + (size_t)group * B::SCALE_BYTES, run * B::SCALE_BYTES);
    if (TILES == 1 || ++wanted.tile == TILES) {
      wanted.tile = 0, wanted.block += RUN;
      if (wanted.block >= end) wanted.block = begin, wanted.set += gridDim.x;
    }
  };
#pragma unroll
  for (int s = 0; s < STAGES; s++) ask(s);
  previous_is_done();

  const int token = t / B::LANES;
  const bool first = t % B::LANES == 0;
  // undoes the unit of `weighed`; the lanes of a token weigh digits 0.., 8/LANES.., ...; +-1/2 becomes +-1
  const float place = (B::CODES ? 0x1p39f : 0x1p40f) * (1 << 16 / B::LANES * (t % B::LANES));
  bits += lane * 2 * M;
  xscale += token * (1 + B::PARTS);
  typename B::template Inputs<HALVES> next(bits, xscale, min(2 * begin, 2 * blocks - HALVES), first);  // one step ahead
  int taken = 0, page = 0;  // pieces taken from the queue
#pragma unroll 1
  for (int set = blockIdx.x; set < sets; set += gridDim.x) {
    float2 sums[TILES];
#pragma unroll
    for (int j = 0; j < TILES; j++) sums[j] = make_float2(0, 0);
    float more[OUTPUTS];  // what is added to the outputs of this thread, fetched while the products are made
#pragma unroll
    for (int k = 0; k < OUTPUTS; k++) {
      const int i = threadIdx.x + k * WARPS * 32, m = i / 16 % M, n = (set * TILES + i / (M * 16)) * 16 + i % 16;
      const bool there = i < TILES * M * 16 && n < N && m < tokens;
      more[k] = bias && there ? number(bias[n]) : 0;
      if (residual && there) more[k] += number(residual[(size_t)m * N + n]);
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
                             (lane >> 2) * B::SCALES);
#pragma unroll
        for (int h = 0; h < 2; h += HALVES) {
          const typename B::template Inputs<HALVES> x = next;
          const int half = 2 * (b + r) + h + HALVES;
          if (half < 2 * end || set + gridDim.x < sets)
            next = typename B::template Inputs<HALVES>(bits, xscale, half < 2 * end ? half : 2 * begin, first);
#pragma unroll
          for (int k = 0; k < HALVES; k++) {
#pragma unroll
            for (int j = 0; j < TILES; j++)
              B::multiply(sums[j], piece[j] + r * B::PLANE_BYTES, scale[j], x.bits[k], x.scale[k], x.sum[k], h + k,
                          lane);
          }
        }
      }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < TILES; j++) ask((taken + j) % STAGES);
      taken += TILES;
    }

    // The warps' sums, in order. Two pages, so that one barrier is enough: nobody is two sets ahead.
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      float a = sums[j].x * place, c = sums[j].y * place;
#pragma unroll
      for (int i = 1; i < B::LANES; i *= 2) a += __shfl_xor_sync(~0u, a, i), c += __shfl_xor_sync(~0u, c, i);
      if (first) partial[page][warp][j][token][lane >> 2] = a, partial[page][warp][j][token][(lane >> 2) + 8] = c;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < OUTPUTS; k++) {
      const int i = threadIdx.x + k * WARPS * 32, m = i / 16 % M, n = (set * TILES + i / (M * 16)) * 16 + i % 16;
      if (i >= TILES * M * 16 || n >= N || m >= tokens) continue;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += (&partial[page][w][0][0][0])[i];
      y[(size_t)m * N + n] = rounded<Y>(sum + more[k]);
    }
    page ^= 1;
  }
}

}  // namespace crelle
