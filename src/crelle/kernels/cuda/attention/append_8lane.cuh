// A head in eight lanes of a warp: norm, rope, H and quantization as in paged_append.cu, with the same roundings.
#pragma once
#include "attention/kv_fragments.cuh"

namespace crelle {

// A head of D channels in eight lanes: lane j has E of each half of it, v[i] being channel i of the first half from E j
// on, v[E + i] its partner in the second. So rope, most sums of H and most of a group's range need no other lane.
template <int D>
struct HeadIn8Lanes {
  static constexpr int E = D / 16, SIZE = 2 * E, PIECE = E < 8 ? E : 8;
  static constexpr bool FITS = D >= 64 && (D & D - 1) == 0;
  template <typename T>
  struct __align__(PIECE * sizeof(T) > 16 ? 16 : PIECE * sizeof(T)) Piece {
    T x[PIECE];
  };

  static __device__ __forceinline__ int channel(int i, int j) { return i / E * (D / 2) + j * E + i % E; }

  template <typename T>
  static __device__ __forceinline__ void load(float (&v)[SIZE], const T *from, int j) {
#pragma unroll
    for (int i = 0; i < SIZE; i += PIECE) {
      const Piece<T> piece = *reinterpret_cast<const Piece<T> *>(from + channel(i, j));
#pragma unroll
      for (int k = 0; k < PIECE; k++) v[i + k] = to_float(piece.x[k]);
    }
  }
  template <typename T>
  static __device__ __forceinline__ void store(const float (&v)[SIZE], T *to, int j) {
#pragma unroll
    for (int i = 0; i < SIZE; i += PIECE) {
      Piece<T> piece;
#pragma unroll
      for (int k = 0; k < PIECE; k++) piece.x[k] = from_float<T>(v[i + k]);
      *reinterpret_cast<Piece<T> *>(to + channel(i, j)) = piece;
    }
  }

  // v = H v, by the same sums in the same order as Head<D>::hadamard.
  static __device__ __forceinline__ void hadamard(float (&v)[SIZE], int j) {
#pragma unroll
    for (int step = 1; step < D; step *= 2) {
      const float sign = j & step / E ? -1.f : 1.f;
#pragma unroll
      for (int i = 0; i < SIZE; i++) {
        const int apart = step < E ? step : E;
        if (step >= E && step < 8 * E) {
          v[i] = fmaf(v[i], sign, __shfl_xor_sync(~0u, v[i], step / E & 7));
        } else if (!(i & apart)) {
          const float a = v[i], b = v[i + apart];
          v[i] = __fadd_rn(a, b), v[i + apart] = __fsub_rn(a, b);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < SIZE; i++) v[i] = __fmul_rn(v[i], Head<D>::norm());
  }

  // As `prepared`, which see.
  template <typename T>
  static __device__ __forceinline__ void apply_norm(float (&v)[SIZE], const T *weight, float eps, int j) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < SIZE; i++) squares = fmaf(v[i], v[i], squares);
#pragma unroll
    for (int i = 1; i < 8; i *= 2) squares += __shfl_xor_sync(~0u, squares, i);
    const float scale = rsqrtf(squares / D + eps);
    if (!weight) return;
    float w[SIZE];
    load(w, weight, j);
#pragma unroll
    for (int i = 0; i < SIZE; i++)
      v[i] = to_float(from_float<T>(__fmul_rn(to_float(from_float<T>(__fmul_rn(v[i], scale))), w[i])));
  }
  template <typename T>
  static __device__ __forceinline__ void apply_rope(float (&v)[SIZE], const float *cos, const float *sin, int j) {
#pragma unroll
    for (int first = 0; first < E; first += PIECE) {
      const Piece<float> c = *reinterpret_cast<const Piece<float> *>(cos + j * E + first);
      const Piece<float> s = *reinterpret_cast<const Piece<float> *>(sin + j * E + first);
#pragma unroll
      for (int k = 0; k < PIECE; k++) {
        const int i = first + k;
        const float a = v[i], b = v[E + i];
        v[i] = to_float(from_float<T>(__fsub_rn(__fmul_rn(a, c.x[k]), __fmul_rn(b, s.x[k]))));
        v[E + i] = to_float(from_float<T>(__fadd_rn(__fmul_rn(b, c.x[k]), __fmul_rn(a, s.x[k]))));
      }
    }
  }

  // Codes and packed scales of a head whose groups are those of whole lanes; `stores`: all lanes must come, not all may
  // write.
  template <int BITS, int C>
  static __device__ __forceinline__ void quantize(const float (&v)[SIZE], unsigned char *codes, unsigned short *words,
                                                  bool stores, int j) {
    constexpr int GROUP = D / C, LANES = GROUP / E < 8 ? GROUP / E : 8;
    float low[2] = {}, high[2] = {};  // of each half; the range holds 0
    bool broken[2] = {};
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
      const int h = C == 1 ? 0 : i / E;
      low[h] = fminf(low[h], v[i]), high[h] = fmaxf(high[h], v[i]), broken[h] |= v[i] != v[i];
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (C == 1 && h == 1) low[1] = low[0], high[1] = high[0], broken[1] = broken[0];
#pragma unroll
      for (int i = 1; i < LANES && (C > 1 || h == 0); i *= 2) {
        low[h] = fminf(low[h], __shfl_xor_sync(~0u, low[h], i));
        high[h] = fmaxf(high[h], __shfl_xor_sync(~0u, high[h], i));
        broken[h] |= __shfl_xor_sync(~0u, static_cast<int>(broken[h]), i) != 0;
      }
      float safe, shift;
      const int word = word_of<BITS>(low[h], high[h], broken[h], safe, shift);
      const float inverse = __frcp_rn(safe);
      uint32 packed[E * BITS / 16] = {};  // 16 bits at a time
#pragma unroll
      for (int i = 0; i < E; i++) {
        // x / safe, rounded as division does: once more by what the product with the inverse leaves
        const float x = v[h * E + i], near = __fmul_rn(x, inverse);
        const float found = rintf(__fadd_rn(fmaf(fmaf(-near, safe, x), inverse, near), shift));
        const int code = static_cast<int>(fminf(fmaxf(found, 0.f), (1 << BITS) - 1));  // NaN: 0
        packed[i * BITS / 16] |= code << i * BITS % 16;
      }
      if (!stores) continue;
      if (j % LANES == 0 && (C > 1 || h == 0)) words[channel(h * E, j) / GROUP] = static_cast<unsigned short>(word);
      unsigned char *to = codes + channel(h * E, j) * BITS / 8;
      if constexpr (E * BITS == 16) {
        *reinterpret_cast<unsigned short *>(to) = static_cast<unsigned short>(packed[0]);
      } else {
#pragma unroll
        for (int i = 0; i < E * BITS / 32; i++)
          reinterpret_cast<uint32 *>(to)[i] = packed[2 * i] | packed[2 * i + 1] << 16;
      }
    }
  }
};

}  // namespace crelle
