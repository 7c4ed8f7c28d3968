// AVX-512 F/BW/VL/DQ without VNNI: byte planes and fields, 64 rows to a block.
#include <immintrin.h>
#include <array>
#include <utility>

#include "isa/isa.h"
#include "base/prefetch.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace avx512 {

#include "planes/lut_pshufb.h"
#include "planes/encode.h"
#include "mixed/mixed_encode.h"
#include "mixed/mixed_kernel.h"
#include "mixed/mixed_avx512.h"
#include "attention/hadamard_blocks.h"
#include "integer/integer_encode.h"
#include "integer/integer_kernel.h"
#include "integer/integer_avx512.h"
#define CRELLE_FIELD_BITS 512
#include "planes/field_codes_x86.h"
#include "planes/field_codes.h"
#include "planes/word_codes_x86.h"
#include "base/read_bandwidth.h"

struct V {
  using Bytes = __m512i;
  using Ints = __m512i;
  using Floats = __m512;
  static constexpr int kRows = 64, kRegisters = 32;

  static CRELLE_INLINE Bytes words(int v) { return _mm512_set1_epi16(short(v)); }
  static CRELLE_INLINE Bytes load(const void *p) { return load_once(p); }
  static CRELLE_INLINE Bytes table(const void *p) {
    return _mm512_broadcast_i32x4(_mm_load_si128(static_cast<const __m128i *>(p)));
  }
  static CRELLE_INLINE Bytes low_nibbles(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  static CRELLE_INLINE Bytes high_nibbles(Bytes v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
  static CRELLE_INLINE Bytes look_up(Bytes t, Bytes i) { return _mm512_shuffle_epi8(t, i); }
  static CRELLE_INLINE Bytes add16(Bytes a, Bytes b) { return _mm512_add_epi16(a, b); }
  static CRELLE_INLINE Bytes accumulate(Bytes sum, Bytes v) {
    sum = add16(sum, v);
    __asm__("" : "+v"(sum));  // GCC would keep all terms, in memory, and add them as a tree
    return sum;
  }
  static CRELLE_INLINE Bytes odd_bytes(Bytes v) { return _mm512_srli_epi16(v, 8); }
  static CRELLE_INLINE Bytes even_sums(Bytes all, Bytes odd) {
    return _mm512_sub_epi16(all, _mm512_slli_epi16(odd, 8));
  }
  // Of 16-bit sums F * high + low, in the order of byte_plane_row.
  template <int F>
  static CRELLE_INLINE void combine(Bytes high, Bytes low, Ints &first, Ints &second) {
    const Ints factors = _mm512_set1_epi32(F | 1 << 16);
    first = _mm512_madd_epi16(_mm512_unpacklo_epi16(high, low), factors);
    second = _mm512_madd_epi16(_mm512_unpackhi_epi16(high, low), factors);
  }
  static CRELLE_INLINE Ints add32(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static CRELLE_INLINE Floats floats(float v) { return _mm512_set1_ps(v); }
  static CRELLE_INLINE Floats to_float(Ints v) { return _mm512_cvtepi32_ps(v); }
  static CRELLE_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static CRELLE_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static CRELLE_INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static CRELLE_INLINE Floats load_floats(const void *p) { return _mm512_loadu_ps(p); }
  static CRELLE_INLINE Floats load_halves(const void *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
  }
  static CRELLE_INLINE Floats load_bytes(const void *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p))));
  }
  static CRELLE_INLINE void store(float *p, Floats v) { _mm512_storeu_ps(p, v); }
};

void matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  if (w.stream != Stream::Fields) return byte_matmul<V, FieldV::kMostBits>(w, a, y, ldy, b0, b1);
  (w.P == 8 ? word_matmul : field_matmul)(w, a, y, ldy, b0, b1);
}

static_assert(kFieldRows == V::kRows);

constexpr MixedKernel kMixed{encode_mixed, mixed_matmul<MixedV>};
constexpr IntegerKernel kInteger{encode_integer, integer_matmul<IntegerV>, 64};

}  // namespace avx512
}  // namespace

const Isa kAvx512{"avx512",         avx512::V::kRows, avx512::field_stream, avx512::field_encode, avx512::matmul,
                  avx512::read_all, &avx512::kMixed,  &avx512::kInteger,    &kTrellisAvx2,        &kF32Avx512};

}  // namespace crelle::cpu
