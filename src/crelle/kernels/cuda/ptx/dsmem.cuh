// Distributed shared memory: thread blocks of a cluster store values into each other's shared memory, and an mbarrier
// there counts the bytes. Only the reader waits, and no memory has to be flushed. Nothing of it exists before sm_90.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

using Mbarrier = unsigned long long;  // a barrier in shared memory, used once

// The address that a place of this block's shared memory has in block `rank` of the cluster.
__device__ __forceinline__ uint32 cluster_address(uint32 mine, int rank) {
  uint32 theirs = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(mine), "r"(rank));
#endif
  return theirs;
}
__device__ __forceinline__ uint32 cluster_address(const void *mine, int rank) {
  return cluster_address(static_cast<uint32>(__cvta_generic_to_shared(mine)), rank);
}

// One thread initializes an mbarrier for so many bytes; then all threads of all blocks call `cluster_arrive`, and
// `cluster_wait` before they send.
__device__ __forceinline__ void init_mbarrier(Mbarrier *mbarrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  const uint32 at = static_cast<uint32>(__cvta_generic_to_shared(mbarrier));
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Store a value to `to`, as this block knows it, in block `rank`, whose mbarrier counts it.
__device__ __forceinline__ void dsmem_store(float *to, float v, Mbarrier *mbarrier, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(cluster_address(to, rank)),
      "f"(v), "r"(cluster_address(mbarrier, rank))
      : "memory");
#endif
}
__device__ __forceinline__ void dsmem_store(float2 *to, float2 v, Mbarrier *mbarrier, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                   cluster_address(to, rank)),
               "f"(v.x), "f"(v.y), "r"(cluster_address(mbarrier, rank))
               : "memory");
#endif
}

// Until all bytes have come.
__device__ __forceinline__ void wait_mbarrier(const Mbarrier *mbarrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .pred done;\n again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n @!done "
      "bra again;\n}" ::"r"(static_cast<uint32>(__cvta_generic_to_shared(mbarrier)))
      : "memory");
#endif
}

}  // namespace crelle
