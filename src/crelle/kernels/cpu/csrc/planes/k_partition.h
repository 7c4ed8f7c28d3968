// How a row of K inputs is split: groups, segments, chunks. Weights and activations must be split alike.
//
//   group    G inputs that share the weight's scales; the last one is shorter where G does not divide K
//   segment  up to 128 inputs of one group that share one activation scale; integer sums live this long
//   chunk    32 inputs, padded with zero activations at the end of a group: the unit of the inner loops
//
// One activation scale per segment, not per row: it is folded with the group's scale (one multiply per 16 outputs and
// 128 inputs), and an outlier in x spoils 128 inputs rather than all of them.
#pragma once

#include <cstdint>

namespace crelle::cpu {

constexpr int kChunk = 32;
constexpr int kSegment = 128;
constexpr int kSegmentChunks = kSegment / kChunk;

struct KPartition {
  int K = 0;
  int G = 0;
  int groups = 0;         // ceil(K / G)
  int full_chunks = 0;    // chunks of a full group
  int last_chunks = 0;    // chunks of the last group
  int chunks = 0;         // of a whole row
  int full_segments = 0;  // segments of a full group
  int segments = 0;       // of a whole row

  KPartition() = default;
  KPartition(int K_, int G_) : K(K_), G(G_) {
    groups = (K + G - 1) / G;
    const int last = K - (groups - 1) * G;
    full_chunks = (G + kChunk - 1) / kChunk;
    last_chunks = (last + kChunk - 1) / kChunk;
    chunks = (groups - 1) * full_chunks + last_chunks;
    full_segments = (full_chunks + kSegmentChunks - 1) / kSegmentChunks;
    segments = (groups - 1) * full_segments + (last_chunks + kSegmentChunks - 1) / kSegmentChunks;
  }

  int chunks_of(int g) const { return g + 1 < groups ? full_chunks : last_chunks; }
  int inputs_of(int g) const { return g + 1 < groups ? G : K - g * G; }
  bool operator==(const KPartition &o) const { return K == o.K && G == o.G; }
};

}  // namespace crelle::cpu
