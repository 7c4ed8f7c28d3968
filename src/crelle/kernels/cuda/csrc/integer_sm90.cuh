// The integer GEMM on Hopper's warpgroups: weights become bytes in registers, the left operand of wgmma; x comes to
// shared memory as it lies, swizzled by the copy engine, and is the right one.
//
// A tile is 64 WG ROW_TILES rows for NT tokens. One thread loads all of it, blocks of 128 inputs at a time (codes and
// scales of the weights, codes and scales of x), STAGES ahead; WG warpgroups multiply 64 rows at a time. Weights are
// asked for before the kernel ahead in the stream has ended, x when it has. While four instructions (a block) are under
// way a warp unpacks the next four operands.
//
// Sums are int32. Where scales change from group to group, each block's sums are multiplied by both and added to f32
// ones: one integer and two float instructions a sum. With SETS == 2 that happens while the next block is multiplied
// into the other set of accumulators; with one set, the other warpgroups multiply meanwhile. With SEGMENTS (one scale
// of x for all inputs that are no outliers, one of w for a row) the sums stay integers to the end of K.
//
// There a warpgroup may have ROW_TILES times 64 rows, in turns: less of x is read for a row. With MULTICAST the CLUSTER
// thread blocks of neighbouring rows read x once for all: each a share of the tokens, which is copied to all of them.
//
// Stream-K, split-K and what is written: gemm_sm90_epilogue.cuh.
#pragma once
#include "gemm_sm90_epilogue.cuh"
#include "integer_weights.cuh"
#include "wgmma_s8.cuh"

