// i16_gemm.h by vpmaddwd of 512 bits.
#include <immintrin.h>

#include "base/half.h"
#include "decoder/ops.h"
#include "dense/i16_gemm.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace avx512 {

#include "base/simd.h"
#include "dense/i16_panels.h"

}  // namespace avx512
}  // namespace

const I16Kernel kI16Avx512 = avx512::kKernel;

}  // namespace crelle::cpu
