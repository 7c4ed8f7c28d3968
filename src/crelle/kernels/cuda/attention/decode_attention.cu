// Attention of one new token per sequence over 16-bit pages (formats/kv/pages.py), in one launch: q and k are normed
// (where the model does that) and rotated, k and v stored where the block table says, and the heads attend.
//
// A key/value head is read once for up to 8 query heads, on the tensor cores, with positions and dimensions along the
// instruction's 16 rows and heads along its 8 columns:
//
//   S [16 positions, heads] = K q^T          O [16 dimensions, heads] += V^T P,   P = exp(S - max)
//
// so that even a single query head wastes no memory traffic, and up to 8 cost what one costs. Tiles of 16 positions,
// which lie in one page, are dealt out to the WARPS warps of SPLITS thread blocks: each warp has its own pipeline of
// STAGES tiles and its own running maximum and sums, and waits for no other. At the end the results of the warps, then
// those of the splits are added in a fixed order: where the chip has clusters, the splits are one, and each writes into
// the shared memory of the others; otherwise they write to memory and the last one to arrive adds.
//
// Pages of earlier tokens, `table` and `position` are read before the previous kernel is done: they must have been
// written before the first kernel of the step began.
#include "ptx/copies.cuh"
#include "ptx/dsmem.cuh"
#include "planes/bitserial.cuh"
#include "attention/extras.cuh"
#include "ptx/tensorcore.cuh"
#include "attention/rope.cuh"

namespace crelle {

#if __CUDA_ARCH__ >= 900
#define CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define CLUSTER_OF(blocks)
#endif

// A warp's pipeline of tiles of 16 positions, in shared memory: rows of keys, then rows of values, padded so that 8
// rows lie in different banks. Positions that are not there are zeros.
template <int D, int STAGES, typename T>
struct Tiles {
  static constexpr int ROW = (D + 15) / 16 * 16 + 8, TILE = 2 * 16 * ROW;

  T *base;
  int lane;

