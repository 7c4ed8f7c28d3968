#include "mixed/mixed_weight.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/half.h"
#include "isa/isa.h"
#include "base/pool.h"
#include "planes/weight.h"

namespace crelle::cpu {

MixedLayout::MixedLayout(const uint8_t *four, int groups, int G_) : G(G_) {
  for (int bit = 0; bit < 2; ++bit)
    for (int c = 0; c < groups; ++c)
      if (!!four[c] == bit) order.push_back(c);
  C4 = static_cast<int>(std::count_if(four, four + groups, [](uint8_t f) { return f != 0; }));
  C2 = groups - C4;
  units = (C2 + kUnitGroups - 1) / kUnitGroups;
  words2 = units * kUnitGroups * G / kWord;
  words4 = (C4 * G + kWord - 1) / kWord;
}

namespace {

bool all_fit_half(const float *v, size_t n) {
  return std::all_of(v, v + (v ? n : 0), [](float f) { return f != f || float_of_half(half_of_float(f)) == f; });
}

void put_scale(bool wide, float v, uint8_t *at, int i) {
  if (wide) {
    std::memcpy(at + 4 * i, &v, 4);
  } else {
    const uint16_t h = half_of_float(v);
    std::memcpy(at + 2 * i, &h, 2);
  }
}

float take_scale(bool wide, const uint8_t *at, int i) {
  if (wide) {
    float v;
    std::memcpy(&v, at + 4 * i, 4);
    return v;
  }
  uint16_t h;
  std::memcpy(&h, at + 2 * i, 2);
  return float_of_half(h);
}

struct Packer {
  const MixedStored &s;
  const MixedLayout &l;

  int slots(int b) const {
    int most = 0;
    if (s.outlier_values)
      for (int n = b * kMixedRows; n < std::min(s.N, (b + 1) * kMixedRows); ++n)
        most = std::max(most, s.outlier_rows[n + 1] - s.outlier_rows[n]);
    return most;
  }

  size_t bytes(int b) const {
    const size_t n = l.head_bytes() + l.words4 * kWord4Bytes + l.units * l.unit_bytes() + slots(b) * l.slot_bytes();
    return (n + 63) / 64 * 64;
  }

  void unit(int first, int rows, int u, uint8_t *out) const {
    uint8_t *codes = out + l.header_bytes();
    for (int j = 0; j < kUnitGroups && u * kUnitGroups + j < l.C2; ++j) {
      const int c = u * kUnitGroups + j;
      for (int r = 0; r < rows; ++r) {
        const size_t at = size_t(first + r) * l.C2 + c, second = size_t((first + r) / s.block) * l.C2 + c;
        const int scale = s.scale_codes[at] & 15, zero = s.second_zeros[second] & 15;
        out[j / 2 * kMixedRows + r] |= scale << 4 * (j % 2);
        out[kHeaderZeros + r] |= (s.zeros[at] & 3) << 2 * j;
        if (l.decoded)
          put_scale(true, s.second_scale[second] * static_cast<float>(scale + zero), out + kUnitHeader, j * 16 + r);
        for (int k = 0; k < l.G; ++k) {
          const int place = j * l.G + k, in = place % kWord;
          codes[place / kWord * kWord2Bytes + r * 4 + in % 4] |= (s.codes2[at * l.G + k] & 3) << 2 * (in / 4);
        }
      }
      if (l.decoded) continue;
      const size_t second = size_t(first / s.block) * l.C2 + c;
      put_scale(false, s.second_scale[second], out + kHeaderSecond, j);
      out[kHeaderSecondZeros + j] = s.second_zeros[second] & 15;
    }
  }

