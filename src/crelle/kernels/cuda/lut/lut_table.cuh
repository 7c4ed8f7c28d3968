// Tables of all 256 signed sums of 8 inputs, in shared memory: how an entry is stored, where it lies, how it is built.
//
//   entry e of a table  =  sum_j (bit j of e ? x_j : -x_j),   for M tokens at once, as float or as half
//
// A warp works on 32 tables at a time, its lane l on table l; 32 such tables (256 inputs) are a slice. SHARED places a
// table's entries one after another, as the papers do: the lanes' bytes are random, so 32 reads fall into 32 banks at
// random and the fullest bank gets 3.5 of them on average (within table l, entry e stands at e ^ l: built without
// conflicts). PRIVATE places entry e of the 32 tables side by side: lane l
// only ever reads its own bank(s), whatever its byte is, without copying anything. With 256 bytes from one entry to the
// next, the address is the weight's byte beside the lane's place: one byte permutation makes it from a word of weights.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

enum Placement { SHARED, PRIVATE };

// M values as a table holds them; sums of entries of up to 4 slices stay in this form.
template <typename T, int M>
struct Entry;

template <int M>
struct Entry<float, M> {
  static constexpr bool SCALED = false;
  float v[M];
  __device__ __forceinline__ void set(const float (&from)[M]) {
#pragma unroll
    for (int m = 0; m < M; m++) v[m] = from[m];
  }
  __device__ __forceinline__ void add(const Entry &o) {
#pragma unroll
    for (int m = 0; m < M; m++) v[m] += o.v[m];
  }
  __device__ __forceinline__ void get(float (&to)[M]) const {
#pragma unroll
    for (int m = 0; m < M; m++) to[m] = v[m];
  }
};

template <>
struct Entry<half, 1> {
  static constexpr bool SCALED = true;
  half v;
  __device__ __forceinline__ void set(const float (&from)[1]) { v = __float2half_rn(from[0]); }
  __device__ __forceinline__ void add(const Entry &o) { v = __hadd(v, o.v); }
  __device__ __forceinline__ void get(float (&to)[1]) const { to[0] = __half2float(v); }
};

template <int M>
struct Entry<half, M> {
  static constexpr bool SCALED = true;
  __half2 v[M / 2];
  __device__ __forceinline__ void set(const float (&from)[M]) {
#pragma unroll
    for (int m = 0; m < M; m += 2) v[m / 2] = __floats2half2_rn(from[m], from[m + 1]);
  }
  __device__ __forceinline__ void add(const Entry &o) {
#pragma unroll
    for (int m = 0; m < M / 2; m++) v[m] = __hadd2(v[m], o.v[m]);
  }
  __device__ __forceinline__ void get(float (&to)[M]) const {
#pragma unroll
    for (int m = 0; m < M; m += 2) {
      const float2 f = __half22float2(v[m / 2]);
      to[m] = f.x, to[m + 1] = f.y;
    }
  }
};

// An entry as one load or store of its size.
template <int BYTES>
struct Bits;
template <>
struct Bits<2> {
  using type = unsigned short;
};
template <>
struct Bits<4> {
  using type = uint32;
};
template <>
struct Bits<8> {
  using type = uint2;
};
template <>
struct Bits<16> {
  using type = uint4;
};

template <typename T, int M, Placement PLACE, int SLICES>
struct Tables {
  using E = Entry<T, M>;
  static constexpr int SIZE = sizeof(T) * M;                          // bytes of an entry
  static constexpr int STEP = SIZE == 16 ? 512 : 256;                 // PRIVATE: from an entry to the next
  static constexpr int PER_STEP = SIZE == 2 ? 4 : SIZE == 4 ? 2 : 1;  // PRIVATE: slices within a step
  static constexpr int BYTES = PLACE == SHARED ? SLICES * 8192 * SIZE : (SLICES + PER_STEP - 1) / PER_STEP * 256 * STEP;

  char *base;
  uint32 place;  // of this lane

  __device__ __forceinline__ Tables(char *shared, int lane)
      : base(shared), place(PLACE == SHARED ? lane * (257 * SIZE) : lane * (SIZE < 4 ? 4 : SIZE)) {}

