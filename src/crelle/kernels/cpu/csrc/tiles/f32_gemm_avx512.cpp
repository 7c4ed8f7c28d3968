// Tiles of f32 for AVX-512: see f32_tiles.h.
#include <immintrin.h>

#include <utility>

#include "base/half.h"
#include "decoder/ops.h"
#include "isa/isa.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace avx512 {

#include "base/simd.h"
#include "tiles/f32_tiles.h"

// Look-ups take as long for each plane and byte of x, vpermb half as long. vpdpbusd multiplies mixed matrices as fast.
bool takes(const Weight &w, Precision p) {
  if (w.stream == Stream::Mixed) return p == Precision::Exact && w.isa->mixed != &kMixedVnni;
  return takes_tables(w.stream) && w.P * static_cast<int>(p) >= (w.stream == Stream::QuadPlanes ? 7 : 4);
}

}  // namespace avx512
}  // namespace

const Gemm kF32Avx512{32,
                      0,
                      avx512::takes,
                      avx512::f32_tiles,
                      avx512::f32_bytes,
                      avx512::f32_pack,
                      avx512::f32_run,
                      avx512::f32_pack_tile,
                      avx512::f32_run_tiles};

}  // namespace crelle::cpu
