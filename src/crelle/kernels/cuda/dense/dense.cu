// y [M, N] = f(x) [M, K] W.T + bias + residual for up to 4 tokens and plain 16-bit weights [N, K], as fast as W is
// read.
//
// A thread block takes 16 rows of W, and its warps share the inputs. A lane reads 16 bytes of row lane / 4 and of the
// row 8 below: four lanes read 64 bytes in a row, 32 inputs. That is what the tensor core instruction takes in two
// steps, if x is read in the same order: which input is called k does not matter as long as both agree. Tokens are the
// instruction's columns, so that four cost what one costs. DEPTH such reads are under way, in registers, from before
// the previous kernel is done until the end.
//
// `f` is an operation of the model (`Prologue`, as in encode.cu). Every thread block applies it to all of x, which
// costs less than a launch for one token; `apply` is that launch, for more work than that.
#include "ptx/global_loads.cuh"
#include "step/prologue.cuh"

namespace crelle {

// 16 bytes that are read only once, or what `to` was.
__device__ __forceinline__ void take_if(bool there, uint4 &to, const void *from) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
      "@p ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
      : "l"(from), "r"((uint32)there));
}

// x [M, K] (gated: [M, 2K], gate then up); norm, shift [K], bias [N], residual [M, N] may be null; y [M, N], which
// may be the residual; ahead: so many values of a row are prefetched. Shared: WARPS * M *
// (32 share + 32) values, share: the steps of 32 inputs that a warp takes.
template <Prologue OP, int M, int WARPS, int DEPTH, int OCCUPANCY, bool ALIGNED, typename T, typename Y>
__global__ void __launch_bounds__(WARPS * 32, OCCUPANCY / WARPS)
    dense_gemv(const T *x, const T *__restrict__ weight, const T *__restrict__ norm, const T *__restrict__ shift,
               const T *__restrict__ bias, const T *residual, Y *y, int N, int K, int share, float eps) {
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane / 4, t = lane % 4;
  const int tile = blockIdx.x * 16, begin = warp * share * 32, stride = share * 32 + 32;
  const int steps = min(share, max(0, (K - begin + 31) / 32));
  const int have = min(steps, max(0, (K - begin - 8 * t + 31) / 32));  // steps in which this lane's inputs exist
  const T *low = weight + (size_t)min(tile + g, N - 1) * K, *high = weight + (size_t)min(tile + g + 8, N - 1) * K;
  T *mine = reinterpret_cast<T *>(shared) + warp * M * stride;
  launch_dependents();

  uint4 a[DEPTH][2] = {};
  const auto issue_load = [&](uint4(&slot)[2], int step) {
    const int k = begin + 8 * t + step * 32;
    if constexpr (ALIGNED) {
      take_if(step < have, slot[0], low + k), take_if(step < have, slot[1], high + k);
    } else if (step < have) {
      slot[0] = eight<false>(low, k, K), slot[1] = eight<false>(high, k, K);
    }
  };
#pragma unroll
  for (int s = 0; s < DEPTH; s++) issue_load(a[s], s);
  if (OP == RMS_NORM || OP == LAYER_NORM) {  // what x waits for else: a line that no kernel has read for a step
    for (int c = lane * 64; norm && c < steps * 32; c += 2048) prefetch_line(norm + begin + c);
    for (int c = lane * 64; shift && c < steps * 32; c += 2048) prefetch_line(shift + begin + c);
  }
  grid_dependency_wait_late(K);

  // --- f(x), as far as this warp needs it
  float extra = 0;  // what the thread adds to the value that it will write
  const int n = tile + threadIdx.x % 16, token = threadIdx.x / 16;
  const bool writes = token < M && n < N;
  if (writes && bias) extra = to_float(bias[n]);
  if (writes && residual) extra += to_float(residual[(size_t)token * N + n]);
  constexpr bool NORM = OP == RMS_NORM || OP == LAYER_NORM;
  __shared__ float2 sums[M][WARPS];
  constexpr int WIDE = is_gated(OP) ? 2 : 1;
  float sum[M] = {}, squares[M] = {};
#pragma unroll 2
  for (int c = lane * 8; c < steps * 32; c += 256) {
    uint4 v[M];
#pragma unroll
    for (int m = 0; m < M; m++) v[m] = eight<ALIGNED>(x + (size_t)m * K * WIDE, begin + c, K);
#pragma unroll
    for (int m = 0; m < M; m++) {
      if constexpr (NORM) {
        float f[8];
        open<T>(f, v[m]);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[m] += f[i], squares[m] = fmaf(f[i], f[i], squares[m]);
      } else {
        v[m] = applied<OP, ALIGNED>(v[m], x + (size_t)m * K * WIDE, begin + c, K, Norm{}, norm, shift);
      }
      *reinterpret_cast<uint4 *>(mine + m * stride + c) = v[m];
    }
  }
  if constexpr (NORM) {
    block_sums(sums, sum, squares);
#pragma unroll 2
    for (int c = lane * 8; c < steps * 32; c += 256) {
#pragma unroll
      for (int m = 0; m < M; m++) {
        uint4 *at = reinterpret_cast<uint4 *>(mine + m * stride + c);
        const Norm norms = norm_of<OP>(make_float2(sum[m], squares[m]), K, eps);
        *at = applied<OP, ALIGNED>(*at, x, begin + c, K, norms, norm, shift);
      }
    }
  }
  __syncwarp();

  // --- the product
  float d[2][4] = {};
#pragma unroll 1
  for (int i = 0; i < steps; i += DEPTH) {
#pragma unroll
    for (int j = 0; j < DEPTH; j++) {
      if (i + j >= steps) break;
      uint4 b = make_uint4(0, 0, 0, 0);
      if (g < M) b = *reinterpret_cast<const uint4 *>(mine + g * stride + (i + j) * 32 + 8 * t);
      multiply<T>(d[0], a[j][0].x, a[j][1].x, a[j][0].y, a[j][1].y, b.x, b.y);
      multiply<T>(d[1], a[j][0].z, a[j][1].z, a[j][0].w, a[j][1].w, b.z, b.w);
      issue_load(a[j], i + j + DEPTH);
    }
  }

  __shared__ float partial[WARPS][M][16];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (2 * t + j % 2 < M) partial[warp][2 * t + j % 2][g + j / 2 * 8] = d[0][j] + d[1][j];
  }
  __syncthreads();
  if (writes) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += partial[w][token][threadIdx.x % 16];
    y[(size_t)token * N + n] = from_float<Y>(sum + extra);
  }
}

