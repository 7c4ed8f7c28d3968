// Products of many rows by dot products of 16-bit integers: what calibration computes on CPUs without AMX.
//
//   y = x Wᵀ + bias                       a linear layer: x [M, K], W [N, K], all in f32
//   hessian += aᵀ a,  cross += dᵀ a       sums over tokens: a = w x, d = w (full - x)
//
// One instruction adds two products of 16-bit integers to each 32-bit sum: with VNNI that is twice the multiply-adds of
// f32, by vpmaddwd and vpaddd 1.4 times on 256 bits (two instructions, of which one does not need the multipliers).
//
// Values that are summed over share a scale in chunks of at most kChunkPairs pairs: a chunk's largest magnitude becomes
// kMostInt, so that its values keep 12 bits, sums of a chunk are exact in 32 bits, and a chunk with an outlier takes no
// digits from the others. Sums of chunks are scaled and added in f32, in one order, so that neither the number of
// threads nor that of rows changes anything. What is not finite makes the scale of its chunk NaN or infinite.
//
//   panel   two vectors of outputs (or of channels); [chunk][pair][output][2], scales [chunk][output]
//
// i16_panels.h has the loops, once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crelle::cpu {

constexpr int kMostInt = 2560;    // 2 kChunkPairs kMostInt² < 2^31
constexpr int kChunkPairs = 160;  // 10 to 20 KB of a panel: L1 holds a chunk of each factor
constexpr int kTokenPairs = 512;  // of tokens that are packed at a time: sums are read and written once for all
constexpr int kMostRows = 256;    // of x that are packed at a time, at most: their sums are 32 KB
constexpr size_t kGroupBytes = size_t{192} << 10;  // of packed rows, which stay in L2 while all weights pass by

// `count` values that are summed over, in pairs, in chunks of equal size.
struct I16Chunks {
  int count = 0;

  int pairs() const { return (count + 1) / 2; }
  int chunks() const { return (pairs() + kChunkPairs - 1) / kChunkPairs; }
  int at(int chunk) const { return static_cast<int>(int64_t{pairs()} * chunk / chunks()); }  // its first pair
};

// Panels of N outputs. ints: room for panels(lanes) * pairs * lanes dwords; scales: panels * chunks * lanes.
struct I16Panels {
  int N = 0, lanes = 0;
  I16Chunks sum;
  int32_t *ints = nullptr;
  float *scales = nullptr;

  int panels() const { return (N + lanes - 1) / lanes; }
  size_t panel_ints() const { return size_t(sum.pairs()) * lanes; }
  size_t panel_scales() const { return size_t(sum.chunks()) * lanes; }
  int32_t *panel(int i) const { return ints + i * panel_ints(); }
  const float *scale(int i, int chunk) const { return scales + i * panel_scales() + size_t(chunk) * lanes; }
};

struct I16Product {
  I16Panels w;
  const float *x;     // [M, K]
  const float *bias;  // [panels * lanes]
  float *y;           // [M, N]
  int M;
};

struct I16Sums {
  int T, K;
  const float *x, *full;   // [T, K]; full: null, then cross is not touched
  const float *weight;     // [T]
  float *hessian, *cross;  // [K, K]
};

// Tokens [first, first + sum.count) of all channels.
struct I16Tokens {
  int first;
  I16Panels a, d;
  float *abssum;  // [chunk][panels * lanes]
};

struct I16Kernel {
  int lanes;  // of a panel
  int rows;   // of x that are multiplied at a time
  void (*pack_weight)(const float *weight, const I16Panels &w, int panel0, int panel1);
  // Rows [row0, row1) of y; room: i16_room bytes.
  void (*multiply)(const I16Product &p, int row0, int row1, uint8_t *room);
  void (*pack_tokens)(const I16Sums &s, const I16Tokens &t, int panel0, int panel1);
  // Some of the i16_products blocks of outputs: H's on and above the diagonal, and all of the cross products.
  void (*add_products)(const I16Sums &s, const I16Tokens &t, int64_t begin, int64_t end);
};

// Rows of x that are packed at a time.
inline int i16_group(const I16Chunks &sum, int rows) {
  const size_t fit = kGroupBytes / (size_t(sum.pairs()) * sizeof(int32_t));
  const int most = fit < size_t(kMostRows) ? static_cast<int>(fit) : kMostRows;
  return most < rows ? rows : most / rows * rows;
}
inline size_t i16_room(const I16Chunks &sum, int rows) {
  return size_t(i16_group(sum, rows)) * (sum.pairs() * sizeof(int32_t) + sum.chunks() * sizeof(float));
}
inline int64_t i16_products(const I16Sums &s, int panels) {
  return int64_t{panels} * (panels + 1) / 2 + (s.full ? int64_t{panels} * panels : 0);
}

extern const I16Kernel kI16Generic;  // plain C++, on any machine: slow, for tests
#if defined(__x86_64__)
extern const I16Kernel kI16Avx2, kI16AvxVnni, kI16Avx512, kI16Avx512Vnni;
#endif

}  // namespace crelle::cpu
