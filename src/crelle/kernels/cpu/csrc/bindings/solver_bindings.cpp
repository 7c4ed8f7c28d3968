// The inner loops of quantizers for Python, on all threads: see solver.h.
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "bindings/bindings.h"
#include "base/pool.h"
#include "solver/solver.h"

using namespace nb::literals;

namespace crelle::cpu {
namespace {

int tiles_of(size_t rows) { return int((rows + kSweepRows - 1) / kSweepRows); }

template <class F>
void for_each_tile(int tiles, int K, F &&work) {
  nb::gil_scoped_release release;
  Pool::get().run([&](int t, int n) {
    std::vector<float> scratch(size_t(K + 130) * kSweepRows);
    for (int tile = part(tiles, t, n); tile < part(tiles, t + 1, n); ++tile) work(tile, scratch.data());
  });
}

// The same, up to `most` neighbouring tiles at once: work(first, how many, scratch).
template <class F>
void for_each_tiles(int tiles, int most, int K, F &&work) {
  nb::gil_scoped_release release;
  Pool::get().run([&](int t, int n) {
    std::vector<float> scratch(size_t(K) * kSweepRows * most);
    const int end = part(tiles, t + 1, n);
    for (int tile = part(tiles, t, n); tile < end; tile += most) work(tile, std::min(most, end - tile), scratch.data());
  });
}

void sweep(In<float, 2> target, In<float, 2> mix, bool triangular, In<float, 2> levels,
           std::optional<In<uint8_t, 2>> level_codes, In<int32_t, 1> first, In<int32_t, 1> count, In<int32_t, 1> group,
           std::optional<In<uint8_t, 2>> outliers, Out<float, 2> error, Out<uint8_t, 2> codes,
           std::optional<Out<float, 2>> kept) {
  const size_t K = target.shape(0), N = target.shape(1), groups = first.shape(0);
  const auto alike = [&](const auto &a) { return a.shape(0) == K && a.shape(1) == N; };
  require(mix.shape(0) == K && mix.shape(1) == K, "mix must be [K, K]");
  require(alike(error) && alike(codes) && (!outliers || alike(*outliers)) && (!kept || alike(*kept)),
          "target, error, codes, outliers and kept must be [K, N]");
  require(!outliers || kept, "outliers need a place for their weights");
  require(levels.shape(1) == N &&
              (!level_codes || (level_codes->shape(0) == levels.shape(0) && level_codes->shape(1) == N)),
          "levels and their codes must be [levels, N]");
  require(count.shape(0) == groups && group.shape(0) == K, "first and count must be [groups], group [K]");
  for (size_t g = 0; g < groups; ++g)
    require(first.data()[g] >= 0 && count.data()[g] >= 1 && count.data()[g] <= 256 &&
                size_t(first.data()[g]) + size_t(count.data()[g]) <= levels.shape(0),
            "a group's levels are beyond the table");
  for (size_t k = 0; k < K; ++k)
    require(group.data()[k] >= 0 && size_t(group.data()[k]) < groups, "a column's group is beyond the table");
  const Sweep s{int(N),
                int(K),
                triangular,
                target.data(),
                mix.data(),
                levels.data(),
                level_codes ? level_codes->data() : nullptr,
                first.data(),
                count.data(),
                group.data(),
                outliers ? outliers->data() : nullptr,
                error.data(),
                codes.data(),
                kept ? kept->data() : nullptr};
  const Ops &ops = ops_of(isa());
  for_each_tiles(tiles_of(N), ops.solver_tiles, s.K,
                 [&](int tile, int tiles, float *scratch) { ops.sweep(s, tile, tiles, scratch); });
}

void nested_sweep(In<float, 2> target, std::optional<In<float, 2>> mix, In<float, 4> grids, In<float, 1> roots,
                  int coarse, In<int32_t, 1> group, std::optional<In<float, 2>> error, Out<uint8_t, 2> codes) {
  const size_t K = target.shape(0), N = target.shape(1), P = roots.shape(0), groups = grids.shape(0);
  require(P >= 1 && P <= NestedSweep::kMost && coarse >= 2 && coarse << (P - 1) <= 256, "a code has 1 to 8 bits");
  require(!mix || (mix->shape(0) == K && mix->shape(1) == K), "mix must be [K, K]");
  require(grids.shape(1) == P && grids.shape(2) == 2 && grids.shape(3) == N, "grids must be [groups, P, 2, N]");
  require(!error || (error->shape(0) == K && error->shape(1) == P * N), "error must be [K, P N]");
  require(codes.shape(0) == K && codes.shape(1) == N && group.shape(0) == K, "codes must be [K, N], group [K]");
  for (size_t k = 0; k < K; ++k)
    require(group.data()[k] >= 0 && size_t(group.data()[k]) < groups, "a column's group is beyond the grids");
  const NestedSweep s{int(N),
                      int(K),
                      int(P),
                      coarse,
                      !error,
                      target.data(),
                      mix ? mix->data() : nullptr,
                      grids.data(),
                      roots.data(),
                      group.data(),
                      error ? error->data() : nullptr,
                      codes.data()};
  const Ops &ops = ops_of(isa());
  for_each_tile(tiles_of(N), s.K * s.P, [&](int tile, float *scratch) { ops.nested_sweep(s, tile, scratch); });
}

void affine_sweep(In<float, 2> target, In<float, 2> mix, In<float, 2> scale, In<float, 2> low, In<float, 1> top,
                  Out<float, 2> error) {
  const size_t K = target.shape(0), N = target.shape(1);
  const auto alike = [&](const auto &a) { return a.shape(0) == K && a.shape(1) == N; };
  require(mix.shape(0) == K && mix.shape(1) == K, "mix must be [K, K]");
  require(alike(scale) && alike(low) && alike(error), "target, scale, low and error must be [K, N]");
  require(top.shape(0) == N, "top must be [N]");
  const AffineSweep s{int(N), int(K), target.data(), mix.data(), scale.data(), low.data(), top.data(), error.data()};
  const Ops &ops = ops_of(isa());
  for_each_tile(tiles_of(N), s.K, [&](int tile, float *scratch) { ops.affine_sweep(s, tile, scratch); });
}

void descend_scales(In<float, 2> hessian, In<int32_t, 1> columns, int G, In<float, 2> factor, In<float, 2> zero2,
                    In<float, 1> top, Out<float, 2> error, Out<float, 2> scale2, Out<float, 2> codes) {
  const size_t K = factor.shape(0), N = factor.shape(1), groups = columns.shape(0), tiles = tiles_of(N);
  require(hessian.shape(0) == K && hessian.shape(1) == K, "the Hessian must be [K, K]");
  require(error.shape(0) == K && error.shape(1) == N, "error and factor must be [K, N]");
  require(G >= 1 && G <= 64, "a group has 1 to 64 columns");
  require(zero2.shape(0) == tiles && zero2.shape(1) == groups && scale2.shape(0) == tiles && scale2.shape(1) == groups,
          "second-order scales and zeros must be [tiles of 16 rows, groups]");
  require(top.shape(0) == groups && codes.shape(0) == groups && codes.shape(1) == N,
          "top must be [groups], codes [groups, N]");
  for (size_t j = 0; j < groups; ++j)
    require(columns.data()[j] >= 0 && size_t(columns.data()[j]) < K, "a group begins behind the last column");
  const ScaleDescent s{int(N),        int(K),       G,          int(groups),  hessian.data(), columns.data(),
                       factor.data(), zero2.data(), top.data(), error.data(), scale2.data(),  codes.data()};
  const Ops &ops = ops_of(isa());
  for_each_tile(int(tiles), s.K, [&](int tile, float *scratch) { ops.descend_scales(s, tile, scratch); });
}

void uniform_grids(In<float, 2> weight, std::optional<In<float, 2>> importance, int bits, bool symmetric,
                   In<float, 1> shrink, int aside, Out<float, 1> scale, Out<float, 1> zero) {
  const size_t R = weight.shape(0), G = weight.shape(1), C = importance ? importance->shape(0) : 1;
  require(bits >= 1 && bits <= 8, "bits must be 1 to 8");
  require(aside == 0 || aside == 1, "zero points are tried as they are, or one step to either side too");
  require(!importance || (importance->shape(1) == G && C > 0 && R % C == 0),
          "importances must be [C, G], where C divides the number of groups");
  require(scale.shape(0) == R && zero.shape(0) == R, "scale and zero must be [R]");
  const UniformGrids s{int(R),
                       int(G),
                       int(C),
                       bits,
                       int(shrink.shape(0)),
                       symmetric,
                       aside == 1,
                       weight.data(),
                       importance ? importance->data() : nullptr,
                       shrink.data(),
                       scale.data(),
                       zero.data()};
  const Ops &ops = ops_of(isa());
  for_each_tile(tiles_of(R), 2 * s.G, [&](int tile, float *scratch) { ops.uniform_grids(s, tile, scratch); });
}

void search_grids(In<float, 2> weight, In<float, 2> importance, int G, In<float, 1> shrink, Out<float, 2> scale,
                  Out<float, 2> zero) {
  const size_t K = weight.shape(0), N = weight.shape(1);
  require(G >= 1 && G <= 64, "a group has 1 to 64 columns");
  const size_t groups = (K + G - 1) / G;
  require(importance.shape(0) == K && importance.shape(1) == N, "weight and importance must be [K, N]");
  require(scale.shape(0) == groups && scale.shape(1) == N && zero.shape(0) == groups && zero.shape(1) == N,
          "scale and zero must be [groups, N]");
  const GridSearch s{int(N),        int(K),       G,          int(shrink.shape(0)), weight.data(), importance.data(),
                     shrink.data(), scale.data(), zero.data()};
  const Ops &ops = ops_of(isa());
  for_each_tile(tiles_of(N), 0, [&](int tile, float *scratch) { ops.search_grids(s, tile, scratch); });
}

void second_order(In<float, 2> scale, In<float, 2> importance, In<float, 1> top, In<float, 1> shrink,
                  Out<float, 2> scale2, Out<float, 2> zero2) {
  const size_t groups = scale.shape(0), N = scale.shape(1), tiles = tiles_of(N);
  require(importance.shape(0) == groups && importance.shape(1) == N, "scale and importance must be [groups, N]");
  require(top.shape(0) == groups, "top must be [groups]");
  require(scale2.shape(0) == tiles && scale2.shape(1) == groups && zero2.shape(0) == tiles && zero2.shape(1) == groups,
          "scale2 and zero2 must be [tiles, groups]");
  const SecondOrderSearch s{int(N),     int(groups),   int(shrink.shape(0)), scale.data(), importance.data(),
                            top.data(), shrink.data(), scale2.data(),        zero2.data()};
  const Ops &ops = ops_of(isa());
  for_each_tile(int(tiles), 0, [&](int tile, float *scratch) { ops.second_order(s, tile, scratch); });
}

// result [K, N] = the level that each code [N, K] names, or a target [N, K] minus it. Levels: [N, groups, L].
void spread_levels(In<uint8_t, 2> codes, In<float, 3> levels, int G, std::optional<In<float, 2>> target,
                   Out<float, 2> result) {
  const int N = int(codes.shape(0)), K = int(codes.shape(1)), C = int(levels.shape(1)), L = int(levels.shape(2));
  require(G >= 1 && levels.shape(0) == size_t(N) && C == (K + G - 1) / G && L >= 1, "levels must be [N, groups, L]");
  require(!target || (target->shape(0) == size_t(N) && target->shape(1) == size_t(K)), "the target must be [N, K]");
  require(result.shape(0) == size_t(K) && result.shape(1) == size_t(N), "the result must be [K, N]");
  const float *const wanted = target ? target->data() : nullptr;
  std::atomic<bool> beyond{false};
  for_each_tile(tiles_of(N), 0, [&](int tile, float *) {
    const int row0 = tile * kSweepRows, rows = std::min(kSweepRows, N - row0);
    int most = 0;
    for (int k = 0; k < K; ++k) {
      float *const to = result.data() + size_t(k) * N + row0;
      for (int r = 0; r < rows; ++r) {
        const size_t n = row0 + r, at = n * K + k;
        const int code = codes.data()[at];
        most = std::max(most, code);
        const float level = levels.data()[(n * C + k / G) * L + std::min(code, L - 1)];
        to[r] = wanted ? wanted[at] - level : level;
      }
    }
    if (most >= L) beyond = true;
  });
  require(!beyond, "a code is beyond its levels");
}

void row_errors(In<float, 2> hessian, In<float, 2> error, Out<float, 1> result) {
  const size_t K = error.shape(0), N = error.shape(1);
  require(hessian.shape(0) == K && hessian.shape(1) == K, "the Hessian must be [K, K]");
  require(result.shape(0) == N, "the result must be [N]");
  const RowErrors s{int(N), int(K), hessian.data(), error.data(), result.data()};
  const Ops &ops = ops_of(isa());
  for_each_tiles(tiles_of(N), ops.solver_tiles, s.K,
                 [&](int tile, int tiles, float *scratch) { ops.row_errors(s, tile, tiles, scratch); });
}

void solve_scales(In<float, 2> hessian, In<float, 2> error, In<float, 3> features, int G, double ridge,
                  Out<float, 3> change) {
  const size_t K = error.shape(0), N = error.shape(1), U = features.shape(0);
  require(hessian.shape(0) == K && hessian.shape(1) == K, "the Hessian must be [K, K]");
  require(G >= 1 && U >= 1, "a group has columns and scales");
  require(features.shape(1) == K && features.shape(2) == N, "features must be [U, K, N]");
  const ScaleSolve s{int(N), int(K), G, int(U), hessian.data(), error.data(), features.data(), ridge, change.data()};
  require(change.shape(0) == size_t(s.groups()) && change.shape(1) == U && change.shape(2) == N,
          "the change must be [groups, U, N]");
  const Ops &ops = ops_of(isa());
  const int all = tiles_of(N), most = ops.solver_tiles;
  nb::gil_scoped_release release;
  Pool::get().run([&](int t, int n) {
    std::vector<float> scratch(s.floats() * most);
    std::vector<double> wide(s.doubles() * most);
    const int end = part(all, t + 1, n);
    for (int tile = part(all, t, n); tile < end; tile += most)
      ops.solve_scales(s, tile, std::min(most, end - tile), scratch.data(), wide.data());
  });
}

void viterbi(In<int16_t, 2> values, In<float, 3> roots, In<int16_t, 2> x, int shift, int window,
             Out<uint16_t, 2> states) {
  const size_t columns = roots.shape(0), V = roots.shape(1), S = x.shape(0);
  require((V == 1 && shift >= 1 && shift <= 4) || (V == 2 && shift >= 2 && shift <= 8), "no such trellis");
  require(values.shape(0) == V && values.shape(1) == size_t(kViterbiStates), "values must be [V, states]");
  require(roots.shape(2) == V && columns >= 1, "roots must be [columns, V, V]");
  require(x.shape(1) == 128 && states.shape(0) == S && states.shape(1) == 128 / V, "x must be [sequences, 128]");
  require(window >= 2, "the run around the beginning has at least two steps");
  nb::gil_scoped_release release;
  static thread_local std::vector<int16_t> kept;
  std::vector<int16_t> &tables = kept;  // this thread's, also in the workers
  tables.resize(columns * V * kViterbiStates);
  const Viterbi p{shift,        int(V),        int(columns), window,       values.data(),
                  roots.data(), tables.data(), x.data(),     states.data()};
  const Ops &ops = ops_of(isa());
  Pool::get().run([&](int t, int n) {
    for (int c = part(int(columns), t, n); c < part(int(columns), t + 1, n); ++c)
      ops.viterbi_tables(p, c, tables.data() + c * V * kViterbiStates);
  });
  std::atomic<int> next{0};
  Pool::get().run([&](int, int) {
    static thread_local std::vector<uint8_t> scratch;
    scratch.resize(p.scratch());
    for (int s; (s = next++) < int(S);) ops.viterbi_ring(p, s, scratch.data());
  });
}

}  // namespace

void bind_solver(nb::module_ &m) {
  m.def("sweep", &sweep, "target"_a.noconvert(), "mix"_a.noconvert(), "triangular"_a, "levels"_a.noconvert(),
        "level_codes"_a.none().noconvert(), "first"_a.noconvert(), "count"_a.noconvert(), "group"_a.noconvert(),
        "outliers"_a.none().noconvert(), "error"_a.noconvert(), "codes"_a.noconvert(), "kept"_a.none().noconvert());
  m.def("nested_sweep", &nested_sweep, "target"_a.noconvert(), "mix"_a.none().noconvert(), "grids"_a.noconvert(),
        "roots"_a.noconvert(), "coarse"_a, "group"_a.noconvert(), "error"_a.none().noconvert(), "codes"_a.noconvert());
  m.def("affine_sweep", &affine_sweep, "target"_a.noconvert(), "mix"_a.noconvert(), "scale"_a.noconvert(),
        "low"_a.noconvert(), "top"_a.noconvert(), "error"_a.noconvert());
  m.def("descend_scales", &descend_scales, "hessian"_a.noconvert(), "columns"_a.noconvert(), "G"_a,
        "factor"_a.noconvert(), "zero2"_a.noconvert(), "top"_a.noconvert(), "error"_a.noconvert(),
        "scale2"_a.noconvert(), "codes"_a.noconvert());
  m.def("uniform_grids", &uniform_grids, "weight"_a.noconvert(), "importance"_a.none().noconvert(), "bits"_a,
        "symmetric"_a, "shrink"_a.noconvert(), "aside"_a, "scale"_a.noconvert(), "zero"_a.noconvert());
  m.def("search_grids", &search_grids, "weight"_a.noconvert(), "importance"_a.noconvert(), "G"_a,
        "shrink"_a.noconvert(), "scale"_a.noconvert(), "zero"_a.noconvert());
  m.def("second_order", &second_order, "scale"_a.noconvert(), "importance"_a.noconvert(), "top"_a.noconvert(),
        "shrink"_a.noconvert(), "scale2"_a.noconvert(), "zero2"_a.noconvert());
  m.def("spread_levels", &spread_levels, "codes"_a.noconvert(), "levels"_a.noconvert(), "G"_a,
        "target"_a.none().noconvert(), "result"_a.noconvert());
  m.def("row_errors", &row_errors, "hessian"_a.noconvert(), "error"_a.noconvert(), "result"_a.noconvert());
  m.def("solve_scales", &solve_scales, "hessian"_a.noconvert(), "error"_a.noconvert(), "features"_a.noconvert(), "G"_a,
        "ridge"_a, "change"_a.noconvert());
  m.def("viterbi", &viterbi, "values"_a.noconvert(), "roots"_a.noconvert(), "x"_a.noconvert(), "shift"_a, "window"_a,
        "states"_a.noconvert());
}

}  // namespace crelle::cpu
