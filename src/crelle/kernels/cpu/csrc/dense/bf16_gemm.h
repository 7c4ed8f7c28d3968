// Products with a matrix that is packed once, as bf16 tiles: what a linear layer computes in calibration.
//
//   y = bf16(x Wᵀ + bias)    x [M, K], W [N, K] as bf16, sums and bias in f32, one rounding
//
// Rows of x and outputs come in blocks of 32, inputs in steps of 32: a step of a block is two tiles, and a step of a
// block of y takes four products for four tile loads. That is twice what L2 can feed, so that one side has to stay in
// L1, and y leaves the tiles a few times on the way through K:
//
//   range   of at most kRangeSteps steps, equal parts of K: a thread packs this much of its x at a time
//   group   as many blocks of rows as fit in kRowsBytes with a range, so that they stay in L2 while all weights pass by
//   chunk   of at most kChunkSteps steps, equal parts of a range: a block's weights stay in L1 while the group's rows
//           pass by, in the order in which they are packed
//
// Weights come from memory once per group, one chunk ahead. Each output is added up by one thread from the first input
// to the last, wherever its sums lie in between, so neither the number of threads nor that of rows changes anything.
//
// bf16_gemm_tiles.h has the loops, over a kind of tiles. bf16_gemm_amx.cpp gives them AMX, bf16_gemm_generic.cpp tiles
// in plain C++, by which every machine can test the packing, the blocks and the edges.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "decoder/ops.h"

namespace crelle::cpu {

constexpr int kBlock = 32;                       // rows or outputs: two tiles
constexpr int kStepInputs = 32;                  // of one product of tiles
constexpr size_t kPairBytes = size_t{2} * 1024;  // a step of a block
constexpr int kSums = kBlock * kBlock;           // of a block of rows and one of outputs
constexpr int kChunkSteps = 10;                  // 20 KB of weights, as much of x, and sums: 44 of L1's 48 KB
constexpr int kRangeSteps = 128;                 // 256 KB for a block of rows: a group has at least three
constexpr size_t kRowsBytes = size_t{1} << 20;   // half of L2
constexpr int kStripBlocks = 16384 / kBlock;     // outputs at a time: bounds the sums that wait for another range

inline int parts_of(int count, int each) { return (count + each - 1) / each; }

// W as right factors, [block of outputs][step][2 tiles][16 pairs of inputs][16 outputs][2]; zeros beyond N and K.
struct PackedMatrix {
  int N = 0, K = 0;
  uint8_t *tiles = nullptr;

  int blocks() const { return parts_of(N, kBlock); }
  int steps() const { return parts_of(K, kStepInputs); }
  uint8_t *at(int block, int step) const { return tiles + (size_t(block) * steps() + step) * kPairBytes; }
};

struct PackedProduct {
  PackedMatrix w;
  Dense x;            // [M, K], F32 or BF16
  const float *bias;  // [blocks of outputs * 32]
  uint16_t *y;        // [M, N]

  int row_blocks() const { return parts_of(x.N, kBlock); }
  int ranges() const { return parts_of(w.steps(), kRangeSteps); }
  int range_steps() const { return parts_of(w.steps(), ranges()); }  // of the longest
  // The most blocks of rows that a group has.
  int group_blocks() const {
    return std::max<int>(1, kRowsBytes / (range_steps() * kPairBytes + kSums * sizeof(float)));
  }
};

// Blocks [row0, row1) of rows times blocks [column0, column1) of outputs.
struct BlockRange {
  int row0, row1, column0, column1;
};

// What multiply needs to itself, on 64 bytes: a range of a group's rows, and the group's sums - of one block of outputs
// where K is one range.
inline size_t room_bytes(const PackedProduct &p, const BlockRange &r) {
  const size_t rows = std::min(p.group_blocks(), r.row1 - r.row0), columns = p.ranges() > 1 ? r.column1 - r.column0 : 1;
  return rows * (p.range_steps() * kPairBytes + columns * kSums * sizeof(float));
}

struct Bf16GemmKernel {
  void (*pack)(const Dense &weight, const PackedMatrix &w, int block0, int block1);  // some of the blocks of outputs
  void (*multiply)(const PackedProduct &p, const BlockRange &r, uint8_t *room);
};

extern const Bf16GemmKernel kBf16GemmEmulated;
#if defined(__x86_64__)
extern const Bf16GemmKernel kBf16GemmAmx;
#endif

}  // namespace crelle::cpu
