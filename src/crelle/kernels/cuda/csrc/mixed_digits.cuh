// A token's x as mixed_decode.cu multiplies it: 16 inputs at a time, in the order of the weight, as two s8 digits each.
//
// A span is 16 places (mixed_layout.py) that share a power of two, xs: x = xs (256 high + low). So an input has 15 bits
// of the span's largest, which loses nothing of an fp16 value down to 1/16 of it. Inputs whose 2-bit code is multiplied
// by 4 as it lies in its byte are divided by 4 (13 bits).
//
// In shared memory, S2 = 16 U2 spans of 2-bit inputs, then S4 = 8 U4 of 4-bit ones:
//   digits  [S2 + S4] high uint4, low uint4: bytes in the order of the right operand of multiply_u8
//   terms   [S2] float4: what the sum of a span is multiplied by and added to for its zero (see `terms2`), xs
//           [S4] float2: xs, the sum of its inputs
//   plain   [S2 + S4][16] T: f(x) in the order of inputs, for outliers
#pragma once
#include "prologue.cuh"

namespace crelle {

constexpr uint32 INT_AS_FLOAT = 0x4b400000u;      // 1.5 2^23: this plus an integer of 22 bits, as a float's bits
constexpr float INT_AS_FLOAT_VALUE = 12582912.0f;  // the same

template <typename T>
struct TokenDigits {
  char *digits;
  float4 *terms2;
  float2 *terms4;
  T *plain;

  __device__ TokenDigits(char *shared, int U2, int U4)
      : digits(shared), terms2(reinterpret_cast<float4 *>(shared + U2 * 512 + U4 * 256)),
        terms4(reinterpret_cast<float2 *>(shared + U2 * 768 + U4 * 256)),
        plain(reinterpret_cast<T *>(shared + U2 * 768 + U4 * 320)) {}
  __host__ __device__ static constexpr int bytes(int U2, int U4) { return U2 * 1280 + U4 * 576; }
};

// Four 16-bit integers that have 128 added to them, as their high digits and their low ones.
__device__ __forceinline__ void split_digits(uint32 a, uint32 b, uint32 c, uint32 d, uint32 &high, uint32 &low) {
  const uint32 p = __byte_perm(a, b, 0x5410), q = __byte_perm(c, d, 0x5410);
  high = __byte_perm(p, q, 0x7531), low = __byte_perm(p, q, 0x6420) ^ 0x80808080u;
}

// Digits of a span; returns xs, which is a NaN where an input is not finite, and the sum of its inputs over xs.
template <bool FOUR>
__device__ __forceinline__ float2 span_digits(const float (&f)[16], uint4 &high, uint4 &low) {
  constexpr int BITS = FOUR ? 13 : 14;  // so that the sum of 16 products has 22 bits
  float top = 0;
#pragma unroll
  for (int i = 0; i < 16; i++) top = max_nan(top, fabsf(f[i]));
  // Digits reach from -128 to 127: the largest integer is 127 256 + 127, a little less than 2^15.
  const int exponent = max((int)(__float_as_uint(top * 1.0052f) >> 23) - 127, -100);
  const float scale = __uint_as_float((127 + BITS - exponent) << 23);
  uint32 y[16];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const bool quarter = !FOUR && i % 2;
    const float v = fmaf(f[i], quarter ? 0.25f * scale : scale, INT_AS_FLOAT_VALUE + 128);
    y[i] = __float_as_uint(v);
    sum = fmaf(v - (INT_AS_FLOAT_VALUE + 128), quarter ? 4.0f : 1.0f, sum);
  }
  if constexpr (FOUR) {
    split_digits(y[0], y[2], y[4], y[6], high.x, low.x), split_digits(y[1], y[3], y[5], y[7], high.y, low.y);
    split_digits(y[8], y[10], y[12], y[14], high.z, low.z), split_digits(y[9], y[11], y[13], y[15], high.w, low.w);
  } else {
    split_digits(y[0], y[4], y[8], y[12], high.x, low.x), split_digits(y[1], y[5], y[9], y[13], high.y, low.y);
    split_digits(y[2], y[6], y[10], y[14], high.z, low.z), split_digits(y[3], y[7], y[11], y[15], high.w, low.w);
  }
  const bool finite = top <= 3.4028234e38f;
  return make_float2(__uint_as_float(finite ? (127 - BITS + exponent) << 23 : 0x7fc00000u), sum);
}

// A zero's code as a float is 1 + code 2^(2 set - 8): (code + 1) / 2 times the sum of the inputs, subtracted from the
// sum of products that comes as INT_AS_FLOAT, is  that float * x + (products + y).
__device__ __forceinline__ float4 terms2(int set, float2 xs_sum) {
  const float part = xs_sum.y * __uint_as_float((127u + 7 - 2 * set) << 23);
  return make_float4(-part, fmaf(-0.5f, xs_sum.y, part) - INT_AS_FLOAT_VALUE, xs_sum.x, 0);
}

