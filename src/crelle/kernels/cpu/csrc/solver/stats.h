// Sums over tokens for calibration, as products of bf16 tiles: what crelle.quantizers.calibration.stats adds up for one
// batch.
//
//   a = bf16(w x),  d = bf16(w (full - x))       w [T], x and full [T, K]
//   hessian += aᵀ a    its upper triangle, and the lower one where a block of 32 x 32 on the diagonal has it
//   cross   += dᵀ a    all of it
//   abssum  += Σ |w x|
//
// Tokens come in blocks of at most kBlockSteps * 32, so that sums are read and written once in 1024 tokens. A block is
// packed once, then multiplied. Threads share both: steps of 32 tokens, then blocks of 32 x 32 outputs. Each output is
// added up by one thread in one order, so the number of threads changes nothing.
//
// stats_tiles.h has the loops, over a kind of tiles. stats_amx.cpp gives them AMX, stats_generic.cpp tiles in plain
// C++, by which every machine can test the packing, the blocks and the edges.
#pragma once

#include <cstddef>
#include <cstdint>

#include "decoder/ops.h"

namespace crelle::cpu {

constexpr int kStepTokens = 32;  // of one product of tiles
constexpr int kBlockSteps = 32;
constexpr int kBlockColumns = 32;                // two tiles
constexpr size_t kStepBytes = size_t{2} * 1024;  // two tiles: 32 columns of 32 tokens

struct TokenSums {
  int T, K;
  DType x_type, full_type;  // F32 or BF16
  const uint8_t *x, *full;  // [T, K]; full: null, then cross is not touched
  const float *weight;      // [T]
  float *hessian, *cross;   // [K, K]
  float *abssum;            // [K]

  int blocks() const { return (K + kBlockColumns - 1) / kBlockColumns; }  // of columns
  // Blocks of outputs: H's on and above the diagonal, and all of C - H.
  int64_t products() const {
    const int64_t n = blocks();
    return n * (n + 1) / 2 + (full ? n * n : 0);
  }
};

// A block of tokens as tiles, [block of 32 columns][step][2 tiles]; zeros for what is beyond T and K.
struct PackedTokens {
  int first, steps;            // the first token; steps of 32 tokens
  uint8_t *pairs;              // a, right factor: [16 pairs of tokens][16 columns][2]
  uint8_t *rows, *difference;  // a and d, left factors: [16 columns][32 tokens]
  float *abssum;               // [step][blocks of 32 columns]
};

struct StatsKernel {
  void (*pack)(const TokenSums &s, const PackedTokens &p, int step0, int step1);
  void (*multiply)(const TokenSums &s, const PackedTokens &p, int64_t begin, int64_t end);  // some of the products
};

extern const StatsKernel kStatsEmulated;
#if defined(__x86_64__)
extern const StatsKernel kStatsAmx;
#endif

}  // namespace crelle::cpu
