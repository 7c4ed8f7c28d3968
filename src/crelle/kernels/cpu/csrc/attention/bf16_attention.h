// Causal attention over whole sequences as bf16 tiles: what a calibration forward pass computes between its products.
//
//   y = bf16(softmax(q kᵀ D^-0.5) v)    q, y [B, T, H, D], k, v [B, T, Hkv, D] in bf16, scores and sums in f32
//
// Token t sees tokens 0 ... t. Query head h reads the keys and values of head h / (H / Hkv); a thread packs those of
// one sequence and head as right factors, once for all query heads that share them. Tokens come in blocks of 32. A
// block of queries of one head takes three steps:
//
//   scores    of all keys up to its own block, in f32, and the largest of each query
//   weights   exp(score - largest), their sums in f32, rounded to bf16 as left factors
//   values    weights times values, added up in f32
//
// Since the largest score is known before the first weight, nothing has to be rescaled. The last two steps take
// kChunkBlocks blocks of keys at a time, whose weights stay in L1 between them.
//
// A query's result depends on nothing but its own block and the tokens before it: neither on the number of threads nor
// on other sequences. What is not finite reaches only tokens that see it.
//
// bf16_attention_tiles.h has the loops, over a kind of tiles; bf16_attention_amx.cpp gives them AMX,
// bf16_attention_generic.cpp tiles in plain C++, for tests. Blocks and tiles are those of bf16_gemm.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>

#include "dense/bf16_gemm.h"

namespace crelle::cpu {

constexpr int kMaxHeadSize = 256;
constexpr int kChunkBlocks = 8;  // 16 KB of weights in L1, beside as much of values that pass by

struct CausalAttention {
  int B, T, H, Hkv, D;  // D: a multiple of 32
  const uint16_t *q, *k, *v;
  uint16_t *y;
  int parts;  // of the blocks of queries: see parts_for

  int blocks() const { return parts_of(T, kBlock); }
  int steps() const { return D / kStepInputs; }  // also blocks of channels
  int group() const { return H / Hkv; }

  // Work is shared out in units: a part of the queries that read one head of keys of one sequence.
  size_t units() const { return size_t(B) * Hkv * parts; }
};

// Parts of the queries, so that n threads have equal numbers of units. Two blocks make the smallest part: the first
// sees the least, the last the most.
inline int parts_for(const CausalAttention &a, int n) {
  const int needed = int(n / std::gcd(size_t(n), size_t(a.B) * a.Hkv));
  return std::clamp(a.blocks() / 2, 1, needed);
}

// What a thread needs to itself, on 64 bytes.
struct AttentionRoom {
  uint8_t *keys;     // [block of tokens][step][2 tiles][16 pairs of channels][16 tokens][2]
  uint8_t *values;   // [block of channels][block of tokens][2 tiles][16 pairs of tokens][16 channels][2]
  uint8_t *queries;  // [step][2 tiles][16 tokens][32 channels]
  uint8_t *weights;  // [block of keys][2 tiles][16 queries][32 keys], a chunk of them
  float *scores;     // [block of keys][32 queries][32 keys]
  float *sums;       // [block of channels][32 queries][32 channels]
  float *tops;       // [32 queries][16]: the largest scores
  float *totals;     // [32 queries][16]: sums of weights
  uint8_t *finite;   // [block of tokens]: whether all of its values are

  AttentionRoom(const CausalAttention &a, uint8_t *room) {
    const size_t blocks = a.blocks(), steps = a.steps(), sums_bytes = kSums * sizeof(float), rows_bytes = kBlock * 64;
    const auto take = [&](size_t bytes) { return room + std::exchange(used, used + bytes); };
    keys = take(blocks * steps * kPairBytes);
    values = take(blocks * steps * kPairBytes);
    queries = take(steps * kPairBytes);
    weights = take(kChunkBlocks * kPairBytes);
    scores = reinterpret_cast<float *>(take(blocks * sums_bytes));
    sums = reinterpret_cast<float *>(take(steps * sums_bytes));
    tops = reinterpret_cast<float *>(take(rows_bytes));
    totals = reinterpret_cast<float *>(take(rows_bytes));
    finite = take(blocks);
  }

  static size_t bytes(const CausalAttention &a) {
    uint8_t none;
    return AttentionRoom(a, &none).used;
  }

private:
  size_t used = 0;
};

struct Bf16AttentionKernel {
  void (*attend)(const CausalAttention &a, size_t unit0, size_t unit1, uint8_t *room);
};

extern const Bf16AttentionKernel kBf16AttentionEmulated;
#if defined(__x86_64__)
extern const Bf16AttentionKernel kBf16AttentionAmx;
#endif

}  // namespace crelle::cpu