namespace crelle {

enum Overlap { WARPGROUPS, BLOCKS, HALVES };

// Large tiles need more registers than every thread could have: then the warp that loads is a warpgroup that gives its
// own away.
__host__ __device__ constexpr bool integer_gives_registers(int nt, int wg, int occupancy) {
  return nt >= 96 && wg > 1 && occupancy == 1;
}
__host__ __device__ constexpr int integer_sm90_threads(int nt, int wg, int occupancy) {
  return wg * 128 + (integer_gives_registers(nt, wg, occupancy) ? 128 : 32);
}

#if __CUDA_ARCH__ == 900
// x [padded, 128 blocks] by x_map, whose box has NT rows (NT / CLUSTER with MULTICAST); row_scale f32 [N rounded up to
// 64] with two levels; the others as of gemm_sm90_tiles.
template <IntegerScheme SCHEME, int SUBS, int SEGMENTS, bool HAS_WIDE, int NT, int WG, int ROW_TILES, int STAGES,
          Overlap OVERLAP, int OCCUPANCY, bool MULTICAST, int CLUSTER, typename X>
__device__ __forceinline__ void integer_sm90_tiles(const TensorMap &x_map, const char *__restrict__ pieces,
                                                   const float *__restrict__ x_scales,
                                                   const float *__restrict__ row_scale, const X *__restrict__ bias,
                                                   const X *residual, X *y, float4 *partial, int *semaphores,
                                                   const IntegerShape &shape, int whole, int stride) {
  static_assert(OVERLAP == WARPGROUPS || (SUBS == 1 && SEGMENTS == 0), "sums are scaled once for each block");
  static_assert(ROW_TILES == 1 || SEGMENTS == 1, "there are no registers for other sums");
  // sets of accumulators, and tokens in each
  constexpr int SETS = OVERLAP == WARPGROUPS ? ROW_TILES : 2, SET_TOKENS = OVERLAP == HALVES ? NT / 2 : NT;
  constexpr int PIECES = WG * ROW_TILES, ROWS = 64 * PIECES, WARPS = 4 * WG, X_BYTES = NT * 128,
                SLOT = HAS_WIDE ? Piece<SUBS>::WIDE : Piece<SUBS>::NARROW;
  constexpr int X_SCALES = SUBS * NT * 4;
  constexpr int SPLIT_K = MULTICAST ? 1 : CLUSTER, TOGETHER = MULTICAST ? CLUSTER : 1, X_SHARE = X_BYTES / TOGETHER;
  static_assert(NT % (8 * TOGETHER) == 0, "shares of x are swizzled rows of eight");
  using Scheduler = TileSchedulerOf<TOGETHER>;
  constexpr bool GIVES = integer_gives_registers(NT, WG, OCCUPANCY);
  extern __shared__ __align__(128) char shared[];
  // barriers, then, behind whole KB, stages of x, of weights, of scales of x
  char *const base = shared + kept(256 + (-(shared_address(shared) + 256) & 1023));
  char *const w_base = base + STAGES * X_BYTES, *const s_base = w_base + STAGES * PIECES * SLOT;
  static_assert(STAGES <= 16, "there is room for as many barriers");
  const uint32 x_at = shared_address(base), full = kept(shared_address(shared)), empty = full + 8 * STAGES;
  const int lane = kept(threadIdx.x & 31), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int rank = TOGETHER > 1 ? blockIdx.x % TOGETHER : 0;
  const int across = (shape.N + ROWS * TOGETHER - 1) / (ROWS * TOGETHER), tiles = across * ((shape.M + NT - 1) / NT);

  launch_dependents();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < STAGES; s++) init_barrier(full + 8 * s, 1), init_barrier(empty + 8 * s, WARPS * TOGETHER);
    fence_barriers();
  }
  if constexpr (MULTICAST)
    cluster_sync();  // nobody is written to before its barriers are there
  else
    __syncthreads();

  if (warp >= WARPS) {
    if constexpr (GIVES) give_registers<24>();
    if (warp == WARPS && elected()) {
      const int padded = shape.padded(), last = (shape.N - 1) / 64;
      const auto load_w = [&](int s, int tile, int block) {
        const int bytes = Piece<SUBS>::bytes(shape, block), tokens = min(NT, padded - tile / across * NT);
        arrive_expecting(full + 8 * s, PIECES * bytes + X_BYTES + SUBS * tokens * 4);
#pragma unroll
        for (int i = 0; i < PIECES; i++)
          copy_bulk(
              shared_address(w_base + (s * PIECES + i) * SLOT),
              pieces + Piece<SUBS>::start(shape, min((tile % across * TOGETHER + rank) * PIECES + i, last), block),
              bytes, full + 8 * s);
      };
      const auto load_x = [&](int s, int tile, int block) {
        const int token = tile / across * NT, tokens = min(NT, padded - token);
        if constexpr (MULTICAST)
          copy_box_to_all(x_at + s * X_BYTES + rank * X_SHARE, x_map, block * 128, token + rank * (NT / TOGETHER),
                          full + 8 * s, TOGETHER);
        else
          copy_box(x_at + s * X_BYTES, x_map, block * 128, token, full + 8 * s);
#pragma unroll
        for (int j = 0; j < SUBS; j++)
          copy_bulk(shared_address(s_base + s * X_SCALES + j * (NT * 4)),
                    x_scales + (size_t)shape.x_row(block, j) * padded + token, tokens * 4, full + 8 * s);
      };
      int early = 0;  // blocks whose weights were asked for
#pragma unroll 1
      for (Scheduler work = Scheduler::template of<SPLIT_K>(tiles, whole, shape.blocks);
           work.count > 0 && early < STAGES; work.advance())
#pragma unroll 1
        for (int i = 0; i < work.count && early < STAGES; i++) load_w(early++, work.tile, work.first + i);
      grid_dependency_wait();
      int s = 0, phase = 1;
#pragma unroll 1
      for (Scheduler work = Scheduler::template of<SPLIT_K>(tiles, whole, shape.blocks); work.count > 0; work.advance())
#pragma unroll 1
        for (int i = 0; i < work.count; i++) {
          if (early > 0) {
            early--;
          } else {
            wait_barrier(empty + 8 * s, phase);
            load_w(s, work.tile, work.first + i);
          }
          load_x(s, work.tile, work.first + i);
          if (++s == STAGES) s = 0, phase ^= 1;
        }
    }
  } else {
    if constexpr (GIVES) take_registers<WG == 2 ? 240 : WG == 3 ? 160 : 112>();
    const int group = warp / 4, part = warp % 4;
    float f[NT / 2];
    uint32 acc[SETS][SET_TOKENS / 2];
    uint32 a[2][4][4];
    uint32 scales[2][SUBS];
    float unit[2];  // of sums of the block's codes
    const uint32 x_matrix = kept(swizzled_rows(x_at));
    int s = 0, phase = 0;

    uint32 seen = 0;  // of the scales of x, what was loaded last
    const auto release = [&](int stage) {
      const uint32 barrier = empty + 8 * stage + nothing_until_loaded(seen, lane);
      if (elected()) {
        if constexpr (MULTICAST) {
#pragma unroll
          for (int r = 0; r < TOGETHER; r++) arrive_at(barrier, r);
        } else {
          arrive(barrier);
        }
      }
    };
    const auto hold_operands = [](uint32(&a)[4][4]) {
#pragma unroll
      for (int i = 0; i < 4; i++) hold(a[i]);
    };
    const auto unpack = [&](int p, int block, int tile) {
      const char *const piece = w_base + (s * PIECES + tile * WG + group) * SLOT;
      const bool narrow = !HAS_WIDE || block < shape.narrow;
      load_scales(scales[p], piece, narrow, part, lane);
      unit[p] = narrow ? 1.0f / 16 : 1.0f;
      if (narrow) {
        uint32 words[8];
        load_words(words, piece, part, lane);
        unpack_words<SCHEME>(a[p], words, scales[p]);
      } else {
        load_bytes(a[p], piece, part, lane);
      }
    };
    // Steps from `first` on of the block in this stage, for tokens from `token` on; `add`: to what is in the
    // accumulators.
    const auto multiply = [&](uint32(&to)[SET_TOKENS / 2], int p, int token, int first, int steps, bool add) {
      fence_products();
      const uint32 matrix = x_matrix + s * (X_BYTES / 16) + token * 8;
#pragma unroll
      for (int k = first; k < first + steps; k++)
        WgmmaS8<SET_TOKENS>::multiply(to, a[p][k], matrix + 2 * k, add || k > first);
      commit_products();
    };
    // The sums of group j of a block for tokens from `token` on, by the scales of x in its stage.
    const auto add_group = [&](uint32(&from)[SET_TOKENS / 2], int p, int token, int j, int stage) {
      hold(from);
      const float2 w = row_scales<SCHEME>(scales[p][j], unit[p]);
      const float less[2] = {-INT_VALUE * w.x, -INT_VALUE * w.y};
      const float *const xs =
          reinterpret_cast<const float *>(s_base + stage * X_SCALES) + j * NT + token + lane % 4 * 2;
#pragma unroll
      for (int c = 0; c < SET_TOKENS / 8; c++) {
        const float2 x = *reinterpret_cast<const float2 *>(xs + c * 8);
        float *const to = f + token / 2 + 4 * c;
        to[0] = add_scaled(from[4 * c], w.x, less[0], x.x, to[0]);
        to[1] = add_scaled(from[4 * c + 1], w.x, less[0], x.y, to[1]);
        to[2] = add_scaled(from[4 * c + 2], w.y, less[1], x.x, to[2]);
        to[3] = add_scaled(from[4 * c + 3], w.y, less[1], x.y, to[3]);
        seen = __float_as_uint(x.y);
      }
    };
    // The same for sums that may be larger: these are converted.
    const auto add_segment = [&](uint32(&from)[SET_TOKENS / 2], int p, int stage, bool first) {
      hold(from);
      const float2 w = row_scales<SCHEME>(scales[p][0], unit[p]);
      const float *const xs = reinterpret_cast<const float *>(s_base + stage * X_SCALES) + lane % 4 * 2;
#pragma unroll
      for (int c = 0; c < NT / 8; c++) {
        const float2 x = *reinterpret_cast<const float2 *>(xs + c * 8);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float v = (float)(int)from[4 * c + i], scale = (i < 2 ? w.x : w.y) * (i % 2 ? x.y : x.x);
          f[4 * c + i] = first ? v * scale : fmaf(v, scale, f[4 * c + i]);
        }
        seen = __float_as_uint(x.y);
      }
    };

