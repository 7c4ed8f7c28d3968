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

// The product of 16 rows and half a block: 128 inputs. GROUPS: groups of scales in a block: 1 (256 or more inputs a
// group), 2, 4, 8.
template <int P, Kind KIND, int GROUPS, int M, typename S>
struct Half {
  static constexpr int SW = scale_words(KIND, P) * Pair<S>::WORDS, SCALES = GROUPS * SW;  // words of a group; of a lane
  static constexpr int PLANE_BYTES = P * 512, SCALE_BYTES = SCALES * 32;                  // of a whole block
  static constexpr int PARTS = GROUPS > 2 ? GROUPS / 2 : 1;                               // groups in half a block
  static constexpr int LANES = 4 / M;                                                     // lanes that share a token
  static constexpr bool CODES = KIND == UNIFORM || KIND == UNIFORM_SYMMETRIC || KIND == AFFINE;

  struct Inputs {
    uint32 bits[2 * M];  // of M instructions: low bits, high bits
    float scale, sum[PARTS];

    // `xbits` and `xscale` are those of this lane; sums count once per row, in the unit of `weighed`
    __device__ __forceinline__ Inputs(const uint32 *xbits, const float *xscale, int half, bool first) {
      take(bits, xbits + half * (64 * M));
      uint32 v[1 + PARTS];
      take(v, reinterpret_cast<const uint32 *>(xscale) + half * (M * (1 + PARTS)));
      scale = __uint_as_float(v[0]);
#pragma unroll
      for (int i = 0; i < PARTS; i++) sum[i] = first ? __uint_as_float(v[1 + i]) * 0x1p-39f : 0;
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

  static __device__ __forceinline__ void multiply(float2 &sums, const char *words, const char *pairs, const Inputs &x,
                                                  int h, int lane) {
    uint4 plane[P];
    uint32 scales[PARTS * SW];
#pragma unroll
    for (int p = 0; p < P; p++) plane[p] = twice(words + ((p * 32 + lane) * 2 + h) * 8);
    take(scales, reinterpret_cast<const uint32 *>(pairs) + (lane >> 2) * SCALES + (GROUPS == 1 ? 0 : h * PARTS * SW));
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const uint32 *scale = scales + part * SW;
      const bool mine = PARTS == 1 || (lane & 3) / (4 / PARTS) == part;  // of the inputs that this lane brings
      const float start = CODES ? 0 : -0.5f * x.sum[part];               // b is +-1/2, or 0 and 1 in a code
      float2 f = make_float2(0, 0);
#pragma unroll
      for (int p = 0; p < P; p++) {
        const float2 alpha =
            CODES ? make_float2(1 << (P - 1 - p), 1 << (P - 1 - p)) : Pair<S>::of(scale + p * Pair<S>::WORDS);
        int c[M][4];
#pragma unroll
        for (int i = 0; i < M; i++) count(c[i], plane[p], mine ? x.bits[2 * i] : 0, mine ? x.bits[2 * i + 1] : 0);
        f.x = fmaf(alpha.x, weighed(start, c, 0), f.x);
        f.y = fmaf(alpha.y, weighed(start, c, 1), f.y);
      }
      const float sum = x.sum[part];
      float2 step = make_float2(x.scale, x.scale);
      if constexpr (KIND == UNIFORM_SYMMETRIC)
        f.x = fmaf(-(1 << (P - 1)), sum, f.x), f.y = fmaf(-(1 << (P - 1)), sum, f.y);
      if constexpr (KIND == UNIFORM) {
        const float2 zero = Pair<S>::of(scale + Pair<S>::WORDS);
        f.x = fmaf(-zero.x, sum, f.x), f.y = fmaf(-zero.y, sum, f.y);
      }
      if constexpr (CODES) {
        const float2 s = Pair<S>::of(scale);
        f.x *= s.x, f.y *= s.y;
      }
      if constexpr (KIND == AFFINE || KIND == BCQ) {
        const float2 low = Pair<S>::of(scale + (KIND == BCQ ? P : 1) * Pair<S>::WORDS);
        const float times = KIND == BCQ ? 0.5f * sum : sum;
        f.x = fmaf(low.x, times, f.x), f.y = fmaf(low.y, times, f.y);
      }
      sums.x = fmaf(step.x, f.x, sums.x);
      sums.y = fmaf(step.y, f.y, sums.y);
    }
  }
};

// words [tiles, blocks, planes, 32, uint4]; scales [tiles, ceil(blocks / span), 8, SCALES]; bits and xscale as in
// bits.cu; bias [N] and residual [tokens, N] may be null; y [tokens, N]; one thread block per TILES tiles. A warp takes
// consecutive blocks, RUN of them at a time (1 where more planes are stored than used, or scales are shared). RESIDENT:
// warps that a multiprocessor should hold at once.
template <int P, Kind KIND, int GROUPS, int M, int TILES, int WARPS, int RUN, int STAGES, int RESIDENT, typename S,
          typename Y>
__global__ void __launch_bounds__(WARPS * 32, RESIDENT / WARPS)
    decode(const char *__restrict__ words, const char *__restrict__ scales, const uint32 *__restrict__ bits,
           const float *__restrict__ xscale, const Y *__restrict__ bias, const Y *residual, Y *y, int N, int tokens,
           int blocks, int planes, int span) {
  using H = Half<P, KIND, GROUPS, M, S>;
  using Queue = Ring<STAGES, RUN *(H::PLANE_BYTES + H::SCALE_BYTES)>;
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), t = lane & 3;
  const int tile = blockIdx.x * TILES, last = (N - 1) / 16;
  const int share = (blocks + WARPS - 1) / WARPS, begin = min(warp * share, blocks), mine = min(share, blocks - begin);
  const int pieces = (mine + RUN - 1) / RUN * TILES;  // run by run, its tiles in turn

