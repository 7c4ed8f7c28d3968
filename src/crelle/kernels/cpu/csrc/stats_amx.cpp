// AMX tiles for stats.h: four results (2 x 2 tiles), four products for four tile loads.
#include <immintrin.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "half.h"
#include "stats.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace amx {

#include "simd.h"
#include "amx_tiles.h"
#include "stats_tiles.h"

static_assert(kStepBytes == 2 * kTileBytes);

struct StatsTile : AmxTile {
  static CRELLE_INLINE Int pair(Vec a, Vec b) { return (Int)pair_up((__m512)a, (__m512)b); }

  // Tiles 0 ... 3: sums; 4, 5: left factors; 6, 7: right ones.
  static CRELLE_INLINE void multiply(const uint8_t *a, const uint8_t *b, int steps, float *y, size_t stride,
                                     const float *next) {
    const size_t pitch = stride * sizeof(float);
    float *const low = y + 16 * stride;
    compiler_fence();
    _tile_loadd(0, y, pitch);
    _tile_loadd(1, y + 16, pitch);
    _tile_loadd(2, low, pitch);
    _tile_loadd(3, low + 16, pitch);
    for (int step = 0; step < steps; ++step, a += kStepBytes, b += kStepBytes) {
      _tile_loadd(4, a, 64);
      _tile_loadd(6, b, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + kTileBytes, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      // The sums of many inputs come from DRAM: a row of the next ones with every step. Into L2, because rows that are
      // a multiple of 2 KB apart share few sets of L1.
      if (next && step < kBlockColumns) {
        __builtin_prefetch(next + step * stride, 1, 2);
        __builtin_prefetch(next + step * stride + 16, 1, 2);
      }
    }
    _tile_stored(0, y, pitch);
    _tile_stored(1, y + 16, pitch);
    _tile_stored(2, low, pitch);
    _tile_stored(3, low + 16, pitch);
    compiler_fence();
  }
};

}  // namespace amx
}  // namespace

const StatsKernel kStatsAmx{amx::pack<amx::StatsTile>, amx::multiply<amx::StatsTile>};

}  // namespace crelle::cpu
