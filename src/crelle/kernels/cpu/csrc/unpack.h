// Rows of codes of 8 or 4 bits back to floats: (code - zero) * scale, a scale and a zero for each group of channels.
//
// Included inside a namespace of the including file, after lanes.h. Written for the compiler's own vectors.

inline void unpack(int bits, const uint8_t *codes, const int16_t *words, int rows, int D, int groups, float *out) {
  const int each = D / groups, zero_bits = bits == 4 ? 6 : 8;
  uint8_t wide[512];  // a row of 4-bit codes, a byte each
  for (int r = 0; r < rows; ++r, codes += D * bits / 8) {
    const uint8_t *code = codes;
    if (bits == 4) {
      for (int i = 0; i < D / 2; ++i)
        wide[2 * i] = codes[i] & 15, wide[2 * i + 1] = static_cast<uint8_t>(codes[i] >> 4);
      code = wide;
    }
    for (int g = 0; g < groups; ++g, ++words, code += each, out += each) {
      const uint16_t word = static_cast<uint16_t>(*words);
      const float scale = float_of_half(static_cast<uint16_t>(word >> zero_bits << (zero_bits - 1)));
      const float zero =
          static_cast<float>(word & ((1 << zero_bits) - 1)) * (1.0f / static_cast<float>(1 << (zero_bits - bits)));
      for (int i = 0; i < each; ++i) out[i] = (static_cast<float>(code[i]) - zero) * scale;
    }
  }
}
