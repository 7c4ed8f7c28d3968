// A weight matrix [N, K] laid out for one instruction set: one sequential stream of codes and scales.
//
// The stream is split into blocks of R output rows. A block holds, in the order in which the kernel reads it,
//
//   zeros   uint8 [groups][R]                            uniform grids with stored zero points only
//   for each group:
//     scales  f16 or f32 [P][R] (BCQ), [R] (others)      then z [R] (BCQ with bias, affine); padded to 64 bytes
//     codes   [chunk][...]                               see Stream
//
// so that a thread reads one long run of memory: the hardware prefetcher follows it, and no second stream of scales
// competes for it. Scales are kept as f16 when that loses nothing, as f32 otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "integer/integer_weight.h"
#include "planes/k_partition.h"
#include "base/memory.h"
#include "mixed/mixed_weight.h"
#include "trellis/trellis_weight.h"

namespace crelle::cpu {

struct Isa;

enum class Kind : uint8_t {
  Bcq,      // w = z + sum_p alpha_p b_p
  Uniform,  // w = scale (q - zero)
  Affine,   // w = z + scale q; Stream::Fields only
  Mixed,    // groups of 2 and of 4 bits, outliers: see mixed_weight.h
  Integer,  // integers for integer activations: see integer_weight.h
  Trellis,  // trellis codes, also of a matrix with rotated inputs: see trellis_weight.h
};

// How the codes lie in the stream, and what the activations must look like.
enum class Stream : uint8_t {
  // Bit-planes, a dword per row: [chunk][R/16][P][16 rows][4 bytes]. Byte j of a row's dword is 8 inputs of one plane.
  // Activations: a table of 16 signed sums for every 4 inputs, four tables to a 64-byte register (vpermb).
  QuadPlanes,
  // Bit-planes, a byte per row: [chunk][4][P][R bytes], rows in the order of byte_plane_row.
  // Activations: the same tables, biased to be unsigned, one 16-byte lane each (pshufb, tbl).
  BytePlanes,
  // 4-bit codes: [chunk][4][R/16][16 rows][4 bytes]. Low nibbles are inputs 8v...8v+3, high nibbles 8v+4...8v+7.
  // Activations: int8 digits, four to a dword (vpdpbusd).
  Nibbles,
  // 8-bit codes: [chunk][8][R/16][16 rows][4 bytes]. Activations: int8 digits.
  Bytes,
  // Codes of 1 to 8 bits: [chunk][4][P][R/4 rows][4 bytes]. P is a sum of fields of 8, 4, 2 and 1 bits; the widest come
  // first and hold the lowest bits of the codes. Field i of a byte is F bits from bit F i on, and the fields of a
  // byte's vectors in order are inputs j, 4 + j, 8 + j ... of the chunk, for byte j of a row. Codes of 8 bits are
  // stored
  // less kByteZero. Activations: int8 digits, four to a lane (sdot, vpdpbusd, vpmaddubsw).
  Fields,
  // Codes of 2 and 4 bits and outliers: see mixed_weight.h. Activations: int8 digits, and x itself.
  Mixed,
  // Integers for integer activations: see integer_weight.h.
  Integer,
  // Rings of trellis codes: see trellis_weight.h. Activations: int8 digits or int16, rotated before if the weight is.
  Trellis,
};

constexpr int kByteZero = 128;

// Stream::BytePlanes: the row of a block of R that byte i belongs to. Sums of even and of odd bytes are 16-bit words
// apart; those of two digits are interleaved within lanes of 16 bytes and come out as vectors of R / 4 rows in order.
inline int byte_plane_row(int i, int R) {
  const int word = i / 2;
  return i % 2 * (R / 2) + word % 8 / 4 * (R / 4) + word / 8 * 4 + word % 4;
}

inline bool takes_tables(Stream s) { return s == Stream::QuadPlanes || s == Stream::BytePlanes; }

struct Weight {
  const Isa *isa = nullptr;  // the kernels that understand this layout
  Kind kind = Kind::Bcq;
  Stream stream = Stream::QuadPlanes;
  int N = 0, K = 0, P = 0;
  KPartition partition;
  int R = 0;                 // rows of a block
  int blocks = 0;            // ceil(N / R)
  bool bias = false;         // BCQ: z present; uniform: zero points stored (absent: 2^(P-1))
  bool wide_scales = false;  // f32 rather than f16
  size_t chunk_bytes = 0;    // codes of one chunk of a block
  size_t scale_bytes = 0;    // scales of one group of a block, padded
  size_t zeros_bytes = 0;    // zero points of a block, padded
  size_t block_bytes = 0;    // of every block, where they are equal
  Buffer data;
  std::vector<size_t> starts;                    // of the blocks and their end, where they differ in size
  std::shared_ptr<const MixedLayout> mixed;      // Kind::Mixed only
  std::shared_ptr<const IntegerLayout> integer;  // Kind::Integer only
  std::shared_ptr<const TrellisLayout> trellis;  // Kind::Trellis only

  const uint8_t *block(int b) const { return data.data() + (starts.empty() ? size_t(b) * block_bytes : starts[b]); }
  size_t bytes(int b0, int b1) const { return block(b1) - block(b0); }
  size_t bytes() const { return bytes(0, blocks); }
  size_t scale_size() const { return wide_scales ? 4 : 2; }
};

// Whether x is gathered, rotated and rounded alike for two weights of one stream and partition.
inline bool same_inputs(const Weight &a, const Weight &b) {
  if (a.stream == Stream::Mixed) return a.mixed->same_inputs(*b.mixed);
  if (a.stream == Stream::Integer) return a.integer->same_inputs(*b.integer);
  return a.stream != Stream::Trellis || a.trellis->same_inputs(*b.trellis);
}

// Storage as crelle.formats.bcq defines it, scales widened to f32. Any pointer may be unaligned.
struct Stored {
  Kind kind;
  int N, K, P, G;
  const uint8_t *planes;  // [P, N, ceil(K/8)], plane 0 is the most significant
  const float *scale;     // BCQ alpha [P, N, C]; uniform scale [N, C]
  const float *z;         // BCQ bias [N, C] or null; affine: the lowest level [N, C]
  const uint8_t *zero;    // uniform zero points [N, C] or null
};

// Scale i of those at `at`, as floats.
float scale_at(const Weight &w, const uint8_t *at, int i);

// Lay a stored matrix out for `isa`. Runs on the pool.
Weight prepare_weight(const Stored &s, const Isa &isa);

// The values of row n, [K], from the prepared layout: for tests, embeddings and tied heads.
void dequantize_row(const Weight &w, int n, float *out);

}  // namespace crelle::cpu
