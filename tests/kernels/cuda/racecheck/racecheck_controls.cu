// Small kernels whose races are known, to tell what compute-sanitizer's racecheck sees: it has to report the first two,
// and what it reports of the others, which follow PTX's examples, it would report of any kernel with their pattern.
#include "ptx/copies.cuh"
#include "ptx/tma.cuh"

namespace crelle {

// Two warps read what the other wrote, without a barrier: a race.
__global__ void control_race(int *out) {
  __shared__ int shared[64];
  shared[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = shared[threadIdx.x ^ 32];
}
// The same with one.
__global__ void control_barrier(int *out) {
  __shared__ int shared[64];
  shared[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = shared[threadIdx.x ^ 32];
}

// TEAMS of two warps share `rounds` and meet at barriers of their own; then all threads write, meet, and read what
// another team wrote.
template <int TEAMS>
__global__ void control_teams(int *out, int rounds) {
  __shared__ int shared[64 * TEAMS];
  const int team = threadIdx.x / 64, mine = rounds * (team + 1) / TEAMS - rounds * team / TEAMS;
  int sum = 0;
  for (int i = 0; i < mine; i++) {
    shared[threadIdx.x] = threadIdx.x;
    team_sync<64, TEAMS>(1 + team);
    sum += shared[threadIdx.x ^ 32];
    team_sync<64, TEAMS>(1 + team);
  }
  __syncthreads();
  shared[threadIdx.x] = sum;
  __syncthreads();
  out[threadIdx.x] = shared[(threadIdx.x + 64) % (64 * TEAMS)];
}

#if __CUDA_ARCH__ == 900
// A producer warp loads pieces of 128 ints into a ring of two stages, a consumer warp adds them up. EARLY: a stage is
// released before it is read, which is a race. BOX: by the tensor copy instead of the bulk copy.
template <bool EARLY, bool BOX>
__global__ void control_ring(const int *from, const __grid_constant__ TensorMap map, int *out, int pieces) {
  __shared__ __align__(1024) int stage[2][128];
  __shared__ __align__(8) unsigned long long barriers[4];
  const uint32 full = shared_address(barriers), empty = full + 16;
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; s++) init_barrier(full + 8 * s, 1), init_barrier(empty + 8 * s, 1);
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x == 32) {
    for (int i = 0; i < pieces; i++) {
      const int s = i % 2;
      wait_barrier(empty + 8 * s, i / 2 % 2 ^ 1);
      arrive_expecting(full + 8 * s, 512);
      if constexpr (BOX)
        copy_box(shared_address(stage[s]), map, 0, 4 * i, full + 8 * s);
      else
        copy_bulk(shared_address(stage[s]), from + 128 * i, 512, full + 8 * s);
    }
  } else if (threadIdx.x < 32) {
    int sum = 0;
    for (int i = 0; i < pieces; i++) {
      const int s = i % 2;
      wait_barrier(full + 8 * s, i / 2 % 2);
      __syncwarp();
      if (EARLY && threadIdx.x == 0) arrive(empty + 8 * s);
      for (int j = threadIdx.x; j < 128; j += 32) sum += stage[s][j];
      __syncwarp();
      if (!EARLY && threadIdx.x == 0) arrive(empty + 8 * s);
    }
    out[threadIdx.x] = sum;
  }
}

// Two thread blocks of a cluster store a value for each thread into the other's shared memory, which waits for them.
__global__ void __cluster_dims__(2, 1, 1) control_store(float4 *out) {
  __shared__ __align__(16) float4 received[128];
  __shared__ __align__(8) unsigned long long barrier;
  const uint32 sent = shared_address(&barrier);
  const int rank = blockIdx.x % 2;
  if (threadIdx.x == 0) {
    init_barrier(sent, 1);
    fence_barriers();
    arrive_expecting(sent, sizeof(received));
  }
  cluster_sync();
  dsmem_store(shared_address(received + threadIdx.x), make_float4(rank, threadIdx.x, 0, 0), sent, rank ^ 1);
  wait_for_stores(sent);
  out[blockIdx.x * 128 + threadIdx.x] = received[threadIdx.x];
  cluster_sync();
}
#endif

}  // namespace crelle
