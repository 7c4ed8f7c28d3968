// The two ends of a decode step: ids become rows of the embedding, and logits become the next ids.
#include "ptx/tensorcore.cuh"

namespace crelle {

// y [B, width] = table[ids] (+ positions[position + first], where positions is not null); grid (ceil(width / 2048), B).
// A row of padding has position -1: it reads what position 0 does, because there may be nothing before the table.
// source [B] may be null; where it is not below 0, the id is sampled[source]: a token that the host does not know yet.
template <typename T>
__global__ void __launch_bounds__(256)
    embed(const long long *ids, const long long *source, const long long *sampled, const T *__restrict__ table,
          const int *position, const T *__restrict__ positions, T *y, int width, int first) {
  const int b = blockIdx.y, k = (blockIdx.x * 256 + threadIdx.x) * 8;
  launch_dependents();
  grid_dependency_wait();
  const long long from = source ? source[b] : -1;
  const T *word = table + (from < 0 ? ids[b] : sampled[from]) * width + k, *place = positions;
  if (positions) place += (size_t)(max(position[b], 0) + first) * width + k;
  y += (size_t)b * width + k;
  if (width % 8 == 0 && k < width) {
    uint4 v = *reinterpret_cast<const uint4 *>(word);
    if (positions) {
      float f[8], g[8];
      open<T>(f, v), open<T>(g, *reinterpret_cast<const uint4 *>(place));
#pragma unroll
      for (int i = 0; i < 8; i++) f[i] += g[i];
      v = closed<T>(f);
    }
    *reinterpret_cast<uint4 *>(y) = v;
  } else {
    for (int i = 0; i < min(8, width - k); i++)
      y[i] = positions ? from_float<T>(to_float(word[i]) + to_float(place[i])) : word[i];
  }
}

// A key that is larger for larger values, then for smaller indices; NaN is the largest, as torch has it.
using Key = unsigned long long;
__device__ __forceinline__ Key key(float v, int index) {
  const uint32 bits = __float_as_uint(v + 0.0f);  // makes -0 the same as 0
  const uint32 ordered = v != v ? ~0u : bits >> 31 ? ~bits : bits | 0x80000000u;
  return (Key)ordered << 32 | (0xffffffffu - index);
}
__device__ __forceinline__ Key largest(Key k) {
#pragma unroll
  for (int i = 16; i; i /= 2) k = max(k, __shfl_xor_sync(~0u, k, i));
  return k;
}

// Whether the largest of a row is finite. If it is not, the row has a NaN, +inf, or nothing but -inf.
__device__ __forceinline__ bool finite(Key k) {
  const uint32 ordered = k >> 32;
  return 0x007fffffu < ordered && ordered < 0xff800000u;
}

// logits [B, V]; ids [B]; made [B]; best [B, 32] and semaphores [1] (zero) are scratch. `made` gets -1 where the
// largest logit is not finite, `ids` an index of the row all the same.
// Grid (up to 32, B): each thread block finds the largest of a piece, the last one to come the largest of all.
template <typename T>
__global__ void __launch_bounds__(256)
    greedy(const T *logits, long long *ids, long long *made, Key *best, int *semaphores, int V) {
  const int b = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  __shared__ Key part[8];
  __shared__ bool last;
  grid_dependency_wait();
  logits += (size_t)b * V;
  Key mine = 0;
#pragma unroll 4
  for (int i = blockIdx.x * 256 + threadIdx.x; i < V; i += gridDim.x * 256)
    mine = max(mine, key(to_float(logits[i]), i));
  mine = largest(mine);
  if (lane == 0) part[warp] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int w = 1; w < 8; w++) mine = max(mine, part[w]);
    best[b * 32 + blockIdx.x] = mine;
    __threadfence();
    last = atomicAdd(semaphores, 1) == gridDim.x * gridDim.y - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int r = warp; r < gridDim.y; r += 8) {
    const Key all = largest(lane < gridDim.x ? __ldcg(best + r * 32 + lane) : 0);
    if (lane == 0) {
      const long long id = 0xffffffffu - (uint32)all;
      ids[r] = id, made[r] = finite(all) ? id : -1;
    }
  }
  if (threadIdx.x == 0) *semaphores = 0;
}

}  // namespace crelle
