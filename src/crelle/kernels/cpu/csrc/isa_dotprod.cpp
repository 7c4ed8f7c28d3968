// NEON with dot products of bytes (Armv8.2 and newer): mixed and integer matrices by sdot.
#include <arm_neon.h>

#include <utility>

#include "isa.h"
#include "prefetch.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace dotprod {

#include "encode.h"
#include "mixed_encode.h"
#include "mixed_kernel.h"
#include "mixed_neon.h"
#include "integer_encode.h"
#include "integer_kernel.h"
#include "integer_neon.h"

}  // namespace dotprod
}  // namespace

const MixedKernel kMixedDotprod{dotprod::encode_mixed, dotprod::mixed_matmul<dotprod::MixedV>};
const IntegerKernel kIntegerDotprod{dotprod::encode_integer, dotprod::integer_matmul<dotprod::IntegerV>, 64};

}  // namespace crelle::cpu
