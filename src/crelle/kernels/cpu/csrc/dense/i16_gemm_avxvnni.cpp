// i16_gemm.h by vpdpwssd of 256 bits.
#include <immintrin.h>

#include "base/half.h"
#include "decoder/ops.h"
#include "dense/i16_gemm.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace avxvnni {

#include "base/simd.h"
#include "dense/i16_panels.h"

}  // namespace avxvnni
}  // namespace

const I16Kernel kI16AvxVnni = avxvnni::kKernel;

}  // namespace crelle::cpu
