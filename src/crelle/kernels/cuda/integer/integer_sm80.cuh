// The integer GEMM with the warp mma that every chip since Ampere has: a warp holds TILES tiles of 16 rows and all NT
// tokens of its thread block. WARPS_N warps along N share x; WARPS_K groups of them split K and add up in a fixed
// order. A pipeline stage is a block of 128 inputs; weights have W_STAGES of them, all but one of which are asked for
// before the kernel ahead in the stream has ended, x has STAGES.
//
// With S4 (signed 4-bit weights and x of at most 4 bits) the weights' words go into the 4-bit instruction as they lie:
// their halves of bytes are the inputs that two registers of x hold, which become one by a shift and a bit selection.
#pragma once
#include "ptx/copies.cuh"
#include "integer/integer_weights.cuh"
#include "ptx/tensorcore.cuh"

namespace crelle {

// Bytes a and b, values of 4 bits, in the low and high halves of bytes.
__device__ __forceinline__ uint32 joined_halves(uint32 a, uint32 b) {
  return (a & 0x0f0f0f0fu) | ((b << 4) & 0xf0f0f0f0u);
}

// x int8 [padded, 128 blocks]; x_scales f32 [groups, padded]; the others as of integer_sm90_tiles. Grid (ceil(N /
// ROWS), ceil(M / NT)), ROWS = 16 TILES WARPS_N, 32 or a multiple of 64. Shared: WARPS_K times the stages; sums take
// their place.
template <IntegerScheme SCHEME, int SUBS, int SEGMENTS, bool HAS_WIDE, bool S4, int NT, int TILES, int WARPS_N,
          int WARPS_K, int STAGES, int W_STAGES, typename X>
__device__ __forceinline__ void integer_sm80_tiles(const char *__restrict__ x, const char *__restrict__ pieces,
                                                   const float *__restrict__ x_scales,
                                                   const float *__restrict__ row_scale, const X *__restrict__ bias,
                                                   const X *residual, X *y, const IntegerShape &shape, int stride) {
  static_assert(!S4 || (SCHEME == SIGNED && SUBS <= 2), "half bytes are multiplied 64 inputs at a time");
  constexpr int ROWS = WARPS_N * TILES * 16, PIECE = ROWS < 64 ? ROWS : 64, PIECES = ROWS / PIECE, STRIDE = ROWS + 4;
  constexpr int SLOT = (HAS_WIDE ? Piece<SUBS>::WIDE : Piece<SUBS>::NARROW) / 64 * PIECE;
  constexpr int X_BYTES = NT * 128, X_STAGE = X_BYTES + SUBS * NT * 4, THREADS = WARPS_N * 32;
  static_assert(ROWS == 32 || ROWS % 64 == 0, "pieces have 64 rows, which two thread blocks may share");
  static_assert(STAGES <= W_STAGES, "a group of copies ends with x");
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
  const int row = blockIdx.x * ROWS, token = blockIdx.y * NT, padded = shape.padded(), tokens = min(NT, padded - token);
  const int begin = shape.blocks * warp_k / WARPS_K, mine = shape.blocks * (warp_k + 1) / WARPS_K - begin;
  char *const w_stages = shared + warp_k * (W_STAGES * PIECES * SLOT + STAGES * X_STAGE);
  char *const x_stages = w_stages + W_STAGES * PIECES * SLOT;

  launch_dependents();
  const int me = threadIdx.x % THREADS;
  const auto fetch_w = [&](int i) {
    if (i >= mine) return;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const char *from = pieces + Piece<SUBS>::start(shape, min(row / 64 + p, (shape.N - 1) / 64), begin + i);
      const uint32 at = shared_address(w_stages + (i % W_STAGES * PIECES + p) * SLOT);
      const int bytes = Piece<SUBS>::bytes(shape, begin + i);
      if constexpr (PIECE == 64) {
        for (int j = me * 16; j < bytes; j += THREADS * 16) copy_16(at + j, from + j);
      } else {  // half of the codes, half of the scales
        const int codes = (bytes - Piece<SUBS>::SCALES) / 2, half = row / 32 % 2;
        for (int j = me * 16; j < bytes / 2; j += THREADS * 16)
          copy_16(at + j, from + j + (j < codes ? half * codes : codes + half * (Piece<SUBS>::SCALES / 2)));
      }
    }
  };
  const auto fetch_x = [&](int i) {
    if (i < mine) {
      char *const to = x_stages + i % STAGES * X_STAGE;
      const int block = begin + i;
      for (int j = me; j < tokens * 8; j += THREADS) {
        const int m = j / 8, unit = j % 8;
        copy_16(shared_address(to + m * 128 + ((unit ^ m) & 7) * 16),
                x + (size_t)(token + m) * shape.blocks * 128 + block * 128 + unit * 16);
      }
#pragma unroll
      for (int j = 0; j < SUBS; j++) {
        const uint32 at = shared_address(to + X_BYTES + j * (NT * 4));
        const float *from = x_scales + (size_t)shape.x_row(block, j) * padded + token;
        for (int m = me * 4; m < tokens; m += THREADS * 4) copy_16(at + m * 4, from + m);
      }
    }
    commit_copies();
  };

