// AVX2 with AVX-VNNI (Alder Lake and newer, Zen 5): uniform and affine grids by vpdpbusd, planes (bcq) as on AVX2.
#include <immintrin.h>

#include <array>
#include <utility>

#include "isa/isa.h"
#include "base/prefetch.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace avxvnni {

#include "planes/encode.h"
#include "mixed/mixed_encode.h"
#include "mixed/mixed_kernel.h"
#include "mixed/mixed_avx2.h"
#include "integer/integer_encode.h"
#include "integer/integer_kernel.h"
#include "integer/integer_avx2.h"
#include "planes/field_codes_avx2.h"
#include "planes/field_codes.h"
#include "base/read_bandwidth.h"

void matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  (w.stream == Stream::Fields ? field_matmul : kAvx2.matmul)(w, a, y, ldy, b0, b1);
}

constexpr MixedKernel kMixed{encode_mixed, mixed_matmul<MixedV>};
constexpr IntegerKernel kInteger{encode_integer, integer_matmul<IntegerV>, 64};

}  // namespace avxvnni
}  // namespace

const Isa kAvxVnni{"avx-vnni",      avxvnni::kFieldRows, avxvnni::field_stream, avxvnni::field_encode,
                   avxvnni::matmul, avxvnni::read_all,   &avxvnni::kMixed,      &avxvnni::kInteger};

}  // namespace crelle::cpu
