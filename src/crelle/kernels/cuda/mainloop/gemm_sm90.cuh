// The GEMM on Hopper's warpgroups: dequantized weights are the left operand of wgmma, from registers; x comes to shared
// memory by bulk copies, packed for the instruction (pack_x), and is the right one.
//
// A tile is 64 WG rows for NT tokens: each of a thread block's WG warpgroups holds 64 rows and all NT tokens in its
// accumulators, so a weight is dequantized once per NT tokens. Every warp loads its own 16 rows of weights through its
// own pipeline; a producer warp loads x, XC times 64 inputs a stage, XS stages, for all. While four instructions (64
// inputs) are in flight the warp dequantizes the operands of the next four, and with two warpgroups there is always one
// in the middle of a product.
//
// Stream-K: as many thread blocks run as the chip holds at once, and all get the same amount of work, for any
// count of rows and tokens: the last tiles are split along K into equal ranges, which begin and end inside tiles. A
// thread block that begins inside a tile leaves its partial sums in memory for the one that has the tile's beginning;
// that one waits on their semaphores, adds them in the order of K and writes the tile, so results do not depend on
// timing. With SPLIT_K > 1 a cluster of so many thread blocks has a tile instead, a split of K each, and they add up in
// distributed shared memory.
#pragma once
#include "mainloop/gemm_sm90_epilogue.cuh"
#include "ptx/wgmma.cuh"

namespace crelle {

// Many tokens need more registers than every thread could have: then the warp that fetches x is a warpgroup that gives
// its own away.
__host__ __device__ constexpr bool gives_registers(int nt) { return nt > 128; }
__host__ __device__ constexpr int gemm_sm90_threads(int nt, int wg) {
  return wg * 128 + (gives_registers(nt) ? 128 : 32);
}

#if __CUDA_ARCH__ == 900
template <int BYTES>
__device__ __forceinline__ void clear_scratch(char *scratch, int lane) {
  for (int i = lane * 16; i < BYTES; i += 512) *reinterpret_cast<uint4 *>(scratch + i) = make_uint4(0, 0, 0, 0);
  __syncwarp();
}
// The tiles of a thread block. xs as pack_x makes it; bias [N] may be null; y [M, stride], stride at least N; residual,
// where the source has one, like y, or null, or y; partial f32 [grid, NT * 64 WG]; semaphores [grid], zero before and
// after.
template <typename Source, int NT, int WG, int XC, int XS, int WS, int SPLIT_K, typename X>
__device__ __forceinline__ void gemm_sm90_tiles(Source source, const char *__restrict__ xs, const X *__restrict__ bias,
                                                const X *residual, X *y, float4 *partial, int *semaphores, int N, int M,
                                                int blocks, int whole, int stride) {
  using Queue = Pipeline<WS, Source::BYTES>;
  constexpr int ROWS = 64 * WG, CHUNK_BYTES = NT * 128, X_BYTES = XC * CHUNK_BYTES, WARPS = 4 * WG;
  extern __shared__ __align__(128) char raw[];
  char *const shared = raw + (-shared_address(raw) & 1023);  // x stages, pipelines, the warps' scratch
  __shared__ __align__(8) unsigned long long barriers[2][XS];
  const uint32 x_at = shared_address(shared), full = kept(shared_address(barriers[0])), empty = full + 8 * XS;

  const int lane = kept(threadIdx.x & 31), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int across = (N + ROWS - 1) / ROWS, tiles = across * ((M + NT - 1) / NT);

  launch_dependents();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < XS; s++) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(full + 8 * s));
      asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(empty + 8 * s), "n"(WARPS));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp >= WARPS) {
    if constexpr (gives_registers(NT)) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == WARPS && elected()) {
      grid_dependency_wait();
      const int padded = (M + 7) & ~7;
      int s = 0, phase = 1;
#pragma unroll 1
      for (TileScheduler work = TileScheduler::of<SPLIT_K>(tiles, whole, blocks); work.count > 0; work.advance()) {
        const int token = work.tile / across * NT, tokens = min(NT, padded - token);
        const char *source = xs + ((size_t)work.first * 4 * padded + token) * 128;
#pragma unroll 1
        for (int i = 0; i < 4 / XC * work.count; i++) {
          wait_barrier(empty + 8 * s, phase);
          asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full + 8 * s), "r"(XC * tokens * 128)
                       : "memory");
#pragma unroll
          for (int c = 0; c < XC; c++) {
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                    x_at + s * X_BYTES + c * CHUNK_BYTES),
                "l"(source), "r"(tokens * 128), "r"(full + 8 * s)
                : "memory");
            source += (size_t)padded * 128;
          }
          if (++s == XS) s = 0, phase ^= 1;
        }
      }
    }
  } else {
    if constexpr (gives_registers(NT)) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    Queue queue(shared + XS * X_BYTES + warp * Queue::SIZE, lane);
    TileScheduler ahead = TileScheduler::of<SPLIT_K>(tiles, whole, blocks);  // as far as loads of weights were issued
    char *const scratch = shared + XS * X_BYTES + WARPS * Queue::SIZE + warp * Source::SCRATCH;
    const auto row_tile = [&](const TileScheduler &at) { return min(at.tile % across * WARPS + warp, (N - 1) / 16); };
    int asked = 0;
    const auto issue_load = [&](int stage, int zero) {
      if (ahead.count == 0) return;
      source.issue_load(queue, stage, ahead.first + asked, zero);
      if (++asked == ahead.count) asked = 0, ahead.advance(), source.seek(row_tile(ahead), ahead.first);
    };
    if constexpr (Source::SCRATCH > 0) clear_scratch<Source::SCRATCH>(scratch, lane);
    source.seek(row_tile(ahead), ahead.first);
#pragma unroll
    for (int s = 0; s < WS; s++) issue_load(s, 0);

    float d[NT / 2];
    uint32 a[2][4][4];
    typename Source::W w;
    int xs_now = 0, x_phase = 0, w_now = 0, w_phase = 0, x_before = 0;

    const auto keep = [](uint32(&a)[4][4]) {  // these registers belong to instructions under way until here
#pragma unroll
      for (int i = 0; i < 16; i++) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
    };
    const auto release = [&](int stage) {
      if (elected()) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(empty + 8 * stage) : "memory");
    };
    // 64 inputs, one `chunk` of four in a block, are multiplied by what a[chunk % 2] holds. Then those before them are
    // done, and their stage of x if they were the last in it (`any`: there were some). All of it is unrolled.
    const auto multiply = [&](int chunk, bool any) {
      const int part = chunk % XC;
      if (part == 0) wait_barrier(full + 8 * xs_now, x_phase);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      // rows of 128 bytes, swizzled, in groups of eight; in units of 16 bytes
      const unsigned long long matrix =
          1ull << 62 | 64ull << 32 | 1ull << 16 | ((x_at + xs_now * X_BYTES + part * CHUNK_BYTES) & 0x3ffff) >> 4;
#pragma unroll
      for (int s = 0; s < 4; s++) Wgmma<NT, X>::multiply(d, a[chunk % 2][s], matrix + 2 * s);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      wait_for_products<1>();
      keep(a[1 - chunk % 2]);
      if (part == 0 && any) release(x_before);
      if (part == XC - 1) {
        x_before = xs_now;
        if (++xs_now == XS) xs_now = 0, x_phase ^= 1;
      }
    };