  float f[TILES][NT / 8][4];
  uint32 acc[TILES][NT / 8][4];
#pragma unroll
  for (int i = 0; i < TILES * NT / 2; i++)
    f[i / (NT / 2)][i % (NT / 2) / 4][i % 4] = 0, acc[i / (NT / 2)][i % (NT / 2) / 4][i % 4] = 0;
#pragma unroll
  for (int s = 0; s < W_STAGES - 1; s++) fetch_w(s);  // the kernel ahead in the stream does not write them
  grid_dependency_wait();
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) fetch_x(s);
#pragma unroll 1
  for (int i = 0; i < mine; i++) {
    wait_for_copies<STAGES - 2>();
    team_sync<THREADS, WARPS_K>(1 + warp_k);
    fetch_w(i + W_STAGES - 1), fetch_x(i + STAGES - 1);
    const char *const stage = x_stages + i % STAGES * X_STAGE;
    const int block = begin + i;
    const bool narrow = !HAS_WIDE || block < shape.narrow;
    uint32 a[TILES][4][4], words[TILES][8], scales[TILES][SUBS];
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      const int tile = warp_n * TILES + j;
      const char *const piece = w_stages + (i % W_STAGES * PIECES + tile / 4) * SLOT;
      load_scales<PIECE / 16>(scales[j], piece, narrow, tile % 4, lane);
      if (narrow) {
        load_words(words[j], piece, tile % 4, lane);
        if constexpr (!S4) unpack_words<SCHEME>(a[j], words[j], scales[j]);
      } else {
        load_bytes(a[j], piece, tile % 4, lane);
      }
    }
    // Registers of x for 32 inputs and 8 tokens, or 16.
    const auto load_x = [&](uint32(&b)[NT == 8 ? 2 : 4], int s, int c) {
      const int m = NT == 8 ? lane & 7 : (lane & 7) + (lane >> 4) * 8, unit = 2 * s + (lane >> 3 & 1);
      matrices(b, stage + m * 128 + ((unit ^ m) & 7) * 16 + c * 1024);
    };
#pragma unroll
    for (int g = 0; g < SUBS; g++) {
      if (S4 && narrow) {
#pragma unroll
        for (int s = 4 / SUBS * g; s < 4 / SUBS * (g + 1); s += 2)
#pragma unroll
          for (int c = 0; c < NT / 8; c += 2) {
            uint32 b[2][NT == 8 ? 2 : 4];
            load_x(b[0], s, c), load_x(b[1], s + 1, c);
#pragma unroll
            for (int h = 0; h < (NT == 8 ? 1 : 2); h++) {
              const uint32 b0 = joined_halves(b[0][2 * h], b[0][2 * h + 1]);
              const uint32 b1 = joined_halves(b[1][2 * h], b[1][2 * h + 1]);
#pragma unroll
              for (int j = 0; j < TILES; j++)
                multiply_s4(acc[j][c + h], words[j][2 * s], words[j][2 * s + 1], words[j][2 * s + 2],
                            words[j][2 * s + 3], b0, b1);
            }
          }
      } else {
#pragma unroll
        for (int s = 4 / SUBS * g; s < 4 / SUBS * (g + 1); s++)
#pragma unroll
          for (int c = 0; c < NT / 8; c += 2) {
            uint32 b[NT == 8 ? 2 : 4];
            load_x(b, s, c);
#pragma unroll
            for (int j = 0; j < TILES; j++) {
              multiply_s8(acc[j][c], a[j][s], b[0], b[1]);
              if constexpr (NT > 8) multiply_s8(acc[j][c + 1], a[j][s], b[2], b[3]);
            }
          }
      }
      if (SEGMENTS > 0 && i + 1 < mine && (SEGMENTS == 1 || block + 1 != shape.normal)) continue;
      const float *const xs = reinterpret_cast<const float *>(stage + X_BYTES) + (SEGMENTS ? 0 : g * NT) + lane % 4 * 2;
      const float unit = narrow && !S4 ? 1.0f / 16 : 1.0f;
      if (SEGMENTS && g + 1 < SUBS) continue;
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        const float2 w = row_scales<SCHEME>(scales[j][SEGMENTS ? 0 : g], unit);
        const float less[2] = {-INT_VALUE * w.x, -INT_VALUE * w.y};
#pragma unroll
        for (int c = 0; c < NT / 8; c++) {
          const float2 v = *reinterpret_cast<const float2 *>(xs + c * 8);
#pragma unroll
          for (int k = 0; k < 4; k++) {
            const float scale_w = k < 2 ? w.x : w.y, scale_x = k % 2 ? v.y : v.x;
            f[j][c][k] = SEGMENTS ? fmaf((float)(int)acc[j][c][k], scale_w * scale_x, f[j][c][k])
                                  : add_scaled(acc[j][c][k], scale_w, less[k / 2], scale_x, f[j][c][k]);
            acc[j][c][k] = 0;
          }
        }
      }
    }
  }
  wait_for_copies<0>();
  __syncthreads();  // no warp reads the stages any more: results take their place

  float *const results = reinterpret_cast<float *>(shared);
  const int t = lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    const int r = (warp_n * TILES + j) * 16 + lane / 4;
#pragma unroll
    for (int c = 0; c < NT / 8; c++) {
      float *const to = results + (warp_k * NT + c * 8 + t) * STRIDE + r;
      to[0] = f[j][c][0], to[STRIDE] = f[j][c][1], to[8] = f[j][c][2], to[STRIDE + 8] = f[j][c][3];
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < NT * ROWS; i += THREADS * WARPS_K) {
    const int m = i / ROWS, n = row + i % ROWS;
    if (token + m >= shape.M || n >= shape.N) continue;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < WARPS_K; k++) sum += results[(k * NT + m) * STRIDE + i % ROWS];
    if constexpr (SCHEME == TWO_LEVEL) sum *= row_scale[n];
    if (bias) sum += to_float(bias[n]);
    if (residual) sum += to_float(residual[(size_t)(token + m) * stride + n]);
    y[(size_t)(token + m) * stride + n] = from_float<X>(sum);
  }
}

}  // namespace crelle
