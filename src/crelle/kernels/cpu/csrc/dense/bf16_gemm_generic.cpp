// Tiles of plain C++ for bf16_gemm.h, on any machine: slow, for tests.
#if defined(__aarch64__)
#include <arm_neon.h>  // for simd.h
#endif

#include <algorithm>
#include <utility>

#include "dense/bf16_gemm.h"
#include "base/half.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace generic {

#include "base/simd.h"
#include "dense/bf16_gemm_tiles.h"
#include "isa/emulated_tiles.h"

struct GemmTile : EmulatedTile {
  static void multiply(const uint8_t *x, const uint8_t *w, int steps, float *sums, bool add, const Ahead &) {
    multiply_blocks(x, w, steps, sums, kBlock, add);
  }
};

}  // namespace generic
}  // namespace

const Bf16GemmKernel kBf16GemmEmulated{generic::pack<generic::GemmTile>, generic::multiply<generic::GemmTile>};

}  // namespace crelle::cpu
