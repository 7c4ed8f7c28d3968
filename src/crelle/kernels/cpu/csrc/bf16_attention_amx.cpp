// AMX tiles for bf16_attention.h: four results (2 x 2 tiles), four products for four tile loads.
#include <immintrin.h>

#include <algorithm>
#include <utility>

#include "bf16_attention.h"
#include "half.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace amx {

#include "simd.h"
#include "amx_tiles.h"
#include "bf16_attention_tiles.h"

static_assert(kPairBytes == 2 * kTileBytes);

constexpr int kAheadSteps = 2;  // keys and values come from L2, about as many cycles away as one product takes

struct AttentionTile : AmxTile {
  static CRELLE_INLINE Int round(Vec a, Vec b) { return (Int)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }

  // Tiles 0 ... 3: sums; 4, 5: queries or weights; 6, 7: keys or values.
  static CRELLE_INLINE void multiply(const uint8_t *x, const uint8_t *w, int steps, float *sums, bool add) {
    constexpr size_t kPitch = kBlock * sizeof(float);
    float *const low = sums + 16 * kBlock;
    const auto fetch = [&](int quarter) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (size_t line = 0; line < kPairBytes / 4; line += 64)
        __builtin_prefetch(w + kAheadSteps * kPairBytes + quarter * (kPairBytes / 4) + line);
    };
    compiler_fence();
    if (add) {
      _tile_loadd(0, sums, kPitch);
      _tile_loadd(1, sums + 16, kPitch);
      _tile_loadd(2, low, kPitch);
      _tile_loadd(3, low + 16, kPitch);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int step = 0; step < steps; ++step, x += kPairBytes, w += kPairBytes) {
      _tile_loadd(6, w, 64);
      _tile_loadd(4, x, 64);
      _tile_dpbf16ps(0, 4, 6);
      fetch(0);
      _tile_loadd(7, w + kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
      fetch(1);
      _tile_loadd(5, x + kTileBytes, 64);
      _tile_dpbf16ps(2, 5, 6);
      fetch(2);
      _tile_dpbf16ps(3, 5, 7);
      fetch(3);
    }
    _tile_stored(0, sums, kPitch);
    _tile_stored(1, sums + 16, kPitch);
    _tile_stored(2, low, kPitch);
    _tile_stored(3, low + 16, kPitch);
    compiler_fence();
  }
};

}  // namespace amx
}  // namespace

const Bf16AttentionKernel kBf16AttentionAmx{amx::attend<amx::AttentionTile>};

}  // namespace crelle::cpu
