// A token's x as mixed_decode.cu multiplies it: 16 inputs at a time, in the order of the weight, as two s8 digits each.
//
// A span is 16 places (mixed_layout.py) that share a power of two, xs: x = xs (256 high + low). So an input has 15 bits
// of the span's largest, which loses nothing of an fp16 value down to 1/16 of it. Inputs whose 2-bit code is multiplied
// by 4 as it lies in its byte are divided by 4 (13 bits).
//
// An RMS norm's factor, which all inputs share, is left to the end of the product.
//
// In shared memory, S2 = 16 U2 spans of 2-bit inputs, then S4 = 8 U4 of 4-bit ones:
//   digits  [S2 + S4] high uint4, low uint4: bytes in the order of the right operand of multiply_u8
//   terms   [S2] float4: what the sum of a span is multiplied by and added to for its zero (see `terms2`), xs
//           [S4] float2: xs, the sum of its inputs
#pragma once
#include "step/prologue.cuh"
#include "ptx/warp.cuh"

namespace crelle {

constexpr uint32 INT_AS_FLOAT = 0x4b400000u;       // 1.5 2^23: this plus an integer of 22 bits, as a float's bits
constexpr float INT_AS_FLOAT_VALUE = 12582912.0f;  // the same

struct TokenDigits {
  char *digits;
  float4 *terms2;
  float2 *terms4;
  int spans2;

  __device__ TokenDigits(char *shared, int U2, int U4)
      : digits(shared),
        terms2(reinterpret_cast<float4 *>(shared + U2 * 512 + U4 * 256)),
        terms4(reinterpret_cast<float2 *>(shared + U2 * 768 + U4 * 256)),
        spans2(16 * U2) {}
  __host__ __device__ static constexpr int bytes(int U2, int U4) { return U2 * 768 + U4 * 320; }

