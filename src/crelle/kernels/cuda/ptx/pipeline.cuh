// A warp's own load pipeline: STAGES pieces of memory in flight at any time, in shared memory, without a register. They
// are taken TOGETHER at a time, then as many are issued.
//
// On Hopper the bulk copy engine loads a piece (one lane issues, an mbarrier counts the bytes); before it, each lane
// issues cp.async of 16 bytes. A piece is up to two runs of bytes, each a multiple of 16.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

__device__ __forceinline__ uint32 shared_address(const void *p) {
  return static_cast<uint32>(__cvta_generic_to_shared(p));
}

#if __CUDA_ARCH__ >= 900
// True in one lane of the warp, in a way that lets the compiler keep addresses in uniform registers.
__device__ __forceinline__ bool elected() {
  uint32 yes;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(yes));
  return yes;
}

template <int STAGES, int BYTES, int TOGETHER = 1>
struct Pipeline {
  static_assert(TOGETHER <= STAGES, "the queue holds what is taken at a time");
  static constexpr int SIZE = STAGES * (BYTES + 8) + (STAGES & 1) * 8;  // barriers, then pieces; a multiple of 16

  char *base;
  int lane;

  __device__ Pipeline(char *shared, int lane) : base(shared), lane(lane) {
    if (elected()) {
#pragma unroll
      for (int s = 0; s < STAGES; s++) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier(s)));
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
  }

  __device__ __forceinline__ uint32 barrier(int s) const { return shared_address(base) + 8 * s; }
  __device__ __forceinline__ const char *piece(int s) const { return base + STAGES * 8 + (STAGES & 1) * 8 + s * BYTES; }

  __device__ __forceinline__ void copy(int s, int at, const void *from, int bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(piece(s)) + at),
                 "l"(from), "r"(bytes), "r"(barrier(s))
                 : "memory");
  }

  // Ask for a piece: `first` bytes of a, then `second` bytes of b.
  __device__ __forceinline__ void issue_load(int s, const void *a, int first, const void *b, int second) {
    if (elected()) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier(s)), "r"(first + second)
                   : "memory");
      copy(s, 0, a, first);
      copy(s, first, b, second);
    }
  }
  // `first` bytes of a, and at `at` in the piece `second` bytes of b, which may be none.
  __device__ __forceinline__ void issue_load(int s, const void *a, int first, int at, const void *b, int second) {
    if (elected()) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier(s)), "r"(first + second)
                   : "memory");
      copy(s, 0, a, first);
      if (second > 0) copy(s, at, b, second);
    }
  }
  // A piece that is one run.
  __device__ __forceinline__ void issue_load(int s, const void *a, int bytes) {
    if (elected()) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier(s)), "r"(bytes) : "memory");
      copy(s, 0, a, bytes);
    }
  }
  __device__ __forceinline__ void issue_nothing() {}

  // Wait for the piece of a stage; `phase` counts how often that stage has been used before.
  __device__ __forceinline__ const char *wait(int s, int phase) const {
    asm volatile(
        "{\n .reg .pred done;\n again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n @!done bra again;\n}" ::
            "r"(barrier(s)),
        "r"(phase & 1)
        : "memory");
    return piece(s);
  }
};
#else
template <int STAGES, int BYTES, int TOGETHER = 1>
struct Pipeline {
  static_assert(TOGETHER <= STAGES, "the queue holds what is taken at a time");
  static constexpr int SIZE = STAGES * (BYTES + 8) + (STAGES & 1) * 8;

  char *base;
  int lane;

  __device__ Pipeline(char *shared, int lane) : base(shared), lane(lane) {}

  __device__ __forceinline__ void copy(char *to, const void *from, int bytes) {
    for (int i = lane * 16; i < bytes; i += 512)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + i)),
                   "l"(static_cast<const char *>(from) + i)
                   : "memory");
  }
  __device__ __forceinline__ void issue_load(int s, const void *a, int first, const void *b, int second) {
    copy(base + s * BYTES, a, first);
    copy(base + s * BYTES + first, b, second);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  __device__ __forceinline__ void issue_load(int s, const void *a, int bytes) {
    copy(base + s * BYTES, a, bytes);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  __device__ __forceinline__ void issue_nothing() { asm volatile("cp.async.commit_group;" ::: "memory"); }

  __device__ __forceinline__ const char *wait(int s, int) const {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - TOGETHER) : "memory");  // in order: all that are taken
    __syncwarp();
    return base + s * BYTES;
  }
};
#endif

}  // namespace crelle
