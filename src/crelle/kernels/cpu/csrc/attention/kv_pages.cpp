#include "attention/kv_pages.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/hadamard.h"
#include "base/half.h"

namespace crelle::cpu {
namespace {

// As crelle.formats.kv.codes.quantize does it, operation by operation: the codes are the same.
void quantize(const float *x, int n, int bits, uint8_t *codes, int16_t *word) {
  const int steps = (1 << bits) - 1, zbits = bits == 8 ? 8 : 6, kept = zbits - 1;
  float low = 0, high = 0;
  bool no_nan = true;
  for (int i = 0; i < n; ++i) {
    low = std::min(low, x[i]), high = std::max(high, x[i]);
    no_nan = no_nan && x[i] == x[i];
  }
  const float span = bits == 2 ? 0.75f : bits == 3 ? 0.90625f : 1.0f;
  low *= span, high *= span;
  int half = no_nan ? half_of_float((high - low) / static_cast<float>(steps)) : 0x7e00;
  half = std::min((half + (1 << kept) - 1) >> kept << kept, 0x7fff & -(1 << kept));
  const float scale = float_of_half(static_cast<uint16_t>(half)), safe = scale > 0 ? scale : 1.0f;
  const float fine = static_cast<float>(1 << (zbits - bits));
  const auto clamped = [](float v, int most) {
    return v != v ? 0.0f : std::min(std::max(std::nearbyint(v), 0.0f), static_cast<float>(most));
  };
  const float z = clamped(-low / safe * fine, (1 << zbits) - 1), offset = z / fine;
  for (int i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(clamped(x[i] / safe + offset, steps));
  if (half >= 0x7c00) half = 0x7e00;
  *word = static_cast<int16_t>(static_cast<uint16_t>(half << 1 | static_cast<int>(z)));
}

// Channel i at bit i * bits of `to`, little end first; of each code the bits from `from` on.
void pack(const uint8_t *codes, int D, int from, int bits, uint8_t *to) {
  std::memset(to, 0, (size_t(D) * bits + 7) / 8);
  for (int i = 0; i < D; ++i)
    to[i * bits / 8] = static_cast<uint8_t>(to[i * bits / 8] | (codes[i] >> from & ((1 << bits) - 1)) << i * bits % 8);
}

}  // namespace

void LayerPages::lay_out(int heads, int page, int head_size, size_t size_of_value) {
  const size_t tokens = size_t(heads) * page;
  const bool apart = kind[0].bits != kind[1].bits;
  const auto rounded = [apart](size_t n) { return apart ? (n + 15) / 16 * 16 : n; };
  for (KindOfPages &k : kind) k.row = k.coded() ? code_bytes(k.bits, head_size) : head_size * size_of_value;
  kind[1].at = rounded(tokens * kind[0].row);
  page_bytes = rounded(kind[1].at + tokens * kind[1].row);
  kind[1].words_at = tokens * kind[0].groups;
  page_words = tokens * (kind[0].groups + kind[1].groups);
}

uint8_t *PagedHead::at(int kind, int position) const {
  const LayerPages &l = own();
  const KindOfPages &k = l.kind[kind];
  const size_t page = static_cast<size_t>(pages[position / c.page]);
  return l.codes + page * l.page_bytes + k.at + (size_t(head) * c.page + position % c.page) * k.row;
}

int16_t *PagedHead::words(int kind, int position) const {
  const LayerPages &l = own();
  const KindOfPages &k = l.kind[kind];
  const size_t page = static_cast<size_t>(pages[position / c.page]);
  return l.words + page * l.page_words + k.words_at + (size_t(head) * c.page + position % c.page) * k.groups;
}

void PagedHead::read(const Ops &ops, int kind, int from, int count, float *out) const {
  const KindOfPages &k = own().kind[kind];
  for (int done = 0; done < count;) {  // a page at a time
    const int position = from + done, n = std::min(count - done, c.page - position % c.page);
    float *to = out + static_cast<size_t>(done) * D;
    if (!k.coded())
      ops.load(c.type, at(kind, position), to, n * D);
    else
      ops.unpack(k.bits, at(kind, position), words(kind, position), n, D, k.groups, to);
    done += n;
  }
}

void PagedHead::prefetch(int from, int count) const {
  for (int done = 0; done < count;) {  // a page at a time
    const int position = from + done, n = std::min(count - done, c.page - position % c.page);
    for (const int kind : {0, 1}) {
      const KindOfPages &k = own().kind[kind];
      const uint8_t *lines = at(kind, position);
      for (size_t i = 0; i < n * k.row; i += 64) __builtin_prefetch(lines + i, 0, 2);
      if (k.coded()) __builtin_prefetch(words(kind, position), 0, 2);
    }
    done += n;
  }
}

void PagedHead::write(const Ops &ops, int kind, int position, const float *x, bool keep, float *out) const {
  const KindOfPages &k = own().kind[kind];
  if (!k.coded()) {
    uint8_t bytes[4 * 512];
    ops.store(c.type, x, bytes, D);
    if (out) ops.load(c.type, bytes, out, D);
    if (keep) std::memcpy(at(kind, position), bytes, k.row);
    return;
  }
  float rotated[512];
  uint8_t codes[512], packed[512];
  int16_t made[64];
  std::copy_n(x, D, rotated);
  if (kind == 0 && own().center)
    for (int d = 0; d < D; ++d) rotated[d] -= own().center[static_cast<size_t>(head) * D + d];
  if (k.rotate) hadamard(rotated, D, c.hadamard_block);
  const int each = D / k.groups;
  for (int g = 0; g < k.groups; ++g) quantize(rotated + g * each, each, k.bits, codes + g * each, made + g);
  if (k.bits == 3)
    pack(codes, D, 0, 2, packed), pack(codes, D, 2, 1, packed + (D + 3) / 4);
  else
    pack(codes, D, 0, k.bits, packed);
  if (out) ops.unpack(k.bits, packed, made, 1, D, k.groups, out);
  if (!keep) return;
  std::memcpy(at(kind, position), packed, k.row);
  std::memcpy(words(kind, position), made, k.groups * sizeof(int16_t));
}

}  // namespace crelle::cpu