  // x of an outlier (mixed_outliers.cuh), over what the outlier is stored times.
  __device__ __forceinline__ float at(uint32 word) const {
    const uint32 at16 = word & 0xfff0;  // 16 times its span
    const signed char *const from = reinterpret_cast<const signed char *>(digits) + ((word & 0xffff) + at16);
    const float *const scale = at16 < 16 * (uint32)spans2
                                   ? reinterpret_cast<const float *>(reinterpret_cast<const char *>(terms2) + at16) + 2
                                   : &terms4[at16 / 16 - spans2].x;
    return (float)(256 * from[0] + from[16]) * *scale;
  }
};

// Four 16-bit integers that have 128 added to them, as their high digits and their low ones.
__device__ __forceinline__ void split_digits(uint32 a, uint32 b, uint32 c, uint32 d, uint32 &high, uint32 &low) {
  const uint32 p = __byte_perm(a, b, 0x5410), q = __byte_perm(c, d, 0x5410);
  high = __byte_perm(p, q, 0x7531), low = __byte_perm(p, q, 0x6420) ^ 0x80808080u;
}

// Digits of a span; returns xs, which is a NaN where an input is not finite, and the sum of its inputs over xs.
__device__ __forceinline__ float2 span_digits(bool four, const float (&f)[16], uint4 &high, uint4 &low) {
  float tops[4], sums[4] = {};  // four chains of operations instead of one
#pragma unroll
  for (int i = 0; i < 4; i++)
    tops[i] = max_nan(max_nan(fabsf(f[i]), fabsf(f[i + 4])), max_nan(fabsf(f[i + 8]), fabsf(f[i + 12])));
  const float top = max_nan(max_nan(tops[0], tops[1]), max_nan(tops[2], tops[3]));
  // Digits reach from -128 to 127: the largest integer is 127 256 + 127, a little less than 2^15. Of 4-bit codes it is
  // half that, so that the sum of 16 products has 22 bits.
  const int bits = four ? 13 : 14, exponent = max((int)(__float_as_uint(top * 1.0052f) >> 23) - 127, -100);
  const float scale = __uint_as_float((127 + bits - exponent) << 23), odd = four ? scale : 0.25f * scale;
  const float undo_odd = four ? 1.0f : 4.0f;
  uint32 y[16];
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float v = fmaf(f[i], i % 2 ? odd : scale, INT_AS_FLOAT_VALUE + 128);
    y[i] = __float_as_uint(v);
    sums[i % 4] += v - (INT_AS_FLOAT_VALUE + 128);
  }
  // The operand's words are inputs 4 apart; of 4-bit codes 2 apart, so those are put in that order.
  constexpr int ORDER[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
  uint32 z[16];
#pragma unroll
  for (int i = 0; i < 16; i++) z[i] = four ? y[ORDER[i]] : y[i];
  split_digits(z[0], z[4], z[8], z[12], high.x, low.x), split_digits(z[1], z[5], z[9], z[13], high.y, low.y);
  split_digits(z[2], z[6], z[10], z[14], high.z, low.z), split_digits(z[3], z[7], z[11], z[15], high.w, low.w);
  const bool finite = top <= 3.4028234e38f;
  return make_float2(__uint_as_float(finite ? (127 - bits + exponent) << 23 : 0x7fc00000u),
                     fmaf(undo_odd, sums[1] + sums[3], sums[0] + sums[2]));
}

// A zero's code as a float is 1 + code 2^(2 set - 8): (code + 1) / 2 times the sum of the inputs, subtracted from the
// sum of products that comes as INT_AS_FLOAT, is  that float * x + (products + y).
__device__ __forceinline__ float4 terms2(int set, float2 xs_sum) {
  const float part = xs_sum.y * __uint_as_float((127u + 7 - 2 * set) << 23);
  return make_float4(-part, fmaf(-0.5f, xs_sum.y, part) - INT_AS_FLOAT_VALUE, xs_sum.x, 0);
}

// f(x) of K inputs, a multiple of 8, by all threads, 16 at a time as they lie in x. `find` and `prefetch` load what no
// kernel writes, then comes grid_dependency_wait, then `load`, then `store`, then a barrier. Where 16 inputs belong
// (`places`) is not asked before they are there. f is known at run time, so that products share their instructions;
// OTHERS: it may be another than PLAIN, RMS_NORM and SILU_MUL.
template <bool OTHERS, int WARPS, typename T>
struct TokenEncoder {
  static constexpr int THREADS = WARPS * 32;
  struct Span {
    int k;                // its first input, or what is behind the last
    int place;            // which span of the order it is
    uint4 v[2], more[2];  // x, and the norm's scales or what a gated activation is multiplied by
  };
  Prologue op;
  const T *x, *norm, *shift;
  const int *places, *places2;  // [spans] of the matrix, of the second of a pair: of all inputs, then of padding
  int K, spans2, spans, all;    // all: twice as many spans of a pair

