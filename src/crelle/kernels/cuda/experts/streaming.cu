// What streaming experts needs beside their products (streaming.py): how often they are taken, and which passes of a
// batch (routing.cu) are of experts that are in memory now.
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

// Of `passes` u64 [pass_count, words] those whose expert belongs to group g, in order, with the addresses that `table`
// u64 [experts, words - 1] has of it. A pass begins with its first place, in 32 bits; order int [slots] is the slot at
// each place, chosen int [slots] its expert, group int [experts]. One warp.
__global__ void __launch_bounds__(32)
    passes_of_group(const unsigned long long *passes, const int *pass_count, const int *order, const int *chosen,
                    const int *group, const unsigned long long *table, unsigned long long *found, int *found_count,
                    int g, int words) {
  const int lane = threadIdx.x, count = __ldcg(pass_count);
  int at = 0;
  for (int i = 0; i < count; i += 32) {
    int expert = 0;
    bool mine = false;
    unsigned long long first = 0;
    if (i + lane < count) {
      first = __ldcg(passes + (size_t)(i + lane) * words);
      expert = __ldcg(chosen + __ldcg(order + (int)first));
      mine = __ldcg(group + expert) == g;
    }
    const unsigned all = __ballot_sync(~0u, mine);
    if (mine) {
      unsigned long long *const to = found + (size_t)(at + __popc(all & ((1u << lane) - 1))) * words;
      to[0] = first;
      for (int k = 1; k < words; k++) to[k] = __ldcg(table + (size_t)expert * (words - 1) + k - 1);
    }
    at += __popc(all);
  }
  if (lane == 0) *found_count = at;
}

}  // namespace crelle
