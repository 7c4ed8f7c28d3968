// AMX tiles for bf16_attention.h.
#include <immintrin.h>

#include <algorithm>
#include <utility>

#include "attention/bf16_attention.h"
#include "base/half.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace amx {

#include "base/simd.h"
#include "isa/amx_tiles.h"
#include "isa/amx_blocks.h"
#include "attention/bf16_attention_tiles.h"

static_assert(kPairBytes == AmxTile::kPair);

struct AttentionTile : AmxTile {
  static CRELLE_INLINE void multiply(const uint8_t *x, const uint8_t *w, int steps, float *sums, bool add) {
    multiply_blocks(x, w, steps, sums, kBlock, add,
                    [&](int step, int product) __attribute__((always_inline)) { fetch_ahead(w, step, product); });
  }
};

}  // namespace amx
}  // namespace

const Bf16AttentionKernel kBf16AttentionAmx{amx::attend<amx::AttentionTile>};

}  // namespace crelle::cpu