// f(x) of K inputs, a multiple of 8, by all threads; perm: of the matrix. `prefetch` loads what no kernel writes, then
// comes grid_dependency_wait, then `store`, then a barrier.
template <Prologue OP, int WARPS, typename T>
struct TokenEncoder {
  static constexpr bool NORM = OP == RMS_NORM || OP == LAYER_NORM;
  int spans2, spans;
  const int *perm;
  const T *norm, *shift;
  int2 runs;                // first inputs of the two runs of 8 of this thread's first span, -1 for none
  uint4 scales[2], shifts[2];  // of the norm there

  __device__ __forceinline__ int2 runs_of(int span) const {
    const int *const at = perm + 16 * span;
    return span < spans2 ? *reinterpret_cast<const int2 *>(at) : make_int2(at[0], at[8]);
  }
  __device__ __forceinline__ void load_norm(int2 at) {
    if constexpr (NORM) {
      const uint4 nothing = make_uint4(0, 0, 0, 0);
      const auto load = [&](const T *from, int k) {
        return from && k >= 0 ? __ldg(reinterpret_cast<const uint4 *>(from + k)) : nothing;
      };
      scales[0] = load(norm, at.x), scales[1] = load(norm, at.y);
      if constexpr (OP == LAYER_NORM) shifts[0] = load(shift, at.x), shifts[1] = load(shift, at.y);
    }
  }
  __device__ __forceinline__ void prefetch(const int *perm_, const T *norm_, const T *shift_, int U2, int U4) {
    perm = perm_, norm = norm_, shift = shift_, spans2 = 16 * U2, spans = spans2 + 8 * U4;
    runs = make_int2(-1, -1);
    if ((int)threadIdx.x < spans) runs = runs_of(threadIdx.x), load_norm(runs);
  }

  __device__ __forceinline__ void store(const T *x, int K, float eps, const TokenDigits<T> &to) {
    __shared__ float2 part[1][WARPS];
    const auto load = [&](int k) { return k < 0 ? make_uint4(0, 0, 0, 0) : *reinterpret_cast<const uint4 *>(x + k); };
    uint4 v[2] = {load(runs.x), load(runs.y)};
    Norm n = {};
    if constexpr (NORM) {
      float sum[1] = {}, squares[1] = {};
      const auto add = [&](uint4 w) {
        float f[8];
        open<T>(f, w);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[0] += f[i], squares[0] = fmaf(f[i], f[i], squares[0]);
      };
      add(v[0]), add(v[1]);
      for (int span = threadIdx.x + WARPS * 32; span < spans; span += WARPS * 32) {
        const int2 at = runs_of(span);
        add(load(at.x)), add(load(at.y));
      }
      block_sums(part, sum, squares);
      n = norm_of<OP>(make_float2(sum[0], squares[0]), K, eps);
    }
    for (int span = threadIdx.x; span < spans; span += WARPS * 32) {
      if (span != (int)threadIdx.x) {
        runs = runs_of(span), load_norm(runs);
        v[0] = load(runs.x), v[1] = load(runs.y);
      }
      float f[16];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int k = h ? runs.y : runs.x;
        if constexpr (NORM)
          v[h] = applied<OP, true>(v[h], x, 0, 8, n, norm ? reinterpret_cast<const T *>(scales + h) : nullptr,
                                   shift ? reinterpret_cast<const T *>(shifts + h) : nullptr);
        else
          v[h] = k < 0 ? make_uint4(0, 0, 0, 0) : applied<OP, true>(v[h], x, k, K, n, norm, shift);
        if (NORM && k < 0) v[h] = make_uint4(0, 0, 0, 0);
        float some[8];
        open<T>(some, v[h]);
#pragma unroll
        for (int i = 0; i < 8; i++) f[8 * h + i] = some[i];
        reinterpret_cast<uint4 *>(to.plain)[2 * span + h] = v[h];
      }
      uint4 high, low;
      if (span < spans2) {
        const float2 made = span_digits<false>(f, high, low);
        to.terms2[span] = terms2(span / 4 % 4, made);
      } else {
        const float2 made = span_digits<true>(f, high, low);
        to.terms4[span - spans2] = make_float2(made.x, made.x * made.y);
      }
      reinterpret_cast<uint4 *>(to.digits)[2 * span] = high, reinterpret_cast<uint4 *>(to.digits)[2 * span + 1] = low;
    }
  }
};

}  // namespace crelle
