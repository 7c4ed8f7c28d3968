// Products by 16-bit integers for Python, on all threads: see i16_gemm.h.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "dense/i16_gemm.h"
#include "bindings/bindings.h"
#include "base/memory.h"
#include "base/pool.h"

using namespace nb::literals;

namespace crelle::cpu {
namespace {

// The kernel for the instruction set in use, or null. Sets with AMX contain AVX-512 with VNNI.
const I16Kernel *kernel_in_use() {
#if defined(__x86_64__)
  const std::string name = isa().name;
  const auto begins = [&](const char *with) { return name.rfind(with, 0) == 0; };
  if (begins("amx") || begins("vbmi") || begins("avx512-vnni")) return &kI16Avx512Vnni;
  if (begins("avx512")) return &kI16Avx512;
  if (begins("avx-vnni")) return &kI16AvxVnni;
  if (begins("avx2")) return &kI16Avx2;
#endif
  return nullptr;
}

const I16Kernel &kernel_of(bool emulate) {
  if (emulate) return kI16Generic;
  const I16Kernel *const found = kernel_in_use();
  require(found, "this instruction set has no products of 16-bit integers");
  return *found;
}

struct PackedI16 {
  PackedI16(In<float, 2> weight, bool emulate) : kernel(kernel_of(emulate)) {
    const size_t N = weight.shape(0), K = weight.shape(1);
    require(N >= 1 && K >= 1 && std::max(N, K) < kMostCount, "a weight must be [N, K], both at least 1");
    w.N = int(N), w.lanes = kernel.lanes, w.sum.count = int(K);
    nb::gil_scoped_release release;
    ints.grow(w.panels() * w.panel_ints() * sizeof(int32_t));
    scales.grow(w.panels() * w.panel_scales() * sizeof(float));
    w.ints = reinterpret_cast<int32_t *>(ints.data());
    w.scales = floats_of(scales);
    const float *const from = weight.data();
    Pool::get().run(
        [&](int t, int n) { kernel.pack_weight(from, w, part(w.panels(), t, n), part(w.panels(), t + 1, n)); });
  }

  const I16Kernel &kernel;
  I16Panels w;
  Buffer ints, scales;
};

void product(const PackedI16 &packed, In<float, 2> x, std::optional<In<float, 1>> bias, Out<float, 2> y) {
  const I16Panels &w = packed.w;
  const size_t M = x.shape(0);
  require(x.shape(1) == size_t(w.sum.count) && M < kMostCount, "x must be [M, K], with the weight's K");
  require(y.shape(0) == M && y.shape(1) == size_t(w.N), "y must be [M, N]");
  require(!bias || bias->shape(0) == size_t(w.N), "the bias must be [N]");
  std::vector<float> addends(size_t(w.panels()) * w.lanes);
  if (bias) std::memcpy(addends.data(), bias->data(), w.N * sizeof(float));
  if (!M) return;
  const I16Product p{w, x.data(), addends.data(), y.data(), int(M)};
  const int rows = packed.kernel.rows, blocks = (p.M + rows - 1) / rows;
  nb::gil_scoped_release release;
  Pool::get().run([&](int t, int n) {
    static thread_local Buffer room;
    room.grow(i16_room(w.sum, rows));
    const int begin = part(blocks, t, n) * rows, end = std::min(part(blocks, t + 1, n) * rows, p.M);
    if (begin < end) packed.kernel.multiply(p, begin, end, room.data());
  });
}

// The kernel and its room for tokens, which stays from batch to batch.
struct StatsI16 {
  explicit StatsI16(bool emulate) : kernel(kernel_of(emulate)) {}

