#include "integer/integer_weight.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <memory>

#include "attention/hadamard.h"
#include "base/half.h"
#include "isa/isa.h"
#include "base/pool.h"
#include "planes/weight.h"

namespace crelle::cpu {

bool IntegerLayout::same_inputs(const IntegerLayout &o) const {
  const auto alike = [](const IntegerSpan &a, const IntegerSpan &b) {
    return a.begin == b.begin && a.width == b.width && a.word == b.word;
  };
  return this == &o ||
         (row_bytes == o.row_bytes && groups == o.groups && perm == o.perm && rotated == o.rotated &&
          block == o.block && std::equal(spans.begin(), spans.end(), o.spans.begin(), o.spans.end(), alike));
}

namespace {

size_t padded(size_t n) { return (n + 63) / 64 * 64; }

// Calls use(begin, width, outlier) for groups of `group` inputs; none mixes the last `outliers` with the others.
template <class F>
void for_groups(int K, int64_t group, int outliers, F &&use) {
  const int normal = K - outliers;
  for (int64_t k = 0; k < normal; k += group) use(int(k), int(std::min(group, normal - k)), false);
  for (int64_t k = normal; k < K; k += group) use(int(k), int(std::min(group, K - k)), true);
}

std::shared_ptr<IntegerLayout> layout_of(const IntegerStored &s) {
  auto layout = std::make_shared<IntegerLayout>();
  IntegerLayout &l = *layout;
  l.two_level = s.group_scale != nullptr;
  if (s.perm) l.perm.assign(s.perm, s.perm + s.K);
  if (s.block > 1) {
    l.rotated = s.K - s.x_outliers, l.block = s.block;
    l.tail = std::max(1, (l.rotated % s.block) & -(l.rotated % s.block));
  }
  if (!l.two_level) {
    const size_t C = (size_t(s.K - s.outliers) + s.group - 1) / s.group + (size_t(s.outliers) + s.group - 1) / s.group;
    l.wide = !std::all_of(s.scale, s.scale + s.N * C,
                          [](float f) { return f != f || float_of_half(half_of_float(f)) == f; });
  }
  size_t at = l.two_level ? kIntegerRows * sizeof(float) : 0;
  int word = 0;
  for_groups(s.K, s.group, s.outliers, [&](int begin, int width, bool outlier) {
    const bool bytes = outlier || s.bits == 8;
    const int words = (width + kIntegerWord - 1) / kIntegerWord;
    const size_t header = l.two_level ? (bytes ? 0 : 2 * kIntegerRows) : kIntegerRows * (l.wide ? 4 : 2);
    l.spans.push_back({begin, width, word, words, bytes, true, at, at + header});
    at += header + words * (bytes ? kByteWordBytes : kNibbleWordBytes);
    word += words;
  });
  l.block_bytes = padded(at);
  for_groups(s.K, s.x_group, s.x_outliers, [&](int begin, int width, bool outlier) {
    const int span0 = l.groups.empty() ? 0 : l.groups.back().span1;
    int span1 = span0;
    while (span1 < int(l.spans.size()) && l.spans[span1].begin < begin + width) ++span1;
    const int bits = outlier ? 8 : s.x_bits, top = (1 << (bits - 1)) - 1;
    const double clip = outlier ? 1.0 : s.clip;
    l.groups.push_back({begin, width, span0, span1, static_cast<float>(clip / top),
                        static_cast<float>(bits == 8 ? -top : -top - 1), static_cast<float>(top)});
    if (l.two_level)
      for (int i = span0; i + 1 < span1; ++i) l.spans[i].ends_scale = false;
  });
  // Tiles of 64 inputs are read from any word on: a little more than the words.
  l.scales_at = padded(size_t(word) * kIntegerWord) + 64;
  l.sums_at = l.scales_at + l.spans.size() * sizeof(float);
  l.row_bytes = padded(l.sums_at + l.spans.size() * sizeof(int32_t));
  return layout;
}

struct Packer {
  const IntegerStored &s;
  const IntegerLayout &l;
  const int normal = s.K - s.outliers;
  const size_t C = (size_t(normal) + s.group - 1) / s.group;  // of codes that are not outliers
  const size_t scales = C + (size_t(s.outliers) + s.group - 1) / s.group;

