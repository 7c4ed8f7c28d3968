// The building blocks between products for Python, each on its own, for tests and batch-invariant products of torch.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "bindings/bindings.h"
#include "decoder/decoder.h"

using namespace nb::literals;

namespace crelle::cpu {
namespace {

// They use the instruction set that is chosen now.

void rms_norm(In<float, 2> x, In<float, 1> weight, float eps, Out<float, 2> y) {
  const size_t K = x.shape(1);
  require(weight.shape(0) == K && y.shape(0) == x.shape(0) && y.shape(1) == K, "x, y [M, K], weight [K]");
  for (size_t m = 0; m < x.shape(0); ++m)
    ops_of(isa()).rms_norm(x.data() + m * K, weight.data(), eps, int(K), y.data() + m * K);
}

void rope(Out<float, 2> x, In<float, 1> cos, In<float, 1> sin) {
  const size_t D = x.shape(1);
  require(D % 2 == 0 && cos.shape(0) == D / 2 && sin.shape(0) == D / 2, "x [M, D], cos and sin [D/2]");
  for (size_t m = 0; m < x.shape(0); ++m) ops_of(isa()).rope(x.data() + m * D, cos.data(), sin.data(), int(D));
}

void layer_norm(In<float, 2> x, In<float, 1> weight, std::optional<In<float, 1>> bias, float eps, Out<float, 2> y) {
  const size_t K = x.shape(1);
  require(weight.shape(0) == K && (!bias || bias->shape(0) == K) && y.shape(0) == x.shape(0) && y.shape(1) == K,
          "x, y [M, K], weight and bias [K]");
  for (size_t m = 0; m < x.shape(0); ++m)
    ops_of(isa()).layer_norm(x.data() + m * K, weight.data(), bias ? bias->data() : nullptr, eps, int(K),
                             y.data() + m * K);
}

void activate(const std::string &kind, Out<float, 1> x, std::optional<In<float, 1>> up) {
  require(!up || x.shape(0) == up->shape(0), "x and up must be alike");
  ops_of(isa()).activate(activation_of(kind), x.data(), up ? up->data() : nullptr, int(x.shape(0)));
}

void dense_matmul(In<float, 2> x, AnyMatrix weight, Out<float, 2> y) {
  const Dense w = dense_of(weight);
  require(x.shape(1) == size_t(w.K) && y.shape(0) == x.shape(0) && y.shape(1) == size_t(w.N), "x [M, K], y [M, N]");
  const Ops &ops = ops_of(isa());
  nb::gil_scoped_release release;
  Pool::get().run([&](int t, int n) {
    ops.dense(w, x.data(), w.K, int(x.shape(0)), y.data(), w.N, part(w.N, t, n), part(w.N, t + 1, n));
  });
}

// One query [D], already rotated, over keys and values [S, D], in runs of kRun.
void attention(In<float, 1> q, AnyMatrix keys, AnyMatrix values, Out<float, 1> out) {
  const Dense k = dense_of(keys), v = dense_of(values);
  const int D = k.K, S = k.N, runs = (S + Decoder::kRun - 1) / Decoder::kRun;
  require(S >= 1 && v.K == D && v.N == S && v.type == k.type, "keys and values must be [S, D], alike");
  require(q.shape(0) == size_t(D) && out.shape(0) == size_t(D), "q and out must be [D]");
  const Ops &ops = ops_of(isa());
  std::vector<float> query((D + 15) / 16 * 16), scores(Decoder::kRun + 16), sums(size_t(runs) * D);
  std::copy_n(q.data(), D, query.data());
  ops.scale(query.data(), 1.0f / std::sqrt(static_cast<float>(D)), D);
  std::vector<AttentionPartial> parts(runs);
  for (int r = 0; r < runs; ++r) {
    const int from = r * Decoder::kRun, count = std::min(S - from, Decoder::kRun);
    const bool last = r + 1 == runs;  // its last key as the token's own
    const Attend a{k.type,
                   D,
                   1,
                   query.data(),
                   k.row(from),
                   v.row(from),
                   count - last,
                   last ? k.row(S - 1) : nullptr,
                   last ? v.row(S - 1) : nullptr,
                   scores.data()};
    ops.attend(a, &parts[r], 0, sums.data() + size_t(r) * D, 0);
  }
  ops.combine(parts.data(), sums.data(), D, runs, D, nullptr, out.data());
}

}  // namespace

void bind_ops(nb::module_ &m) {
  m.def("rms_norm", &rms_norm, "x"_a.noconvert(), "weight"_a.noconvert(), "eps"_a, "y"_a.noconvert());
  m.def("rope", &rope, "x"_a.noconvert(), "cos"_a.noconvert(), "sin"_a.noconvert());
  m.def("layer_norm", &layer_norm, "x"_a.noconvert(), "weight"_a.noconvert(), "bias"_a.none().noconvert(), "eps"_a,
        "y"_a.noconvert());
  m.def("activate", &activate, "kind"_a, "x"_a.noconvert(), "up"_a.none().noconvert());
  m.def("dense_matmul", &dense_matmul, "x"_a.noconvert(), "weight"_a.noconvert(), "y"_a.noconvert());
  m.def("attention", &attention, "q"_a.noconvert(), "keys"_a.noconvert(), "values"_a.noconvert(), "out"_a.noconvert());
}

}  // namespace crelle::cpu
