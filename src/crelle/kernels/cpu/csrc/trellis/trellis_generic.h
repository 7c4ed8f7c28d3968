// Products with trellis matrices (trellis_weight.h) in plain C++, output by output: the second oracle of
// trellis_kernel.h.
//
// Included inside a namespace of the including file.

void trellis_row(const Weight &w, const Activations &a, int m, int b, int r, const uint8_t *bytes, float *y) {
  const TrellisLayout &l = *w.trellis;
  const uint8_t *const row = a.row(m);
  const auto *const x = reinterpret_cast<const int16_t *>(row);
  const auto *const scales = reinterpret_cast<const float *>(row + l.scales_at);
  const auto *const sums = reinterpret_cast<const int32_t *>(row + l.sums_at);
  float lanes[kTrellisLanes] = {};
  for (int s = 0; s < l.segments; ++s)
    for (int lane = 0; lane < kTrellisLanes; ++lane) {
      int sum = -trellis_code(l.pair).zero * sums[s * kTrellisLanes + lane];
      for (int i = s * l.segment; i < l.steps && i < (s + 1) * l.segment; ++i)
        for (int k = i * kTrellisInputs + 2 * lane, end = k + 2; k < end; ++k) {
          const uint8_t *const p = bytes + k * 4;
          sum += x[k] * (l.pair ? p[0] + p[1] : p[0] + p[1] + p[2] + p[3]);
        }
      lanes[lane] += static_cast<float>(sum) * scales[s * kTrellisLanes + lane];
    }
  float scale;
  __builtin_memcpy(&scale, w.block(b) + r * sizeof scale, sizeof scale);
  for (int n = kTrellisLanes / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
  *y = lanes[0] * scale;
}

// The bytes whose sum is a weight, 4 (or 2) for each input of output r.
void trellis_bytes(const Weight &w, int b, int r, uint8_t *bytes) {
  const TrellisLayout &l = *w.trellis;
  const int shift = l.pair ? l.half_bits : l.half_bits / 2;
  for (int c = 0; c < l.steps * kTrellisStep; ++c)
    for (int j = 0; j < kTrellisColumns; ++j, bytes += 4) {
      const int i = r * kTrellisColumns + j, bit = (l.pair ? i / 2 : i) * shift;
      uint32_t state = 0;
      for (int at = bit; at < bit + 16; ++at) {
        uint64_t word;
        __builtin_memcpy(&word, w.block(b) + kTrellisHeader + at / 64 % l.half_bits * l.run_bytes + c * sizeof word, 8);
        state |= static_cast<uint32_t>(word >> at % 64 & 1) << (at - bit);
      }
      uint32_t p = state * trellis_code(l.pair).multiplier;
      if (l.pair) p = p >> 8 * (i % 2) & 0x00ff00ff, p |= p >> 8;
      __builtin_memcpy(bytes, &p, 4);
    }
}

void trellis_matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  static thread_local Buffer scratch;
  scratch.grow(size_t(w.trellis->steps) * kTrellisInputs * 4);
  for (int b = b0; b < b1; ++b)
    for (int r = 0; r < kTrellisRows && b * kTrellisRows + r < w.N; ++r) {
      trellis_bytes(w, b, r, scratch.data());
      for (int m = 0; m < a.M; ++m) trellis_row(w, a, m, b, r, scratch.data(), y + m * ldy + b * kTrellisRows + r);
    }
}