  uint8_t code(int n, int k) const {
    return k < normal ? s.codes[size_t(n) * normal + k]
                      : static_cast<uint8_t>(s.outlier_codes[size_t(n) * s.outliers + k - normal]);
  }

  void header(int n, int r, size_t i, uint8_t *at) const {
    if (l.two_level) {
      if (l.spans[i].bytes) return;
      at[r] = s.group_scale[n * C + i], at[kIntegerRows + r] = s.group_zero[n * C + i];
      return;
    }
    const float scale = s.scale[n * scales + i];
    const uint16_t half = half_of_float(scale);
    if (l.wide)
      std::memcpy(at + 4 * r, &scale, 4);
    else
      std::memcpy(at + 2 * r, &half, 2);
  }

  void row(int n, int r, uint8_t *block) const {
    if (l.two_level) std::memcpy(block + 4 * r, &s.scale[n], 4);
    for (size_t i = 0; i < l.spans.size(); ++i) {
      const IntegerSpan &span = l.spans[i];
      header(n, r, i, block + span.header);
      uint8_t *const codes = block + span.codes + 4 * r;
      for (int j = 0; j < span.width; ++j) {
        const uint8_t q = code(n, span.begin + j);
        if (span.bytes)
          codes[j / 4 * kIntegerRows * 4 + j % 4] = q;
        else
          codes[j / 8 * kIntegerRows * 4 + j % 4] |= static_cast<uint8_t>(q << (j % 8 < 4 ? 0 : 4));
      }
    }
  }
};

}  // namespace

Weight prepare_integer(const IntegerStored &s, const Isa &isa) {
  Weight w;
  const auto layout = layout_of(s);
  w.isa = &isa;
  w.kind = Kind::Integer;
  w.stream = Stream::Integer;
  w.N = s.N, w.K = s.K, w.P = s.bits;
  w.partition = KPartition(s.K, std::min(s.K, s.group));
  w.R = kIntegerRows;
  w.blocks = (s.N + w.R - 1) / w.R;
  w.integer = layout;
  w.block_bytes = layout->block_bytes;
  w.data.grow(w.blocks * w.block_bytes);
  uint8_t *const data = w.data.data();
  const Packer packer{s, *layout};
  Pool::get().run([&](int t, int n) {
    for (int b = part(w.blocks, t, n); b < part(w.blocks, t + 1, n); ++b)
      for (int r = 0; r < w.R && b * w.R + r < w.N; ++r) packer.row(b * w.R + r, r, data + b * w.block_bytes);
  });
  return w;
}

void dequantize_integer_row(const Weight &w, int n, float *out) {
  const IntegerLayout &l = *w.integer;
  const int r = n % w.R;
  const uint8_t *const block = w.block(n / w.R);
  std::vector<float> stored(w.K);
  for (const IntegerSpan &span : l.spans) {
    const uint8_t *const header = block + span.header, *const codes = block + span.codes + 4 * r;
    float scale;
    if (l.two_level || l.wide) {
      std::memcpy(&scale, (l.two_level ? block : header) + 4 * r, 4);
    } else {
      uint16_t half;
      std::memcpy(&half, header + 2 * r, 2);
      scale = float_of_half(half);
    }
    const int times = l.two_level && !span.bytes ? header[r] : 1;
    const int zero = span.bytes ? 0 : l.two_level ? header[kIntegerRows + r] : kNibbleZero;
    for (int j = 0; j < span.width; ++j) {
      const int q = span.bytes ? static_cast<int8_t>(codes[j / 4 * kIntegerRows * 4 + j % 4])
                               : codes[j / 8 * kIntegerRows * 4 + j % 4] >> (j % 8 < 4 ? 0 : 4) & 15;
      const int k = span.begin + j;
      stored[k] = scale * static_cast<float>(times * q - zero);
    }
  }
  const int whole = l.rotated - l.rotated % l.block;
  hadamard(stored.data(), whole, l.block);
  hadamard(stored.data() + whole, l.rotated - whole, l.tail);
  for (int k = 0; k < w.K; ++k) out[l.perm.empty() ? k : l.perm[k]] = stored[k];
}

}  // namespace crelle::cpu
