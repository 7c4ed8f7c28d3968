// AVX2 with AVX-VNNI (Alder Lake and newer, Zen 5): uniform and affine grids by vpdpbusd, all else as on AVX2.
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
#define CRELLE_FIELD_BITS 256
#include "planes/field_codes_x86.h"
#include "planes/field_codes.h"

void matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  (w.stream == Stream::Fields ? field_matmul : kAvx2.matmul)(w, a, y, ldy, b0, b1);
}

void encode(Activations &a, const float *x, size_t ldx, int m0, int m1) { kAvx2.encode(a, x, ldx, m0, m1); }
uint64_t read(const uint8_t *data, size_t bytes) { return kAvx2.read(data, bytes); }

}  // namespace avxvnni
}  // namespace

const Isa kAvxVnni{"avx-vnni",    avxvnni::kFieldRows, avxvnni::field_stream, avxvnni::encode, avxvnni::matmul,
                   avxvnni::read, &kMixedAvx2,         &kIntegerAvx2,         &kTrellisAvx2,   &kF32Avx2};

}  // namespace crelle::cpu
