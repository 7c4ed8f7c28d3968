// Keys and values in pages of 16, 8, 4, 3 or 2 bits; crelle/formats/kv/pages.py defines the layout and every rounding.
//
// A cache is either one block per sequence (`capacity` tokens each) or pages that a table names. Coded pages hold keys
// and values rotated by a Hadamard matrix, which is its own inverse: queries are rotated as well, and so is the result.
#pragma once

#include <cstdint>
#include <vector>

#include "decoder/ops.h"

namespace crelle::cpu {

// Keys and values of all layers; borrowed. It never changes: calls of several threads share it. Which pages belong to a
// sequence is told with every call, in a copy that was checked and that no caller can change (decoder.h). Blocks: [2,
// rows, kv_heads, capacity, head_size]. Pages: those of LayerPages.

// How keys or values lie in a page: [kv_heads, page, row] bytes from `at` on, packed scales [kv_heads, page, groups].
struct KindOfPages {
  int bits = 16, groups = 0;
  bool rotate = false;
  size_t row = 0, at = 0;  // bytes of a head of a token; of the page before the first
  size_t words_at = 0;     // packed scales of the page before the first

  bool coded() const { return bits < 16; }
};

struct LayerPages {
  uint8_t *codes = nullptr;
  int16_t *words = nullptr;
  const float *center = nullptr;  // [kv_heads, head_size], or none
  size_t page_bytes = 0, page_words = 0;
  KindOfPages kind[2];  // keys, values

  bool coded() const { return kind[0].coded() || kind[1].coded(); }
  // Fill in where keys and values of a page lie, as crelle.formats.kv.format.PageLayout has it.
  void lay_out(int heads, int page, int head_size, size_t size_of_value);
};

struct Cache {
  DType type = DType::F32;  // of values; codes are read as f32
  int heads = 0, head_size = 0;
  std::vector<uint8_t *> layers;
  // blocks only
  int rows = 0, capacity = 0;
  // pages only
  int page = 0, pages = 0;  // tokens of a page; pages of all
  int hadamard_block = 0;   // channels that are rotated together
  std::vector<LayerPages> paged_layers;

  bool paged() const { return page > 0; }
  bool rotates(int layer, int kind) const { return paged() && paged_layers[layer].kind[kind].rotate; }
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

  const LayerPages &own() const { return c.paged_layers[layer]; }
  // Where a token's codes or values lie; the rest of its page lies behind it.
  uint8_t *at(int kind, int position) const;
  int16_t *words(int kind, int position) const;
};

// Bytes of the codes of a head: 3 bits are a plane of the low two and a plane of the third.
inline size_t code_bytes(int bits, int D) {
  return bits == 3 ? size_t(D + 3) / 4 + size_t(D + 7) / 8 : (size_t(D) * bits + 7) / 8;
}

}  // namespace crelle::cpu
