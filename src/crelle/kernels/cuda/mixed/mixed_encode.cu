// f(x) [M, K] as mixed_gemv.cu takes it: fp16, in the order of the weight (mixed_layout.py), with sums of groups.
//
// A token is scaled by a power of two, so that its largest value is between 2^11 and 2^12: then no sum of a group
// overflows, and the factors 4^-i of the places, down to 2^-8, lose no bit of any value down to 2^-18 of the largest. A
// NaN or an infinity makes the factor that undoes this a NaN, so that no output of the token is finite.
//
// Every thread block applies `f` to the whole row, keeps it in shared memory and writes its part of the places.
#include "step/prologue.cuh"

namespace crelle {

// x [tokens, K] (gated: [tokens, 2K], gate then up); norm, shift [K] may be null; perm [orders, 256 U2 + 128 U4]; to
// [orders, rows, x_bytes]: 256 U2 + 128 U4 values f16; for each 2-bit group, [U2][set][t][SUBS], s = -sum / 2 as four
// f16, s 4^-set and s, each as a value and what it lacks; then f32: the sums of every 64 4-bit inputs, 16 bytes
// aligned, and the factor of the outputs, 0, 0, 0. Rows behind the tokens are zeros. Shared: K values. Grid
// (ceil(places / 2 / (32 WARPS)), rows, orders).
template <Prologue OP, int WARPS, bool ALIGNED, int SUBS, typename T>
__global__ void __launch_bounds__(WARPS * 32)
    mixed_encode(const T *x, const T *__restrict__ norm, const T *__restrict__ shift, const int2 *__restrict__ perm,
                 char *to, int tokens, int K, int U2, int U4, float eps) {
  constexpr bool NORM = OP == RMS_NORM || OP == LAYER_NORM;
  extern __shared__ __align__(16) char shared[];
  __shared__ float2 part[1][WARPS];
  __shared__ float tops[WARPS];
  T *const row = reinterpret_cast<T *>(shared);
  const int values = U2 * 512 + U4 * 256, pairs = values / 4, pair_index = blockIdx.x * WARPS * 32 + threadIdx.x;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int fours = values + U2 * 128 * SUBS, x_bytes = fours + (U4 + 1) / 2 * 16 + 16;
  to += (size_t)(blockIdx.z * gridDim.y + blockIdx.y) * x_bytes;
  perm += (size_t)blockIdx.z * pairs;
  x += (size_t)blockIdx.y * K * (is_gated(OP) ? 2 : 1);
  const bool there = (int)blockIdx.y < tokens;
  const int2 from = pair_index < pairs ? perm[pair_index] : make_int2(-1, -1);
  launch_dependents();
  grid_dependency_wait();

  float top = 0;
  if (there) {
    float sum[1] = {}, squares[1] = {};
#pragma unroll 2
    for (int k = threadIdx.x * 8; k < K; k += WARPS * 256) {
      uint4 v = eight<ALIGNED>(x, k, K);
      float f[8];
      if constexpr (NORM) {
        open<T>(f, v);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[0] += f[i], squares[0] = fmaf(f[i], f[i], squares[0]);
      } else {
        v = applied<OP, ALIGNED>(v, x, k, K, Norm{}, norm, shift);
        open<T>(f, v);
#pragma unroll
        for (int i = 0; i < 8; i++) top = max_nan(top, fabsf(f[i]));
      }
      *reinterpret_cast<uint4 *>(row + k) = v;
    }
    if constexpr (NORM) {
      block_sums(part, sum, squares);
      const Norm n = norm_of<OP>(make_float2(sum[0], squares[0]), K, eps);
#pragma unroll 2
      for (int k = threadIdx.x * 8; k < K; k += WARPS * 256) {
        uint4 *const at = reinterpret_cast<uint4 *>(row + k);
        float f[8];
        *at = applied<OP, ALIGNED>(*at, x, k, K, n, norm, shift);
        open<T>(f, *at);
#pragma unroll
        for (int i = 0; i < 8; i++) top = max_nan(top, fabsf(f[i]));
      }
    }
  }
#pragma unroll
  for (int i = 16; i; i /= 2) top = max_nan(top, __shfl_xor_sync(~0u, top, i));
  if (lane == 0) tops[warp] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; w++) top = max_nan(top, tops[w]);
  const bool finite = top <= 3.4028234e38f;
  const int exponent = 11 - max((int)(__float_as_uint(top) >> 23) - 127, -100);
  const float scale = !finite || top == 0 ? 1.0f : __uint_as_float((127 + exponent) << 23);
  const auto value = [&](int k) { return there && k >= 0 ? to_float(row[k]) * scale : 0.0f; };

  if (pair_index < pairs) {
    const float low = value(from.x), high = value(from.y);
    const bool two = pair_index < U2 * 128;
    const int i = pair_index % 8, bits = two ? 2 * (i < 5 ? i : i - 5) : 4 * (i & 1);
    const float factor = __uint_as_float((127 - bits) << 23);
    reinterpret_cast<uint32 *>(to)[pair_index] = pair<half>(low * factor, high * factor);
    float sum = low + high;
    if (two) {  // whole warps
      constexpr int OVER = 8 / SUBS;
#pragma unroll
      for (int j = 1; j < OVER; j *= 2) sum += __shfl_xor_sync(~0u, sum, j);
      const int set = pair_index / 32 % 4;
      if (i % OVER == 0) {
        sum *= -0.5f;
        const float head = to_float(from_float<half>(sum)), small = __uint_as_float((127 - 2 * set) << 23);
        reinterpret_cast<uint2 *>(to + values)[pair_index / OVER] =
            make_uint2(pair<half>(head * small, (sum - head) * small), pair<half>(head, sum - head));
      }
    } else {
#pragma unroll
      for (int j = 1; j < 32; j *= 2) sum += __shfl_xor_sync(~0u, sum, j);
      if (lane == 0) reinterpret_cast<float *>(to + fours)[pair_index / 32 - U2 * 4] = sum * 0x1p-24f;
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (U4 & 1) reinterpret_cast<float2 *>(to + fours)[U4] = make_float2(0, 0);  // padding
    const float undo = finite ? 1 / scale : __uint_as_float(0x7fc00000u);
    *reinterpret_cast<float4 *>(to + x_bytes - 16) = make_float4(undo, 0, 0, 0);
  }
}

}  // namespace crelle
