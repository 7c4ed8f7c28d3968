// NEON (every 64-bit Arm): byte planes, 16 rows to a block.
#include <arm_neon.h>
#include <utility>

#include "isa/isa.h"
#include "base/prefetch.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace neon {

#include "planes/lut_pshufb.h"
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
#include "base/read_bandwidth.h"

struct V {
  using Bytes = uint8x16_t;
  using Ints = int32x4_t;
  using Floats = float32x4_t;
  static constexpr int kRows = 16, kRegisters = 32;

  static CRELLE_INLINE uint16x8_t words(Bytes v) { return vreinterpretq_u16_u8(v); }
  static CRELLE_INLINE Bytes bytes(uint16x8_t v) { return vreinterpretq_u8_u16(v); }
  static CRELLE_INLINE Bytes words(int v) { return bytes(vdupq_n_u16(uint16_t(v))); }
  static CRELLE_INLINE Bytes load(const uint8_t *p) { return vld1q_u8(p); }
  static CRELLE_INLINE Bytes table(const uint8_t *p) { return vld1q_u8(p); }
  static CRELLE_INLINE Bytes low_nibbles(Bytes v) { return vandq_u8(v, vdupq_n_u8(15)); }
  static CRELLE_INLINE Bytes high_nibbles(Bytes v) { return vshrq_n_u8(v, 4); }
  static CRELLE_INLINE Bytes look_up(Bytes t, Bytes i) { return vqtbl1q_u8(t, i); }
  static CRELLE_INLINE Bytes add16(Bytes a, Bytes b) { return bytes(vaddq_u16(words(a), words(b))); }
  static CRELLE_INLINE Bytes accumulate(Bytes sum, Bytes v) {
    sum = add16(sum, v);
    __asm__("" : "+w"(sum));  // GCC would keep all terms, in memory, and add them as a tree
    return sum;
  }
  static CRELLE_INLINE Bytes odd_bytes(Bytes v) { return bytes(vshrq_n_u16(words(v), 8)); }
  static CRELLE_INLINE Bytes even_sums(Bytes all, Bytes odd) {
    return bytes(vsubq_u16(words(all), vshlq_n_u16(words(odd), 8)));
  }
  // Of 16-bit sums F * high + low, in order.
  template <int F>
  static CRELLE_INLINE void combine(Bytes high, Bytes low, Ints &first, Ints &second) {
    const int16x8_t h = vreinterpretq_s16_u8(high), l = vreinterpretq_s16_u8(low);
    first = vmlal_n_s16(vmovl_s16(vget_low_s16(l)), vget_low_s16(h), F);
    second = vmlal_high_n_s16(vmovl_high_s16(l), h, F);
  }
  static CRELLE_INLINE Ints add32(Ints a, Ints b) { return vaddq_s32(a, b); }
  static CRELLE_INLINE Floats floats(float v) { return vdupq_n_f32(v); }
  static CRELLE_INLINE Floats to_float(Ints v) { return vcvtq_f32_s32(v); }
  static CRELLE_INLINE Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
  static CRELLE_INLINE Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
  static CRELLE_INLINE Floats sub(Floats a, Floats b) { return vsubq_f32(a, b); }
  static CRELLE_INLINE Floats load_floats(const uint8_t *p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }
  static CRELLE_INLINE Floats load_halves(const uint8_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));  // conversion is part of the base instruction set
  }
  static CRELLE_INLINE Floats load_bytes(const uint8_t *p) {
    uint32_t four;
    __builtin_memcpy(&four, p, 4);
    const uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
  }
  static CRELLE_INLINE void store(float *p, Floats v) { vst1q_f32(p, v); }
};

Stream stream(Kind, int) { return Stream::BytePlanes; }

void encode(Activations &a, const float *x, size_t ldx, int m0, int m1) {
  encode_stream<Stream::BytePlanes>(a, x, ldx, m0, m1);
}

constexpr MixedKernel kMixed{encode_mixed, mixed_matmul<MixedV>};
constexpr IntegerKernel kInteger{encode_integer, integer_matmul<IntegerV>, 64};
constexpr TrellisKernel kTrellis{encode_trellis<TrellisV::kDigits>, trellis_matmul<TrellisV>, 64};

}  // namespace neon
}  // namespace

const Isa kNeon{"neon",         neon::V::kRows, neon::stream,    neon::encode,    neon::byte_matmul<neon::V, 0>,
                neon::read_all, &neon::kMixed,  &neon::kInteger, &neon::kTrellis, &kF32Generic};

}  // namespace crelle::cpu
