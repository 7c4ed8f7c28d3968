// Thread blocks that count themselves in memory.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

// Add to a counter and return what it was. What this thread has written or seen before is seen by threads that add
// later, and what follows is done behind it: one instruction that does less than two __threadfence.
__device__ __forceinline__ int add_acq_rel(int *counter, int by) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(by) : "memory");
  return before;
}

}  // namespace crelle