  void block(int b, uint8_t *out) const {
    const int first = b * kMixedRows, rows = std::min(kMixedRows, s.N - first);
    const uint32_t count = slots(b);
    std::memcpy(out + l.slots_at(), &count, 4);
    if (l.C4)
      for (int r = 0; r < rows; ++r) {
        put_scale(l.wide, s.row_scale[first + r], out, r);
        out[l.zeros_at() + r] = s.row_zero[first + r];
      }
    out += l.head_bytes();
    for (int r = 0; r < rows; ++r)
      for (int k = 0; k < l.C4 * l.G; ++k) {
        const int in = k % kWord;
        out[k / kWord * kWord4Bytes + in / 8 * 64 + r * 4 + in % 4] |=
            (s.codes4[size_t(first + r) * l.C4 * l.G + k] & 15) << (in % 8 < 4 ? 0 : 4);
      }
    out += l.words4 * kWord4Bytes;
    for (int u = 0; u < l.units; ++u, out += l.unit_bytes()) unit(first, rows, u, out);
    if (!count) return;
    for (int r = 0; r < rows; ++r)
      for (int i = s.outlier_rows[first + r], slot = 0; i < s.outlier_rows[first + r + 1]; ++i, ++slot) {
        const uint16_t column = static_cast<uint16_t>(s.outlier_columns[i]);
        std::memcpy(out + slot * l.slot_bytes() + 2 * r, &column, 2);
        put_scale(l.wide, s.outlier_values[i], out + slot * l.slot_bytes() + 2 * kMixedRows, r);
      }
  }
};

}  // namespace

Weight prepare_mixed(const MixedStored &s, const Isa &isa) {
  const int C = (s.K + s.G - 1) / s.G, B = (s.N + s.block - 1) / s.block;
  auto layout = std::make_shared<MixedLayout>(s.four, C, s.G);
  const size_t outliers = s.outlier_values ? size_t(s.outlier_rows[s.N]) : 0;
  layout->decoded = (s.block % kMixedRows && s.block < s.N) || !all_fit_half(s.second_scale, size_t(B) * layout->C2);
  layout->wide = !all_fit_half(s.row_scale, s.N) || !all_fit_half(s.outlier_values, outliers);
  Weight w;
  w.isa = &isa;
  w.kind = Kind::Mixed;
  w.stream = Stream::Mixed;
  w.N = s.N, w.K = s.K, w.P = 2;
  w.partition = KPartition(s.K, s.G);
  w.R = kMixedRows;
  w.blocks = (s.N + w.R - 1) / w.R;
  const Packer packer{s, *layout};
  w.starts.assign(1, 0);
  for (int b = 0; b < w.blocks; ++b) w.starts.push_back(w.starts.back() + packer.bytes(b));
  w.data.grow(w.starts.back());
  uint8_t *data = w.data.data();
  Pool::get().run([&](int t, int n) {
    for (int b = part(w.blocks, t, n); b < part(w.blocks, t + 1, n); ++b) packer.block(b, data + w.starts[b]);
  });
  w.mixed = std::move(layout);
  return w;
}

void dequantize_mixed_row(const Weight &w, int n, float *out) {
  const MixedLayout &l = *w.mixed;
  const int r = n % kMixedRows;
  const uint8_t *head = w.block(n / kMixedRows), *at = head + l.head_bytes();
  const auto put = [&](int place, int k, float v) {  // input k of the group at that place
    const int64_t to = int64_t(l.order[place]) * l.G + k;
    if (to < w.K) out[to] = v;
  };
  for (int k = 0; k < l.C4 * l.G; ++k) {
    const int in = k % kWord;
    const int q = at[k / kWord * kWord4Bytes + in / 8 * 64 + r * 4 + in % 4] >> (in % 8 < 4 ? 0 : 4) & 15;
    put(l.C2 + k / l.G, k % l.G, take_scale(l.wide, head, r) * static_cast<float>(q - head[l.zeros_at() + r]));
  }
  at += l.words4 * kWord4Bytes;
  for (int c = 0; c < l.C2; ++c) {
    const int j = c % kUnitGroups;
    const uint8_t *header = at + c / kUnitGroups * l.unit_bytes(), *codes = header + l.header_bytes();
    const int code = header[j / 2 * kMixedRows + r] >> 4 * (j % 2) & 15;
    const float scale = l.decoded ? take_scale(true, header + kUnitHeader, j * kMixedRows + r)
                                  : take_scale(false, header + kHeaderSecond, j) *
                                        static_cast<float>(code + header[kHeaderSecondZeros + j]);
    const float zero = 0.5f * static_cast<float>((header[kHeaderZeros + r] >> 2 * j & 3) + 1);
    for (int k = 0; k < l.G; ++k) {
      const int place = j * l.G + k, in = place % kWord;
      const int q = codes[place / kWord * kWord2Bytes + r * 4 + in % 4] >> 2 * (in / 4) & 3;
      put(c, k, scale * (static_cast<float>(q) - zero));
    }
  }
  at += l.units * l.unit_bytes();
  uint32_t slots;
  std::memcpy(&slots, head + l.slots_at(), 4);
  for (uint32_t i = 0; i < slots; ++i, at += l.slot_bytes()) {
    uint16_t column;
    std::memcpy(&column, at + 2 * r, 2);
    out[column] += take_scale(l.wide, at + 2 * kMixedRows, r);  // nothing, in slots that the row does not need
  }
}

}  // namespace crelle::cpu
