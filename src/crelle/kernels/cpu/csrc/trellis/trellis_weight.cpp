#include "trellis/trellis_weight.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <memory>

#include "base/pool.h"
#include "isa/isa.h"
#include "planes/weight.h"

namespace crelle::cpu {
namespace {

constexpr float kUnit = 1.0f / 128;  // crelle.formats.trellis.UNIT

size_t padded(size_t n) { return (n + 63) / 64 * 64; }

std::shared_ptr<TrellisLayout> layout_of(const TrellisStored &s) {
  auto layout = std::make_shared<TrellisLayout>();
  TrellisLayout &l = *layout;
  l.half_bits = s.half_bits, l.pair = s.pair;
  l.steps = (s.K + kTrellisInputs - 1) / kTrellisInputs;
  l.segments = (l.steps + kTrellisSegment - 1) / kTrellisSegment;
  l.segment = (l.steps + l.segments - 1) / l.segments;  // as equal as can be
  l.segments = (l.steps + l.segment - 1) / l.segment;
  l.run_bytes = size_t(l.steps) * kTrellisStep * sizeof(uint64_t);
  l.scales_at = l.steps * kTrellisStepBytes;
  l.sums_at = l.scales_at + l.segments * kTrellisLanes * sizeof(float);
  l.row_bytes = l.sums_at + l.segments * kTrellisLanes * sizeof(int32_t);
  l.inputs = s.inputs, l.outputs = s.outputs;
  return layout;
}

}  // namespace

Weight prepare_trellis(const TrellisStored &s, const Isa &isa) {
  Weight w;
  const auto layout = layout_of(s);
  w.isa = &isa;
  w.kind = Kind::Trellis;
  w.stream = Stream::Trellis;
  w.N = s.N, w.K = s.K, w.P = (s.half_bits + 1) / 2;
  w.partition = KPartition(s.K, s.K);
  w.R = kTrellisRows;
  w.blocks = (s.N + w.R - 1) / w.R;
  w.trellis = layout;
  w.block_bytes = padded(kTrellisHeader + s.half_bits * layout->run_bytes);
  w.data.grow(w.blocks * w.block_bytes);
  uint8_t *const data = w.data.data();
  const int columns = (s.K + kTrellisColumns - 1) / kTrellisColumns;
  const size_t words = s.half_bits;
  Pool::get().run([&](int t, int n) {
    for (int b = part(w.blocks, t, n); b < part(w.blocks, t + 1, n); ++b) {
      uint8_t *const block = data + b * w.block_bytes;
      for (int r = 0; r < w.R && b * w.R + r < w.N; ++r) {
        const float scale = s.scale[b * w.R + r] * kUnit;
        std::memcpy(block + r * sizeof scale, &scale, sizeof scale);
      }
      const uint8_t *codes = s.codes + size_t(b) * columns * words * 8;
      for (int c = 0; c < columns; ++c)
        for (size_t q = 0; q < words; ++q, codes += 8)
          std::memcpy(block + kTrellisHeader + q * layout->run_bytes + c * sizeof(uint64_t), codes, 8);
    }
  });
  return w;
}

void dequantize_trellis_row(const Weight &w, int n, float *out) {
  const TrellisLayout &l = *w.trellis;
  assert(l.outputs.empty());
  const auto [multiplier, zero] = trellis_code(l.pair);
  const int r = n % w.R, shift = l.pair ? l.half_bits : l.half_bits / 2;
  const uint8_t *const block = w.block(n / w.R), *const rings = block + kTrellisHeader;
  float scale;
  std::memcpy(&scale, block + r * sizeof scale, sizeof scale);
  const auto product = [&](int c, int i) {  // of state i of sequence c
    const int bit = i * shift, q = bit / 64, at = bit % 64;
    const auto word = [&](int j) {
      uint64_t v;
      std::memcpy(&v, rings + j % l.half_bits * l.run_bytes + c * sizeof v, sizeof v);
      return v;
    };
    const uint64_t v = at ? word(q) >> at | word(q + 1) << (64 - at) : word(q);
    return static_cast<uint32_t>(v & 0xffff) * multiplier;
  };
  for (int k = 0; k < w.K; ++k) {
    const int c = k / kTrellisColumns, i = r * kTrellisColumns + k % kTrellisColumns;
    const uint32_t p = product(c, l.pair ? i / 2 : i);
    const auto byte = [&](int j) { return static_cast<int>(p >> 8 * j & 255); };
    const int sum = l.pair ? byte(i % 2) + byte(2 + i % 2) : byte(0) + byte(1) + byte(2) + byte(3);
    out[k] = scale * static_cast<float>(sum - zero);
  }
  if (!l.inputs.empty()) undo_rotation(l.inputs, out, 0, w.K);
}

}  // namespace crelle::cpu
