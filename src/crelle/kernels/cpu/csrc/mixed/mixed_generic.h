// Products with mixed matrices (mixed_weight.h) in plain C++, output by output: the second oracle of mixed_kernel.h.
//
// Included inside a namespace of the including file.

inline int digit_at(const uint8_t *digits, int place, int D) {
  const uint8_t *at = digits + place / kWord * kWord * D + place % kWord;
  const int first = static_cast<int8_t>(at[0]);
  return D == 1 ? first : 256 * first + static_cast<int8_t>(at[kWord]);
}

inline float mixed_scale(bool wide, const uint8_t *at, int i) {
  if (wide) {
    float v;
    __builtin_memcpy(&v, at + 4 * i, 4);
    return v;
  }
  uint16_t h;
  __builtin_memcpy(&h, at + 2 * i, 2);
  return float_of_half(h);
}

float mixed_dot(const Weight &w, const Activations &a, int m, int b, int r) {
  const MixedLayout &l = *w.mixed;
  const int D = a.digits();
  const MixedInputs in(w.K, l.G, D);
  const uint8_t *const head = w.block(b), *at = head + l.head_bytes(), *row = a.row(m);
  const auto floats = [&](size_t from) { return reinterpret_cast<const float *>(row + from); };
  float y = 0;
  if (l.C4) {
    for (int segment = 0, k = 0; k < l.words4 * kWord; ++segment) {
      int sum = 0;
      for (const int end = k + kSegment; k < end && k < l.words4 * kWord; ++k) {
        const int i = k % kWord;
        const int q = at[k / kWord * kWord4Bytes + i / 8 * 64 + r * 4 + i % 4] >> (i % 8 < 4 ? 0 : 4) & 15;
        sum += q * digit_at(row, l.words2 * kWord + k, D);
      }
      y += static_cast<float>(sum) * floats(in.scales4)[segment];
    }
    y = (y - static_cast<float>(head[l.zeros_at() + r]) * *floats(in.sum4)) * mixed_scale(l.wide, head, r);
  }
  at += l.words4 * kWord4Bytes;
  for (int u = 0; u < l.units; ++u, at += l.unit_bytes())
    for (int j = 0; j < kUnitGroups; ++j) {
      const uint8_t *codes = at + l.header_bytes();
      const int c = u * kUnitGroups + j, zero = at[kHeaderZeros + r] >> 2 * j & 3;
      int sum = reinterpret_cast<const int32_t *>(row + in.zeros)[4 * c + zero];
      for (int k = j * l.G; k < (j + 1) * l.G; ++k) {
        const int i = k % kWord, q = codes[k / kWord * kWord2Bytes + r * 4 + i % 4] >> 2 * (i / 4) & 3;
        sum += q * digit_at(row, u * kUnitGroups * l.G + k, D);
      }
      const int code = (at[j / 2 * kMixedRows + r] >> 4 * (j % 2) & 15) + at[kHeaderSecondZeros + j];
      const float scale = l.decoded ? mixed_scale(true, at + kUnitHeader, j * kMixedRows + r)
                                    : mixed_scale(false, at + kHeaderSecond, j) * static_cast<float>(code);
      y += static_cast<float>(sum) * scale * floats(in.scales2)[c];
    }
  uint32_t slots;
  __builtin_memcpy(&slots, head + l.slots_at(), 4);
  for (; slots > 0; --slots, at += l.slot_bytes()) {
    uint16_t column;
    __builtin_memcpy(&column, at + 2 * r, 2);
    y += mixed_scale(l.wide, at + 2 * kMixedRows, r) * floats(in.x)[column];
  }
  return y;
}

void mixed_matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  for (int b = b0; b < b1; ++b)
    for (int m = 0; m < a.M; ++m)
      for (int r = 0; r < kMixedRows && b * kMixedRows + r < w.N; ++r)
        y[m * ldy + b * kMixedRows + r] = mixed_dot(w, a, m, b, r);
}
