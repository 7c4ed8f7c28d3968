// Integer matrices (integer_weight.h) from Python, and their encoded inputs for tests.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "bindings/bindings.h"
#include "isa/isa.h"
#include "planes/matmul.h"

using namespace nb::literals;
using namespace crelle::cpu;

namespace {

using Levels = std::tuple<In<uint8_t, 2>, In<uint8_t, 2>>;

Weight py_prepare_integer(In<uint8_t, 2> codes, int bits, int group, In<float, 2> scale,
                          std::optional<In<int8_t, 2>> outliers, std::optional<Levels> levels,
                          std::optional<In<int32_t, 1>> perm, std::tuple<int, int, int, double, int> activation) {
  const int64_t N = codes.shape(0), normal = codes.shape(1), n = outliers ? outliers->shape(1) : 0, K = normal + n;
  const auto &[x_bits, x_group, x_outliers, clip, block] = activation;
  require(N >= 1 && K >= 1, "a matrix has at least one row and one column");
  require(K <= 1 << 17, "sums of more than 131072 inputs may not fit 32 bits");
  require(group >= 1 && x_group >= 1, "groups hold at least one input");
  require((bits == 3 || bits == 4 || bits == 8) && (x_bits == 3 || x_bits == 4 || x_bits == 8),
          "weights and inputs have 3, 4 or 8 bits");
  require(!outliers || outliers->shape(0) == size_t(N), "outliers must be [N, n]");
  const int64_t C = (normal + group - 1) / group, more = (n + group - 1) / group;
  require(scale.shape(0) == size_t(N) && scale.shape(1) == size_t(levels ? 1 : C + more),
          "scale must be [N, groups], or [N, 1] with two levels");
  const bool fits = x_group >= K ? x_outliers == 0 || x_outliers == n : x_group == group && x_outliers == n;
  require(fits, "groups of inputs must be those of the weight, or one");
  require(block >= 1 && (block & (block - 1)) == 0, "blocks that are rotated have a power of two of inputs");
  const uint8_t *const q = codes.data();
  require(bits == 8 || std::all_of(q, q + N * normal, [](uint8_t c) { return c < 16; }), "codes must be below 16");
  IntegerStored s{int(N),       int(K),  bits,    group,   int(n), q,       outliers ? outliers->data() : nullptr,
                  scale.data(), nullptr, nullptr, nullptr, x_bits, x_group, x_outliers,
                  clip,         block};
  if (levels) {
    const auto &[a, z] = *levels;
    const auto is = [&](const auto &t) { return t.shape(0) == size_t(N) && t.shape(1) == size_t(C); };
    require(bits == 4 && is(a) && is(z), "two levels are of 4 bits, scales and zeros [N, groups]");
    s.group_scale = a.data(), s.group_zero = z.data();
  }
  if (perm) {
    require(perm->shape(0) == size_t(K), "perm must be [K]");
    std::vector<bool> seen(K);
    for (int64_t k = 0; k < K; ++k) {
      const int32_t p = perm->data()[k];
      require(p >= 0 && p < K && !seen[p], "perm must name each input once");
      seen[p] = true;
    }
    s.perm = perm->data();
  }
  nb::gil_scoped_release release;
  return prepare_integer(s, isa());
}

void py_encode_integer(In<float, 2> x, const Weight &w, Out<int8_t, 2> codes, Out<float, 2> scales) {
  require(w.stream == Stream::Integer, "the weight does not take integer activations");
  const IntegerLayout &l = *w.integer;
  const size_t M = x.shape(0);
  require(x.shape(1) == size_t(w.K) && codes.shape(0) == M && codes.shape(1) == size_t(w.K), "x and codes are [M, K]");
  require(scales.shape(0) == M && scales.shape(1) == l.groups.size(), "scales must be [M, groups of x]");
  nb::gil_scoped_release release;
  Activations a;
  prepare_activations(a, x.data(), int(M), w, Precision::Exact);
  for (size_t m = 0; m < M; ++m) {
    const uint8_t *const row = a.row(int(m));
    for (size_t g = 0; g < l.groups.size(); ++g) {
      float *const scale = scales.data() + m * l.groups.size() + g;
      *scale = reinterpret_cast<const float *>(row + l.scales_at)[l.groups[g].span0];
      for (int i = l.groups[g].span0; i < l.groups[g].span1; ++i)
        std::copy_n(reinterpret_cast<const int8_t *>(row) + l.spans[i].word * kIntegerWord, l.spans[i].width,
                    codes.data() + m * w.K + l.spans[i].begin);
    }
  }
}

bool same_integers(const Weight &a, const Weight &b) {
  return a.stream == Stream::Integer && b.stream == Stream::Integer && a.isa == b.isa && a.partition == b.partition &&
         a.integer->same_inputs(*b.integer);
}

}  // namespace

void crelle::cpu::bind_integer(nb::module_ &m) {
  m.def("prepare_integer", &py_prepare_integer, "codes"_a.noconvert(), "bits"_a, "group"_a, "scale"_a.noconvert(),
        "outliers"_a.none(), "levels"_a.none(), "perm"_a.none(), "activation"_a,
        "activation: bits, group, outliers and clip of x.");
  m.def("encode_integer", &py_encode_integer, "x"_a.noconvert(), "weight"_a, "codes"_a.noconvert(),
        "scales"_a.noconvert(), "The integers of x in stored order, and the scales of its groups: for tests.");
  m.def("same_integers", &same_integers, "a"_a, "b"_a, "Whether an input encoded for one serves the other.");
}