  const I16Kernel &kernel;
  Buffer a, d, scales;
  std::mutex mutex;
};

// The tokens [first, first + count) as panels.
I16Tokens make_room(const I16Sums &s, StatsI16 &stats, int first, int count) {
  I16Panels p;
  p.N = s.K, p.lanes = stats.kernel.lanes, p.sum.count = count;
  const size_t ints = p.panels() * p.panel_ints(), scales = p.panels() * p.panel_scales();
  stats.a.grow(ints * sizeof(int32_t));
  if (s.full) stats.d.grow(ints * sizeof(int32_t));
  stats.scales.grow(3 * scales * sizeof(float));
  float *const from = floats_of(stats.scales);
  I16Tokens t{first, p, p, from + 2 * scales};
  t.a.ints = reinterpret_cast<int32_t *>(stats.a.data());
  t.d.ints = reinterpret_cast<int32_t *>(stats.d.data());
  t.a.scales = from;
  t.d.scales = from + scales;
  return t;
}

void add_tokens(StatsI16 &stats, const I16Sums &s, float *abssum) {
  const int blocks = (s.T - 1) / (2 * kTokenPairs) + 1;
  for (int i = 0; i < blocks; ++i) {
    const int begin = part(s.T, i, blocks);
    const I16Tokens t = make_room(s, stats, begin, part(s.T, i + 1, blocks) - begin);
    const int panels = t.a.panels();
    Pool::get().run(
        [&](int th, int n) { stats.kernel.pack_tokens(s, t, part(panels, th, n), part(panels, th + 1, n)); });
    for (int c = 0; c < t.a.sum.chunks(); ++c)
      for (int k = 0; k < s.K; ++k) abssum[k] += t.abssum[size_t(c) * panels * t.a.lanes + k];
    Pool::get().run([&](int th, int n) {
      const int64_t all = i16_products(s, panels);
      stats.kernel.add_products(s, t, all * th / n, all * (th + 1) / n);
    });
  }
}

void add(StatsI16 &stats, In<float, 2> x, std::optional<In<float, 2>> full, In<float, 1> weight, Out<float, 2> hessian,
         std::optional<Out<float, 2>> cross, Out<float, 1> abssum) {
  const size_t T = x.shape(0), K = x.shape(1);
  const auto square = [&](const Out<float, 2> &a) { return a.shape(0) == K && a.shape(1) == K; };
  require(K >= 1 && std::max(T, K) < kMostCount, "x must be [T, K], K at least 1");
  require(!full || (full->shape(0) == T && full->shape(1) == K), "x and full must be [T, K] alike");
  require(weight.shape(0) == T, "the tokens' weights must be [T]");
  require(square(hessian) && (!cross || square(*cross)), "hessian and cross must be [K, K]");
  require(abssum.shape(0) == K, "abssum must be [K]");
  require(full.has_value() == cross.has_value(), "full and cross are given both or neither");
  if (!T) return;
  const I16Sums s{int(T),
                  int(K),
                  x.data(),
                  full ? full->data() : nullptr,
                  weight.data(),
                  hessian.data(),
                  cross ? cross->data() : nullptr};
  float *const sums = abssum.data();
  nb::gil_scoped_release release;
  std::lock_guard lock(stats.mutex);
  add_tokens(stats, s, sums);
}

}  // namespace

void bind_i16_gemm(nb::module_ &m) {
  m.def(
      "has_i16", [] { return kernel_in_use() != nullptr; },
      "Whether the instruction set in use has products of 16-bit integers.");
  nb::class_<PackedI16>(m, "PackedI16", "A matrix [N, K] as panels of 16-bit integers; emulate: in plain C++, slowly.")
      .def(nb::init<In<float, 2>, bool>(), "weight"_a.noconvert(), "emulate"_a)
      .def("product", &product, "x"_a.noconvert(), "bias"_a.none().noconvert(), "y"_a.noconvert(),
           "y [M, N] = x Wᵀ + bias.");
  nb::class_<StatsI16>(m, "StatsI16", "Adds up the products of tokens by 16-bit integers; emulate: slowly.")
      .def(nb::init<bool>(), "emulate"_a)
      .def("add", &add, "x"_a.noconvert(), "full"_a.none().noconvert(), "weight"_a.noconvert(), "hessian"_a.noconvert(),
           "cross"_a.none().noconvert(), "abssum"_a.noconvert());
}

}  // namespace crelle::cpu