  next_may_start();
  Queue queue(shared + warp * Queue::SIZE, lane);
  const auto ask = [&](int i) {
    const int b = begin + i / TILES * RUN, n = min(tile + i % TILES, last),
              run = RUN == 1 ? 1 : min(RUN, begin + mine - b);
    const int set = GROUPS > 1 ? n * blocks + b : n * ((blocks + span - 1) / span) + b / span;
    queue.ask(i % STAGES, words + (size_t)(n * blocks + b) * (planes * 512), run * H::PLANE_BYTES,
              scales + (size_t)set * H::SCALE_BYTES, run * H::SCALE_BYTES);
  };
#pragma unroll
  for (int s = 0; s < STAGES; s++) {
    if (s < pieces)
      ask(s);
    else
      queue.ask_nothing();
  }
  previous_is_done();

  const int token = t / H::LANES, end = 2 * (begin + mine);
  const bool first = t % H::LANES == 0;
  float2 sums[TILES];
#pragma unroll
  for (int j = 0; j < TILES; j++) sums[j] = make_float2(0, 0);
  bits += lane * 2 * M;
  xscale += token * (1 + H::PARTS);
  typename H::Inputs next(bits, xscale, min(2 * begin, 2 * blocks - 1), first);  // one half block ahead
#pragma unroll 1
  for (int i = 0; i < pieces; i += TILES) {
    const int b = begin + i / TILES * RUN, run = RUN == 1 ? 1 : min(RUN, begin + mine - b);
    const char *piece[TILES];
#pragma unroll
    for (int j = 0; j < TILES; j++) piece[j] = queue.wait((i + j) % STAGES, (i + j) / STAGES);
#pragma unroll
    for (int r = 0; r < RUN; r++) {
      if (r == run) break;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const typename H::Inputs x = next;
        next = typename H::Inputs(bits, xscale, min(2 * (b + r) + h + 1, end - 1), first);
#pragma unroll
        for (int j = 0; j < TILES; j++)
          H::multiply(sums[j], piece[j] + r * H::PLANE_BYTES, piece[j] + run * H::PLANE_BYTES + r * H::SCALE_BYTES, x,
                      h, lane);
      }
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      if (i + j + STAGES < pieces)
        ask(i + j + STAGES);
      else
        queue.ask_nothing();
    }
  }

  __shared__ float partial[WARPS][TILES][M][16];
  // undoes the unit of `weighed`; the lanes of a token weigh digits 0.., 8/LANES.., ...; +-1/2 becomes +-1
  const float place = (H::CODES ? 0x1p39f : 0x1p40f) * (1 << 16 / H::LANES * (t % H::LANES));
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    float a = sums[j].x * place, b = sums[j].y * place;
#pragma unroll
    for (int i = 1; i < H::LANES; i *= 2) a += __shfl_xor_sync(~0u, a, i), b += __shfl_xor_sync(~0u, b, i);
    if (first) partial[warp][j][token][lane >> 2] = a, partial[warp][j][token][(lane >> 2) + 8] = b;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < TILES * M * 16; i += WARPS * 32) {
    const int j = i / (M * 16), m = i / 16 % M, n = (tile + j) * 16 + i % 16;
    if (n >= N || m >= tokens) continue;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += partial[w][j][m][i % 16];
    if (bias) sum += number(bias[n]);
    if (residual) sum += number(residual[(size_t)m * N + n]);
    y[(size_t)m * N + n] = rounded<Y>(sum);
  }
}

}  // namespace crelle
