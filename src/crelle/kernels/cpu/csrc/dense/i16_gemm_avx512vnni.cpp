// i16_gemm.h by vpdpwssd of 512 bits.
#include <immintrin.h>

#include "base/half.h"
#include "decoder/ops.h"
#include "dense/i16_gemm.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace avx512vnni {

#include "base/simd.h"
#include "dense/i16_panels.h"

}  // namespace avx512vnni
}  // namespace

const I16Kernel kI16Avx512Vnni = avx512vnni::kKernel;

}  // namespace crelle::cpu