#pragma unroll 1
    for (TileScheduler work = TileScheduler::of<SPLIT_K>(tiles, whole, blocks); work.count > 0; work.advance()) {
#pragma unroll
      for (int i = 0; i < NT / 2; i++) d[i] = 0;
      const int row_block = row_tile(work);
      int block = work.first;
      w.begin_tile(source, row_block, lane);
      w.load(source, queue.wait(w_now, w_phase), row_block, block, 0, lane);
      w.unpack(a[0], 0, scratch, lane);
#pragma unroll 1
      for (int left = work.count;;) {
        multiply(0, left < work.count);
        w.unpack(a[1], 1, scratch, lane);
        multiply(1, true);
        w.load(source, queue.piece(w_now), row_block, block, 1, lane);
        const int zero = w.nothing(blocks);
        __syncwarp();
        issue_load(w_now, zero);
        w.unpack(a[0], 2, scratch, lane);
        multiply(2, true);
        w.unpack(a[1], 3, scratch, lane);
        multiply(3, true);
        if (++w_now == WS) w_now = 0, w_phase ^= 1;
        if (--left == 0) break;
        block++;
        w.load(source, queue.wait(w_now, w_phase), row_block, block, 0, lane);
        w.unpack(a[0], 0, scratch, lane);
      }
      wait_for_products<0>();
      keep(a[1]);
      release(x_before);
      if constexpr (requires { source.row_scales(0, 0); }) {
        const float2 scale = source.row_scales(row_block, lane);
#pragma unroll
        for (int i = 0; i < NT / 2; i++) d[i] *= i % 4 < 2 ? scale.x : scale.y;
      }

      const auto place = [&] { return make_int2(work.tile % across * ROWS + warp * 16, work.tile / across * NT); };
      finish_tile<NT, WG, SPLIT_K, Source::RESIDUAL>(d, work, place, shared, bias, residual, y, partial, semaphores, N,
                                                     M, blocks, tiles, whole, stride, lane);
    }
  }
}
#endif

}  // namespace crelle
