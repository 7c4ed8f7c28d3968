// y [tokens, N] = x [tokens, K] W.T + bias + residual for trellis weights (trellis_layout.py) and many tokens: states
// are decoded to f16 in registers, once for NT tokens, for mma with f32 sums. x is f16, rotated.
//
// A tile is 256 outputs for NT tokens. The 8 warps of a thread block share units of 256 outputs and 16 inputs, and x of
// them, in a load pipeline of STAGES times 64 inputs (cp.async): warp w decodes the states of outputs 32g + 4w … 32g +
// 4w + 3 in the ring of lane (g, t), two left operands of m16n8k16 whose rows g and g + 8 are neighbouring outputs and
// whose columns 2t, 2t + 1, 2t + 8 and 2t + 9 are inputs 4t … 4t + 3: so the right operand of a token is 8 bytes of x.
//
// A weight is a sum of bytes, less its mean. As the bits of an f16 such integers are denormal, n 2^-24, so they need no
// conversion; sums of two are exact, and the scale of the output takes 2^24 back.
//
// On Hopper SPLIT thread blocks of a cluster share the inputs, and clusters the tiles; sums are added in the order of
// the ranks, each of which stores NT / SPLIT tokens.
#include "ptx/copies.cuh"
#include "ptx/pack2.cuh"
#include "trellis/trellis_states.cuh"
#include "ptx/tensorcore.cuh"
#if __CUDA_ARCH__ == 900
#include "ptx/tma.cuh"
#endif

namespace crelle {

// The states of warp w in a unit's rings: as many as 4 outputs have.
template <int WEIGHTS, int SHIFT>
struct TrellisPart {
  using W = Trellis<WEIGHTS, SHIFT>;
  static constexpr int STATES = W::STATES / 8, BITS = (STATES - 1) * SHIFT + 16, WORDS = (BITS + 31) / 32;
  uint32 words[WORDS];

