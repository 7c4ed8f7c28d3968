// The warp's matrix instructions m16n8k16, m16n8k32 and m16n8k64, for tests on a CPU. Stands in for
// ptx/tensorcore.cuh.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

// What the hardware does to a sum, as far as it is known: all terms and what they are added to are cut off, towards
// zero, two bits below the last one of a float as large as the largest of them, added exactly, and cut off to a float.
// (Keys and values of 4 bits, 32768 tokens, offsets that add up: 2.5e-3 on an H200, and so here.)
inline float truncated_sum(const double *terms, int count) {
  double most = 0, sum = 0;
  for (int i = 0; i < count; i++) most = std::fmax(most, std::fabs(terms[i]));
  if (!(most > 0) || std::isinf(most)) {
    for (int i = 0; i < count; i++) sum += terms[i];
    return static_cast<float>(sum);
  }
  const double unit = std::ldexp(1.0, std::ilogb(most) - 25);
  for (int i = 0; i < count; i++) sum += std::trunc(terms[i] / unit) * unit;
  if (!(std::fabs(sum) > 0)) return static_cast<float>(sum);
  const double last = std::ldexp(1.0, std::ilogb(sum) - 23);
  return static_cast<float>(std::trunc(sum / last) * last);
}

template <typename T>
inline void multiply(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
  const int me = emulator.current;
  const uint32 mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(emulator.in[me], mine, sizeof mine);
  memcpy(emulator.in[me] + 3, d, sizeof d);
  with_warp([](int first) {
    static float a[16][16], b[16][8];
    const auto value = [](uint32 v, int i) {
      T x;
      x.bits = static_cast<uint16_t>(v >> 16 * i);
      return (float)x;
    };
    for (int lane = 0; lane < 32; lane++) {
      const int g = lane / 4, t = lane % 4;
      uint32 r[6];
      memcpy(r, emulator.in[first + lane], sizeof r);
      for (int i = 0; i < 2; i++) {
        a[g][2 * t + i] = value(r[0], i), a[g + 8][2 * t + i] = value(r[1], i);
        a[g][2 * t + 8 + i] = value(r[2], i), a[g + 8][2 * t + 8 + i] = value(r[3], i);
        b[2 * t + i][g] = value(r[4], i), b[2 * t + 8 + i][g] = value(r[5], i);
      }
    }
    for (int lane = 0; lane < 32; lane++) {
      const int g = lane / 4, t = lane % 4;
      float sums[4];
      memcpy(sums, emulator.in[first + lane] + 3, sizeof sums);
      for (int j = 0; j < 4; j++) {
        double sum = sums[j], terms[17];
        terms[16] = sum;
        for (int k = 0; k < 16; k++) sum += terms[k] = (double)a[g + j / 2 * 8][k] * b[k][2 * t + j % 2];
        sums[j] = TRUNCATES ? truncated_sum(terms, 17) : (float)sum;
      }
      memcpy(emulator.out[first + lane], sums, sizeof sums);
    }
  });
  memcpy(d, emulator.out[me], sizeof d);
}

