// The integer GEMM on Hopper's warpgroups: weights become bytes in registers, the left operand of wgmma; x comes to
// shared memory as it lies, swizzled by the copy engine, and is the right one.
//
// A tile is 64 WG rows for NT tokens. One thread loads all of it, blocks of 128 inputs at a time (codes and scales of
// the weights, codes and scales of x), STAGES ahead; WG warpgroups multiply 64 rows each. Weights are asked for before
// the kernel ahead in the stream has ended, x when it has.
//
// Sums are int32. Where scales change from group to group, each block's sums are multiplied by both and added to f32
// ones: one integer and two float instructions a sum. With SEGMENTS (one scale of x for all inputs that are no
// outliers, one of w for a row) the sums stay integers to the end of K.
//
// Stream-K, split-K and what is written: gemm_sm90_epilogue.cuh.
#pragma once
#include "mainloop/gemm_sm90_epilogue.cuh"
#include "integer/integer_weights.cuh"
#include "ptx/wgmma_s8.cuh"

namespace crelle {

// Large tiles need more registers than every thread could have: then the warp that loads is a warpgroup that gives its
// own away.
__host__ __device__ constexpr bool integer_gives_registers(int nt, int wg, int occupancy) {
  return nt >= 96 && wg > 1 && occupancy == 1;
}
__host__ __device__ constexpr int integer_sm90_threads(int nt, int wg, int occupancy) {
  return wg * 128 + (integer_gives_registers(nt, wg, occupancy) ? 128 : 32);
}

#if __CUDA_ARCH__ == 900
// x [padded, 128 blocks] by x_map, whose box has NT rows; row_scale f32 [N rounded up to 64] with two levels; the
// others as of gemm_sm90_tiles.
template <IntegerScheme SCHEME, int SUBS, int SEGMENTS, bool HAS_WIDE, int NT, int WG, int STAGES, int OCCUPANCY,
          int SPLIT_K, typename X>
__device__ __forceinline__ void integer_sm90_tiles(const TensorMap &x_map, const char *__restrict__ pieces,
                                                   const float *__restrict__ x_scales,
                                                   const float *__restrict__ row_scale, const X *__restrict__ bias,
                                                   const X *residual, X *y, float4 *partial, int *semaphores,
                                                   const IntegerShape &shape, int whole, int stride) {
  constexpr int ROWS = 64 * WG, WARPS = 4 * WG, X_BYTES = NT * 128,
                SLOT = HAS_WIDE ? Piece<SUBS>::WIDE : Piece<SUBS>::NARROW;
  constexpr int X_SCALES = SUBS * NT * 4;
  constexpr bool SENDS = SPLIT_K > 1;
  constexpr bool GIVES = integer_gives_registers(NT, WG, OCCUPANCY);
  extern __shared__ __align__(128) char shared[];
  // barriers, then, behind whole KB, stages of x, of weights, of scales of x, sums of other thread blocks
  char *const base = shared + kept(256 + (-(shared_address(shared) + 256) & 1023));
  char *const w_base = base + STAGES * X_BYTES, *const s_base = w_base + STAGES * WG * SLOT,
              *const received = s_base + STAGES * X_SCALES;
  static_assert(STAGES <= 12, "there is room for as many barriers");
  const uint32 x_at = shared_address(base), full = kept(shared_address(shared)), empty = full + 8 * STAGES;
  const uint32 sent = empty + 8 * STAGES;
  const int lane = kept(threadIdx.x & 31), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int across = (shape.N + ROWS - 1) / ROWS, tiles = across * ((shape.M + NT - 1) / NT);

  launch_dependents();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < STAGES; s++) init_barrier(full + 8 * s, 1), init_barrier(empty + 8 * s, WARPS);
    if constexpr (SENDS) init_barrier(sent, 1);
    fence_barriers();
    if constexpr (SENDS) arrive_expecting(sent, received_bytes<NT, WG, SPLIT_K>(blockIdx.x % SPLIT_K));
  }
  __syncthreads();
  if constexpr (SENDS) cluster_arrive();

  if (warp >= WARPS) {
    if constexpr (GIVES) give_registers<24>();
    if (warp == WARPS && elected()) {
      prefetch_map(x_map);
      const int padded = shape.padded(), last = (shape.N - 1) / 64;
      const auto load_w = [&](int s, int tile, int block) {
        const int bytes = Piece<SUBS>::bytes(shape, block), tokens = min(NT, padded - tile / across * NT);
        arrive_expecting(full + 8 * s, WG * bytes + X_BYTES + SUBS * tokens * 4);
#pragma unroll
        for (int i = 0; i < WG; i++)
          copy_bulk(shared_address(w_base + (s * WG + i) * SLOT),
                    pieces + Piece<SUBS>::start(shape, min(tile % across * WG + i, last), block), bytes, full + 8 * s);
      };
      const auto load_x = [&](int s, int tile, int block) {
        const int token = tile / across * NT, tokens = min(NT, padded - token);
        copy_box(x_at + s * X_BYTES, x_map, block * 128, token, full + 8 * s);
#pragma unroll
        for (int j = 0; j < SUBS; j++)
          copy_bulk(shared_address(s_base + s * X_SCALES + j * (NT * 4)),
                    x_scales + (size_t)shape.x_row(block, j) * padded + token, tokens * 4, full + 8 * s);
      };
      int early = 0;  // blocks whose weights were asked for
#pragma unroll 1
      for (TileScheduler work = TileScheduler::of<SPLIT_K>(tiles, whole, shape.blocks);
           work.count > 0 && early < STAGES; work.advance())
#pragma unroll 1
        for (int i = 0; i < work.count && early < STAGES; i++) load_w(early++, work.tile, work.first + i);
      grid_dependency_wait();
      int s = 0, phase = 1;
#pragma unroll 1
      for (TileScheduler work = TileScheduler::of<SPLIT_K>(tiles, whole, shape.blocks); work.count > 0; work.advance())
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
    uint32 acc[NT / 2];
    uint32 a[2][4][4];
    uint32 scales[2][SUBS];
    float unit[2];  // of sums of the block's codes
    const uint32 x_matrix = kept(swizzled_rows(x_at));
    int s = 0, phase = 0;

    uint32 seen = 0;  // of the scales of x, what was loaded last
    const auto release = [&](int stage) {
      const uint32 barrier = empty + 8 * stage + nothing_until_loaded(seen, lane);
      if (elected()) arrive(barrier);
    };
    const auto hold_operands = [](uint32(&a)[4][4]) {
#pragma unroll
      for (int i = 0; i < 4; i++) hold(a[i]);
    };
    const auto unpack = [&](int p, int block, int stage) {
      const char *const piece = w_base + (stage * WG + group) * SLOT;
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
    // Steps from `first` on of the block in this stage; `add`: to what is in the accumulators.
    const auto multiply = [&](int p, int first, int steps, bool add) {
      fence_products();
      const uint32 matrix = x_matrix + s * (X_BYTES / 16);
#pragma unroll
      for (int k = first; k < first + steps; k++) WgmmaS8<NT>::multiply(acc, a[p][k], matrix + 2 * k, add || k > first);
      commit_products();
    };
    // The sums of group j of a block by the scales of x in its stage.
    const auto add_group = [&](int p, int j, int stage) {
      hold(acc);
      const float2 w = row_scales<SCHEME>(scales[p][j], unit[p]);
      const float less[2] = {-INT_VALUE * w.x, -INT_VALUE * w.y};
      const float *const xs = reinterpret_cast<const float *>(s_base + stage * X_SCALES) + j * NT + lane % 4 * 2;
#pragma unroll
      for (int c = 0; c < NT / 8; c++) {
        const float2 x = *reinterpret_cast<const float2 *>(xs + c * 8);
        float *const to = f + 4 * c;
        to[0] = add_scaled(acc[4 * c], w.x, less[0], x.x, to[0]);
        to[1] = add_scaled(acc[4 * c + 1], w.x, less[0], x.y, to[1]);
        to[2] = add_scaled(acc[4 * c + 2], w.y, less[1], x.x, to[2]);
        to[3] = add_scaled(acc[4 * c + 3], w.y, less[1], x.y, to[3]);
        seen = __float_as_uint(x.y);
      }
    };
    // The same for sums that may be larger: these are converted.
    const auto add_segment = [&](int p, int stage, bool first) {
      hold(acc);
      const float2 w = row_scales<SCHEME>(scales[p][0], unit[p]);
      const float *const xs = reinterpret_cast<const float *>(s_base + stage * X_SCALES) + lane % 4 * 2;
#pragma unroll
      for (int c = 0; c < NT / 8; c++) {
        const float2 x = *reinterpret_cast<const float2 *>(xs + c * 8);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float v = (float)(int)acc[4 * c + i], scale = (i < 2 ? w.x : w.y) * (i % 2 ? x.y : x.x);
          f[4 * c + i] = first ? v * scale : fmaf(v, scale, f[4 * c + i]);
        }
        seen = __float_as_uint(x.y);
      }
    };

#pragma unroll 1
    for (TileScheduler work = TileScheduler::of<SPLIT_K>(tiles, whole, shape.blocks); work.count > 0; work.advance()) {
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
        unpack(p, block, s);
        if constexpr (SEGMENTS > 0) {
          multiply(p, 0, 4, add);
          add = true;
          if (SEGMENTS > 1 && i + 1 < work.count && block + 1 == shape.normal) {
            wait_for_products<0>();
            if (before >= 0) release(before);
            add_segment(p, s, true);
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
            multiply(p, 4 / SUBS * j, 4 / SUBS, false);
            wait_for_products<0>();
            add_group(p, j, s);
          }
          hold_operands(a[p]);
          release(s);
        } else {
          if (!first) {
            wait_for_products<0>();
            hold_operands(a[1 - p]);
            add_group(1 - p, 0, before);
            release(before);
          }
          multiply(p, 0, 4, false);
          before = s;
        }
        if (++s == STAGES) s = 0, phase ^= 1;
      };
      const auto finish = [&](int p) {  // what is still under way; p: of the last block
        if constexpr (SUBS > 1 && SEGMENTS == 0) return;
        wait_for_products<0>();
        hold_operands(a[p]);
        if constexpr (SEGMENTS > 0)
          add_segment(p, before, SEGMENTS == 1);
        else
          add_group(p, 0, before);
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
      const int row = work.tile % across * ROWS + warp * 16;
      if constexpr (SCHEME == TWO_LEVEL) {
        const int here = min(row / 64, (shape.N - 1) / 64) * 64 + part * 16 + lane / 4;
        const float w[2] = {row_scale[here], row_scale[here + 8]};
#pragma unroll
        for (int i = 0; i < NT / 2; i++) f[i] *= w[i / 2 % 2];
      }
      const auto place = [&] { return make_int2(row, work.tile / across * NT); };
      finish_tile<NT, WG, SPLIT_K, true, SENDS>(f, work, place, received, bias, residual, y, partial, semaphores,
                                                shape.N, shape.M, shape.blocks, tiles, whole, stride, lane, sent);
    }
  }
}
#endif

}  // namespace crelle