  // unit [pieces][32 lanes][PIECE words]
  __device__ __forceinline__ void load(const char *unit, int w, int lane) {
    const int bit = w * STATES * SHIFT, first = bit / 32, shift = bit % 32;
    uint32 raw[WORDS + 1];
#pragma unroll
    for (int i = 0; i <= WORDS; i++) {
      const int word = first + i < W::WORDS ? first + i : first + i - W::WORDS;
      raw[i] = reinterpret_cast<const uint32 *>(unit)[(word / W::PIECE * 32 + lane) * W::PIECE + word % W::PIECE];
    }
#pragma unroll
    for (int i = 0; i < WORDS; i++)
      words[i] = (STATES * SHIFT) % 32 == 0 ? raw[i] : __funnelshift_r(raw[i], raw[i + 1], shift);
  }
  // The product of state i, a constant where this is called.
  __device__ __forceinline__ uint32 bytes(int i) const {
    const int bit = i * SHIFT, word = bit / 32;
    const uint32 bits = bit % 32 > 16 ? __funnelshift_r(words[word], words[word + 1], bit % 32) : words[word];
    const int at = bit % 32 > 16 ? 0 : bit % 32;
    return (at == 16 ? bits >> 16 : at ? bits << (16 - at) >> 16 : bits & 0xffff) * W::MULTIPLIER;
  }
  // Weights 2i and 2i + 1 of the part, as f16 times 2^-24.
  __device__ __forceinline__ uint32 two(int i) const {
    if constexpr (WEIGHTS == 2) {
      const uint32 p = bytes(i);
      return Pack2<half>::add(Pack2<half>::add(__byte_perm(p, 0, 0x4342), 0x80ff80ff), __byte_perm(p, 0, 0x4140));
    } else {
      const uint32 low = __dp4a(bytes(2 * i), 0x01010101u, 0u), high = __dp4a(bytes(2 * i + 1), 0x01010101u, 0u);
      return Pack2<half>::add(multiply_add(high, 1 << 16, low), 0x81fe81fe);
    }
  }
};

template <int WEIGHTS, int SHIFT, int NT, int STAGES, int SPLIT>
struct TrellisGemmShared {
  static constexpr int UNITS = 4 * Trellis<WEIGHTS, SHIFT>::UNIT;  // bytes of weights of a stage
  static constexpr int ROW = 160;  // bytes of a token: 64 inputs, and banks between rows
  static constexpr int STAGE = UNITS + NT * ROW;
};

template <int WEIGHTS, int SHIFT, int NT, int STAGES, int SPLIT>
__device__ __forceinline__ void trellis_tiles(const char *__restrict__ weight, const half *__restrict__ row_scale,
                                              const half *x, const half *__restrict__ bias, const half *residual,
                                              half *y, int N, int tokens, int K, int quads, int tiles, int stride,
                                              int residual_stride, char *shared) {
  using Room = TrellisGemmShared<WEIGHTS, SHIFT, NT, STAGES, SPLIT>;
  using Part = TrellisPart<WEIGHTS, SHIFT>;
  constexpr int SUMS = 260;  // f32 of a token: 256, and banks between tokens
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % SPLIT, first = quads * rank / SPLIT, count = quads * (rank + 1) / SPLIT - first;
  const int groups = (tokens + NT - 1) / NT;
  launch_dependents();
  grid_dependency_wait();
#pragma unroll 1
  for (int at = blockIdx.x / SPLIT; at < tiles * groups; at += gridDim.x / SPLIT) {
    const int tile = at / groups, token = at % groups * NT;
    const int row = threadIdx.x / 8, column = threadIdx.x % 8 * 8;  // of x, that a thread copies, and every 32nd
    const char *units = weight + ((size_t)tile * quads + first) * Room::UNITS + threadIdx.x * 16;
    const half *inputs = x + (size_t)(token + row) * K + first * 64 + column;
    const uint32 to = shared_address(shared);
    int loaded = 0;
    const auto load = [&] {  // the next stage
      if (loaded < count) {
        const uint32 stage = to + loaded % STAGES * Room::STAGE;
#pragma unroll
        for (int b = 0; b < Room::UNITS; b += 4096)
          if (b + threadIdx.x * 16 < Room::UNITS) copy_16(stage + b + threadIdx.x * 16, units + b);
        const bool inside = (first + loaded) * 64 + column < K;
#pragma unroll
        for (int m = 0; m < NT; m += 32) {
          const bool there = inside && token + row + m < tokens;
          copy_padded<16>(stage + Room::UNITS + (row + m) * Room::ROW + column * 2,
                          reinterpret_cast<const char *>(there ? inputs + (size_t)m * K : x), there ? 16 : 0);
        }
        units += Room::UNITS, inputs += 64, loaded++;
      }
      commit_copies();
    };
    float d[2][NT / 8][4];
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int n = 0; n < NT / 8; n++) d[r][n][0] = d[r][n][1] = d[r][n][2] = d[r][n][3] = 0;
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) load();
#pragma unroll 1
    for (int i = 0; i < count; i++) {
      wait_for_copies<STAGES - 2>();
      __syncthreads();
      load();
      const char *const stage = shared + i % STAGES * Room::STAGE;
#pragma unroll
      for (int u = 0; u < 4; u++) {
        Part part;
        part.load(stage + u * (Room::UNITS / 4), warp, lane);
        uint32 a[2][4];
#pragma unroll
        for (int r = 0; r < 2; r++)
          a[r][0] = part.two(4 * r), a[r][1] = part.two(4 * r + 2), a[r][2] = part.two(4 * r + 1),
          a[r][3] = part.two(4 * r + 3);
        const char *const row = stage + Room::UNITS + g * Room::ROW + u * 32 + t * 8;
#pragma unroll
        for (int n = 0; n < NT / 8; n++) {
          const uint2 b = *reinterpret_cast<const uint2 *>(row + n * 8 * Room::ROW);
          multiply<half>(d[0][n], a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
          multiply<half>(d[1][n], a[1][0], a[1][1], a[1][2], a[1][3], b.x, b.y);
        }
      }
    }
    wait_for_copies<0>();
    __syncthreads();

    // Sums [NT][256], so that outputs of a token are stored side by side, and thread blocks can read each other's.
    float *const sums = reinterpret_cast<float *>(shared);
#pragma unroll
    for (int n = 0; n < NT / 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        *reinterpret_cast<float4 *>(sums + (n * 8 + 2 * t + e) * SUMS + 32 * g + 4 * warp) =
            make_float4(d[0][n][e], d[0][n][2 + e], d[1][n][e], d[1][n][2 + e]);
    __syncthreads();
#if __CUDA_ARCH__ == 900
    if constexpr (SPLIT > 1) cluster_sync();
#endif
    const int n = tile * 256 + threadIdx.x % 64 * 4;
    for (int m = rank * (NT / SPLIT) + threadIdx.x / 64; m < (rank + 1) * (NT / SPLIT) && token + m < tokens; m += 4) {
      const float *const mine = sums + m * SUMS + threadIdx.x % 64 * 4;
      float total[4] = {};
#pragma unroll
      for (int r = 0; r < SPLIT; r++) {
        float4 v;
#if __CUDA_ARCH__ == 900
        if constexpr (SPLIT > 1)
          v = dsmem_load(shared_address(mine), r);
        else
#endif
          v = *reinterpret_cast<const float4 *>(mine);
        total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
      }
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (n + e >= N) break;
        float out = total[e] * (to_float(row_scale[n + e]) * 0x1p17f);
        if (bias) out += to_float(bias[n + e]);
        if (residual) out += to_float(residual[(size_t)(token + m) * residual_stride + n + e]);
        y[(size_t)(token + m) * stride + n + e] = from_float<half>(out);
      }
    }
#if __CUDA_ARCH__ == 900
    if constexpr (SPLIT > 1)
      cluster_sync();
    else
#endif
      __syncthreads();
  }
}

