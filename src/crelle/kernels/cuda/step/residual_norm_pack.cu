// Fused residual add, norm or activation, and packing of x for the next GEMM, in one launch.
//
//   sum = x + addend          h = f(sum)          xs = h, laid out as `pack_x` does (gemm.cu), or rows as they are
//
// A thread block takes `part` inputs of a row, all of them where f is a norm, which needs their sum: 16 bytes at a time
// as they lie, V times for a thread, then through shared memory, and 16 bytes at a time as they shall lie. A row's
// values have one order of sums, whatever the number of rows.
//
// It is all waiting: for the kernel before, for x, for the other warps' sums. What a norm multiplies with is loaded
// before any of that.
#include "ptx/tensorcore.cuh"
#include "mainloop/x_layout.cuh"

namespace crelle {

// x [M, K] (gated: [M, 2K], gate then up), K a multiple of 8; more [M, K] may be null, and so may sum, where nothing
// reads it; norm, shift [K] may be null; perm [orders, places]: which input stands where, -1 for none, or null; then
// part is 256 blocks. xs [orders, 4 blocks, M', 64], M' = M rounded up to 8, or where there is a `pitch` [M, pitch], in
// order and padded with zeros; order: as of x_layout.cuh. Grid (ceil(256 blocks / part), M', orders), part at most 256
// WARPS V; the first row's thread blocks also clear `semaphores`. Shared: 2 part bytes.
template <Prologue OP, int WARPS, int V, typename T>
__global__ void __launch_bounds__(WARPS * 32)
    add_norm_pack(const T *x, const T *addend, const T *__restrict__ norm, const T *__restrict__ shift,
                  const int *__restrict__ perm, T *sum, uint4 *xs, int *semaphores, int count, int M, int K, int blocks,
                  int part, int pitch, int order, int places, float eps) {
  constexpr bool NORM = OP == RMS_NORM || OP == LAYER_NORM;
  constexpr int THREADS = WARPS * 32;
  extern __shared__ __align__(128) char shared[];
  T *const mine = reinterpret_cast<T *>(shared);
  const int token = blockIdx.y, padded = gridDim.y, first = blockIdx.x * part;
  const int here = min(part, 256 * blocks - first);  // inputs of this thread block
  const size_t row = (size_t)token * K;
  const bool there = token < M;
  if (perm) perm += (size_t)blockIdx.z * places;
  xs += (size_t)blockIdx.z * blocks * padded * 32;
  if (blockIdx.z > 0) sum = nullptr;
  launch_dependents();
  uint4 weight[NORM ? V : 1], shifts[NORM ? V : 1], v[V];
  if constexpr (NORM) {
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int k = (threadIdx.x + i * THREADS) * 8;
      weight[i] = shifts[i] = make_uint4(0, 0, 0, 0);
      if (norm && k < K) weight[i] = *reinterpret_cast<const uint4 *>(norm + k);
      if (shift && k < K) shifts[i] = *reinterpret_cast<const uint4 *>(shift + k);
    }
  }
  // Which inputs stand where thread i of a row writes; all loads at once, and where there is room before all else.
  constexpr bool EARLY = V <= 3;
  int inputs[EARLY ? V : 1][8];
  const auto find = [&](int (&to)[8], int i) {
#pragma unroll
    for (int p = 0; p < 8; p++) {
      const int at = pitch ? i * 8 + p : i / 16 * 128 + input_at(i % 16, p, order, i / 16);
      const int k = __ldg(perm + min(at, places - 1));
      to[p] = at < places ? k : -1;
    }
  };
  const auto taken = [&](int k) { return k < 0 ? from_float<T>(0) : mine[max(k, 0)]; };
  if (EARLY && perm) {
#pragma unroll
    for (int n = 0; n < (EARLY ? V : 1); n++) find(inputs[n], threadIdx.x + n * THREADS);
  }
  grid_dependency_wait_late(K);
  if (token == 0)
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) semaphores[i] = 0;

  uint4 second[V];  // what is added, or multiplied with
