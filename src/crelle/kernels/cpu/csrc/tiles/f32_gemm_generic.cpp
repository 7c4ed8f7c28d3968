// Tiles of f32 for the compiler's own choice of vectors, NEON for one: see f32_tiles.h.
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <utility>

#include "base/half.h"
#include "decoder/ops.h"
#include "isa/isa.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace generic {

#include "base/simd.h"
#include "tiles/f32_tiles.h"

// Look-ups take as long for each plane and byte of x. The limit is an estimate for NEON.
bool takes(const Weight &w, Precision p) {
  if (w.stream == Stream::Mixed) return p == Precision::Exact;
  return takes_tables(w.stream) && w.P * static_cast<int>(p) >= 3;
}

}  // namespace generic
}  // namespace

const Gemm kF32Generic{32,
                       0,
                       generic::takes,
                       generic::f32_tiles,
                       generic::f32_bytes,
                       generic::f32_pack,
                       generic::f32_run,
                       generic::f32_pack_tile,
                       generic::f32_run_tiles};

}  // namespace crelle::cpu
