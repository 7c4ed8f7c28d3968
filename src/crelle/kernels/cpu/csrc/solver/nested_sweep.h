// Passes over the columns of 16 rows with one code for several precisions (solver.h).
//
// All codes are compared; those that begin alike share the terms of the coarser precisions. With 4 bits and three
// precisions that are 28 terms a weight, against the K multiply-adds of each precision that gather the errors.
//
// Included inside a namespace of the including file, after sweep.h.

// The best of the codes that begin with `prefix` at precision p; cost: of the precisions before. Of equals the lower.
// Beyond four precisions the first ones are loops: written out, eight of them would be 255 terms.
template <int P, int p = 0>
CRELLE_INLINE void best_below(const Part (&step)[P], const Part (&want)[P], int prefix, Part cost, Part &best,
                              PartInt &code) {
  const Part off = step[p] * float(prefix) - want[p];
  cost += off * off;
  if constexpr (p == P - 1) {
    const PartInt won = cost < best;
    best = won ? cost : best;
    code = won ? PartInt{} + prefix : code;
  } else if constexpr (P - p > 4) {
#pragma GCC unroll 1
    for (int bit = 0; bit < 2; ++bit) best_below<P, p + 1>(step, want, 2 * prefix + bit, cost, best, code);
  } else {
    best_below<P, p + 1>(step, want, 2 * prefix, cost, best, code);
    best_below<P, p + 1>(step, want, 2 * prefix + 1, cost, best, code);
  }
}

// The common codes of 16 rows; scale, low, want: at each precision.
template <int P>
Int best_codes(const Vec *scale, const Vec *low, const Vec *want, const float *roots, int coarse) {
  Int found;
  for (int i = 0; i < kParts; ++i) {
    const auto part = [i](const Vec &v) __attribute__((always_inline)) {
      Part some;
      __builtin_memcpy(&some, reinterpret_cast<const char *>(&v) + i * sizeof some, sizeof some);
      return some;
    };
    Part step[P], wanted[P], best = Part{} + __builtin_inff();
    for (int p = 0; p < P; ++p)
      step[p] = roots[p] * part(scale[p]), wanted[p] = roots[p] * (part(want[p]) - part(low[p]));
    PartInt code = {};
    for (int j = 0; j < coarse; ++j) best_below<P>(step, wanted, j, Part{}, best, code);
    __builtin_memcpy(reinterpret_cast<char *>(&found) + i * sizeof code, &code, sizeof code);
  }
  return found;
}

using BestCodes = Int (*)(const Vec *scale, const Vec *low, const Vec *want, const float *roots, int coarse);

// error: scratch of 16 K P floats, a plane for each precision.
inline void nested_sweep_tile(const NestedSweep &s, int tile, float *error) {
  static constexpr BestCodes kBest[] = {best_codes<1>, best_codes<2>, best_codes<3>, best_codes<4>,
                                        best_codes<5>, best_codes<6>, best_codes<7>, best_codes<8>};
  constexpr int kMost = std::size(kBest);
  const int N = s.N, K = s.K, P = s.P, row0 = tile * kLanes, rows = rows_of(row0, N);
  const size_t plane = size_t(K) * kLanes;
  for (int k = 0; s.error && k < K; ++k)
    for (int p = 0; p < P; ++p)
      store(error + p * plane + size_t(k) * kLanes, lanes_of(s.error + (size_t(k) * P + p) * N, row0, N));
  Vec scale[kMost] = {}, low[kMost] = {}, want[kMost] = {};
  Vec outside[kMost][kColumns] = {}, behind[1][kColumns] = {};  // what reaches the columns of a block from outside it
  for (int i = 0; i < K; ++i) {
    const int column = i % kColumns, begin = i - column, end = begin + kColumns;
    const bool blocked = end <= K;
    const float *const mix = s.mix ? s.mix + size_t(i) * K : nullptr;
    const Vec target = lanes_of(s.target + size_t(i) * N, row0, N);
    for (int p = 0; p < P; ++p) {
      const float *const e = error + p * plane, *const grid = s.grids + (size_t(s.group[i]) * P + p) * 2 * N;
      scale[p] = lanes_of(grid, row0, N), low[p] = lanes_of(grid + N, row0, N);
      want[p] = target;
      if (!s.mix) continue;
      if (blocked && column == 0) {
        weighted_sums<1>(mix, K, e, 0, begin, outside + p);
        if (!s.triangular) {
          weighted_sums<1>(mix + end, K, e + size_t(end) * kLanes, 0, K - end, behind);
          for (int c = 0; c < kColumns; ++c) outside[p][c] += behind[0][c];
        }
      }
      if (blocked) {
        want[p] += outside[p][column];
        for (int j = begin; j < (s.triangular ? i : end); ++j) want[p] += mix[j] * load(e + size_t(j) * kLanes);
      } else {
        want[p] += weighted_sum(mix, e, s.triangular ? i : K);
      }
    }
    const Int code = kBest[P - 1](scale, low, want, s.roots, s.coarse);
    using Bytes = uint8_t __attribute__((vector_size(kLanes)));
    const Bytes bytes = __builtin_convertvector(code, Bytes);
    __builtin_memcpy(s.codes + size_t(i) * N + row0, &bytes, rows);
    for (int p = 0; p < P; ++p) {
      const Vec level = __builtin_convertvector(code >> (P - 1 - p), Vec);
      store(error + p * plane + size_t(i) * kLanes, target - (low[p] + scale[p] * level));
    }
  }
}
