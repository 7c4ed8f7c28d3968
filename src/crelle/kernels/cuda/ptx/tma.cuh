// What Hopper's copy engine and warpgroup instructions need around them: mbarriers, bulk and tensor copies, the order
// of wgmma groups, registers that warpgroups give each other, clusters. (tests/kernels/cuda/emulator has the same for a
// CPU.)
#pragma once
#include "ptx/dsmem.cuh"
#include "ptx/pipeline.cuh"

namespace crelle {

// A CUtensorMap, a parameter by value: what the copy engine knows of a matrix.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

#if __CUDA_ARCH__ == 900
__device__ __forceinline__ void init_barrier(uint32 barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
// Behind those that were initialized, in the thread that did it.
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_expecting(uint32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_barrier(uint32 barrier, int phase) {
  asm volatile(
      "{\n .reg .pred done;\n again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n @!done bra again;\n}" ::"r"(
          barrier),
      "r"(phase & 1)
      : "memory");
}
// A multiple of 16 bytes, counted by the barrier when they are there.
__device__ __forceinline__ void copy_bulk(uint32 to, const void *from, int bytes, uint32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// The map's box from (row, column) on; rows that do not exist become zeros, and count.
__device__ __forceinline__ void copy_box(uint32 to, const TensorMap &map, int column, int row, uint32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The copy engine reads a map before the first copy that needs it.
__device__ __forceinline__ void prefetch_map(const TensorMap &map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// These registers belong to instructions under way until here.
template <int COUNT>
__device__ __forceinline__ void hold(uint32 (&r)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(r[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Threads that have left count as there.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Store a value to the place `to` of thread block `rank` of the cluster, whose barrier counts its bytes.
__device__ __forceinline__ void dsmem_store(uint32 to, float4 v, uint32 barrier, int rank) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   cluster_address(to, rank)),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(cluster_address(barrier, rank))
               : "memory");
}
// Until what other thread blocks of the cluster stored has come; the barrier's first phase.
__device__ __forceinline__ void wait_for_stores(uint32 barrier) {
  asm volatile(
      "{\n .reg .pred done;\n again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n @!done "
      "bra again;\n}" ::"r"(barrier)
      : "memory");
}
// What a thread block of the cluster has at this place of its shared memory.
__device__ __forceinline__ float4 dsmem_load(uint32 address, int rank) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(cluster_address(address, rank))
               : "memory");
  return v;
}

// Zero, but not before `loaded` is there in all lanes: the copy engine does not wait for reads that are under way, so
// whoever lets it write over them has to. lane >= 0, which the compiler must not know. A vote alone orders no memory:
// by PTX's model the other lanes' reads come before what this lane does next only because of the barrier.
__device__ __forceinline__ uint32 nothing_until_loaded(uint32 loaded, int lane) {
  uint32 zero;
  asm volatile("shr.u32 %0, %1, %2;" : "=r"(zero) : "r"(loaded), "r"(lane < 0 ? 31 : 32));
  zero = __ballot_sync(~0u, zero);
  __syncwarp();
  return zero;
}
// A flag in global memory that a thread block of the same grid waits for.
__device__ __forceinline__ void raise_flag(int *flag) {
  __threadfence();
  asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
}
__device__ __forceinline__ void wait_for_flag(int *flag) {
  int there;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(flag) : "memory");
  while (!there);
}
#endif

}  // namespace crelle
