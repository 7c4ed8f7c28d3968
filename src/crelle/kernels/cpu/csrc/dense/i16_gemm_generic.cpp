// i16_gemm.h in plain C++, on any machine: slow, for tests.
#if defined(__aarch64__)
#include <arm_neon.h>  // for simd.h
#endif

#include "base/half.h"
#include "decoder/ops.h"
#include "dense/i16_gemm.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace generic {

#include "base/simd.h"
#include "dense/i16_panels.h"

}  // namespace generic
}  // namespace

const I16Kernel kI16Generic = generic::kKernel;

}  // namespace crelle::cpu
