// AMX tiles for bf16_gemm.h: four results (2 x 2 tiles), four products for four tile loads.
#include <immintrin.h>

#include <algorithm>
#include <utility>

#include "bf16_gemm.h"
#include "half.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace amx {

#include "simd.h"
#include "amx_tiles.h"
#include "bf16_gemm_tiles.h"

static_assert(kPairBytes == 2 * kTileBytes);

constexpr int kAheadSteps = 2;  // rows come from L2, about as many cycles away as one product takes

struct GemmTile : AmxTile {
  static CRELLE_INLINE Int round(Vec a, Vec b) { return (Int)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }

  // Tiles 0 ... 3: sums; 4, 5: rows of x; 6, 7: weights.
  static CRELLE_INLINE void multiply(const uint8_t *x, const uint8_t *w, int steps, float *sums, bool add,
                                     const Ahead &ahead) {
    constexpr size_t kPitch = kBlock * sizeof(float);
    float *const low = sums + 16 * kBlock;
    const auto fetch_rows = [&](int quarter) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (size_t line = 0; line < kPairBytes / 4; line += 64)
        __builtin_prefetch(x + kAheadSteps * kPairBytes + quarter * (kPairBytes / 4) + line);
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
    const uint8_t *weights = ahead.weights;
    for (int step = 0; step < steps; ++step, x += kPairBytes, w += kPairBytes, weights += kPairBytes) {
      _tile_loadd(6, w, 64);
      _tile_loadd(4, x, 64);
      _tile_dpbf16ps(0, 4, 6);
      fetch_rows(0);
      _tile_loadd(7, w + kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
      fetch_rows(1);
      _tile_loadd(5, x + kTileBytes, 64);
      _tile_dpbf16ps(2, 5, 6);
      fetch_rows(2);
      _tile_dpbf16ps(3, 5, 7);
      fetch_rows(3);
      for (int line = 0; line < ahead.lines; ++line) __builtin_prefetch(weights + line * 64, 0, 2);
      // Into L2, because rows that are a multiple of 4 KB apart share few sets of L1.
      if (ahead.y && 4 * step < kBlock)
        for (int i = 4 * step; i < 4 * step + 4; ++i) __builtin_prefetch(ahead.y + i * ahead.stride, 1, 2);
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

const Bf16GemmKernel kBf16GemmAmx{amx::pack<amx::GemmTile>, amx::multiply<amx::GemmTile>};

}  // namespace crelle::cpu
