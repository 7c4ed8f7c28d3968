// A matrix of integers for integer activations (crelle.formats.grouped and two_level), laid out for products of bytes.
//
// The inputs lie in stored order (perm), outliers last, in spans: inputs with one scale (grouped) or one pair of
// integer scale and zero (two-level) in every output, and one scale in x. A span is padded to words of 16 inputs. A
// block has 32 outputs, is laid out alike for every instruction set, and is one run of memory in the order in which it
// is read:
//
//   head      two-level: scales f32 [32]
//   span      grouped: scales f16 or f32 [32];   two-level, codes of 4 bits: scales u8 [32], zeros u8 [32]
//     4 bits  a word is 256 bytes: [2][32 outputs][4]; byte i of half h holds input 8 h + i in its low and 8 h + 4 + i
//             in its high nibble. Codes are unsigned: q + 8 (grouped, 3 bits too), or q (two-level)
//     8 bits  a word is 512 bytes: [4][32 outputs][4], signed
//
// So sums are those of unsigned codes, less 8 (or the group's zero) times the sum of x's integers: exact in int32.
//
// A row of x, encoded: int8 [word][16], f32 scale [span], int32 sum of the integers [span].
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace crelle::cpu {

struct Weight;
struct Isa;

constexpr int kIntegerRows = 32, kIntegerWord = 16;
constexpr size_t kNibbleWordBytes = kIntegerRows * kIntegerWord / 2, kByteWordBytes = kIntegerRows * kIntegerWord;
constexpr int kNibbleZero = 8;  // of grouped codes

struct IntegerSpan {
  int begin, width;      // inputs, in stored order
  int word, words;       // where they lie in an encoded row
  bool bytes;            // of 8 bits
  bool ends_scale;       // two-level: the sums are scaled behind this span
  size_t header, codes;  // where they lie in a block
};

// Inputs of x that share a scale: spans [span0, span1).
struct IntegerGroup {
  int begin, width, span0, span1;
  float factor, least, top;  // scale = max |x| factor; codes lie in least ... top
  bool operator==(const IntegerGroup &) const = default;
};

struct IntegerLayout {
  bool two_level = false;
  bool wide = false;          // grouped: scales are f32
  std::vector<int32_t> perm;  // stored input j is x[perm[j]]; empty: j
  // The first `rotated` inputs are multiplied by Hadamard matrices before they are rounded: blocks of `block`, and of
  // `tail` behind the last whole block.
  int rotated = 0, block = 1, tail = 1;
  std::vector<IntegerSpan> spans;
  std::vector<IntegerGroup> groups;
  size_t scales_at = 0, sums_at = 0, row_bytes = 0;  // of an encoded row
  size_t block_bytes = 0;

  // Whether the integers of x are the same, and lie alike.
  bool same_inputs(const IntegerLayout &o) const;
};

// What the formats store, codes one to a byte and scales as f32.
struct IntegerStored {
  int N, K, bits, group, outliers;
  const uint8_t *codes;                     // [N, K - outliers]: unsigned (see above), at 8 bits two's complement
  const int8_t *outlier_codes;              // [N, outliers] or null
  const float *scale;                       // [N, C], two-level [N]
  const uint8_t *group_scale, *group_zero;  // two-level [N, C], else null
  const int32_t *perm;                      // [K] or null
  int x_bits, x_group, x_outliers;
  double clip;
  int block;  // inputs that are rotated together; 1: none
};

Weight prepare_integer(const IntegerStored &s, const Isa &isa);
void dequantize_integer_row(const Weight &w, int n, float *out);

}  // namespace crelle::cpu
