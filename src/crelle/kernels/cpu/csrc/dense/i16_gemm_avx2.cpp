// i16_gemm.h by vpmaddwd of 256 bits.
#include <immintrin.h>

#include "base/half.h"
#include "decoder/ops.h"
#include "dense/i16_gemm.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace avx2 {

#include "base/simd.h"
#include "dense/i16_panels.h"

}  // namespace avx2
}  // namespace

const I16Kernel kI16Avx2 = avx2::kKernel;

}  // namespace crelle::cpu
