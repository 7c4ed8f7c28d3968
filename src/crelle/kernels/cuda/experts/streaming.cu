// How often experts are taken, for the cache of experts on the GPU (streaming.py).
#include "ptx/warp.cuh"

namespace crelle {

// counts int [count + 1] += uses of each expert in chosen int [choices], and, last, how many of those were of experts
// that lie in `slots` slots of `slot_bytes` from `begin` on, by the address in `column` of their row of the table u64
// [count, columns]. Grid (ceil(choices / 256)), 256 threads.
__global__ void __launch_bounds__(256)
    count_experts(const int *chosen, const unsigned long long *table, int *counts, const char *begin, int choices,
                  int count, int columns, int column, int slots, int slot_bytes) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  const unsigned long long first = reinterpret_cast<unsigned long long>(begin);
  bool hit = false;
  if (i < choices) {
    const int e = __ldcg(chosen + i);
    if (e >= 0 && e < count) {
      atomicAdd(counts + e, 1);
      const unsigned long long at = __ldcg(table + (size_t)e * columns + column);
      hit = at >= first && at - first < (unsigned long long)slots * slot_bytes;
    }
  }
  const unsigned hits = __ballot_sync(~0u, hit);
  if ((threadIdx.x & 31) == 0 && hits) atomicAdd(counts + count, __popc(hits));
}

}  // namespace crelle
