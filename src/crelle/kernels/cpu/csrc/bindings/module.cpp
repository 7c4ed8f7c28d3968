// The Python face of the module: arrays in and out, the GIL released while the work is done.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <vector>

#include "bindings/bindings.h"
#include "isa/isa.h"
#include "planes/matmul.h"
#include "base/pool.h"

using namespace nb::literals;
using namespace crelle::cpu;

namespace {

Stored stored(Kind kind, const In<uint8_t, 3> &planes, int K, int G) {
  require(planes.shape(0) >= 1 && planes.shape(0) <= 8, "planes must be 1 to 8");
  require(K >= 1 && planes.shape(2) == size_t(K + 7) / 8, "planes must be [P, N, ceil(K/8)]");
  require(G >= 1 && G <= K && (G == K || G % 8 == 0), "the group must be K or a multiple of 8");
  return {kind, int(planes.shape(1)), K, int(planes.shape(0)), G, planes.data(), nullptr, nullptr, nullptr};
}

Weight prepare_bcq(In<uint8_t, 3> planes, int K, int G, In<float, 3> alpha, std::optional<In<float, 2>> z) {
  Stored s = stored(Kind::Bcq, planes, K, G);
  const size_t C = KPartition(K, G).groups;
  require(alpha.shape(0) == size_t(s.P) && alpha.shape(1) == size_t(s.N) && alpha.shape(2) == C,
          "alpha must be [P, N, ceil(K/G)]");
  require(!z || (z->shape(0) == size_t(s.N) && z->shape(1) == C), "z must be [N, ceil(K/G)]");
  s.scale = alpha.data();
  s.z = z ? z->data() : nullptr;
  nb::gil_scoped_release release;
  return prepare_weight(s, isa());
}

Weight prepare_uniform(In<uint8_t, 3> planes, int K, int G, In<float, 2> scale, std::optional<In<uint8_t, 2>> zero) {
  Stored s = stored(Kind::Uniform, planes, K, G);
  const size_t C = KPartition(K, G).groups;
  require(scale.shape(0) == size_t(s.N) && scale.shape(1) == C, "scale must be [N, ceil(K/G)]");
  require(!zero || (zero->shape(0) == size_t(s.N) && zero->shape(1) == C), "zero must be [N, ceil(K/G)]");
  s.scale = scale.data();
  s.zero = zero ? zero->data() : nullptr;
  nb::gil_scoped_release release;
  return prepare_weight(s, isa());
}

// Instruction sets without a layout for it take it as planes with alphas: w = z + scale q = middle + sum_p alpha_p b_p.
Weight prepare_affine(In<uint8_t, 3> planes, int K, int G, In<float, 2> scale, In<float, 2> low) {
  Stored s = stored(Kind::Affine, planes, K, G);
  const size_t C = KPartition(K, G).groups, each = s.N * C;
  for (const auto &a : {scale, low})
    require(a.shape(0) == size_t(s.N) && a.shape(1) == C, "scale and low must be [N, ceil(K/G)]");
  s.scale = scale.data(), s.z = low.data();
  nb::gil_scoped_release release;
  if (isa().stream(Kind::Affine, s.P) == Stream::Fields) return prepare_weight(s, isa());
  std::vector<float> alpha(s.P * each), middle(each);
  for (size_t i = 0; i < each; ++i) {
    for (int p = 0; p < s.P; ++p) alpha[p * each + i] = std::ldexp(s.scale[i], s.P - 2 - p);
    middle[i] = s.z[i] + s.scale[i] * (0.5f * ((1 << s.P) - 1));
  }
  s.kind = Kind::Bcq, s.scale = alpha.data(), s.z = middle.data();
  return prepare_weight(s, isa());
}

Weight py_prepare_mixed(int K, int block, In<uint8_t, 1> four, In<uint8_t, 3> codes2, In<uint8_t, 3> codes4,
                        In<uint8_t, 2> scale_codes, In<uint8_t, 2> zeros, In<uint8_t, 2> second_zeros,
                        In<float, 2> second_scale, std::optional<std::tuple<In<float, 1>, In<uint8_t, 1>>> row,
                        std::optional<std::tuple<In<float, 1>, In<int32_t, 1>, In<int32_t, 1>>> outliers) {
  const size_t N = codes2.shape(0), C2 = codes2.shape(1), C4 = codes4.shape(1), G = codes2.shape(2);
  require(N >= 1 && K >= 1 && block >= 1, "a matrix has at least one row, column and row of a block");
  require(G == 8 || G == 16 || G == 32 || G == 64, "the group must be 8, 16, 32 or 64");
  const size_t C = (size_t(K) + G - 1) / G, B = (N + block - 1) / block;
  require(four.shape(0) == C && C2 + C4 == C, "four must be [ceil(K/G)]");
  require(size_t(std::count(four.data(), four.data() + C, 0)) == C2, "four must mark the 4-bit groups");
  require(codes4.shape(0) == N && codes4.shape(2) == G, "codes4 must be [N, C4, G]");
  const auto is = [&](const auto &a, size_t rows) { return a.shape(0) == rows && a.shape(1) == C2; };
  require(is(scale_codes, N) && is(zeros, N), "scale_codes and zeros must be [N, C2]");
  require(is(second_scale, B) && is(second_zeros, B), "second_scale and second_zeros must be [ceil(N/block), C2]");
  MixedStored s{int(N),
                K,
                int(G),
                block,
                four.data(),
                codes2.data(),
                codes4.data(),
                scale_codes.data(),
                zeros.data(),
                second_zeros.data(),
                second_scale.data(),
                nullptr,
                nullptr,
                nullptr,
                nullptr,
                nullptr};
  require(C4 == 0 || row, "4-bit groups have row scales and zeros");
  if (row) {
    const auto &[scale, zero] = *row;
    require(scale.shape(0) == N && zero.shape(0) == N, "row scales and zeros must be [N]");
    s.row_scale = scale.data(), s.row_zero = zero.data();
  }
  if (outliers) {
    const auto &[values, columns, rows] = *outliers;
    require(K <= 1 << 16, "columns of outliers have 16 bits");
    require(columns.shape(0) == values.shape(0) && rows.shape(0) == N + 1, "outliers must be [n], [n] and [N + 1]");
    const int32_t *r = rows.data(), *c = columns.data(), n = int32_t(values.shape(0));
    require(r[0] == 0 && r[N] == n && std::is_sorted(r, r + N + 1), "row pointers must ascend from 0 to n");
    require(std::all_of(c, c + n, [&](int32_t k) { return k >= 0 && k < K; }), "an outlier lies outside of the matrix");
    s.outlier_values = values.data(), s.outlier_columns = c, s.outlier_rows = r;
  }
  nb::gil_scoped_release release;
  return prepare_mixed(s, isa());
}

template <class X, class Y>
void check_product(const X &x, const Weight &w, const Y &y) {
  require(x.shape(1) == size_t(w.K), "x must be [M, K]");
  require(y.shape(0) == x.shape(0) && y.shape(1) == size_t(w.N), "y must be [M, N]");
}

void py_matmul(In<float, 2> x, const Weight &w, Out<float, 2> y, const std::string &precision) {
  check_product(x, w, y);
  const Precision p = precision_of(precision);
  nb::gil_scoped_release release;
  matmul(x.data(), int(x.shape(0)), w, y.data(), p);
}

// numpy has no bf16: arrays of 16 bits come as integers.
void py_matmul_half(In<uint16_t, 2> x, const Weight &w, Out<uint16_t, 2> y, const std::string &precision, bool bf16) {
  check_product(x, w, y);
  const Precision p = precision_of(precision);
  nb::gil_scoped_release release;
  matmul(reinterpret_cast<const uint8_t *>(x.data()), bf16 ? DType::BF16 : DType::F16, int(x.shape(0)), w,
         reinterpret_cast<uint8_t *>(y.data()), p);
}

// Activations that threads of Python may share: who prepares them anew waits until no thread multiplies by them. The
// GIL is given back before the wait, and what is checked is what is used.
struct SharedActivations {
  Activations a;
  std::shared_mutex mutex;
};

void py_prepare(SharedActivations &shared, In<float, 2> x, const Weight &w, const std::string &precision) {
  require(x.shape(1) == size_t(w.K), "x must be [M, K]");
  const Precision p = precision_of(precision);
  nb::gil_scoped_release release;
  std::unique_lock lock(shared.mutex);
  prepare_activations(shared.a, x.data(), int(x.shape(0)), w, p);
}

void py_matmul_prepared(SharedActivations &shared, const Weight &w, Out<float, 2> y) {
  nb::gil_scoped_release release;
  std::shared_lock lock(shared.mutex);
  const Activations &a = shared.a;
  require(a.fits(w), "the activations were prepared for a weight of another group size, width or layout");
  require(y.shape(0) == size_t(a.M) && y.shape(1) == size_t(w.N), "y must be [M, N]");
  matmul(w, a, y.data(), w.N);
}

bool py_fits(SharedActivations &shared, const Weight &w) {
  nb::gil_scoped_release release;
  std::shared_lock lock(shared.mutex);
  return shared.a.fits(w);
}

void py_dequantize(const Weight &w, Out<float, 2> out) {
  require(out.shape(0) == size_t(w.N) && out.shape(1) == size_t(w.K), "out must be [N, K]");
  require(!w.trellis || w.trellis->outputs.empty(), "rows of a matrix with rotated outputs are not dequantized alone");
  nb::gil_scoped_release release;
  Pool::get().run([&](int t, int n) {
    for (int r = part(w.N, t, n); r < part(w.N, t + 1, n); ++r) dequantize_row(w, r, out.data() + size_t(r) * w.K);
  });
}

void py_dequantize_rows(const Weight &w, In<int64_t, 1> rows, Out<float, 2> out) {
  require(out.shape(0) == rows.shape(0) && out.shape(1) == size_t(w.K), "out must be [rows, K]");
  const int M = int(rows.shape(0));
  const std::vector<int64_t> which(rows.data(), rows.data() + M);  // what is checked is what is used
  require(std::all_of(which.begin(), which.end(), [&](int64_t n) { return n >= 0 && n < w.N; }),
          "rows must be among those of the weight");
  nb::gil_scoped_release release;
  const auto read = [&](int m0, int m1) {
    for (int m = m0; m < m1; ++m) dequantize_row(w, int(which[m]), out.data() + size_t(m) * w.K);
  };
  if (M < 16) return read(0, M);
  Pool::get().run([&](int t, int n) { read(part(M, t, n), part(M, t + 1, n)); });
}

const char *py_tiles(const Weight &w, const std::string &precision) {
  const Precision p = precision_of(precision);
  const Gemm *gemm = gemm_of(w, p);
  if (!gemm) return "none";
  const Tiles tiles = gemm->tiles(w, p);
  return tiles == Tiles::Int8 ? "int8" : tiles == Tiles::F32 ? "f32" : "bf16";
}

uint64_t py_read(const Weight &w) {
  nb::gil_scoped_release release;
  std::atomic<uint64_t> all{0};
  Pool::get().run([&](int t, int n) {
    const int b0 = part(w.blocks, t, n), b1 = part(w.blocks, t + 1, n);
    all ^= isa().read(w.block(b0), w.bytes(b0, b1));
  });
  return all;
}

}  // namespace