// weight [tiles, quads of units]; row_scale, bias (may be null) [N]; x [tokens, K], K a multiple of 8; residual (may be
// null, or y), y [tokens, strides]. Grid: thread blocks, which take tiles in turns.
template <int WEIGHTS, int SHIFT, int NT, int STAGES>
__global__ void __launch_bounds__(256, NT <= 64 ? 2 : 1)
    trellis_gemm_sm80(const char *__restrict__ weight, const half *__restrict__ row_scale, const half *x,
                      const half *__restrict__ bias, const half *residual, half *y, int N, int tokens, int K, int quads,
                      int tiles, int stride, int residual_stride) {
  extern __shared__ __align__(128) char shared[];
  trellis_tiles<WEIGHTS, SHIFT, NT, STAGES, 1>(weight, row_scale, x, bias, residual, y, N, tokens, K, quads, tiles,
                                               stride, residual_stride, shared);
}

#if __CUDA_ARCH__ == 900
// The same, in clusters of SPLIT.
template <int WEIGHTS, int SHIFT, int NT, int STAGES, int SPLIT, typename T>
__global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(256, NT <= 64 ? 2 : 1)
    trellis_gemm_sm90(const char *__restrict__ weight, const half *__restrict__ row_scale, const T *x,
                      const T *__restrict__ bias, const T *residual, T *y, int N, int tokens, int K, int quads,
                      int tiles, int stride, int residual_stride) {
  extern __shared__ __align__(128) char shared[];
  trellis_tiles<WEIGHTS, SHIFT, NT, STAGES, SPLIT>(weight, row_scale, x, bias, residual, y, N, tokens, K, quads, tiles,
                                                   stride, residual_stride, shared);
}
#endif

}  // namespace crelle
