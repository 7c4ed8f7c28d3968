// Products with packed bf16 matrices for Python, on all threads: see bf16_gemm.h.
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "dense/bf16_gemm.h"
#include "bindings/bindings.h"
#include "base/memory.h"
#include "base/pool.h"

using namespace nb::literals;

namespace crelle::cpu {
namespace {

using AnyVector = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AnyOutput = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;

Dense matrix_of(const AnyMatrix &a, const char *otherwise) {
  return {static_cast<const uint8_t *>(a.data()), f32_or_bf16(a.dtype(), otherwise), int(a.shape(0)), int(a.shape(1))};
}

struct PackedBf16 {
  PackedBf16(AnyMatrix weight, bool emulate)
      : kernel(tile_kernel(emulate, kBf16GemmEmulated, CRELLE_AMX(kBf16GemmAmx))) {
    const size_t N = weight.shape(0), K = weight.shape(1);
    require(N >= 1 && K >= 1 && std::max(N, K) < kMostCount, "a weight must be [N, K], both at least 1");
    const Dense from = matrix_of(weight, "a weight must be f32 or bf16");
    w.N = from.N, w.K = from.K;
    nb::gil_scoped_release release;
    tiles.grow(size_t(w.blocks()) * w.steps() * kPairBytes);
    w.tiles = tiles.data();
    Pool::get().run([&](int t, int n) { kernel.pack(from, w, part(w.blocks(), t, n), part(w.blocks(), t + 1, n)); });
  }

  const Bf16GemmKernel &kernel;
  PackedMatrix w;
  Buffer tiles;
};

// What thread t of n takes: of all ways to cut rows and outputs into n equal parts the one that is done first. Packing
// rows takes about as long as two blocks of outputs do.
BlockRange share_of(const PackedProduct &p, int t, int n) {
  const int rows = p.row_blocks(), columns = p.w.blocks();
  int across = 1;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int i = 1; i <= n; ++i) {
    if (n % i) continue;
    const int64_t cost = int64_t{parts_of(rows, n / i)} * (parts_of(columns, i) + 2);
    if (cost < least) across = i, least = cost;
  }
  const int down = n / across, i = t / across, j = t % across;
  return {part(rows, i, down), part(rows, i + 1, down), part(columns, j, across), part(columns, j + 1, across)};
}

void product(const PackedBf16 &packed, AnyMatrix x, std::optional<AnyVector> bias, AnyOutput y) {
  const PackedMatrix &w = packed.w;
  const size_t M = x.shape(0);
  require(x.shape(1) == size_t(w.K) && M < kMostCount, "x must be [M, K], with the weight's K");
  require(y.shape(0) == M && y.shape(1) == size_t(w.N), "y must be [M, N]");
  require(is_bf16(y.dtype()), "y must be bf16");
  std::vector<float> addends(size_t(w.blocks()) * kBlock);
  if (bias) {
    require(bias->shape(0) == size_t(w.N), "the bias must be [N]");
    if (f32_or_bf16(bias->dtype(), "the bias must be f32 or bf16") == DType::F32) {
      std::memcpy(addends.data(), bias->data(), w.N * sizeof(float));
    } else {
      const auto *from = static_cast<const uint16_t *>(bias->data());
      for (int n = 0; n < w.N; ++n) {
        const uint32_t bits = uint32_t{from[n]} << 16;
        std::memcpy(&addends[n], &bits, sizeof bits);
      }
    }
  }
  const PackedProduct p{w, matrix_of(x, "x must be f32 or bf16"), addends.data(), static_cast<uint16_t *>(y.data())};
  if (!M) return;
  nb::gil_scoped_release release;
  Pool::get().run([&](int t, int n) {
    static thread_local Buffer room;
    const BlockRange all = share_of(p, t, n);
    for (int column = all.column0; column < all.column1; column += kStripBlocks) {
      const BlockRange strip{all.row0, all.row1, column, std::min(column + kStripBlocks, all.column1)};
      room.grow(room_bytes(p, strip));
      packed.kernel.multiply(p, strip, room.data());
    }
  });
}

}  // namespace

void bind_bf16_gemm(nb::module_ &m) {
  nb::class_<PackedBf16>(m, "PackedBf16", "A matrix [N, K] as bf16 tiles; emulate: without AMX, slowly.")
      .def(nb::init<AnyMatrix, bool>(), "weight"_a.noconvert(), "emulate"_a)
      .def("product", &product, "x"_a.noconvert(), "bias"_a.none().noconvert(), "y"_a.noconvert(),
           "y [M, N] = bf16(x Wᵀ + bias).");
}

}  // namespace crelle::cpu