#pragma unroll 1
    for (Scheduler work = Scheduler::template of<SPLIT_K>(tiles, whole, shape.blocks); work.count > 0; work.advance()) {
      if constexpr (SEGMENTS != 1) {
#pragma unroll
        for (int i = 0; i < NT / 2; i++) f[i] = 0;
      }
      int before = -1;  // the stage that the instructions under way read, if any
      bool add = false;
      // Block i; p = i % 2 and i = 0 are constants: all of it is unrolled. (Instructions under way at a branch would be
      // waited for.)
      const auto step = [&](int p, int i, bool first) {
        const int block = work.first + i;
        wait_barrier(full + 8 * s, phase);
        if constexpr (ROW_TILES == 2) {
          unpack(0, block, 0);
          multiply(acc[0], 0, 0, 0, 4, !first);
          if (!first) {
            wait_for_products<1>();
            hold_operands(a[1]);
            release(before);
          }
          unpack(1, block, 1);
          multiply(acc[SETS - 1], 1, 0, 0, 4, !first);
          wait_for_products<1>();
          hold_operands(a[0]);
          before = s;
          if (++s == STAGES) s = 0, phase ^= 1;
          return;
        }
        unpack(p, block, 0);
        if constexpr (SEGMENTS > 0) {
          multiply(acc[0], p, 0, 0, 4, add);
          add = true;
          if (SEGMENTS > 1 && i + 1 < work.count && block + 1 == shape.normal) {
            wait_for_products<0>();
            if (before >= 0) release(before);
            add_segment(acc[0], p, s, true);
            release(s);
            before = -1, add = false;
          } else {
            wait_for_products<1>();
            if (before >= 0) release(before);
            before = s;
          }
          hold_operands(a[1 - p]);
        } else if constexpr (SUBS > 1) {
#pragma unroll
          for (int j = 0; j < SUBS; j++) {
            multiply(acc[0], p, 0, 4 / SUBS * j, 4 / SUBS, false);
            wait_for_products<0>();
            add_group(acc[0], p, 0, j, s);
          }
          hold_operands(a[p]);
          release(s);
        } else if constexpr (OVERLAP == HALVES) {
          multiply(acc[0], p, 0, 0, 4, false);
          if (!first) {
            wait_for_products<1>();
            hold_operands(a[1 - p]);
            add_group(acc[1], 1 - p, NT / 2, 0, before);
            release(before);
          }
          multiply(acc[1], p, NT / 2, 0, 4, false);
          wait_for_products<1>();
          add_group(acc[0], p, 0, 0, s);
          before = s;
        } else {
          if constexpr (SETS == 2) multiply(acc[p], p, 0, 0, 4, false);
          if (!first) {
            wait_for_products<SETS - 1>();
            hold_operands(a[1 - p]);
            add_group(acc[(SETS - 1) * (1 - p)], 1 - p, 0, 0, before);
            release(before);
          }
          if constexpr (SETS == 1) multiply(acc[0], p, 0, 0, 4, false);
          before = s;
        }
        if (++s == STAGES) s = 0, phase ^= 1;
      };
      const auto finish = [&](int p) {  // what is still under way; p: of the last block
        if constexpr (SUBS > 1 && SEGMENTS == 0) return;
        wait_for_products<0>();
        hold_operands(a[ROW_TILES == 2 ? 1 : p]);
        if constexpr (ROW_TILES == 2) return;
        if constexpr (SEGMENTS > 0)
          add_segment(acc[0], p, before, SEGMENTS == 1);
        else
          add_group(acc[OVERLAP == HALVES ? 1 : (SETS - 1) * p], p, OVERLAP == HALVES ? NT / 2 : 0, 0, before);
        release(before);
      };
      step(0, 0, true);
#pragma unroll 1
      for (int i = 1;; i++) {
        if (i == work.count) {
          finish(0);
          break;
        }
        step(1, i, false);
        if (++i == work.count) {
          finish(1);
          break;
        }
        step(0, i, false);
      }
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) {
        const int row = ((work.tile % across * TOGETHER + rank) * PIECES + r * WG) * 64 + warp * 16;
        if constexpr (ROW_TILES == 2) add_segment(acc[r], r, before, true);
        if constexpr (SCHEME == TWO_LEVEL) {
          const int here = min(row / 64, (shape.N - 1) / 64) * 64 + part * 16 + lane / 4;
          const float w[2] = {row_scale[here], row_scale[here + 8]};
#pragma unroll
          for (int i = 0; i < NT / 2; i++) f[i] *= w[i / 2 % 2];
        }
        const auto place = [&] { return make_int2(row, work.tile / across * NT); };
        finish_tile<NT, WG, SPLIT_K, true, ROW_TILES>(f, work, place, base, bias, residual, y, partial, semaphores,
                                                      shape.N, shape.M, shape.blocks, tiles, whole, stride, lane, r);
      }
      if constexpr (ROW_TILES == 2) release(before);
    }
    if constexpr (MULTICAST) cluster_sync();  // others arrive at this block's barriers until they are done
  }
}
#endif

}  // namespace crelle