// a [16, K] b [K, 8] of integers: of 8 bits, K = 32, or of 4 bits, K = 64.
template <int K, bool A_SIGNED>
inline void multiply_integers(uint32 (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
  const int me = emulator.current;
  const uint32 mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(emulator.in[me], mine, sizeof mine);
  memcpy(emulator.in[me] + 3, d, sizeof d);
  with_warp([](int first) {
    constexpr int BITS = 256 / K, EACH = 32 / BITS;  // values of a register
    static int a[16][K], b[K][8];
    const auto value = [](uint32 v, int i, bool is_signed) {
      const int bits = static_cast<int>(v << (32 - BITS * (i + 1)));
      return is_signed ? bits >> (32 - BITS) : static_cast<int>(static_cast<uint32>(bits) >> (32 - BITS));
    };
    for (int lane = 0; lane < 32; lane++) {
      const int g = lane / 4, t = lane % 4;
      uint32 r[6];
      memcpy(r, emulator.in[first + lane], sizeof r);
      for (int i = 0; i < EACH; i++)
        for (int half = 0; half < 2; half++) {
          const int k = EACH * t + half * (K / 2) + i;
          a[g][k] = value(r[2 * half], i, A_SIGNED), a[g + 8][k] = value(r[2 * half + 1], i, A_SIGNED);
          b[k][g] = value(r[4 + half], i, true);
        }
    }
    for (int lane = 0; lane < 32; lane++) {
      const int g = lane / 4, t = lane % 4;
      int sums[4];
      memcpy(sums, emulator.in[first + lane] + 3, sizeof sums);
      for (int j = 0; j < 4; j++)
        for (int k = 0; k < K; k++) sums[j] += a[g + j / 2 * 8][k] * b[k][2 * t + j % 2];
      memcpy(emulator.out[first + lane], sums, sizeof sums);
    }
  });
  memcpy(d, emulator.out[me], sizeof d);
}
inline void multiply_u8(uint32 (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
  multiply_integers<32, false>(d, a0, a1, a2, a3, b0, b1);
}
inline void multiply_s8(uint32 (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  multiply_integers<32, true>(d, a[0], a[1], a[2], a[3], b0, b1);
}
inline void multiply_s4(uint32 (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
  multiply_integers<64, true>(d, a0, a1, a2, a3, b0, b1);
}
inline uint32 multiply_add(uint32 a, uint32 b, uint32 c) { return a * b + c; }
// 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
template <int COUNT>
inline void matrices(uint32 (&to)[COUNT], const void *row) {
  const int me = emulator.current;
  memcpy(emulator.in[me], &row, sizeof row);
  with_warp([](int first) {
    for (int lane = 0; lane < 32; lane++)
      for (int m = 0; m < COUNT; m++) {
        const char *from;
        memcpy(&from, emulator.in[first + m * 8 + lane / 4], sizeof from);
        memcpy(reinterpret_cast<char *>(emulator.out[first + lane]) + 4 * m, from + lane % 4 * 4, 4);
      }
  });
  memcpy(to, emulator.out[me], 4 * COUNT);
}

// The transposes of what `matrices` gives, and of a matrix that a warp holds.
inline void transposed(uint32 (&to)[4], const void *row) {
  const int me = emulator.current;
  memcpy(emulator.in[me], &row, sizeof row);
  with_warp([](int first) {
    for (int lane = 0; lane < 32; lane++)
      for (int m = 0; m < 4; m++)
        for (int i = 0; i < 2; i++) {
          const char *from;
          memcpy(&from, emulator.in[first + m * 8 + lane % 4 * 2 + i], sizeof from);
          memcpy(reinterpret_cast<char *>(emulator.out[first + lane]) + 4 * m + 2 * i, from + lane / 4 * 2, 2);
        }
  });
  memcpy(to, emulator.out[me], 16);
}
inline uint32 transposed(uint32 matrix) {
  const int me = emulator.current;
  memcpy(emulator.in[me], &matrix, 4);
  with_warp([](int first) {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 2; i++) {
        const char *from = reinterpret_cast<const char *>(emulator.in[first + (lane % 4 * 2 + i) * 4 + lane / 8]);
        memcpy(reinterpret_cast<char *>(emulator.out[first + lane]) + 2 * i, from + lane / 4 % 2 * 2, 2);
      }
  });
  uint32 to;
  memcpy(&to, emulator.out[me], 4);
  return to;
}

inline uint32 masked_not(uint32 v, uint32 mask, uint32 exponent) { return (~v & mask) | exponent; }
inline uint32 masked(uint32 v, uint32 mask, uint32 exponent) { return (v & mask) | exponent; }

template <typename T>
inline uint32 pair(float first, float second) {
  const T v[2] = {from_float<T>(first), from_float<T>(second)};
  uint32 bits;
  memcpy(&bits, v, 4);
  return bits;
}
template <typename T>
inline void open(float (&v)[8], uint4 from) {
  T values[8];
  memcpy(values, &from, 16);
  for (int i = 0; i < 8; i++) v[i] = values[i];
}
template <typename T>
inline uint4 closed(const float (&v)[8]) {
  return make_uint4(pair<T>(v[0], v[1]), pair<T>(v[2], v[3]), pair<T>(v[4], v[5]), pair<T>(v[6], v[7]));
}

}  // namespace crelle
