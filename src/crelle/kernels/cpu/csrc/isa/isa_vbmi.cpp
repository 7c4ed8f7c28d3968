// AVX-512 with VBMI and VNNI (Ice Lake, Zen 4 and newer): quad planes, and fields for 4 and 8 bits; mixed and integer
// matrices as without VBMI.
#include <immintrin.h>
#include <utility>

#include "isa/isa.h"
#include "base/prefetch.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace vbmi {

#include "planes/encode.h"
#include "attention/hadamard_blocks.h"
#include "trellis/trellis_encode.h"
#include "trellis/trellis_kernel.h"
#include "trellis/trellis_avx512.h"
#include "base/read_bandwidth.h"
#include "planes/lut_vpermb.h"
#include "planes/vnni_codes.h"

Stream stream(Kind kind, int P) {
  if (kind == Kind::Uniform && P == 4) return Stream::Nibbles;
  if (kind == Kind::Uniform && P == 8) return Stream::Bytes;
  return Stream::QuadPlanes;
}

void encode(Activations &a, const float *x, size_t ldx, int m0, int m1) {
  if (takes_tables(a.stream))
    encode_stream<Stream::QuadPlanes>(a, x, ldx, m0, m1);
  else
    encode_stream<Stream::Nibbles>(a, x, ldx, m0, m1);
}

void matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  using Run = void (*)(const Weight &, const Activations &, float *, size_t, int, int);
  static constexpr Run kBcq[8] = {quad_blocks<1, false>, quad_blocks<2, false>, quad_blocks<3, false>,
                                  quad_blocks<4, false>, quad_blocks<5, false>, quad_blocks<6, false>,
                                  quad_blocks<7, false>, quad_blocks<8, false>};
  static constexpr Run kUniform[8] = {quad_blocks<1, true>, quad_blocks<2, true>, quad_blocks<3, true>,
                                      field_blocks<4>,      quad_blocks<5, true>, quad_blocks<6, true>,
                                      quad_blocks<7, true>, field_blocks<8>};
  (w.kind == Kind::Bcq ? kBcq : kUniform)[w.P - 1](w, a, y, ldy, b0, b1);
}

constexpr TrellisKernel kTrellis{encode_trellis<TrellisV::kDigits>, trellis_matmul<TrellisV, TrellisWideV>, 64};

}  // namespace vbmi
}  // namespace

const Isa kVbmi{"vbmi",         vbmi::kRows, vbmi::stream,  vbmi::encode,    vbmi::matmul,
                vbmi::read_all, &kMixedVnni, &kIntegerVnni, &vbmi::kTrellis, &kF32Avx512};

}  // namespace crelle::cpu