#pragma unroll
  for (int i = 0; i < V; i++) {
    const int k = first + (threadIdx.x + i * THREADS) * 8;
    v[i] = second[i] = make_uint4(0, 0, 0, 0);
    if (k >= K || !there) continue;
    v[i] = *reinterpret_cast<const uint4 *>(x + (is_gated(OP) ? 2 * row : row) + k);
    if (is_gated(OP)) second[i] = *reinterpret_cast<const uint4 *>(x + 2 * row + K + k);
    if (!is_gated(OP) && addend) second[i] = *reinterpret_cast<const uint4 *>(addend + row + k);
  }
  float total = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < V; i++) {
    const int c = (threadIdx.x + i * THREADS) * 8, k = first + c;
    float f[8], g[8];
    if (is_gated(OP) || addend) {
      open<T>(f, v[i]), open<T>(g, second[i]);
#pragma unroll
      for (int e = 0; e < 8; e++)
        f[e] = OP == SILU_MUL ? __fdividef(f[e], 1 + __expf(-f[e])) * g[e]
               : is_gated(OP) ? gelu_of<OP>(f[e]) * g[e]
                              : __fadd_rn(f[e], g[e]);
      v[i] = closed<T>(f);
      if (sum && k < K && there) *reinterpret_cast<uint4 *>(sum + row + k) = v[i];
    }
    if (NORM) {
      open<T>(f, v[i]);
#pragma unroll
      for (int e = 0; e < 8; e++) total += f[e], squares = fmaf(f[e], f[e], squares);
    }
    if (OP == RELU) {
      open<T>(f, v[i]);
#pragma unroll
      for (int e = 0; e < 8; e++) f[e] = relu(f[e]);
      v[i] = closed<T>(f);
    }
    if constexpr (is_gelu(OP) && !is_gated(OP)) {
      open<T>(f, v[i]);
#pragma unroll
      for (int e = 0; e < 8; e++) f[e] = gelu_of<OP>(f[e]);
      v[i] = closed<T>(f);
    }
    if (!NORM && c < here) *reinterpret_cast<uint4 *>(mine + c) = v[i];
  }

  if constexpr (NORM) {
    __shared__ float2 sums[WARPS];
#pragma unroll
    for (int i = 16; i; i /= 2) {
      total += __shfl_xor_sync(~0u, total, i), squares += __shfl_xor_sync(~0u, squares, i);
    }
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = make_float2(total, squares);
    __syncthreads();
    total = squares = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += sums[w].x, squares += sums[w].y;
    const float mean = OP == LAYER_NORM ? total / K : 0, scale = rsqrtf(relu(squares / K - mean * mean) + eps);
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int c = (threadIdx.x + i * THREADS) * 8;
      if (c >= here) break;
      float f[8], g[8];
      open<T>(f, v[i]), open<T>(g, weight[i]);
#pragma unroll
      for (int e = 0; e < 8; e++) {
        f[e] = (f[e] - mean) * scale;
        if (norm) f[e] = (OP == RMS_NORM ? to_float(from_float<T>(f[e])) : f[e]) * g[e];
      }
      if (shift) {
        open<T>(g, shifts[i]);
#pragma unroll
        for (int e = 0; e < 8; e++) f[e] += g[e];
      }
      *reinterpret_cast<uint4 *>(mine + c) = there && c < K ? closed<T>(f) : make_uint4(0, 0, 0, 0);
    }
  }
  __syncthreads();

#pragma unroll
  for (int n = 0; n < V; n++) {
    const int i = threadIdx.x + n * THREADS;
    if (i >= here / 8) break;
    if (!EARLY && perm) find(inputs[0], i);
    T out[8];
    if (pitch) {
      if (!there || first + i * 8 >= pitch) break;
#pragma unroll
      for (int p = 0; p < 8; p++) out[p] = taken(perm ? inputs[EARLY ? n : 0][p] : i * 8 + p);
      xs[((size_t)token * pitch + first) / 8 + i] = *reinterpret_cast<const uint4 *>(out);
    } else {
      const int u = i % 16, half = i / 16;
#pragma unroll
      for (int p = 0; p < 8; p++)
        out[p] = taken(perm ? inputs[EARLY ? n : 0][p] : half * 128 + input_at(u, p, order, half));
      xs[((size_t)(first / 64 + half * 2 + u / 8) * padded + token) * 8 + (u ^ token) % 8] =
          *reinterpret_cast<const uint4 *>(out);
    }
  }
}

}  // namespace crelle