  __device__ __forceinline__ Tiles(T *shared, int lane) : base(shared), lane(lane) {
    if constexpr (D % 16) {  // the instruction reads 8 dimensions more than there are
      for (int i = lane; i < STAGES * 16; i += 32)
        *reinterpret_cast<uint4 *>(base + i / 16 * TILE + i % 16 * ROW + D) = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ T *tile(int i) const { return base + i % STAGES * TILE; }

  // Issue tile i, of which `count` positions (perhaps none) are stored, from `keys` and `values` on.
  __device__ __forceinline__ void issue_load(int i, const T *keys, const T *values, int count) {
    T *to = tile(i);
    if (count > 0) {
      const T *k = keys + 8 * lane, *v = values + 8 * lane;
#pragma unroll
      for (int j = 0; j < (2 * D + 31) / 32; j++) {
        const int c = lane + 32 * j, row = c / (D / 8), column = c % (D / 8) * 8, bytes = row < count ? 16 : 0;
        if (2 * D % 32 && c >= 2 * D) break;
        copy(to + row * ROW + column, k + 256 * j, bytes);
        copy(to + (16 + row) * ROW + column, v + 256 * j, bytes);
      }
    } else if (count == 0) {
      for (int c = lane; c < 2 * D; c += 32) {
        const int row = c / (D / 8), column = c % (D / 8) * 8;
        *reinterpret_cast<uint4 *>(to + (16 + row) * ROW + column) = make_uint4(0, 0, 0, 0);
      }
    }
    commit_copies();
  }
  static __device__ __forceinline__ void copy(T *to, const T *from, int bytes) {
    copy_padded<16>(shared_address(to), reinterpret_cast<const char *>(from), bytes);
  }
  __device__ __forceinline__ T *wait(int i) const {
    wait_for_copies<STAGES - 1>();
    __syncwarp();
    return tile(i);
  }
};

// qkv [B, (heads + 2 kv_heads) D]; pages [pages, 2, kv_heads, page, D], page a multiple of 16; table [B, max_pages];
// position [B]: of the new tokens, -1: padding, nothing is stored and out is 0; cos, sin f32 [context, R/2] and the
// norms' weights [D] may be null; out [B, heads D]; window: how many positions a token sees, itself among them.
// EXTRAS (extras.cuh): scores are bounded by `softcap`; each head has one more score, sinks f32 [heads].
// parts, semaphores (zeros): only without clusters. Grid (SPLITS, kv_heads * chunks of G query heads, B).
// DIGITS is 0, or the M of bitserial.cuh: heads of 128 channels are half blocks then and are stored bit-serial, `out`
// and `xscale`.
template <int D, int G, int SPLITS, int STAGES, int WARPS, bool CLUSTER, int DIGITS, int R, int EXTRAS, typename T>
__global__ void CLUSTER_OF(CLUSTER ? SPLITS : 1) __launch_bounds__(WARPS * 32)
    decode_attention(const T *qkv, T *pages, const int *table, const int *position, const float *__restrict__ cos,
                     const float *__restrict__ sin, const T *__restrict__ q_norm, const T *__restrict__ k_norm,
                     void *out, float *xscale, float *parts, int *semaphores, int heads, int kv_heads, int max_pages,
                     int page, int window, float scale, float eps, float softcap, const float *__restrict__ sinks) {
  using Queue = Tiles<D, STAGES, T>;
  constexpr int ROW = Queue::ROW, STEPS = (D + 15) / 16;
  struct Part {  // what a warp found; heads are 4 floats apart in their banks
    float largest[WARPS][8], sum[WARPS][8], out[WARPS][G][D + 4];
  };
  extern __shared__ __align__(128) char shared[];
  __shared__ __align__(16) T queries[8][ROW], fresh[2][ROW];
  __shared__ __align__(16) Part part;

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int split = blockIdx.x, b = blockIdx.z, group = heads / kv_heads, chunks = (group + G - 1) / G;
  const int kv = blockIdx.y / chunks, chunk = blockIdx.y % chunks, head = kv * group + chunk * G;
  const int count = min(G, group - chunk * G);
  launch_dependents();
  constexpr bool MEET = CLUSTER && SPLITS > 1;
  constexpr int ADDERS = CLUSTER && !DIGITS ? SPLITS : 1, SHARE = G * D / ADDERS;
  struct ClusterPartials {
    float largest[SPLITS][G], sum[SPLITS][G], out[SPLITS][SHARE];
  };
  __shared__ __align__(16) float gathered[MEET ? sizeof(ClusterPartials) / 4 : 1];
  __shared__ Mbarrier mbarrier;
  if constexpr (MEET) {
    if (threadIdx.x == 0 && split < ADDERS) init_mbarrier(&mbarrier, sizeof(ClusterPartials));
    cluster_arrive();
  }

  // --- before the previous kernel is done: what this warp reads of the pages, every STRIDE-th tile from the first that
  // is seen. Without a window which ones these are depends on no position: the table is read at the same time as that.
  constexpr int STRIDE = SPLITS * WARPS;
  const int *entries = table + (size_t)b * max_pages, room = max_pages * page, own = split * WARPS + warp;
  const int guessed = __ldcg(entries + min(own + lane * STRIDE, room / 16 - 1) * 16 / page);
  const int at = min(__ldcg(position + b), room - 1), first = max(0, at + 1 - window), before = first / 16;
  const int tiles = at < 0 ? 0 : at / 16 - before + 1, mine = (max(tiles - own, 0) + STRIDE - 1) / STRIDE;
  const auto keys_at = [&](int entry, int position) {
    return pages + (((size_t)entry * 2 * kv_heads + kv) * page + position % page) * D;
  };
  const size_t to_values = (size_t)kv_heads * page * D;
  Queue queue(reinterpret_cast<T *>(shared) + warp * STAGES * Queue::TILE, lane);
  int entry_of_lane = guessed;  // of tile 32 n + lane of this warp
  const auto issue_load = [&](int i) {
    if (i % 32 == 0 && (i || before)) {
      const int from = (before + own + STRIDE * (i + lane)) * 16;
      entry_of_lane = from <= at ? __ldcg(entries + from / page) : 0;
    }
    const int from = (before + own + STRIDE * i) * 16;
    const T *keys = keys_at(__shfl_sync(~0u, entry_of_lane, i % 32), from);
    queue.issue_load(i, keys, keys + to_values, i < mine ? min(16, at - from) : -1);
  };
#pragma unroll
  for (int s = 0; s < STAGES; s++) issue_load(s);
  const Rope<D, R> rope(cos, sin, max(at, 0), lane);
  const bool owner = tiles && (tiles - 1) % STRIDE / WARPS == split, keeps = chunk == 0;  // of the new token
  T *key = keys_at(owner ? __ldcg(entries + at / page) : 0, max(at, 0)), *value = key + to_values;
  if constexpr (MEET) cluster_wait();
  grid_dependency_wait_late(max_pages);

  // --- the new token: key and value where they belong, queries in shared memory
  const T *row = qkv + (size_t)b * (heads + 2 * kv_heads) * D;
  for (int r = warp; r < count + 2; r += WARPS) {
    if (r >= 2) {
      rope.head(row + (head + r - 2) * D, q_norm, eps, lane, queries[r - 2], static_cast<T *>(nullptr));
    } else if (owner && r == 0) {
      rope.head(row + (heads + kv) * D, k_norm, eps, lane, fresh[0], keeps ? key : nullptr);
    } else if (owner) {
      const uint4 *from = reinterpret_cast<const uint4 *>(row + (heads + kv_heads + kv) * D);
      if (lane < D / 8) {
        const uint4 v = from[lane];
        *reinterpret_cast<uint4 *>(fresh[1] + 8 * lane) = v;
        if (keeps) *reinterpret_cast<uint4 *>(value + 8 * lane) = v;
      }
    }
  }
  if (D % 16 && threadIdx.x < 8) *reinterpret_cast<uint4 *>(queries[threadIdx.x] + D) = make_uint4(0, 0, 0, 0);
  __syncthreads();

  uint32 q[STEPS][2];
#pragma unroll
  for (int k = 0; k < STEPS; k++) matrices(q[k], queries[lane % 8] + 16 * k + lane / 8 % 2 * 8);
  scale *= LOG2_E, softcap *= LOG2_E;

  float largest[2] = {MASKED, MASKED}, sum[2] = {0, 0}, o[STEPS][4];  // of heads 2t and 2t + 1
#pragma unroll
  for (int k = 0; k < STEPS; k++) o[k][0] = o[k][1] = o[k][2] = o[k][3] = 0;
#pragma unroll 1
  for (int i = 0; i < mine; i++) {
    T *tile = queue.wait(i);
    const int from = (before + own + STRIDE * i) * 16;
    if (from <= at && at < from + 16) {  // the new token is not in its page yet, as far as this tile knows
      if (lane < D / 8) {
        *reinterpret_cast<uint4 *>(tile + (at - from) * ROW + 8 * lane) =
            *reinterpret_cast<uint4 *>(fresh[0] + 8 * lane);
        *reinterpret_cast<uint4 *>(tile + (16 + at - from) * ROW + 8 * lane) =
            *reinterpret_cast<uint4 *>(fresh[1] + 8 * lane);
      }
      __syncwarp();
    }

    float s[2][4] = {};  // two chains
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      uint32 a[4];
      matrices(a, tile + lane % 16 * ROW + 16 * k + lane / 16 * 8);
      multiply<T>(s[k & 1], a[0], a[1], a[2], a[3], q[k][0], q[k][1]);
    }
    float p[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int seen = from + lane / 4 + j / 2 * 8;
      const float score = (s[0][j] + s[1][j]) * scale;
      p[j] = first <= seen && seen <= at ? (EXTRAS & SOFTCAP ? soft_capped(score, softcap) : score) : MASKED;
    }
    float factor[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float now = fmaxf(largest[j], max_of_rows(fmaxf(p[j], p[j + 2])));
      factor[j] = exp2_approx(largest[j] - now), largest[j] = now;
      p[j] = exp2_approx(p[j] - now), p[j + 2] = exp2_approx(p[j + 2] - now);
      sum[j] = fmaf(sum[j], factor[j], p[j] + p[j + 2]);
    }
    const uint32 low = transposed(pair<T>(p[0], p[1])), high = transposed(pair<T>(p[2], p[3]));
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      uint32 a[4];
      transposed(a, tile + (16 + lane / 16 * 8 + lane % 8) * ROW + 16 * k + lane / 8 % 2 * 8);
#pragma unroll
      for (int j = 0; j < 4; j++) o[k][j] *= factor[j % 2];
      multiply<T>(o[k], a[0], a[1], a[2], a[3], low, high);
    }
    __syncwarp();
    issue_load(i + STAGES);
  }

