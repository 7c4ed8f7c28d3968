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

using StoredRotation = std::tuple<In<uint8_t, 1>, int, In<float, 2>>;  // signs, block, Paley's matrix

Rotation rotation_of(const std::optional<StoredRotation> &stored, int64_t channels) {
  Rotation r;
  if (!stored) return r;
  const auto &[signs, block, paley] = *stored;
  require(int64_t(signs.shape(0)) == (channels + 7) / 8, "signs must have a bit for each channel");
  require(block >= 1 && channels % block == 0, "a block must divide the channels");
  r.block = block, r.order = int(paley.shape(0)), r.step = r.order ? block / r.order : 0;
  require(paley.shape(1) == paley.shape(0) && (r.order == 1 || (r.order > 0 && r.order % 4 == 0)),
          "Paley's matrix must be square, of 1 row or a multiple of 4");
  require(block % r.order == 0 && (r.step & (r.step - 1)) == 0, "a block must be a power of two times Paley's matrix");
  if (r.order > 1) r.paley.assign(paley.data(), paley.data() + paley.size());
  for (int64_t k = 0; k < channels; ++k) r.signs.push_back(signs.data()[k / 8] >> k % 8 & 1 ? -1.0f : 1.0f);
  return r;
}

Weight py_prepare_trellis(In<uint8_t, 3> codes, int64_t K, const std::string &code, In<float, 1> scale,
                          std::optional<StoredRotation> inputs, std::optional<StoredRotation> outputs) {
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
  const TrellisStored s{int(N),       int(K),       int(half_bits),         pair,
                        codes.data(), scale.data(), rotation_of(inputs, K), rotation_of(outputs, N)};
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
        "inputs"_a.none() = nb::none(), "outputs"_a.none() = nb::none(),
        "inputs, outputs: signs of the channels that are rotated, how many are together, and Paley's matrix.");
  m.def("same_rotation", &same_rotation, "a"_a, "b"_a, "Whether an input encoded for one serves the other.");
}
