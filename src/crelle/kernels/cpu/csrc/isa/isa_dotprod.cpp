// NEON with dot products of bytes (Armv8.2 and newer): uniform and affine grids, mixed and integer matrices by sdot,
// planes (bcq) as on NEON.
#include <arm_neon.h>

#include <array>
#include <utility>

#include "isa/isa.h"
#include "base/prefetch.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace dotprod {

#include "planes/encode.h"
#include "mixed/mixed_encode.h"
#include "mixed/mixed_kernel.h"
#include "mixed/mixed_neon.h"
#include "attention/hadamard_blocks.h"
#include "integer/integer_encode.h"
#include "integer/integer_kernel.h"
#include "integer/integer_neon.h"
#include "trellis/trellis_encode.h"
#include "trellis/trellis_kernel.h"
#include "trellis/trellis_neon.h"
#include "planes/field_codes_neon.h"
#include "planes/field_codes.h"
#include "base/read_bandwidth.h"

void matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  (w.stream == Stream::Fields ? field_matmul : kNeon.matmul)(w, a, y, ldy, b0, b1);
}

constexpr MixedKernel kMixed{encode_mixed, mixed_matmul<MixedV>};
constexpr IntegerKernel kInteger{encode_integer, integer_matmul<IntegerV>, 64};
constexpr TrellisKernel kTrellis{encode_trellis<TrellisV::kDigits>, trellis_matmul<TrellisV>, 64};

}  // namespace dotprod
}  // namespace

const Isa kDotprod{"dotprod",          dotprod::kFieldRows, dotprod::field_stream, dotprod::field_encode,
                   dotprod::matmul,    dotprod::read_all,   &dotprod::kMixed,      &dotprod::kInteger,
                   &dotprod::kTrellis, &kF32Generic};

}  // namespace crelle::cpu
