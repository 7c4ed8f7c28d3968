// Scales of mixed 2/4-bit matrices: the search of 2-bit grids, and the descent over their second-order scales
// (crelle.quantizers.solvers.mixed_solver, which is the reference).
#include "solver/sweep_block.cuh"

namespace crelle {

constexpr float TINY = 0x1p-24f;  // the smallest positive f16

// The 2-bit grid  scale (0 … 3 - zero)  with the least weighted error for each G columns of each row; zero is 0.5, 1,
// 1.5 or 2, the scale one of `tries` shares of the one that covers all weights. weight, importance [N, K] (importance
// 0: does not count); scale, zero [N, C]. A thread has a group of a row. Grid: ceil(N C / 128).
template <int G>
__global__ void __launch_bounds__(128)
    search_grids(const float *__restrict__ weight, const float *__restrict__ importance,
                 const float *__restrict__ shrink, float *scale, float *zero, int tries, int N, int K, int C) {
  const size_t i = (size_t)blockIdx.x * 128 + threadIdx.x;
  if (i >= (size_t)N * C) return;
  const size_t row = i / C;
  const int begin = i % C * G, end = min(begin + G, K);
  float w[G], h[G], low = 3.4e38f, high = -3.4e38f;
#pragma unroll
  for (int k = 0; k < G; k++) {
    const bool real = begin + k < end;
    const size_t at = row * K + (real ? begin + k : begin);
    w[k] = weight[at], h[k] = real ? importance[at] : 0.0f;
    if (h[k] > 0) low = fminf(low, w[k]), high = fmaxf(high, w[k]);
  }
  float best = 3.4e38f, found_scale = TINY, found_zero = 1.5f;
  for (int z = 1; z <= 4; z++) {
    const float offset = 0.5f * z;
    const float reach = fmaxf(fmaxf(high / (3 - offset), -low / offset), TINY);
    for (int t = 0; t < tries; t++) {
      const float a = fmaxf(reach * shrink[t], TINY), inverse = 1.0f / a;
      float error = 0;
#pragma unroll
      for (int k = 0; k < G; k++) {
        const float code = rintf(fminf(fmaxf(fmaf(w[k], inverse, offset), 0.0f), 3.0f));
        const float off = fmaf(-a, code - offset, w[k]);
        error = fmaf(h[k] * off, off, error);
      }
      if (error < best) best = error, found_scale = a, found_zero = offset;
    }
  }
  scale[i] = found_scale, zero[i] = found_zero;
}

// The sum over the 16 lanes that have a block of rows, the same bits in all of them.
__device__ __forceinline__ float block_sum(float v) {
#pragma unroll
  for (int i = 8; i; i /= 2) v += __shfl_xor_sync(~0u, v, i);
  return v;
}

// The scales  scale2 (code + zero2)  of the groups of up to 64 columns, in order: each code and each scale2, which 16
// rows share, is set to the best value that can be stored, given all others and the codes of weights (weight = scale
// factor). pull [B, N]: (H error)_i as it was before the block; what the block changes is added here. factor, error,
// change [B, N]: error is updated, and change gets the difference; hessian: the block's first diagonal element in a
// matrix with rows of K; top [groups], zero2, scale2 [ceil(N / 16), groups], codes [groups, N], all from the block's
// first group on, though rows of zero2 and scale2 are `groups` apart. Grid: ceil(N / 32).
__global__ void __launch_bounds__(32, 4)
    descend_scales(const float *__restrict__ pull, const float *__restrict__ factor, const float *__restrict__ hessian,
                   const float *__restrict__ zero2, const float *__restrict__ top, float *error, float *change,
                   float *scale2, float *codes, int N, int K, int B, int G, int groups) {
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x, row = blockIdx.x * ROWS + lane, here = min(row, N - 1);
  const bool real = row < N;
  float *const by = reinterpret_cast<float *>(shared);  // [BLOCK][BLOCK]
  float *const f = by + MIX + lane;                     // [BLOCK][ROWS]
  float *const changes = f + BLOCK * ROWS;              // [BLOCK][ROWS]
  copy_mix<true>(by, hessian, K, B, lane);
  for (int k = 0; k < B; k++) copy_4(shared_address(f + k * ROWS), factor + (size_t)k * N + here);
  commit_copies();
  wait_for_copies<0>();
  __syncwarp();
  for (int begin = 0, j = 0; begin < B; begin += G, j++) {
    const int end = min(begin + G, B);
    float num = 0, den = 0;
    for (int k = begin; k < end; k += 4) {
      float reach[4][1] = {}, own[4][1] = {};  // of the block's changes; of the group's factors
      add_contributions(reach, by + k, changes, 0, begin);
      add_contributions(own, by + k, f, begin, end);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        if (k + c >= end) continue;
        const float factor_k = f[(k + c) * ROWS];
        num = fmaf(factor_k, pull[(size_t)(k + c) * N + here] + reach[c][0], num);
        den = fmaf(factor_k, own[c][0], den);
      }
    }
    if (!real) num = den = 0;  // rows behind the last count for nothing in the sums
    float *const stored = scale2 + (size_t)(here / 16) * groups + j;
    const float old_scale = *stored, zero = zero2[(size_t)(here / 16) * groups + j];
    const float most = top[j], least = zero == 0;  // a scale is never 0
    const float code = codes[(size_t)j * N + here], multiple = code + zero, old = old_scale * multiple;
    const float best = old + num / fmaxf(den, 1e-30f);
    const float pulled = block_sum(multiple * multiple * den);
    const float moved = old_scale + block_sum(multiple * num) / fmaxf(pulled, 1e-30f);
    const float steps[2] = {old_scale, to_float(from_float<half>(moved > TINY ? moved : old_scale))};
    float found = code, found_scale = old_scale, found_gain = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float step = steps[i];
      const float other = fminf(fmaxf(rintf(best / step - zero), least), most);
      const float by_step = step * (other + zero) - old;
      const float gain = block_sum(2 * by_step * num - by_step * by_step * den);
      if (step > 0 && step <= 65504.0f && gain > found_gain) found = other, found_scale = step, found_gain = gain;
    }
    const float by_scale = found_scale * (found + zero) - old;
    __syncwarp();  // all of the block of rows have read the old scale
    for (int k = begin; k < end; k++) {
      const float moved_k = -by_scale * f[k * ROWS];
      changes[k * ROWS] = moved_k;
      const size_t at = (size_t)k * N + here;
      if (real) change[at] = moved_k, error[at] += moved_k;
    }
    if (!real) continue;
    codes[(size_t)j * N + row] = found;
    if (lane % 16 == 0) *stored = found_scale;
  }
}

}  // namespace crelle
