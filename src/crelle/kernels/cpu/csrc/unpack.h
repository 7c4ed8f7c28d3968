// Rows of codes of 8 or 4 bits back to floats: (code - zero) * scale, a scale and a zero for each group of channels.
//
// Included inside a namespace of the including file, after lanes.h. Written for the compiler's own vectors.

inline void unpack(int bits, const uint8_t *codes, const int16_t *words, int rows, int D, int groups, float *out) {
  const int each = D / groups, zero_bits = bits == 4 ? 6 : 8;
  for (int r = 0; r < rows; ++r)
    for (int g = 0; g < groups; ++g, ++words, codes += each * bits / 8, out += each) {
      const uint16_t word = static_cast<uint16_t>(*words);
      const float scale = float_of_half(static_cast<uint16_t>(word >> zero_bits << (zero_bits - 1)));
      const float zero =
          static_cast<float>(word & ((1 << zero_bits) - 1)) * (1.0f / static_cast<float>(1 << (zero_bits - bits)));
      if (bits == 8) {
        for (int i = 0; i < each; ++i) out[i] = (static_cast<float>(codes[i]) - zero) * scale;
      } else {
        for (int i = 0; i < each / 2; ++i) {
          out[2 * i] = (static_cast<float>(codes[i] & 15) - zero) * scale;
          out[2 * i + 1] = (static_cast<float>(codes[i] >> 4) - zero) * scale;
        }
      }
    }
}
