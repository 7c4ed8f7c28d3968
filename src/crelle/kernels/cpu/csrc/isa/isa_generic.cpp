// Portable C++: no intrinsics, plain loops over the byte-plane layout. Slow, and the second oracle of the others.
#include "base/half.h"
#include "isa/isa.h"
#include "base/prefetch.h"

#define CRELLE_PORTABLE  // no intrinsics, also where the compiler has them
#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace generic {

#include "planes/encode.h"
#include "mixed/mixed_encode.h"
#include "mixed/mixed_generic.h"
#include "attention/hadamard_blocks.h"
#include "integer/integer_encode.h"
#include "integer/integer_generic.h"
#include "trellis/trellis_encode.h"
#include "trellis/trellis_generic.h"
#include "base/read_bandwidth.h"

constexpr int R = 16;

Stream stream(Kind, int) { return Stream::BytePlanes; }

void encode(Activations &a, const float *x, size_t ldx, int m0, int m1) {
  encode_stream<Stream::BytePlanes>(a, x, ldx, m0, m1);
}

// Row r of a block: the integer sum of plane p over `chunks` chunks.
int plane_sum(const uint8_t *codes, const uint8_t *tables, int P, int p, int r, int chunks, int D) {
  int byte = 0;
  while (byte_plane_row(byte, R) != r) ++byte;
  int sum = 0;
  for (int j = 0; j < chunks * 4; ++j) {
    const uint8_t bits = codes[(size_t(j) * P + p) * R + byte];
    const uint8_t *even = tables + size_t(2 * j) * 16 * D, *odd = even + 16 * D;
    const int lo = bits & 15, hi = bits >> 4;
    if (D == 1)
      sum += (even[lo] - 128) + (odd[hi] - 128);
    else
      sum += (even[lo] * 256 + even[16 + lo] - 32768) + (odd[hi] * 256 + odd[16 + hi] - 32768);
  }
  return sum;
}

float dot(const Weight &w, const Activations &a, int m, int b, int r) {
  const int D = a.digits(), P = w.P;
  const uint8_t *at = w.block(b), *zeros = at, *tables = a.row(m);
  at += w.zeros_bytes;
  const float *scale = a.scales(m), *sum = a.sums(m);
  float y = 0;
  for (int g = 0; g < w.partition.groups; ++g) {
    const int chunks = w.partition.chunks_of(g);
    const uint8_t *scales = at;
    at += w.scale_bytes;
    float part[8] = {}, fused = 0;  // sums over the group of b_p x; of all planes, 2^(P-1-p) b_p x
    for (int c = 0; c < chunks; c += kSegmentChunks, ++scale) {
      const int n = chunks - c < kSegmentChunks ? chunks - c : kSegmentChunks;
      int combined = 0;
      for (int p = 0; p < P; ++p) {
        const int s = plane_sum(at, tables, P, p, r, n, D);
        part[p] += static_cast<float>(s) * *scale;
        combined = 2 * combined + s;
      }
      fused += static_cast<float>(combined) * *scale;
      at += n * w.chunk_bytes;
      tables += size_t(n) * 128 * D;
    }
    if (w.kind == Kind::Bcq) {
      for (int p = 0; p < P; ++p) y += scale_at(w, scales, p * R + r) * part[p];
      if (w.bias) y += scale_at(w, scales, P * R + r) * sum[g];
    } else {  // q = (sum_p 2^(P-1-p) b_p + 2^P - 1) / 2
      const int zero = w.bias ? zeros[g * R + r] : 1 << (P - 1);
      y += scale_at(w, scales, r) * (0.5f * fused + (0.5f * static_cast<float>((1 << P) - 1 - 2 * zero)) * sum[g]);
    }
  }
  return y;
}

void matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  for (int b = b0; b < b1; ++b)
    for (int m = 0; m < a.M; ++m)
      for (int r = 0; r < R && b * R + r < w.N; ++r) y[m * ldy + b * R + r] = dot(w, a, m, b, r);
}

constexpr MixedKernel kMixed{encode_mixed, mixed_matmul};
constexpr IntegerKernel kInteger{encode_integer, integer_matmul, 64};
constexpr TrellisKernel kTrellis{encode_trellis<false>, trellis_matmul, 64};

}  // namespace generic
}  // namespace

const Isa kGeneric{"generic",         generic::R,       generic::stream,    generic::encode,   generic::matmul,
                   generic::read_all, &generic::kMixed, &generic::kInteger, &generic::kTrellis};

}  // namespace crelle::cpu