// y [M, K] = f(x): grid (ceil(K / (8 * 32 * WARPS)), M); every thread block repeats the sums that norms need.
template <Prologue OP, int WARPS, bool ALIGNED, typename T>
__global__ void __launch_bounds__(WARPS * 32)
    apply(const T *x, const T *__restrict__ norm, const T *__restrict__ shift, T *y, int K, float eps) {
  const T *row = x + (size_t)blockIdx.y * K * (is_gated(OP) ? 2 : 1);
  const int k = (blockIdx.x * WARPS * 32 + threadIdx.x) * 8;
  y += (size_t)blockIdx.y * K;
  launch_dependents();
  grid_dependency_wait();

  const uint4 v = eight<ALIGNED>(row, k, K);
  Norm norms{};
  if constexpr (OP == RMS_NORM || OP == LAYER_NORM) {
    __shared__ float2 part[1][WARPS];
    float sum[1] = {}, squares[1] = {};
    for (int c = threadIdx.x * 8; c < K; c += WARPS * 256) {
      float f[8];
      open<T>(f, eight<ALIGNED>(row, c, K));
#pragma unroll
      for (int i = 0; i < 8; i++) sum[0] += f[i], squares[0] = fmaf(f[i], f[i], squares[0]);
    }
    block_sums(part, sum, squares);
    norms = norm_of<OP>(make_float2(sum[0], squares[0]), K, eps);
  }
  if (k >= K) return;
  const uint4 result = applied<OP, ALIGNED>(v, row, k, K, norms, norm, shift);
  if constexpr (ALIGNED) {
    *reinterpret_cast<uint4 *>(y + k) = result;
  } else {
    const T *from = reinterpret_cast<const T *>(&result);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (k + i < K) y[k + i] = from[i];
    }
  }
}

}  // namespace crelle
