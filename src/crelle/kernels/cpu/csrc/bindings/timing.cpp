// Times products and plain reads from inside C++, so that the clock sees nothing but the work.
//
// The weights in the list are visited in turn: with one of them everything is hot, with more than the caches hold
// each visit finds its weight cold.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>

#include "bindings/bindings.h"
#include "planes/matmul.h"

using namespace nb::literals;
using namespace crelle::cpu;

namespace {

using Clock = std::chrono::steady_clock;

// Seconds of every call of fn(weight), each weight at least once, until `budget` seconds have passed.
template <class F>
std::vector<double> time_calls(const std::vector<Weight *> &weights, double budget, F &&fn) {
  std::vector<double> seconds;
  const auto begun = Clock::now();
  do {
    for (const Weight *w : weights) {
      const auto before = Clock::now();
      fn(*w);
      seconds.push_back(std::chrono::duration<double>(Clock::now() - before).count());
    }
  } while (std::chrono::duration<double>(Clock::now() - begun).count() < budget);
  return seconds;
}

std::vector<double> time_matmul(const std::vector<Weight *> &weights,
                                nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> x,
                                const std::string &precision, double budget) {
  if (precision != "int8" && precision != "exact") throw std::invalid_argument("precision must be 'int8' or 'exact'");
  const Precision p = precision == "int8" ? Precision::Int8 : Precision::Exact;
  const int M = static_cast<int>(x.shape(0));
  int widest = 0;
  for (const Weight *w : weights) {
    if (x.shape(1) != size_t(w->K)) throw std::invalid_argument("x must be [M, K] for every weight");
    widest = std::max(widest, w->N);
  }
  nb::gil_scoped_release release;
  std::vector<float> y(size_t(M) * widest);
  return time_calls(weights, budget, [&](const Weight &w) { matmul(x.data(), M, w, y.data(), p); });
}

std::vector<double> time_read(const std::vector<Weight *> &weights, double budget) {
  nb::gil_scoped_release release;
  std::atomic<uint64_t> all{0};
  return time_calls(weights, budget, [&](const Weight &w) {
    Pool::get().run([&](int t, int n) {
      const int b0 = part(w.blocks, t, n), b1 = part(w.blocks, t + 1, n);
      all ^= w.isa->read(w.block(b0), w.bytes(b0, b1));
    });
  });
}

}  // namespace

void crelle::cpu::bind_timing(nb::module_ &m) {
  m.def("time_matmul", &time_matmul, "weights"_a, "x"_a.noconvert(), "precision"_a, "budget"_a,
        "Seconds of each product, the weights in turn, for at least `budget` seconds.");
  m.def("time_read", &time_read, "weights"_a, "budget"_a,
        "Seconds of each plain read of a weight's bytes: the roofline of time_matmul.");
}
