// Tiles of plain C++ for stats.h, on any machine: slow, for tests.
#if defined(__aarch64__)
#include <arm_neon.h>  // for simd.h
#endif

#include <algorithm>
#include <type_traits>
#include <utility>

#include "base/half.h"
#include "solver/stats.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace generic {

#include "base/simd.h"
#include "isa/emulated_tiles.h"
#include "solver/stats_tiles.h"

struct StatsTile : EmulatedTile {
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

  static void multiply(const uint8_t *a, const uint8_t *b, int steps, float *y, size_t stride, const float *) {
    multiply_blocks(a, b, steps, y, stride, true);
  }
};

}  // namespace generic
}  // namespace

const StatsKernel kStatsEmulated{generic::pack<generic::StatsTile>, generic::multiply<generic::StatsTile>};

}  // namespace crelle::cpu
