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
#include "pipeline.cuh"
#include "pack2.cuh"
#include "tensorcore.cuh"
#include "wgmma.cuh"
#include "stream_k.cuh"

namespace crelle {

// Many tokens need more registers than every thread could have: then the warp that fetches x is a warpgroup that gives
// its own away.
__host__ __device__ constexpr bool gives_registers(int nt) { return nt > 128; }
__host__ __device__ constexpr int gemm_sm90_threads(int nt, int wg) {
  return wg * 128 + (gives_registers(nt) ? 128 : 32);
}

#if __CUDA_ARCH__ == 900
__device__ __forceinline__ void wait_barrier(uint32 barrier, int phase) {
  asm volatile(
      "{\n .reg .pred done;\n again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n @!done bra again;\n}" ::"r"(
          barrier),
      "r"(phase & 1)
      : "memory");
}
template <int LEFT>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
template <int BYTES>
__device__ __forceinline__ void clear_scratch(char *scratch, int lane) {
  for (int i = lane * 16; i < BYTES; i += 512) *reinterpret_cast<uint4 *>(scratch + i) = make_uint4(0, 0, 0, 0);
  __syncwarp();
}
// Four values of a row plus those `from` there on, of which `left` exist; in one piece if `aligned`.
template <typename X>
__device__ __forceinline__ uint2 plus_residual(uint2 v, const X *from, int left, bool aligned) {
  uint2 more;
  if (aligned) {
    more = *reinterpret_cast<const uint2 *>(from);
  } else {
    X each[4];
#pragma unroll
    for (int j = 0; j < 4; j++) each[j] = j < left ? from[j] : from_float<X>(0);
    more = *reinterpret_cast<const uint2 *>(each);
  }
  return make_uint2(Pack2<X>::add(v.x, more.x), Pack2<X>::add(v.y, more.y));
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

      if constexpr (SPLIT_K == 1) {
        if (work.first > 0) {  // the thread block that has the beginning of this tile will add this
          float4 *const to = partial + (size_t)blockIdx.x * (NT / 8 * WG * 128) + threadIdx.x;
#pragma unroll
          for (int c = 0; c < NT / 8; c++)
            __stcg(to + c * (WG * 128), make_float4(d[4 * c], d[4 * c + 1], d[4 * c + 2], d[4 * c + 3]));
          asm volatile("bar.sync 1, %0;" ::"n"(WG * 128) : "memory");
          if (threadIdx.x == 0) {
            __threadfence();
            asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(semaphores + blockIdx.x) : "memory");
          }
          continue;
        }
        const long long units = (long long)(tiles - whole) * blocks;
        const int others =
            work.count < blocks ? (int)(((work.tile + 1ll) * blocks * gridDim.x - 1) / units) - (int)blockIdx.x : 0;
        if (others > 0) {
          for (int i = threadIdx.x; i < others; i += WG * 128) {
            int *const flag = semaphores + blockIdx.x + 1 + i;
            int there;
            do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(flag) : "memory");
            while (!there);
            *flag = 0;  // as the next launch wants it
          }
          asm volatile("bar.sync 1, %0;" ::"n"(WG * 128) : "memory");
          const float4 *from = partial + (size_t)(blockIdx.x + 1) * (NT / 8 * WG * 128) + threadIdx.x;
#pragma unroll NT <= 32 ? 4 : NT <= 64 ? 2 : 1
          for (int i = 0; i < others; i++, from += NT / 8 * WG * 128) {
#pragma unroll
            for (int c = 0; c < NT / 8; c++) {
              const float4 v = __ldcg(from + c * (WG * 128));
              d[4 * c] += v.x, d[4 * c + 1] += v.y, d[4 * c + 2] += v.z, d[4 * c + 3] += v.w;
            }
          }
        }
      }
      // A lane has rows g and g + 8, tokens 2t and 2t + 1 of eight; transposed it has token g and four rows in a piece.
      const int row = work.tile % across * ROWS + warp * 16, token = work.tile / across * NT, g = lane / 4,
                t = lane % 4;
      float add[2] = {0, 0};
      if (bias) {
        if (row + g < N) add[0] = to_float(bias[row + g]);
        if (row + g + 8 < N) add[1] = to_float(bias[row + g + 8]);
      }
      const int n = row + (t & 1) * 8 + (t & 2) * 2;
      X *to = y + (size_t)(token + g) * stride + n;
      const bool whole_pieces = (N | stride) % 4 == 0;
      const auto put = [&](int c, float4 v) {
        const uint32 a = transposed(Pack2<X>::of(v.x + add[0], v.y + add[0])),
                     b = transposed(Pack2<X>::of(v.z + add[1], v.w + add[1]));
        const uint32 other = __shfl_xor_sync(~0u, t & 1 ? a : b, 1);
        uint2 out = t & 1 ? make_uint2(other, b) : make_uint2(a, other);
        if (token + 8 * c + g >= M || n >= N) return;
        X *const here = to + (size_t)c * 8 * stride;
        if constexpr (Source::RESIDUAL)
          if (residual) out = plus_residual<X>(out, residual + (here - y), N - n, whole_pieces);
        if (whole_pieces) {
          *reinterpret_cast<uint2 *>(here) = out;
        } else {
          const X *each = reinterpret_cast<const X *>(&out);
#pragma unroll
          for (int j = 0; j < 4; j++)
            if (n + j < N) here[j] = each[j];
        }
      };
      if constexpr (SPLIT_K > 1) {  // all blocks' sums in shared memory; each block adds and writes some tokens
        float4 *const sums = reinterpret_cast<float4 *>(shared);
        asm volatile("bar.sync 1, %0;" ::"n"(WG * 128) : "memory");  // no warp multiplies by x any more
#pragma unroll
        for (int c = 0; c < NT / 8; c++)
          sums[c * (WG * 128) + threadIdx.x] = make_float4(d[4 * c], d[4 * c + 1], d[4 * c + 2], d[4 * c + 3]);
        cluster_sync();
        const int rank = blockIdx.x % SPLIT_K;
#pragma unroll
        for (int i = 0; i < (NT / 8 + SPLIT_K - 1) / SPLIT_K; i++) {
          const int c = i * SPLIT_K + rank;
          if (NT / 8 % SPLIT_K && c >= NT / 8) break;
          float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
          for (int r = 0; r < SPLIT_K; r++) {
            const float4 v = dsmem_load(shared_address(sums + c * (WG * 128) + threadIdx.x), r);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
          }
          put(c, sum);
        }
        cluster_sync();  // no block exits while others read
      } else {
#pragma unroll
        for (int c = 0; c < NT / 8; c++) put(c, make_float4(d[4 * c], d[4 * c + 1], d[4 * c + 2], d[4 * c + 3]));
      }
    }
  }
}
#endif

}  // namespace crelle
