// A matrix of 2- and 4-bit input-channel groups (crelle.formats.mixed), laid out for products of integers.
//
// The groups are reordered, all of 2 bits before all of 4, and x is gathered in that order when it is encoded. A block
// has 16 output rows, on every instruction set, and is one run of memory in the order in which it is read:
//
//   head     row scales of the 4-bit groups f16 [16], their zeros u8 [16], number of slots u32     (f32 scales: 128 B)
//   4 bits   a word for 16 inputs, 128 bytes: [2][16 rows][4 bytes]; byte i of half h holds input 8 h + i in its low
//   and
//            8 h + 4 + i in its high nibble
//   2 bits   units of four groups:
//     header   scale codes: u8 [2][16 rows], a nibble for each group; zero codes: u8 [16 rows], 2 bits for each group;
//              second-order scales f16 [4] and zeros u8 [4]: 64 bytes in all
//     codes    a word for 16 inputs, 64 bytes: [16 rows][4 bytes]; byte i holds inputs i, 4 + i, 8 + i, 12 + i, from
//     the
//              lowest bits on. With groups of 8 a word belongs to two groups
//   slots    outliers: u16 columns [16 rows], f16 (or f32) values [16 rows]; as many as the row with the most has
//
// So a 2-bit weight has 2.5 bits at groups of 16 (2.45 as stored), and scales are decoded in registers. Where 16 rows
// do not share their second-order scales, or these are no f16 values, the scales are decoded beforehand: a header is
// followed by f32 [4][16 rows].
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace crelle::cpu {

struct Weight;
struct Isa;

constexpr int kMixedRows = 16, kUnitGroups = 4;
constexpr int kWord = 16;  // inputs
constexpr size_t kWord2Bytes = 64, kWord4Bytes = 128;
constexpr size_t kUnitHeader = 64, kDecodedScales = sizeof(float) * kUnitGroups * kMixedRows;
constexpr size_t kHeaderZeros = 32, kHeaderSecond = 48, kHeaderSecondZeros = 56;  // where they lie in a unit's header

struct MixedLayout {
  int G = 0, C2 = 0, C4 = 0;
  std::vector<int32_t> order;  // groups as they lie: C2 of 2 bits, C4 of 4
  bool decoded = false;        // first-order scales are stored as f32
  bool wide = false;           // row scales and outliers are f32
  int units = 0, words2 = 0, words4 = 0;

  MixedLayout() = default;
  MixedLayout(const uint8_t *four, int groups, int G_);

  size_t head_bytes() const { return wide ? 128 : 64; }
  size_t header_bytes() const { return kUnitHeader + (decoded ? kDecodedScales : 0); }
  size_t unit_bytes() const { return header_bytes() + kWord2Bytes * kUnitGroups * G / kWord; }
  size_t slot_bytes() const { return kMixedRows * (wide ? 6 : 4); }
  size_t zeros_at() const { return kMixedRows * (wide ? 4 : 2); }  // in the head
  size_t slots_at() const { return zeros_at() + kMixedRows; }
  bool same_inputs(const MixedLayout &o) const { return G == o.G && C2 == o.C2 && order == o.order; }
};

// Where the parts of an encoded row of x lie, in bytes. Depends on K and G only, so that weights with other groups of
// 4 bits can use the same memory, one after the other.
struct MixedInputs {
  size_t zeros, halves, scales2, scales4, sum4, x, bytes;  // digits int8 [word][digit][16] come first

  MixedInputs(int K, int G, int digits) {
    const size_t groups = (size_t(K) + G - 1) / G + kUnitGroups, words = groups * G / kWord + 2;
    zeros = words * kWord * digits;  // int32 [group][4]: -sum/2 times 1, 2, 3, 4
    halves = zeros + groups * 16;    // int16 [group][2]: -sum/2 as 256 first + second, or the second alone
    scales2 = halves + groups * 4;   // float [group]: what a unit of the integers is worth
    scales4 = (scales2 + groups * sizeof(float) + 15) / 16 * 16;  // float [segment]
    sum4 = scales4 + (words * kWord / 128 + 1) * sizeof(float);   // float: the sum of the inputs of 4-bit groups
    x = (sum4 + sizeof(float) + 63) / 64 * 64;                    // float [K], as it is
    bytes = (x + sizeof(float) * K + 63) / 64 * 64;
  }
};

// The codes of a tensor, one to a byte, and its scales as f32.
struct MixedStored {
  int N, K, G, block;
  const uint8_t *four;                                // [C]
  const uint8_t *codes2, *codes4;                     // [N, C2, G], [N, C4, G]
  const uint8_t *scale_codes, *zeros, *second_zeros;  // [N, C2] twice, [B, C2]
  const float *second_scale, *row_scale;              // [B, C2], [N] or null
  const uint8_t *row_zero;                            // [N] or null
  const float *outlier_values;                        // [n] or null
  const int32_t *outlier_columns, *outlier_rows;      // [n], [N + 1]
};

Weight prepare_mixed(const MixedStored &s, const Isa &isa);
void dequantize_mixed_row(const Weight &w, int n, float *out);

}  // namespace crelle::cpu
