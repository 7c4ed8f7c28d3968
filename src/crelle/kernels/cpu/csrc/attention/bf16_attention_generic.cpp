// Tiles of plain C++ for bf16_attention.h, on any machine: slow, for tests.
#if defined(__aarch64__)
#include <arm_neon.h>  // for simd.h
#endif

#include <algorithm>
#include <utility>

#include "attention/bf16_attention.h"
#include "base/half.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace generic {

#include "base/simd.h"
#include "attention/bf16_attention_tiles.h"
#include "isa/emulated_tiles.h"

struct AttentionTile : EmulatedTile {
  static void multiply(const uint8_t *x, const uint8_t *w, int steps, float *sums, bool add) {
    multiply_blocks(x, w, steps, sums, kBlock, add);
  }
};

}  // namespace generic
}  // namespace

const Bf16AttentionKernel kBf16AttentionEmulated{generic::attend<generic::AttentionTile>};

}  // namespace crelle::cpu
