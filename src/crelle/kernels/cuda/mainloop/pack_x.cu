// x packed for the matrix instructions of gemm.cu and mixed_gemm.cu.
#include "ptx/tensorcore.cuh"
#include "mainloop/x_layout.cuh"

namespace crelle {

// x [M, K] in the order in which the matrix instructions take it, and ready to be copied to shared memory as it is:
//   xs [4 blocks, M', 64]   64 inputs of a token: 128 bytes, eight units of 16; M' = M rounded up to 8
// Unit u = 0 ... 15 of half a block (x_layout.cuh) stands at place (u ^ token) % 8 of its 128 bytes, the hardware's
// swizzle. perm [orders, places], a multiple of 8: which input stands where, -1 for none, or null; none stands behind
// them. Half a block of 32 tokens comes to shared memory as it is, then a thread makes two units; grid (2 blocks,
// ceil(M' / 32), orders), 256 threads. The first of them also clear `semaphores`.
template <typename X>
__global__ void __launch_bounds__(256) pack_x(const X *__restrict__ x, const int *__restrict__ perm, uint4 *xs,
                                              int *semaphores, int count, int M, int K, int order, int places) {
  constexpr int ROW = 128 + 8;  // of shared memory: tokens begin in different banks
  __shared__ __align__(16) X rows[32 * ROW];
  const int u = threadIdx.x % 16, padded = (M + 7) & ~7;
  const bool pieces = !perm && K % 8 == 0 && (reinterpret_cast<size_t>(x) & 15) == 0;
  if (perm) perm += (size_t)blockIdx.z * places;
  xs += (size_t)blockIdx.z * gridDim.x * padded * 16;
  launch_dependents();
  grid_dependency_wait();
  if (blockIdx.y == 0)
    for (int i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) semaphores[i] = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = threadIdx.x / 16 + 16 * i, token = blockIdx.y * 32 + row, at = blockIdx.x * 128 + u * 8;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (pieces) {
      if (token < M && at < K) v = __ldg(reinterpret_cast<const uint4 *>(x + (size_t)token * K + at));
    } else {
      X each[8];
      int from[8];
#pragma unroll
      for (int j = 0; j < 8; j++) from[j] = at + j < K ? at + j : -1;
      if (perm) {
        const int4 *const order = reinterpret_cast<const int4 *>(perm + min(at, places - 8));
        const int4 a = __ldg(order), b = __ldg(order + 1);
        from[0] = a.x, from[1] = a.y, from[2] = a.z, from[3] = a.w;
        from[4] = b.x, from[5] = b.y, from[6] = b.z, from[7] = b.w;
      }
      const X *const mine = x + (size_t)min(token, M - 1) * K;
#pragma unroll
      for (int j = 0; j < 8; j++) each[j] = mine[max(from[j], 0)];  // all at once, none behind a branch
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (from[j] < 0 || token >= M || (perm && at >= places)) each[j] = from_float<X>(0);
      v = *reinterpret_cast<const uint4 *>(each);
    }
    *reinterpret_cast<uint4 *>(rows + row * ROW + u * 8) = v;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = threadIdx.x / 16 + 16 * i, token = blockIdx.y * 32 + row;
    if (token >= padded) return;
    const X *const from = rows + row * ROW;
    X v[8];
#pragma unroll
    for (int p = 0; p < 8; p++) v[p] = from[input_at(u, p, order, blockIdx.x)];
    xs[((size_t)(blockIdx.x * 2 + u / 8) * padded + token) * 8 + (u ^ token) % 8] = *reinterpret_cast<const uint4 *>(v);
  }
}

}  // namespace crelle
