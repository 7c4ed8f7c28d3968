// Copies of 16 bytes to shared memory without registers, as every chip since Ampere has them, and the barrier of some
// of a thread block's warps.
#pragma once
#include "ptx/pipeline.cuh"

namespace crelle {

__device__ __forceinline__ void copy_16(uint32 to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// SIZE (8 or 16) bytes, of which only the first `bytes` are read; the rest becomes zeros.
template <int SIZE>
__device__ __forceinline__ void copy_padded(uint32 to, const char *from, int bytes = SIZE) {
  if constexpr (SIZE == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// A multiple of 16 bytes, by the lanes of a warp.
__device__ __forceinline__ void copy_run(char *to, const char *from, int bytes, int lane) {
  const uint32 at = shared_address(to);
  for (int i = lane * 16; i < bytes; i += 512) copy_16(at + i, from + i);
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the last LEFT groups are there.
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
// Barrier `id` of IDS, from 1 on; a constant of the instruction, so that only IDS barriers are taken.
template <int THREADS, int IDS = 1>
__device__ __forceinline__ void team_sync(int id) {
  if constexpr (IDS > 1) {
    if (id < IDS) return team_sync<THREADS, IDS - 1>(id);
  }
  asm volatile("bar.sync %0, %1;" ::"n"(IDS), "n"(THREADS) : "memory");
}

}  // namespace crelle
