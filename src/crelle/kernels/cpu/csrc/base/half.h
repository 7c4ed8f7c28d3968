// IEEE half precision in portable integer arithmetic, rounding to nearest even. Not for inner loops.
#pragma once

#include <cstdint>
#include <cstring>

namespace crelle::cpu {

inline float float_of_half(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ffu;
  float f;
  uint32_t bits;
  if (exponent == 0) {
    f = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal: exact
    std::memcpy(&bits, &f, 4);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
  }
  std::memcpy(&f, &bits, 4);
  return f;
}

inline uint16_t half_of_float(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7e00u;   // NaN
  if (bits >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
  if (bits < 0x38800000u) {                        // subnormal: let the float adder round to a multiple of 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  bits += 0xfffu + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | (bits - 0x38000000u) >> 13);
}

}  // namespace crelle::cpu
