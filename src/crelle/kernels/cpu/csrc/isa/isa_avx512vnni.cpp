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
#include "attention/hadamard_blocks.h"
#include "integer/integer_encode.h"
#include "integer/integer_kernel.h"
#include "integer/integer_avx512.h"
#include "trellis/trellis_encode.h"
#include "trellis/trellis_kernel.h"
#include "trellis/trellis_avx512.h"
#define CRELLE_FIELD_BITS 512
#include "planes/field_codes_x86.h"
#include "planes/field_codes.h"

void matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  (w.stream == Stream::Fields ? field_matmul : kAvx512.matmul)(w, a, y, ldy, b0, b1);
}

void encode(Activations &a, const float *x, size_t ldx, int m0, int m1) { kAvx512.encode(a, x, ldx, m0, m1); }
constexpr TrellisKernel kTrellis{encode_trellis<TrellisV::kDigits>, trellis_matmul<TrellisV, TrellisWideV>, 64};

uint64_t read(const uint8_t *data, size_t bytes) { return kAvx512.read(data, bytes); }

}  // namespace avx512vnni
}  // namespace

const MixedKernel kMixedVnni{avx512vnni::encode_mixed, avx512vnni::mixed_matmul<avx512vnni::MixedV>};
const IntegerKernel kIntegerVnni{avx512vnni::encode_integer, avx512vnni::integer_matmul<avx512vnni::IntegerV>, 64};
const Isa kAvx512Vnni{"avx512-vnni",      avx512vnni::kFieldRows, avx512vnni::field_stream,
                      avx512vnni::encode, avx512vnni::matmul,     avx512vnni::read,
                      &kMixedVnni,        &kIntegerVnni,          &avx512vnni::kTrellis,
                      &kF32Avx512};

}  // namespace crelle::cpu
