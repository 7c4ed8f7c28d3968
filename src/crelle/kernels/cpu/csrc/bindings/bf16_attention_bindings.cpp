// Causal attention as bf16 tiles for Python, on all threads: see bf16_attention.h.
#include "attention/bf16_attention.h"

#include <algorithm>

#include "bindings/bindings.h"
#include "base/memory.h"
#include "base/pool.h"

using namespace nb::literals;

namespace crelle::cpu {
namespace {

using Heads = nb::ndarray<nb::ro, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using HeadsOut = nb::ndarray<nb::ndim<4>, nb::c_contig, nb::device::cpu>;

template <class A, class B>
bool same_shape(const A &a, const B &b) {
  for (size_t i = 0; i < 4; ++i)
    if (a.shape(i) != b.shape(i)) return false;
  return true;
}

void causal_attention(Heads q, Heads k, Heads v, HeadsOut y, bool emulate) {
  const size_t B = q.shape(0), T = q.shape(1), H = q.shape(2), D = q.shape(3), Hkv = k.shape(2);
  require(is_bf16(q.dtype()) && is_bf16(k.dtype()) && is_bf16(v.dtype()) && is_bf16(y.dtype()),
          "q, k, v and y must be bf16");
  require(D >= kStepInputs && D % kStepInputs == 0 && D <= kMaxHeadSize,
          "heads must have a multiple of 32 channels, at most 256");
  require(k.shape(0) == B && k.shape(1) == T && k.shape(3) == D, "q must be [B, T, H, D] and k [B, T, Hkv, D]");
  require(same_shape(k, v), "k and v must be alike");
  require(same_shape(q, y), "q and y must be alike");
  require(H >= 1 && Hkv >= 1 && H % Hkv == 0, "the heads of q must be a multiple of those of k");
  require(std::max({B, T, H}) < kMostCount, "q must be smaller");
  const Bf16AttentionKernel &kernel = tile_kernel(emulate, kBf16AttentionEmulated, CRELLE_AMX(kBf16AttentionAmx));
  if (!B || !T) return;
  const auto bits = [](const auto &a) { return static_cast<const uint16_t *>(a.data()); };
  CausalAttention a{int(B), int(T), int(H), int(Hkv), int(D), bits(q), bits(k), bits(v), nullptr, 1};
  a.y = static_cast<uint16_t *>(y.data());
  nb::gil_scoped_release release;
  Pool::get().run([&](int t, int n) {
    static thread_local Buffer room;
    CausalAttention own = a;
    own.parts = parts_for(a, n);
    const size_t begin = own.units() * t / n, end = own.units() * (t + 1) / n;
    if (begin == end) return;
    room.grow(AttentionRoom::bytes(own));
    kernel.attend(own, begin, end, room.data());
  });
}

}  // namespace

void bind_bf16_attention(nb::module_ &m) {
  m.def("causal_attention", &causal_attention, "q"_a.noconvert(), "k"_a.noconvert(), "v"_a.noconvert(),
        "y"_a.noconvert(), "emulate"_a,
        "y [B, T, H, D] = bf16(softmax(q kᵀ D^-0.5) v), k and v [B, T, Hkv, D]; emulate: without AMX, slowly.");
}

}  // namespace crelle::cpu
