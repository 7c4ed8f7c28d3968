// Tiles of f32 for AVX2: see f32_tiles.h.
#include <immintrin.h>

#include <utility>

#include "base/half.h"
#include "decoder/ops.h"
#include "isa/isa.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace avx2 {

#include "base/simd.h"
#include "tiles/f32_tiles.h"

// Look-ups take as long for each plane and byte of x.
bool takes(const Weight &w, Precision p) {
  if (w.stream == Stream::Mixed) return p == Precision::Exact;
  return takes_tables(w.stream) && w.P * static_cast<int>(p) >= 5;
}

}  // namespace avx2
}  // namespace

const Gemm kF32Avx2{32,
                    0,
                    avx2::takes,
                    avx2::f32_tiles,
                    avx2::f32_bytes,
                    avx2::f32_pack,
                    avx2::f32_run,
                    avx2::f32_pack_tile,
                    avx2::f32_run_tiles};

}  // namespace crelle::cpu
