// AVX-512 with VNNI but without VBMI (Cascade Lake, Cooper Lake): uniform and affine grids, mixed and integer matrices
// by vpdpbusd, planes (bcq) as on AVX-512.
#include <immintrin.h>

#include <array>
#include <utility>

#include "isa/isa.h"
#include "base/prefetch.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace avx512vnni {

#include "planes/encode.h"
#include "mixed/mixed_encode.h"
#include "mixed/mixed_kernel.h"
#include "mixed/mixed_avx512.h"
#include "integer/integer_encode.h"
#include "integer/integer_kernel.h"
#include "integer/integer_avx512.h"
#include "planes/field_codes_avx512.h"
#include "planes/field_codes.h"
#include "base/read_bandwidth.h"

void matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  (w.stream == Stream::Fields ? field_matmul : kAvx512.matmul)(w, a, y, ldy, b0, b1);
}

constexpr MixedKernel kMixed{encode_mixed, mixed_matmul<MixedV>};
constexpr IntegerKernel kInteger{encode_integer, integer_matmul<IntegerV>, 64};

}  // namespace avx512vnni
}  // namespace

const Isa kAvx512Vnni{"avx512-vnni",      avx512vnni::kFieldRows, avx512vnni::field_stream, avx512vnni::field_encode,
                      avx512vnni::matmul, avx512vnni::read_all,   &avx512vnni::kMixed,      &avx512vnni::kInteger};

}  // namespace crelle::cpu