NB_MODULE(_core, m) {
  // The command line ends without a last garbage collection, which nanobind would take for leaks. What holds memory is
  // watched by the sanitizer build and by valgrind.
  nb::set_leak_warnings(false);

  m.doc() = "Crelle's CPU kernels: products with bit-plane and integer-coded matrices";

  nb::class_<Weight>(m, "Weight", "A matrix laid out for one instruction set; immutable.")
      .def_prop_ro("shape", [](const Weight &w) { return nb::make_tuple(w.N, w.K); })
      .def_ro("bits", &Weight::P)
      .def_prop_ro("group", [](const Weight &w) { return w.partition.G; })
      .def_prop_ro("kind",
                   [](const Weight &w) {
                     return w.kind == Kind::Bcq       ? "bcq"
                            : w.kind == Kind::Uniform ? "uniform"
                            : w.kind == Kind::Affine  ? "affine"
                            : w.kind == Kind::Mixed   ? "mixed"
                            : w.kind == Kind::Integer ? "integer"
                                                      : "trellis";
                   })
      .def_prop_ro("isa", [](const Weight &w) { return w.isa->name; })
      .def_prop_ro("nbytes", [](const Weight &w) { return w.bytes(); })
      .def("tiles", &py_tiles, "precision"_a,
           "What many rows of x are multiplied as: 'int8', 'bf16' or 'f32' tiles, or 'none'.")
      .def("read", &py_read, "Read the whole stream and do nothing with it: the roofline of a product.")
      .def("dequantize", &py_dequantize, "out"_a.noconvert())
      .def("dequantize_rows", &py_dequantize_rows, "rows"_a.noconvert(), "out"_a.noconvert());

  nb::class_<SharedActivations>(m, "Activations", "x encoded as integers once, for every weight that fits.")
      .def(nb::init<>())
      .def("prepare", &py_prepare, "x"_a.noconvert(), "weight"_a, "precision"_a)
      .def("fits", &py_fits, "weight"_a)
      .def("matmul", &py_matmul_prepared, "weight"_a, "y"_a.noconvert());

  m.def("prepare_bcq", &prepare_bcq, "planes"_a.noconvert(), "K"_a, "group"_a, "alpha"_a.noconvert(),
        "z"_a.none().noconvert() = nb::none());
  m.def("prepare_uniform", &prepare_uniform, "planes"_a.noconvert(), "K"_a, "group"_a, "scale"_a.noconvert(),
        "zero"_a.none().noconvert() = nb::none());
  m.def("prepare_affine", &prepare_affine, "planes"_a.noconvert(), "K"_a, "group"_a, "scale"_a.noconvert(),
        "low"_a.noconvert());
  m.def("prepare_mixed", &py_prepare_mixed, "K"_a, "block"_a, "four"_a.noconvert(), "codes2"_a.noconvert(),
        "codes4"_a.noconvert(), "scale_codes"_a.noconvert(), "zeros"_a.noconvert(), "second_zeros"_a.noconvert(),
        "second_scale"_a.noconvert(), "row"_a.none() = nb::none(), "outliers"_a.none() = nb::none());
  m.def("matmul", &py_matmul, "x"_a.noconvert(), "weight"_a, "y"_a.noconvert(), "precision"_a);
  m.def("matmul_half", &py_matmul_half, "x"_a.noconvert(), "weight"_a, "y"_a.noconvert(), "precision"_a, "bf16"_a,
        "The same for x and y of 16 bits, as uint16: bf16, or f16.");

  bind_timing(m);
  bind_decoder(m);
  bind_ops(m);
  bind_row_ops(m);
  bind_solver(m);
  bind_groups(m);
  bind_stats(m);
  bind_bf16_gemm(m);
  bind_i16_gemm(m);
  bind_bf16_attention(m);
  bind_f32_attention(m);
  bind_integer(m);
  bind_trellis(m);
  m.def(
      "isas",
      [] {
        std::vector<std::string> names;
        for (const Isa *p : isas()) names.emplace_back(p->name);
        return names;
      },
      "Instruction sets this machine can run, the best first.");
  m.def("isa", [] { return isa().name; }, "The one that weights are laid out for from now on.");
  m.def(
      "set_isa",
      [](const std::string &name) {
        if (!set_isa(name)) throw std::invalid_argument("this machine or build has no instruction set '" + name + "'");
      },
      "name"_a);
  m.def("threads", [] { return Pool::get().threads(); });
  m.def(
      "set_threads",
      [](int n) {
        nb::gil_scoped_release release;  // who works now may go on for long
        Pool::get().set_threads(n);
      },
      "n"_a, "0: as many as the affinity mask allows.");
}
