// Barriers 1 ... 15 of a thread block, at which some warps wait and others only arrive.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

#if __CUDA_ARCH__ >= 900
constexpr bool NAMED_BARRIERS = true;
#else
constexpr bool NAMED_BARRIERS = false;
#endif

// THREADS: all that wait or arrive, whole warps.
template <int THREADS>
__device__ __forceinline__ void sync_barrier(int id) {
#if __CUDA_ARCH__ >= 900
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
#endif
}
template <int THREADS>
__device__ __forceinline__ void arrive_barrier(int id) {
#if __CUDA_ARCH__ >= 900
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
#endif
}

}  // namespace crelle
