// Sums over tokens for Python, on all threads: see stats.h.
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <mutex>
#include <optional>

#include "bindings/bindings.h"
#include "base/memory.h"
#include "base/pool.h"
#include "solver/stats.h"

using namespace nb::literals;

namespace crelle::cpu {
namespace {

// The kernel and its room for a block of tokens, which stays from batch to batch.
struct StatsTiles {
  explicit StatsTiles(bool emulate) : kernel(tile_kernel(emulate, kStatsEmulated, CRELLE_AMX(kStatsAmx))) {}

  const StatsKernel &kernel;
  Buffer room;
  std::mutex mutex;
};

// The factors of `steps` steps, and what each step adds to abssum.
PackedTokens make_room(const TokenSums &s, Buffer &room, int steps) {
  const size_t factor = size_t(s.blocks()) * steps * kStepBytes, sums = size_t(s.blocks()) * steps * kBlockColumns;
  room.grow((s.full ? 3 : 2) * factor + sums * sizeof(float));
  uint8_t *const at = room.data();
  return {0,
          steps,
          at,
          at + factor,
          s.full ? at + 2 * factor : nullptr,
          reinterpret_cast<float *>(at + (s.full ? 3 : 2) * factor)};
}

void add_tokens(const StatsKernel &kernel, const TokenSums &s, Buffer &room) {
  const int steps = (s.T - 1) / kStepTokens + 1, blocks = (steps + kBlockSteps - 1) / kBlockSteps;
  PackedTokens p = make_room(s, room, (steps + blocks - 1) / blocks);
  for (int i = 0; i < blocks; ++i) {
    const int begin = part(steps, i, blocks);
    p.first = begin * kStepTokens;
    p.steps = part(steps, i + 1, blocks) - begin;
    Pool::get().run([&](int t, int n) { kernel.pack(s, p, part(p.steps, t, n), part(p.steps, t + 1, n)); });
    for (int step = 0; step < p.steps; ++step) {
      const float *const sums = p.abssum + size_t(step) * s.blocks() * kBlockColumns;
      for (int k = 0; k < s.K; ++k) s.abssum[k] += sums[k];
    }
    Pool::get().run([&](int t, int n) {
      const int64_t all = s.products();
      kernel.multiply(s, p, all * t / n, all * (t + 1) / n);
    });
  }
}

void add(StatsTiles &tiles, AnyMatrix x, std::optional<AnyMatrix> full, In<float, 1> weight, Out<float, 2> hessian,
         std::optional<Out<float, 2>> cross, Out<float, 1> abssum) {
  const size_t T = x.shape(0), K = x.shape(1);
  const auto type = [](const AnyMatrix &a) { return f32_or_bf16(a.dtype(), "inputs must be f32 or bf16"); };
  const auto square = [&](const Out<float, 2> &a) { return a.shape(0) == K && a.shape(1) == K; };
  require(K >= 1 && std::max(T, K) < kMostCount, "x must be [T, K], K at least 1");
  require(!full || (full->shape(0) == T && full->shape(1) == K), "x and full must be [T, K] alike");
  require(weight.shape(0) == T, "the tokens' weights must be [T]");
  require(square(hessian) && (!cross || square(*cross)), "hessian and cross must be [K, K]");
  require(abssum.shape(0) == K, "abssum must be [K]");
  require(full.has_value() == cross.has_value(), "full and cross are given both or neither");
  if (!T) return;
  const TokenSums s{int(T),
                    int(K),
                    type(x),
                    full ? type(*full) : DType::F32,
                    static_cast<const uint8_t *>(x.data()),
                    full ? static_cast<const uint8_t *>(full->data()) : nullptr,
                    weight.data(),
                    hessian.data(),
                    cross ? cross->data() : nullptr,
                    abssum.data()};
  nb::gil_scoped_release release;
  std::lock_guard lock(tiles.mutex);
  add_tokens(tiles.kernel, s, tiles.room);
}

}  // namespace

void bind_stats(nb::module_ &m) {
  nb::class_<StatsTiles>(m, "StatsTiles", "Adds up the products of tokens as bf16 tiles; emulate: without AMX, slowly.")
      .def(nb::init<bool>(), "emulate"_a)
      .def("add", &add, "x"_a.noconvert(), "full"_a.none().noconvert(), "weight"_a.noconvert(), "hessian"_a.noconvert(),
           "cross"_a.none().noconvert(), "abssum"_a.noconvert());
}

}  // namespace crelle::cpu
