// Products with integer matrices (integer_weight.h) in plain C++, output by output: the second oracle of
// integer_kernel.h.
//
// Included inside a namespace of the including file.

float integer_dot(const Weight &w, const Activations &a, int m, int b, int r) {
  const IntegerLayout &l = *w.integer;
  const uint8_t *const block = w.block(b), *const row = a.row(m);
  float y = 0;
  uint32_t sum = 0;  // as int32; unsigned numbers may wrap
  for (size_t i = 0; i < l.spans.size(); ++i) {
    const IntegerSpan &s = l.spans[i];
    const uint8_t *const header = block + s.header, *const codes = block + s.codes + 4 * r;
    const int times = l.two_level && !s.bytes ? header[r] : 1;
    const int zero = s.bytes ? 0 : l.two_level ? header[kIntegerRows + r] : kNibbleZero;
    for (int j = 0; j < s.width; ++j) {
      const int q = s.bytes ? static_cast<int8_t>(codes[j / 4 * kIntegerRows * 4 + j % 4])
                            : codes[j / 8 * kIntegerRows * 4 + j % 4] >> (j % 8 < 4 ? 0 : 4) & 15;
      sum += static_cast<uint32_t>((times * q - zero) * static_cast<int8_t>(row[s.word * kIntegerWord + j]));
    }
    if (!s.ends_scale) continue;
    float scale, x_scale;
    __builtin_memcpy(&x_scale, row + l.scales_at + 4 * i, 4);
    if (l.two_level || l.wide) {
      __builtin_memcpy(&scale, (l.two_level ? block : header) + 4 * r, 4);
    } else {
      uint16_t half;
      __builtin_memcpy(&half, header + 2 * r, 2);
      scale = float_of_half(half);
    }
    y += static_cast<float>(static_cast<int32_t>(sum)) * (x_scale * scale);
    sum = 0;
  }
  return y;
}

void integer_matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  for (int b = b0; b < b1; ++b)
    for (int m = 0; m < a.M; ++m)
      for (int r = 0; r < kIntegerRows && b * kIntegerRows + r < w.N; ++r)
        y[m * ldy + b * kIntegerRows + r] = integer_dot(w, a, m, b, r);
}
