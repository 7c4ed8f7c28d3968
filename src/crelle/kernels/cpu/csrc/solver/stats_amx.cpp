// AMX tiles for stats.h.
#include <immintrin.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "base/half.h"
#include "solver/stats.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace amx {

#include "base/simd.h"
#include "isa/amx_tiles.h"
#include "isa/amx_blocks.h"
#include "solver/stats_tiles.h"

static_assert(kStepBytes == AmxTile::kPair);

struct StatsTile : AmxTile {
  static CRELLE_INLINE Int pair(Vec a, Vec b) { return (Int)pair_up((__m512)a, (__m512)b); }

  static CRELLE_INLINE void multiply(const uint8_t *a, const uint8_t *b, int steps, float *y, size_t stride,
                                     const float *next) {
    // The sums of many inputs come from DRAM: a row of the next ones with every step. Into L2, because rows that are a
    // multiple of 2 KB apart share few sets of L1.
    multiply_blocks(a, b, steps, y, stride, true, [&](int step, int product) __attribute__((always_inline)) {
      if (product < 3 || !next || step >= kBlockColumns) return;
      __builtin_prefetch(next + step * stride, 1, 2);
      __builtin_prefetch(next + step * stride + 16, 1, 2);
    });
  }
};

}  // namespace amx
}  // namespace

const StatsKernel kStatsAmx{amx::pack<amx::StatsTile>, amx::multiply<amx::StatsTile>};

}  // namespace crelle::cpu