  // Where a slice begins. Two slices of 2-byte entries share the words of a bank.
  static __device__ __forceinline__ constexpr uint32 slice(int s) {
    if (PLACE == SHARED) return s * 8192 * SIZE;
    const int in = s % PER_STEP;
    return s / PER_STEP * 256 * STEP + (SIZE == 2 ? in / 2 * 128 + in % 2 * 2 : in * 128);
  }
  // Where the entry lies that byte j of a word asks for.
  __device__ __forceinline__ uint32 at(uint32 word, int j) const {
    if (PLACE == SHARED) return place ^ (word >> (8 * j) & 255) * SIZE;
    if (STEP == 512) return (word >> (8 * j) & 255) * 512 + place;
    return __byte_perm(word, place, 0x5504 | j << 4);
  }
  __device__ __forceinline__ E look_up(int s, uint32 at) const {
    using B = typename Bits<SIZE>::type;
    E e;
    *reinterpret_cast<B *>(&e) = *reinterpret_cast<const B *>(base + at + slice(s));
    return e;
  }
  __device__ __forceinline__ void put(int s, uint32 index, const E &e) {
    using B = typename Bits<SIZE>::type;
    *reinterpret_cast<B *>(base + at(index, 0) + slice(s)) = *reinterpret_cast<const B *>(&e);
  }
};

// The inputs that the tables of a thread block are of, as floats: token m's input j of lane l in slice s at
// ((m * SLICES + s) * 8 + j) * PITCH + l; the pitch keeps both the stores and the loads free of bank conflicts.
// x [tokens, K]; `perm` says which input stands where, -1 for none, or is null; `first` is lane 0's first.
constexpr int PITCH = 33;

template <int M, int SLICES, int WARPS, typename X>
__device__ __forceinline__ void stage(float *to, const X *x, const int *perm, int tokens, int K, int first) {
#pragma unroll 1
  for (int i = threadIdx.x; i < M * SLICES * 256; i += WARPS * 32) {
    const int m = i / (SLICES * 256), lane = i % (SLICES * 256) / (SLICES * 8), j = i % (SLICES * 8);
    const int at = first + lane * 32 + j, k = perm ? perm[at] : at;
    to[(m * SLICES * 8 + j) * PITCH + lane] = m < tokens && 0 <= k && k < K ? to_float(x[(size_t)m * K + k]) : 0;
  }
}

// Build this lane's tables of staged inputs: a warp takes the entries that agree in their upper bits and doubles its
// way through the lower ones, one addition an entry. Half entries are of x times a power of two, per token, such that
// no sum of a lane's entries overflows; `undo` gets what undoes it.
template <typename T, int M, Placement PLACE, int SLICES, int WARPS>
__device__ __forceinline__ void build(Tables<T, M, PLACE, SLICES> tables, const float *x, int warp, float (&undo)[M]) {
  constexpr int LOW = M > 2 ? 3 : 4, RUN = 1 << LOW, RUNS = 256 / RUN;
  const auto input = [&](int m, int s, int j) { return x[((m * SLICES + s) * 8 + j) * PITCH]; };
  float up[M];
#pragma unroll
  for (int m = 0; m < M; m++) {
    up[m] = undo[m] = 1;
    if constexpr (Entry<T, M>::SCALED) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < SLICES * 8; i++) sum += fabsf(input(m, i / 8, i % 8));
      const int exponent = min(max(static_cast<int>(__reduce_max_sync(~0u, __float_as_uint(sum)) >> 23), 15), 253);
      up[m] = __uint_as_float(static_cast<uint32>(268 - exponent) << 23);  // up * sum < 2^15
      undo[m] = __uint_as_float(static_cast<uint32>(exponent - 14) << 23);
    }
  }
#pragma unroll 1
  for (int c = warp; c < SLICES * RUNS; c += WARPS) {
    const int s = c / RUNS, high = c % RUNS;
    float sums[RUN][M];
#pragma unroll
    for (int m = 0; m < M; m++) {
      float v[8], start = 0;
#pragma unroll
      for (int j = 7; j >= 0; j--) {
        v[j] = input(m, s, j) * up[m];
        start += j >= LOW && (high >> (j - LOW) & 1) ? v[j] : -v[j];
      }
      sums[0][m] = start;
#pragma unroll
      for (int i = 1; i < RUN; i++) {
        const float x_j = i & 1 ? v[0] : i & 2 ? v[1] : i & 4 ? v[2] : v[3];  // of the lowest bit set
        sums[i][m] = fmaf(2, x_j, sums[i & (i - 1)][m]);
      }
    }
#pragma unroll
    for (int i = 0; i < RUN; i++) {
      typename Tables<T, M, PLACE, SLICES>::E e;
      e.set(sums[i]);
      tables.put(s, high * RUN + i, e);
    }
  }
}

}  // namespace crelle
