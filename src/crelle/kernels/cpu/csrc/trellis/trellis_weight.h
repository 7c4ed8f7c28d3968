// A matrix of trellis codes (crelle.formats.trellis), bare or with rotated inputs and outputs
// (crelle.formats.wrappers.rotated), laid out for products of bytes.
//
// A sequence is 32 outputs by 4 inputs, and its ring has 128 bits for each bit of a weight. A block has the sequences
// of 32 outputs, is laid out alike for every instruction set, and is one run of memory:
//
//   scales   f32 [32]                       of a unit of the values
//   rings    u64 [2 bits][sequences]        64 bits of each ring, then the next 64; sequences to a multiple of 8
//
// Lanes of a vector are sequences. An output owns 4 bits of a ring for each bit of a weight, and its states lie in at
// most 28 bits: so they come from one u64, or from the two halves of neighbours. Kernels go through a run of u64 once
// for the outputs whose bits it holds, 8 or so at a time, and read memory nearly in order.
//
// A step is 8 sequences: 32 inputs. Up to 20 steps are a segment. x has a scale for each segment and lane: inputs 2 l
// and 2 l + 1 of each step, since that is how sums lie in a vector; an outlier in x spoils 40 inputs only. Sums of a
// segment are exact integers of 32 bits, whose 16 lanes are scaled, added up as f32, and folded once for an output.
//
// A row of x, encoded:
//
//   integers   [step] bytes [digit][32], or int16 [32] where a kernel multiplies 16 bits at once
//   scales     f32 [segment][16]
//   sums       int32 [segment][16]: of the integers
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/rotation.h"

namespace crelle::cpu {

struct Weight;
struct Isa;

constexpr int kTrellisRows = 32, kTrellisColumns = 4;
constexpr int kTrellisStep = 8, kTrellisInputs = kTrellisStep * kTrellisColumns;  // sequences; inputs
constexpr int kTrellisLanes = 16;
constexpr int kTrellisSegment = 20;  // steps, at most; up to 32 of them sums of any integers stay below 2^31
constexpr size_t kTrellisStepBytes = 64, kTrellisHeader = kTrellisRows * sizeof(float);

struct TrellisLayout {
  int half_bits = 4;                  // of a weight, in halves of a bit; also how many u64 a ring has
  bool pair = true;                   // the code: a state stands for two weights, or for one
  int steps = 0, segment = 1;         // of a row; of a segment
  int segments = 0;                   // of a row
  size_t run_bytes = 0;               // a u64 of all sequences
  size_t scales_at = 0, sums_at = 0;  // in an encoded row
  size_t row_bytes = 0;
  Rotation inputs, outputs;

  // Whether the integers of x are the same.
  bool same_inputs(const TrellisLayout &o) const {
    return this == &o || (row_bytes == o.row_bytes && inputs == o.inputs);
  }
};

struct TrellisCode {
  uint32_t multiplier;
  int zero;  // of a sum of the bytes of one weight
};
constexpr TrellisCode trellis_code(bool pair) {
  return pair ? TrellisCode{0xd2c2d6c9u, 255} : TrellisCode{0x83dcd12du, 510};
}

struct TrellisStored {
  int N, K, half_bits;
  bool pair;
  const uint8_t *codes;  // [ceil(N/32), ceil(K/4), 8 half_bits]
  const float *scale;    // [N]
  Rotation inputs, outputs;
};

Weight prepare_trellis(const TrellisStored &s, const Isa &isa);

// Of a matrix whose outputs are not rotated.
void dequantize_trellis_row(const Weight &w, int n, float *out);

}  // namespace crelle::cpu
