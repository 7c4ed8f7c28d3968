// A warp's load pipeline whose stages are COUNT runs of the same length, by cp.async or by the bulk copy engine.
//
// refill(stage, from, there, seen, stride, last): asks for run i at from + min(i, last) * stride. The address of what
// is loaded depends on `seen`, an OR of all that was read from the stage that it overwrites
// (docs/notes/cuda-kernels.md).
#pragma once
#include "ptx/copies.cuh"
#include "ptx/shared_loads.cuh"
#include "ptx/tma.cuh"

namespace crelle {

template <int STAGES, int BYTES, int COUNT = 1>
struct CopiedRuns {
  char *base;
  int lane, positive;  // which the compiler must not know

  __device__ CopiedRuns(char *base, uint32, int lane, int positive) : base(base), lane(lane), positive(positive) {}
  __device__ __forceinline__ void refill(int stage, const char *from, bool there, uint32 seen, size_t stride = 0,
                                         int last = COUNT - 1) {
    __syncwarp();
    char *const to = base + stage * (COUNT * BYTES) + nothing(seen, positive);
    if (there) {
#pragma unroll
      for (int i = 0; i < COUNT; i++) copy_run(to + i * BYTES, from + min(i, last) * stride, BYTES, lane);
    }
    commit_copies();
  }
  __device__ __forceinline__ const char *wait(int stage, int) const {
    wait_for_copies<STAGES - 1>();
    __syncwarp();
    return base + stage * (COUNT * BYTES);
  }
};

#if __CUDA_ARCH__ == 900
template <int STAGES, int BYTES, int COUNT = 1>
struct BulkRuns {
  char *base;
  uint32 barriers;
  int positive;

  __device__ BulkRuns(char *base, uint32 barriers, int, int positive)
      : base(base), barriers(barriers), positive(positive) {
    if (elected()) {
#pragma unroll
      for (int s = 0; s < STAGES; s++) init_barrier(barriers + 8 * s, 1);
      fence_barriers();
    }
    __syncwarp();
  }
  __device__ __forceinline__ void refill(int stage, const char *from, bool there, uint32 seen, size_t stride = 0,
                                         int last = COUNT - 1) {
    const uint32 barrier = barriers + 8 * stage + nothing_until_loaded(seen, positive);
    if (there && elected()) {
      const uint32 to = shared_address(base) + stage * (COUNT * BYTES);
      arrive_expecting(barrier, COUNT * BYTES);
#pragma unroll
      for (int i = 0; i < COUNT; i++) copy_bulk(to + i * BYTES, from + min(i, last) * stride, BYTES, barrier);
    }
  }
  __device__ __forceinline__ const char *wait(int stage, int phase) const {
    wait_barrier(barriers + 8 * stage, phase);
    return base + stage * (COUNT * BYTES);
  }
};
#endif

}  // namespace crelle