  __device__ __forceinline__ uint4 eight_of(const T *from, int k) const {
    return from && k < K ? *reinterpret_cast<const uint4 *>(from + k) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void find(Span &s, int i) const {
    const bool other = i >= spans;
    const int span = other ? i - spans : i;
    s.k = i < all ? span * 16 : K, s.place = i < all ? (other ? places2 : places)[span] : 0;
  }
  __device__ __forceinline__ bool normed() const { return op == RMS_NORM || op == LAYER_NORM; }
  __device__ __forceinline__ void prefetch(Span &s) const {
    if (normed()) s.more[0] = eight_of(norm, s.k), s.more[1] = eight_of(norm, s.k + 8);
  }
  __device__ __forceinline__ void load(Span &s) const {
    s.v[0] = eight_of(x, s.k), s.v[1] = eight_of(x, s.k + 8);
    if (is_gated(op)) s.more[0] = eight_of(x + K, s.k), s.more[1] = eight_of(x + K, s.k + 8);
  }

  // The mean and the deviation of x, by all threads.
  __device__ __forceinline__ Norm layer_norm(float eps) const {
    __shared__ float2 part[1][WARPS];
    float sum[1] = {}, squares[1] = {};
#pragma unroll 1
    for (int k = threadIdx.x * 8; k < K; k += THREADS * 8) {
      float f[8];
      open<T>(f, eight_of(x, k));
#pragma unroll
      for (int i = 0; i < 8; i++) sum[0] += f[i], squares[0] = fmaf(f[i], f[i], squares[0]);
    }
    block_sums(part, sum, squares);
    return norm_of<LAYER_NORM>(make_float2(sum[0], squares[0]), K, eps);
  }

  // f of a span, and the sum of its squares before.
  __device__ __forceinline__ float apply(const Span &s, Norm n, float (&f)[16]) const {
    float squares[4] = {};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float some[8], more[8];
      open<T>(some, s.v[h]), open<T>(more, s.more[h]);
      if (op == RMS_NORM) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
          squares[i % 4] = fmaf(some[i], some[i], squares[i % 4]);
          some[i] = norm ? some[i] * more[i] : some[i];
        }
      } else if (op == SILU_MUL) {
        activate<SILU_MUL, T>(some, s.more[h]);
      }
      if constexpr (OTHERS) {
        if (op == LAYER_NORM) {
          const int k = s.k + 8 * h;
          float added[8];
          open<T>(added, eight_of(shift, k));
#pragma unroll
          for (int i = 0; i < 8; i++) {
            const float v = (some[i] - n.mean) * n.scale;
            some[i] = k < K ? fmaf(v, norm ? more[i] : 1, added[i]) : 0;
          }
        }
        if (op == RELU) activate<RELU, T>(some, s.more[h]);
        if (op == GELU) activate<GELU, T>(some, s.more[h]);
        if (op == GELU_TANH) activate<GELU_TANH, T>(some, s.more[h]);
        if (op == GELU_MUL) activate<GELU_MUL, T>(some, s.more[h]);
        if (op == GELU_TANH_MUL) activate<GELU_TANH_MUL, T>(some, s.more[h]);
      }
#pragma unroll
      for (int i = 0; i < 8; i++) f[8 * h + i] = some[i];
    }
    return (squares[0] + squares[1]) + (squares[2] + squares[3]);
  }

  // s, ahead: the thread's first two spans; s is loaded; squares [WARPS]: sums of x^2 for `factor`.
  __device__ __forceinline__ void store(Span &s, Span &ahead, float eps, char *shared, int U2, int U4,
                                        float *squares) const {
    Norm n = {};
    if constexpr (OTHERS) {
      if (op == LAYER_NORM) n = layer_norm(eps);
    }
    float square = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < all; i += THREADS) {
      prefetch(ahead), load(ahead);
      float f[16];
      const bool other = i >= spans;
      const int span = s.place;
      const TokenDigits to(shared + (other ? TokenDigits::bytes(U2, U4) : 0), U2, U4);
      const float more = apply(s, n, f);
      square += other ? 0 : more;
      uint4 high, low;
      const float2 made = span_digits(span >= spans2, f, high, low);
      if (span < spans2)
        to.terms2[span] = terms2(span / 4 % 4, made);
      else
        to.terms4[span - spans2] = make_float2(made.x, made.x * made.y);
      reinterpret_cast<uint4 *>(to.digits)[2 * span] = high, reinterpret_cast<uint4 *>(to.digits)[2 * span + 1] = low;
      s = ahead;
      find(ahead, i + 2 * THREADS);
    }
    if (op == RMS_NORM) {
      square = warp_sum(square);
      if ((threadIdx.x & 31) == 0) squares[threadIdx.x >> 5] = square;
    }
  }

  // What the outputs are multiplied by, behind the barrier.
  __device__ __forceinline__ float factor(const float *squares, float eps) const {
    float sum = 0;
    if (op != RMS_NORM) return 1;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += squares[w];
    return norm_of<RMS_NORM>(make_float2(0, sum), K, eps).scale;
  }
};

}  // namespace crelle
