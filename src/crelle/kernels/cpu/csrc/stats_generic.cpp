// Tiles of plain C++ for stats.h, on any machine: slow, for tests. Sums are f32, added up token by token as AMX does.
#if defined(__aarch64__)
#include <arm_neon.h>  // for simd.h
#endif

#include <algorithm>
#include <type_traits>
#include <utility>

#include "half.h"
#include "stats.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace generic {

#include "simd.h"
#include "stats_tiles.h"

struct EmulatedTile {
  static CRELLE_INLINE Int pair(Vec a, Vec b) {
    Bfloat both[32];
    for (int i = 0; i < 16; ++i) {
      store_one(both + 2 * i, a[i]);
      store_one(both + 2 * i + 1, b[i]);
    }
    Int v;
    __builtin_memcpy(&v, both, sizeof v);
    return v;
  }

  static CRELLE_INLINE void transpose(Int (&v)[16]) {
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < i; ++j) {
        const int other = v[i][j];
        v[i][j] = v[j][i];
        v[j][i] = other;
      }
  }

  static void begin() {}
  static void end() {}

  // One product of tiles: y [16, 16] += a [16 rows][32 tokens] b [16 pairs][16 columns][2].
  static void multiply_tile(const uint8_t *a, const uint8_t *b, float *y, size_t stride) {
    const auto *left = reinterpret_cast<const Bfloat *>(a), *right = reinterpret_cast<const Bfloat *>(b);
    for (int m = 0; m < 16; ++m)
      for (int t = 0; t < kStepTokens; ++t)
        for (int n = 0; n < 16; ++n)
          y[m * stride + n] += value(left[m * 32 + t]) * value(right[t / 2 * 32 + 2 * n + t % 2]);
  }

  static void multiply(const uint8_t *a, const uint8_t *b, int steps, float *y, size_t stride, const float *) {
    for (int step = 0; step < steps; ++step, a += kStepBytes, b += kStepBytes)
      for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) multiply_tile(a + i * 1024, b + j * 1024, y + i * 16 * stride + j * 16, stride);
  }

  static float value(Bfloat v) {
    const uint32_t bits = uint32_t{v.bits} << 16;
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return f;
  }
};

}  // namespace generic
}  // namespace

const StatsKernel kStatsEmulated{generic::pack<generic::EmulatedTile>, generic::multiply<generic::EmulatedTile>};

}  // namespace crelle::cpu
