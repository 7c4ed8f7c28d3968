// AMX tiles for bf16_gemm.h.
#include <immintrin.h>

#include <algorithm>
#include <utility>

#include "dense/bf16_gemm.h"
#include "base/half.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace amx {

#include "base/simd.h"
#include "isa/amx_tiles.h"
#include "isa/amx_blocks.h"
#include "dense/bf16_gemm_tiles.h"

static_assert(kPairBytes == AmxTile::kPair);

struct GemmTile : AmxTile {
  static CRELLE_INLINE void multiply(const uint8_t *x, const uint8_t *w, int steps, float *sums, bool add,
                                     const Ahead &ahead) {
    multiply_blocks(x, w, steps, sums, kBlock, add, [&](int step, int product) __attribute__((always_inline)) {
      fetch_ahead(x, step, product);
      if (product < 3) return;
      const uint8_t *const weights = ahead.weights + step * kPairBytes;
      for (int line = 0; line < ahead.lines; ++line) __builtin_prefetch(weights + line * 64, 0, 2);
      // Into L2, because rows that are a multiple of 4 KB apart share few sets of L1.
      if (ahead.y && 4 * step < kBlock)
        for (int i = 4 * step; i < 4 * step + 4; ++i) __builtin_prefetch(ahead.y + i * ahead.stride, 1, 2);
    });
  }
};

}  // namespace amx
}  // namespace

const Bf16GemmKernel kBf16GemmAmx{amx::pack<amx::GemmTile>, amx::multiply<amx::GemmTile>};

}  // namespace crelle::cpu
