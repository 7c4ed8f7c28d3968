// Activations x [M, K], encoded as small integers once and used by every matrix that takes the same x (q, k, v).
//
// A segment of up to 128 inputs has one scale. Two encodings, chosen by the weight's stream:
//   digits   d = round(x / scale), so that sum_k q_k x_k is an integer dot product (vpdpbusd)
//   tables   for every 4 inputs the 16 sums +-x0 +-x1 +-x2 +-x3, divided by the scale and rounded: bit i of the index
//            is the sign of x_i. Rounding a sum of four once is about as exact as rounding the four.
// Two precisions: Int8 keeps one byte of each, Exact two (value = 256 hi + lo, sums still exact in int32).
//
// Integers know no NaN. A row with a value that is not finite is encoded as zeros with the factor NaN, by which all its
// products are multiplied at the end; so all of them are NaN. A row of very large or very small values is scaled by a
// power of two before, and its products are scaled back: no sum on the way overflows, no scale is subnormal. All other
// rows have the factor 1, which is not applied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "planes/k_partition.h"
#include "base/memory.h"
#include "planes/weight.h"

namespace crelle::cpu {

enum class Precision : uint8_t { Int8 = 1, Exact = 2 };  // the value is the number of bytes

struct Activations {
  const Isa *isa = nullptr;
  Stream stream = Stream::QuadPlanes;
  Precision precision = Precision::Int8;
  int M = 0;
  KPartition partition;
  size_t row_bytes = 0;                      // codes of one row of x
  Buffer codes;                              // [M][chunks][tables 128 B or digits 32 B][bytes of a value]
  Buffer scale_buffer;                       // float [M][segments]
  Buffer sum_buffer;                         // float [M][groups]
  Buffer factor_buffer;                      // float [M]
  std::shared_ptr<const MixedLayout> mixed;  // Stream::Mixed: of the weight that x was encoded for; codes: MixedInputs
  std::shared_ptr<const IntegerLayout> integer;  // Stream::Integer: likewise; codes: see integer_weight.h
  std::shared_ptr<const TrellisLayout> trellis;  // Stream::Trellis: likewise; codes: see trellis_weight.h

  int digits() const { return static_cast<int>(precision); }
  const uint8_t *row(int m) const { return codes.data() + size_t(m) * row_bytes; }
  // What a unit of the integers is worth.
  const float *scales(int m) const {
    return reinterpret_cast<const float *>(scale_buffer.data()) + size_t(m) * partition.segments;
  }
  // The sum of each group's inputs: of x itself for tables, of the rounded x for digits. There the error of
  // sum (q - zero) d is small only if both terms see the same rounded d.
  const float *sums(int m) const {
    return reinterpret_cast<const float *>(sum_buffer.data()) + size_t(m) * partition.groups;
  }
  float factor(int m) const { return reinterpret_cast<const float *>(factor_buffer.data())[m]; }
  float &factor(int m) { return floats_of(factor_buffer)[m]; }
  float *scales(int m) { return const_cast<float *>(static_cast<const Activations *>(this)->scales(m)); }
  float *sums(int m) { return const_cast<float *>(static_cast<const Activations *>(this)->sums(m)); }

  // Whether these integers are the ones that w multiplies.
  bool fits(const Weight &w) const {
    return same_shape(w) && (stream != Stream::Mixed || mixed->same_inputs(*w.mixed)) &&
           (stream != Stream::Integer || integer->same_inputs(*w.integer)) &&
           (stream != Stream::Trellis || trellis->same_inputs(*w.trellis));
  }
  // Whether they lie in memory as those that w multiplies.
  bool same_shape(const Weight &w) const {
    return isa == w.isa && stream == w.stream && partition == w.partition &&
           (stream != Stream::Integer || row_bytes == w.integer->row_bytes);
  }

  // Get the buffers ready for M rows of what w takes; no allocation when they are large enough already.
  void shape(const Weight &w, int M, Precision precision);
};

}  // namespace crelle::cpu
