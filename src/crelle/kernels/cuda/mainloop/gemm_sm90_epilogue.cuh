// What a thread block of gemm_sm90.cuh and integer_sm90.cuh does with the sums of a tile: split-K and stream-K parts
// are added in a fixed order, then bias and residual, and rows are written.
#pragma once
#include "ptx/copies.cuh"
#include "ptx/pack2.cuh"
#include "mainloop/stream_k.cuh"
#include "ptx/tensorcore.cuh"
#include "ptx/tma.cuh"

namespace crelle {

#if __CUDA_ARCH__ == 900
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

// Split-K in a cluster: block r adds up and writes the tokens of every SPLIT_K-th eight from r on. What the others have
// of them they send to it, `received_bytes` of shared memory that nothing else uses.
template <int NT, int WG, int SPLIT_K>
__device__ __forceinline__ int received_bytes(int rank) {
  return (SPLIT_K - 1) * ((NT / 8 - rank + SPLIT_K - 1) / SPLIT_K) * WG * 2048;
}
template <int NT, int WG, int SPLIT_K, typename Put>
__device__ __forceinline__ void add_in_cluster(const float (&d)[NT / 2], char *received, uint32 sent, const Put &put) {
  const int rank = blockIdx.x % SPLIT_K;
  const auto place = [&](int from, int to, int c) {  // of what block `from` sends to block `to`
    const int owned = (NT / 8 - to + SPLIT_K - 1) / SPLIT_K;
    return (((from < to ? from : from - 1) * owned + c / SPLIT_K) * (WG * 128) + threadIdx.x) * 16;
  };
  cluster_wait();  // all blocks have their barriers
#pragma unroll
  for (int c = 0; c < NT / 8; c++)
    if (c % SPLIT_K != rank)
      dsmem_store(shared_address(received) + place(rank, c % SPLIT_K, c),
                  make_float4(d[4 * c], d[4 * c + 1], d[4 * c + 2], d[4 * c + 3]), sent, c % SPLIT_K);
  wait_for_stores(sent);
#pragma unroll
  for (int c = 0; c < NT / 8; c++) {
    if (c % SPLIT_K != rank) continue;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int r = 0; r < SPLIT_K; r++) {
      const float4 v = r == rank ? make_float4(d[4 * c], d[4 * c + 1], d[4 * c + 2], d[4 * c + 3])
                                 : *reinterpret_cast<const float4 *>(received + place(r, rank, c));
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    put(c, sum);
  }
}

// The sums of a warpgroup's 64 rows and NT tokens of the tile of `work`, in d; place(): the first row of this warp and
// the first token (asked for late, for the registers' sake). shared, where SPLIT_K > 1: NT * 256 WG bytes that nothing
// uses any more; with SENDS those of `add_in_cluster`. The others as of gemm_sm90_tiles; partial and semaphores [grid].
template <int NT, int WG, int SPLIT_K, bool RESIDUAL, bool SENDS = false, typename Place, typename X>
__device__ __forceinline__ void finish_tile(float (&d)[NT / 2], const TileScheduler &work, const Place &place,
                                            char *shared, const X *__restrict__ bias, const X *residual, X *y,
                                            float4 *partial, int *semaphores, int N, int M, int blocks, int tiles,
                                            int whole, int stride, int lane, uint32 sent = 0) {
  constexpr int SUMS = NT / 8 * WG * 128;
  if constexpr (SPLIT_K == 1) {
    if (work.first > 0) {  // the thread block that has the beginning of this tile will add this
      float4 *const to = partial + (size_t)blockIdx.x * SUMS + threadIdx.x;
#pragma unroll
      for (int c = 0; c < NT / 8; c++)
        __stcg(to + c * (WG * 128), make_float4(d[4 * c], d[4 * c + 1], d[4 * c + 2], d[4 * c + 3]));
      team_sync<WG * 128>(1);
      if (threadIdx.x == 0) raise_flag(semaphores + blockIdx.x);
      return;
    }
    const long long units = (long long)(tiles - whole) * blocks;
    const int others =
        work.count < blocks ? (int)(((work.tile + 1ll) * blocks * gridDim.x - 1) / units) - (int)blockIdx.x : 0;
    if (others > 0) {
      for (int i = threadIdx.x; i < others; i += WG * 128) {
        int *const flag = semaphores + blockIdx.x + 1 + i;
        wait_for_flag(flag);
        *flag = 0;  // as the next launch wants it
      }
      team_sync<WG * 128>(1);
      const float4 *from = partial + (size_t)(blockIdx.x + 1) * SUMS + threadIdx.x;
#pragma unroll NT <= 32 ? 4 : NT <= 64 ? 2 : 1
      for (int i = 0; i < others; i++, from += SUMS) {
#pragma unroll
        for (int c = 0; c < NT / 8; c++) {
          const float4 v = __ldcg(from + c * (WG * 128));
          d[4 * c] += v.x, d[4 * c + 1] += v.y, d[4 * c + 2] += v.z, d[4 * c + 3] += v.w;
        }
      }
    }
  }
  // A lane has rows g and g + 8, tokens 2t and 2t + 1 of eight; transposed it has token g and four rows in a piece.
  const int2 at = place();
  const int row = at.x, token = at.y, g = lane / 4, t = lane % 4;
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
    if constexpr (RESIDUAL)
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
  if constexpr (SENDS) {
    add_in_cluster<NT, WG, SPLIT_K>(d, shared, sent, put);
  } else if constexpr (SPLIT_K > 1) {  // all blocks' sums in shared memory; each block adds and writes some tokens
    float4 *const sums = reinterpret_cast<float4 *>(shared);
    team_sync<WG * 128>(1);  // no warp multiplies by x any more
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
#endif

}  // namespace crelle
