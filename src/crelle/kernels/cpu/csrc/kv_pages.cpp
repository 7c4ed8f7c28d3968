#include "kv_pages.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"

namespace crelle::cpu {
namespace {

int zero_bits(int bits) { return bits == 4 ? 6 : 8; }

// As crelle.formats.kv.quantize does it, operation by operation: the codes are the same.
void quantize(const float *x, int n, int bits, uint8_t *codes, int16_t *word) {
  const int steps = (1 << bits) - 1, zbits = zero_bits(bits), kept = zbits - 1;
  float low = 0, high = 0;
  bool no_nan = true;
  for (int i = 0; i < n; ++i) {
    low = std::min(low, x[i]), high = std::max(high, x[i]);
    no_nan = no_nan && x[i] == x[i];
  }
  int half = no_nan ? half_of_float((high - low) / static_cast<float>(steps)) : 0x7e00;
  half = std::min((half + (1 << kept) - 1) >> kept << kept, 0x7fff & -(1 << kept));
  const float scale = float_of_half(static_cast<uint16_t>(half)), safe = scale > 0 ? scale : 1.0f;
  const float fine = static_cast<float>(1 << (zbits - bits));
  const auto clamped = [](float v, int most) {
    return v != v ? 0.0f : std::min(std::max(std::nearbyint(v), 0.0f), static_cast<float>(most));
  };
  const float z = clamped(-low / safe * fine, (1 << zbits) - 1), offset = z / fine;
  for (int i = 0; i < n; ++i) {
    const auto code = static_cast<uint8_t>(clamped(x[i] / safe + offset, steps));
    if (bits == 8)
      codes[i] = code;
    else if (i % 2 == 0)
      codes[i / 2] = code;
    else
      codes[i / 2] = static_cast<uint8_t>(codes[i / 2] | code << 4);
  }
  if (half >= 0x7c00) half = 0x7e00;
  *word = static_cast<int16_t>(static_cast<uint16_t>(half << 1 | static_cast<int>(z)));
}

}  // namespace

void hadamard(float *x, int n, int block) {
  for (int step = 1; step < block; step *= 2)
    for (int i = 0; i < n; i += 2 * step)
      for (int j = i; j < i + step; ++j) {
        const float a = x[j], b = x[j + step];
        x[j] = a + b, x[j + step] = a - b;
      }
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  for (int i = 0; i < n; ++i) x[i] *= factor;
}

size_t PagedHead::place(int kind, int position) const {
  const size_t page = static_cast<size_t>(pages[position / c.page]);
  return ((page * 2 + kind) * heads + head) * c.page + position % c.page;
}

void PagedHead::read(const Ops &ops, int kind, int from, int count, float *out) const {
  for (int done = 0; done < count;) {  // a page at a time
    const int position = from + done, n = std::min(count - done, c.page - position % c.page);
    const size_t at = place(kind, position);
    float *to = out + static_cast<size_t>(done) * D;
    if (!c.coded()) {
      ops.load(c.type, c.layers[layer] + at * D * size_of(c.type), to, n * D);
    } else {
      const size_t bytes = static_cast<size_t>(D) * c.bits / 8;
      ops.unpack(c.bits, c.layers[layer] + at * bytes, c.words[layer] + at * c.groups, n, D, c.groups, to);
    }
    done += n;
  }
}

void PagedHead::prefetch(int from, int count) const {
  const size_t bytes = static_cast<size_t>(D) * (c.coded() ? c.bits : 8 * static_cast<int>(size_of(c.type))) / 8;
  for (int done = 0; done < count;) {  // a page at a time
    const int position = from + done, n = std::min(count - done, c.page - position % c.page);
    for (const int kind : {0, 1}) {
      const size_t at = place(kind, position);
      const uint8_t *lines = c.layers[layer] + at * bytes;
      for (size_t i = 0; i < n * bytes; i += 64) __builtin_prefetch(lines + i, 0, 2);
      if (c.coded()) __builtin_prefetch(c.words[layer] + at * c.groups, 0, 2);
    }
    done += n;
  }
}

void PagedHead::write(const Ops &ops, int kind, int position, const float *x, bool keep, float *out) const {
  const size_t at = place(kind, position);
  if (!c.coded()) {
    uint8_t bytes[4 * 512];
    const size_t size = D * size_of(c.type);
    ops.store(c.type, x, bytes, D);
    if (out) ops.load(c.type, bytes, out, D);
    if (keep) std::memcpy(c.layers[layer] + at * size, bytes, size);
    return;
  }
  float rotated[512];
  uint8_t codes[512];
  int16_t words[64];
  std::copy_n(x, D, rotated);
  if (kind == 0 && !c.center.empty())
    for (int d = 0; d < D; ++d) rotated[d] -= c.center[layer][static_cast<size_t>(head) * D + d];
  if (c.hadamard_block) hadamard(rotated, D, c.hadamard_block);
  const int each = D / c.groups;
  for (int g = 0; g < c.groups; ++g)
    quantize(rotated + g * each, each, c.bits, codes + g * each * c.bits / 8, words + g);
  if (out) ops.unpack(c.bits, codes, words, 1, D, c.groups, out);
  if (!keep) return;
  const size_t bytes = static_cast<size_t>(D) * c.bits / 8;
  std::memcpy(c.layers[layer] + at * bytes, codes, bytes);
  std::memcpy(c.words[layer] + at * c.groups, words, c.groups * sizeof(int16_t));
}

}  // namespace crelle::cpu
