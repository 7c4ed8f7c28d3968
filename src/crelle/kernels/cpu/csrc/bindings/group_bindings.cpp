// The levels of groups of weights for Python, on all threads: see group_solver.h.
#include <nanobind/stl/optional.h>

#include <optional>
#include <vector>

#include "bindings/bindings.h"
#include "solver/group_solver.h"
#include "base/pool.h"

using namespace nb::literals;

namespace crelle::cpu {
namespace {

using Importance = std::optional<In<float, 2>>;  // [C, G]: that of group r is row r modulo C

template <class F>
void for_each_group(const In<float, 2> &w, const Importance &importance, F &&work) {
  const size_t R = w.shape(0), G = w.shape(1), C = importance ? importance->shape(0) : 1;
  require(!importance || (importance->shape(1) == G && C > 0 && R % C == 0),
          "importances must be [C, G], where C divides the number of groups");
  const float *const h = importance ? importance->data() : nullptr;
  nb::gil_scoped_release release;
  Pool::get().run([&](int t, int n) {
    SortedGroup group{int(G)};
    for (int r = part(int(R), t, n); r < part(int(R), t + 1, n); ++r) {
      group.set(w.data() + size_t(r) * G, h ? h + (r % C) * G : nullptr, int(G));
      work(r, group);
    }
  });
}

void require_bits(int bits) { require(bits >= 1 && bits <= kMaxPlanes, "bits must be 1 to 8"); }

void bound_binary_scales(In<float, 2> w, Importance importance, int rounds, bool bias, Out<float, 2> alpha,
                         Out<float, 1> z) {
  const int P = int(alpha.shape(1));
  require_bits(P);
  require(alpha.shape(0) == w.shape(0) && z.shape(0) == w.shape(0), "alpha must be [R, P], z [R]");
  with_bits(P, [&](auto planes) {
    for_each_group(w, importance, [&](int r, const SortedGroup &g) {
      Scales s;
      if (g.n) s = greedy_planes(g, P, bias);
      if (g.n && rounds) s = best_planes<planes>(g, s, rounds, bias);
      for (int p = 0; p < P; ++p) alpha.data()[size_t(r) * P + p] = s.alpha[p];
      z.data()[r] = s.z;
    });
  });
}

void bound_binary_codes(In<float, 2> w, In<float, 2> alpha, In<float, 1> z, Out<uint8_t, 2> codes) {
  const size_t R = w.shape(0), G = w.shape(1);
  const int P = int(alpha.shape(1));
  require_bits(P);
  require(alpha.shape(0) == R && z.shape(0) == R && codes.shape(0) == R && codes.shape(1) == G,
          "alpha must be [R, P], z [R], codes [R, G]");
  nb::gil_scoped_release release;
  Pool::get().run([&](int t, int n) {
    std::vector<int> rank(G);
    for (int r = part(int(R), t, n); r < part(int(R), t + 1, n); ++r) {
      Scales s;
      for (int p = 0; p < P; ++p) s.alpha[p] = alpha.data()[size_t(r) * P + p];
      s.z = z.data()[r];
      with_bits(P, [&](auto p) { nearest_codes<p>(w.data() + r * G, int(G), s, rank.data(), codes.data() + r * G); });
    }
  });
}

void bound_affine_grids(In<float, 2> w, Importance importance, int bits, In<float, 1> shrink, int rounds,
                        Out<float, 1> scale, Out<float, 1> low) {
  require_bits(bits);
  require(shrink.shape(0) > 0, "there must be a part of the range to try");
  require(scale.shape(0) == w.shape(0) && low.shape(0) == w.shape(0), "scale and low must be [R]");
  const GridCandidates c{shrink.data(), int(shrink.shape(0))};
  with_bits(bits, [&](auto b) {
    for_each_group(w, importance, [&](int r, const SortedGroup &g) {
      scale.data()[r] = kTinyHalf, low.data()[r] = 0;
      if (g.n) affine_grid<b>(g, c, rounds, scale.data() + r, low.data() + r);
    });
  });
}

}  // namespace

void bind_groups(nb::module_ &m) {
  m.def("binary_scales", &bound_binary_scales, "w"_a.noconvert(), "importance"_a.none().noconvert(), "rounds"_a,
        "bias"_a, "alpha"_a.noconvert(), "z"_a.noconvert());
  m.def("binary_codes", &bound_binary_codes, "w"_a.noconvert(), "alpha"_a.noconvert(), "z"_a.noconvert(),
        "codes"_a.noconvert());
  m.def("affine_grids", &bound_affine_grids, "w"_a.noconvert(), "importance"_a.none().noconvert(), "bits"_a,
        "shrink"_a.noconvert(), "rounds"_a, "scale"_a.noconvert(), "low"_a.noconvert());
}

}  // namespace crelle::cpu