  // --- this block's part: its warps' parts, added in order
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int h = 2 * (lane % 4) + j;
    const float all = sum_of_rows(sum[j]);
    if (lane < 4) part.largest[warp][h] = largest[j], part.sum[warp][h] = all;
    if (h >= G) continue;
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      const int d = 16 * k + lane / 4;
      part.out[warp][h][d] = o[k][j];
      if (d + 8 < D) part.out[warp][h][d + 8] = o[k][j + 2];
    }
  }
  __syncthreads();
  const auto added = [&](int h, int d, float &top, float &total) {
    float result = 0;
    top = MASKED, total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, part.largest[w][h]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float factor = exp2_approx(part.largest[w][h] - top);
      total = fmaf(factor, part.sum[w][h], total), result = fmaf(factor, part.out[w][h][d], result);
    }
    return result;
  };
  const auto share = [&](int h, float result, float top, float total) {  // of the whole sequence, for head h
    if (EXTRAS & SINKS) result *= add_sink(sinks[head + min(h, count - 1)], top, total);
    return total == 0 ? 0 : result / total;
  };
  T *to = static_cast<T *>(out) + ((size_t)b * heads + head) * D;
  const auto encode_head = [&](int g, float (&v)[4]) {  // a warp: head g as digits
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = to_float(from_float<T>(v[i]));
    write_bitserial<1, DIGITS ? DIGITS : 1>(v, static_cast<uint32 *>(out), xscale, head + g, b, lane);
  };
  if constexpr (SPLITS == 1 && DIGITS) {
    for (int g = warp; g < count; g += WARPS) {
      float v[4], top, total;
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = added(g, lane + 32 * i, top, total), v[i] = share(g, v[i], top, total);
      encode_head(g, v);
    }
  } else if constexpr (SPLITS == 1) {
    for (int i = threadIdx.x; i < count * D; i += WARPS * 32) {
      float top, total;
      const float result = added(i / D, i % D, top, total);
      to[i] = from_float<T>(share(i / D, result, top, total));
    }
  } else {
    // --- all blocks' parts: each block gives every adder its share of the values
    const int set = b * gridDim.y + blockIdx.y;
    ClusterPartials *mine =
        reinterpret_cast<ClusterPartials *>(CLUSTER ? gathered : parts + (size_t)set * (sizeof(ClusterPartials) / 4));
    const auto put = [&](float *to, float v, int adder) {
      if constexpr (CLUSTER)
        dsmem_store(to, v, &mbarrier, adder);
      else
        *to = v;
    };
    for (int i = threadIdx.x; i < G * D; i += WARPS * 32) {
      float top, total;
      const float result = added(i / D, i % D, top, total);
      put(&mine->out[split][i % SHARE], result, i / SHARE);
      if (i % D < ADDERS) {
        put(&mine->largest[split][i / D], top, i % D);
        put(&mine->sum[split][i / D], total, i % D);
      }
    }
    if constexpr (CLUSTER) {
      if (split >= ADDERS) return;
      wait_mbarrier(&mbarrier);
    } else {
      __shared__ bool last;
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        last = atomicAdd(semaphores + set, 1) == SPLITS - 1;
        if (last) semaphores[set] = 0;
      }
      __syncthreads();
      if (!last) return;
      __threadfence();
    }
    const int adder = CLUSTER ? split : 0;
    const ClusterPartials *all = mine;
    const auto summed = [&](int h, int i) {
      float top = MASKED, total = 0, result = 0;
#pragma unroll
      for (int c = 0; c < SPLITS; c++) top = fmaxf(top, all->largest[c][h]);
#pragma unroll
      for (int c = 0; c < SPLITS; c++) {
        const float factor = exp2_approx(all->largest[c][h] - top);
        total = fmaf(factor, all->sum[c][h], total), result = fmaf(factor, all->out[c][i], result);
      }
      return share(h, result, top, total);
    };
    if constexpr (DIGITS) {
      for (int g = warp; g < count; g += WARPS) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = summed(g, g * D + lane + 32 * i);
        encode_head(g, v);
      }
    } else {
      for (int i = threadIdx.x; i < SHARE; i += WARPS * 32) {
        const int e = adder * SHARE + i, h = e / D;
        if (h >= count) break;
        to[e] = from_float<T>(summed(h, i));
      }
    }
  }
}

}  // namespace crelle
