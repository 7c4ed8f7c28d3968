// Trellis matrices (trellis_weight.h) from Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <string>
#include <tuple>

#include "bindings/bindings.h"
#include "isa/isa.h"
#include "planes/matmul.h"

using namespace nb::literals;
using namespace crelle::cpu;

namespace {

using Rotation = std::tuple<In<uint8_t, 1>, int>;

Weight py_prepare_trellis(In<uint8_t, 3> codes, int64_t K, const std::string &code, In<float, 1> scale,
                          std::optional<Rotation> rotation) {
  const int64_t N = scale.shape(0);
  require(N >= 1 && K >= 1 && K <= INT32_MAX / 64, "a matrix has at least one row and one column");
  require(code == "pair" || code == "mul1", "the code must be 'pair' or 'mul1'");
  const bool pair = code == "pair";
  const int64_t half_bits = codes.shape(2) / 8;
  require(codes.shape(2) % 8 == 0 && half_bits >= 2 && half_bits <= 8, "a ring has 16 bytes a bit, for 1 to 4 bits");
  require(pair || half_bits % 2 == 0, "the code 'mul1' has whole bits");
  require(int64_t(codes.shape(0)) == (N + kTrellisRows - 1) / kTrellisRows &&
              int64_t(codes.shape(1)) == (K + kTrellisColumns - 1) / kTrellisColumns,
          "codes must be [ceil(N/32), ceil(K/4), 16 bits]");
  TrellisStored s{int(N), int(K), int(half_bits), pair, codes.data(), scale.data(), nullptr, 1};
  if (rotation) {
    const auto &[signs, block] = *rotation;
    require(int64_t(signs.shape(0)) == (K + 7) / 8, "signs must be [ceil(K/8)]");
    require(block >= 1 && (block & (block - 1)) == 0 && K % block == 0, "a block is a power of two that divides K");
    s.signs = signs.data(), s.rotated = block;
  }
  nb::gil_scoped_release release;
  return prepare_trellis(s, isa());
}

bool same_rotation(const Weight &a, const Weight &b) {
  return a.stream == Stream::Trellis && b.stream == Stream::Trellis && a.isa == b.isa && a.partition == b.partition &&
         a.trellis->same_inputs(*b.trellis);
}

}  // namespace

void crelle::cpu::bind_trellis(nb::module_ &m) {
  m.def("prepare_trellis", &py_prepare_trellis, "codes"_a.noconvert(), "K"_a, "code"_a, "scale"_a.noconvert(),
        "rotation"_a.none() = nb::none(), "rotation: signs of the inputs, and how many are rotated together.");
  m.def("same_rotation", &same_rotation, "a"_a, "b"_a, "Whether an input encoded for one serves the other.");
}
