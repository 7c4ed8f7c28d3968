// Keys and values in pages of 16, 8 or 4 bits; crelle/formats/kv.py defines the layout and every rounding.
//
// A cache is either one block per sequence (`capacity` tokens each) or pages that a table names. Coded pages hold keys
// and values rotated by a Hadamard matrix, which is its own inverse: queries are rotated as well, and so is the result.
#pragma once

#include <cstdint>
#include <vector>

#include "ops.h"

namespace crelle::cpu {

// Keys and values of all layers; borrowed. It never changes: calls of several threads share it. Which pages belong to a
// sequence is told with every call, in a copy that was checked and that no caller can change (decoder.h). Blocks: [2,
// rows, kv_heads, capacity, head_size]. Pages: [pages, 2, kv_heads, page, values or codes of a head], and packed scales
// [pages, 2, kv_heads, page, groups] beside codes.
struct Cache {
  DType type = DType::F32;  // of values; codes are read as f32
  int heads = 0, head_size = 0;
  std::vector<uint8_t *> layers;
  // blocks only
  int rows = 0, capacity = 0;
  // pages only
  int page = 0, bits = 16, groups = 0,
      hadamard_block = 0;  // tokens of a page; channels that are rotated together, 0: none
  std::vector<int16_t *> words;
  std::vector<const float *> center;  // [kv_heads, head_size] per layer, or empty
  int pages = 0;                      // of all

  bool paged() const { return page > 0; }
  bool coded() const { return bits < 16; }
};

// One head of one layer for one sequence: where its tokens lie.
struct PagedHead {
  const Cache &c;
  const int32_t *pages;  // of the sequence, in order
  int layer, head, heads, D;

  // Tokens [from, from + count) as f32 rows; `kind` 0: keys, 1: values.
  void read(const Ops &ops, int kind, int from, int count, float *out) const;
  // Store x [D] of a token, rotated and centred first where pages are coded; `out` (or null) gets it as it is read
  // back.
  void write(const Ops &ops, int kind, int position, const float *x, bool keep, float *out) const;

  // Prefetch keys and values of tokens [from, from + count): they will be needed soon.
  void prefetch(int from, int count) const;

  // Where a token's values lie, in pages that are not coded; the rest of its page lies behind it.
  const uint8_t *at(int kind, int position) const {
    return c.layers[layer] + place(kind, position) * D * size_of(c.type);
  }

private:
  size_t place(int kind, int position) const;  // in tokens of this head, over all pages
};

// x [n], in blocks of `block` channels: times the Hadamard matrix over the root of its size. `block` a power of two.
void hadamard(float *x, int n, int block);

}  // namespace crelle::cpu
