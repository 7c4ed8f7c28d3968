// Levels of groups of weights by alternating least squares: the loops of crelle.quantizers.solvers.alternating_ls, bcq
// and gptq over one group at a time, whose sorted weights and sums stay in the L1 cache.
//
// A group's weights are sorted once. The weights of one level are then an interval, so whatever a step needs of them
// are differences of running sums between two places that a binary search finds: a round costs L searches and a system
// of a few unknowns, never a pass over the weights. Sums are f64, levels f32, as in torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "base/half.h"

namespace crelle::cpu {

constexpr int kMaxPlanes = 8, kMaxLevels = 1 << kMaxPlanes;
constexpr float kTinyHalf = 0x1p-24f;  // the smallest positive f16

inline float to_half(float f) { return float_of_half(half_of_float(f)); }

// One group, ascending; weights of importance 0 are padding and not in it.
class SortedGroup {
public:
  explicit SortedGroup(int G) : w_(G), index_(G), mass_(G + 1), sum_(G + 1) {}

  // importance [G] or null: all 1.
  void set(const float *w, const float *importance, int G) {
    n = 0;
    for (int k = 0; k < G; ++k)
      if (!importance || importance[k] > 0) index_[n++] = k;
    if (n <= 128) {
      sort_by_rank(w);
    } else {
      std::sort(index_.begin(), index_.begin() + n,
                [w](int a, int b) { return w[a] < w[b] || (w[a] == w[b] && a < b); });
      for (int i = 0; i < n; ++i) w_[i] = w[index_[i]];
    }
    squares = mass_[0] = sum_[0] = 0;
    for (int i = 0; i < n; ++i) {
      const double h = importance ? importance[index_[i]] : 1.0, v = w_[i];
      mass_[i + 1] = mass_[i] + h;
      sum_[i + 1] = sum_[i] + h * v;
      squares += h * v * v;
    }
  }

  int n = 0;           // weights
  double squares = 0;  // sum of h w^2

  float low() const { return w_[0]; }
  float high() const { return w_[n - 1]; }
  double mass() const { return mass_[n]; }
  double mass(int a, int b) const { return mass_[b] - mass_[a]; }
  double sum(int a, int b) const { return sum_[b] - sum_[a]; }

  // The first place in [a, b] whose weight is not below v.
  int place(float v, int a, int b) const {
    const float *base = w_.data() + a;
    for (int left = b - a; left > 0;) {
      const int half = (left + 1) / 2;
      base += half * (base[half - 1] < v);  // no branch: it would be a guess
      left -= half;
    }
    return int(base - w_.data());
  }

  // The same for kCount values in the whole group, the searches side by side: each waits for its own loads only.
  template <int kCount>
  void places(const float *v, int *at) const {
    for (int i = 0; i < kCount; ++i) at[i] = 0;
    for (int left = n; left > 0;) {
      const int half = (left + 1) / 2;
      const float *const base = w_.data() + half - 1;
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i) at[i] += half * (base[at[i]] < v[i]);
      left -= half;
    }
  }

  // sum of h |w - v| in [a, b), m being the place of v.
  double distance(double v, int a, int m, int b) const {
    return (sum(m, b) - v * mass(m, b)) - (sum(a, m) - v * mass(a, m));
  }

private:
  // The rank of a weight is how many are below it: for few weights counting is faster than sorting.
  void sort_by_rank(const float *w) {
    float v[128];
    int rank[128], from[128];
    for (int i = 0; i < n; ++i) from[i] = index_[i], v[i] = w[from[i]], rank[i] = 0;
    for (int j = 0; j < n; ++j) {
      const float x = v[j];
      for (int i = 0; i < j; ++i) rank[i] += x < v[i];
      for (int i = j + 1; i < n; ++i) rank[i] += x <= v[i];
    }
    for (int i = 0; i < n; ++i) w_[rank[i]] = v[i], index_[rank[i]] = from[i];
  }

  std::vector<float> w_;
  std::vector<int> index_;  // of the sorted weights in the group
  std::vector<double> mass_, sum_;
};

// alpha_p times the sign of plane p, of all planes, plus z; or, for a uniform grid, alpha_0 times the code, plus z.
struct Scales {
  float alpha[kMaxPlanes] = {}, z = 0;

  Scales stored(int planes) const {
    Scales s;
    for (int p = 0; p < planes; ++p) s.alpha[p] = to_half(alpha[p]);
    s.z = to_half(z);
    return s;
  }
};

constexpr int kUnknowns = kMaxPlanes + 1;

// Binary coding: the sign of plane p is bit P-1-p of the code.
template <int P>
struct SignBook {
  static constexpr int kPlanes = P, kLevels = 1 << P;

  static void values(const Scales &s, float *v) {
    v[0] = 0;
    for (int p = P - 1; p >= 0; --p)  // from the lowest bit of the code on
      for (int c = (1 << (P - 1 - p)) - 1; c >= 0; --c) {
        v[c + (1 << (P - 1 - p))] = v[c] + s.alpha[p];
        v[c] -= s.alpha[p];
      }
    for (int c = 0; c < kLevels; ++c) v[c] += s.z;
  }

  // The normal equations A x = b of alpha and z, from the sums of h and h w by code, which are overwritten: a
  // Walsh-Hadamard transform has the sums of the products of any two signs.
  static void equations(double *mass, double *total, double (&A)[kUnknowns][kUnknowns], double *b) {
    for (double *t : {mass, total})
      for (int bit = 1; bit < kLevels; bit *= 2)
        for (int first = 0; first < kLevels; first += 2 * bit)
          for (int c = first; c < first + bit; ++c) {
            const double minus = t[c], plus = t[c + bit];
            t[c] = plus + minus, t[c + bit] = plus - minus;
          }
    for (int p = 0; p < P; ++p) {
      for (int q = 0; q < p; ++q) A[p][q] = mass[1 << (P - 1 - p) | 1 << (P - 1 - q)];
      A[p][p] = mass[0];
      A[P][p] = mass[1 << (P - 1 - p)];
      b[p] = total[1 << (P - 1 - p)];
    }
    A[P][P] = mass[0], b[P] = total[0];
  }
};

// Levels z + alpha * (0 … 2^bits - 1).
template <int kBits>
struct UniformBook {
  static constexpr int kPlanes = 1, kLevels = 1 << kBits;

  static void values(const Scales &s, float *v) {
    for (int c = 0; c < kLevels; ++c) v[c] = s.alpha[0] * float(c) + s.z;
  }

  static void equations(double *mass, double *total, double (&A)[kUnknowns][kUnknowns], double *b) {
    A[0][0] = A[1][0] = A[1][1] = b[0] = b[1] = 0;
    for (int c = 0; c < kLevels; ++c) {
      A[0][0] += mass[c] * c * c, A[1][0] += mass[c] * c, A[1][1] += mass[c];
      b[0] += total[c] * c, b[1] += total[c];
    }
  }
};

// The levels in ascending order, and where the weights nearest to each begin: bounds[L] is the end.
template <class Book>
struct Intervals {
  static constexpr int kLevels = Book::kLevels;
  float level[kLevels];
  int order[kLevels], bounds[kLevels + 1];  // order: code of each level

  Intervals() { std::iota(order, order + kLevels, 0); }

  void set(const SortedGroup &g, const Scales &s) {
    float values[kLevels];
    Book::values(s, values);
    for (int i = 0; i < kLevels; ++i) level[i] = values[order[i]];
    for (int i = 1; i < kLevels; ++i) {  // they are nearly in the order of the round before
      if (!(level[i - 1] > level[i])) continue;
      const int code = order[i];
      const float v = level[i];
      int j = i;
      for (; j > 0 && level[j - 1] > v; --j) level[j] = level[j - 1], order[j] = order[j - 1];
      level[j] = v, order[j] = code;
    }
    float border[kLevels];
    for (int i = 1; i < kLevels; ++i) border[i] = (level[i - 1] + level[i]) / 2;
    bounds[0] = 0, bounds[kLevels] = g.n;
    g.places<kLevels - 1>(border + 1, bounds + 1);
  }

  double squared_error(const SortedGroup &g) const {
    double error = g.squares;
    for (int i = 0; i < kLevels; ++i) {
      const double v = level[i];
      error += v * (v * g.mass(bounds[i], bounds[i + 1]) - 2 * g.sum(bounds[i], bounds[i + 1]));
    }
    return error;
  }
};

template <class Book>
double squared_error(const SortedGroup &g, const Scales &s) {
  Intervals<Book> at;
  at.set(g, s);
  return at.squared_error(g);
}

// Solve A x = b by Cholesky, A given as its lower triangle; a tiny ridge where it is singular.
template <int U>
void solve_small(double (&A)[kUnknowns][kUnknowns], double *b, double ridge) {
  double inverse[U];
  for (int j = 0; j < U; ++j) {
    double pivot = A[j][j];
    for (int k = 0; k < j; ++k) pivot -= A[j][k] * A[j][k];
    inverse[j] = 1 / std::sqrt(std::max(pivot + ridge, 1e-12));
    for (int i = j + 1; i < U; ++i) {
      double v = A[i][j];
      for (int k = 0; k < j; ++k) v -= A[i][k] * A[j][k];
      A[i][j] = v * inverse[j];
    }
    for (int k = 0; k < j; ++k) b[j] -= A[j][k] * b[k];
    b[j] *= inverse[j];
  }
  for (int j = U - 1; j >= 0; --j) {
    for (int i = j + 1; i < U; ++i) b[j] -= A[i][j] * b[i];
    b[j] *= inverse[j];
  }
}

// Codes and scales in turn until the codes no longer change.
template <class Book>
Scales alternate(const SortedGroup &g, Scales s, int rounds, bool bias) {
  constexpr int L = Book::kLevels, P = Book::kPlanes;
  Intervals<Book> at;
  int order[L], bounds[L];
  double mass[L], total[L], A[kUnknowns][kUnknowns], b[kUnknowns];
  for (int round = 0; round < rounds; ++round) {
    at.set(g, s);
    if (round && std::equal(order, order + L, at.order) && std::equal(bounds, bounds + L, at.bounds)) break;
    std::copy(at.order, at.order + L, order);
    std::copy(at.bounds, at.bounds + L, bounds);
    for (int i = 0; i < L; ++i) {
      mass[order[i]] = g.mass(at.bounds[i], at.bounds[i + 1]);
      total[order[i]] = g.sum(at.bounds[i], at.bounds[i + 1]);
    }
    Book::equations(mass, total, A, b);
    if (bias)
      solve_small<P + 1>(A, b, 1e-9 * g.mass());
    else
      solve_small<P>(A, b, 1e-9 * g.mass());
    for (int p = 0; p < P; ++p) s.alpha[p] = float(b[p]);
    if (bias) s.z = float(b[P]);
  }
  return s;
}

// The best of several solutions as f16 stores them; NaN is the worst, and of equals the first wins.
template <class Book>
class Best {
public:
  explicit Best(const SortedGroup &g) : g_(g) {}

  void add(const Scales &s) {
    const Scales stored = s.stored(Book::kPlanes);
    double error = squared_error<Book>(g_, stored);
    if (!(error == error)) error = std::numeric_limits<double>::infinity();
    if (none_ || error < error_) found = stored, error_ = error, none_ = false;
  }

  Scales found;

private:
  const SortedGroup &g_;
  double error_ = 0;
  bool none_ = true;
};

// Plane by plane: alpha is the mean size of the residual, whose sign is the next plane. Weights whose signs are alike
// so far are an interval, and their residual is the distance from one value.
inline Scales greedy_planes(const SortedGroup &g, int P, bool bias) {
  Scales s;
  s.z = bias ? float(g.sum(0, g.n) / g.mass()) : 0.0f;
  float center[kMaxLevels] = {s.z};
  int end[kMaxLevels] = {g.n};
  for (int p = 0; p < P; ++p) {
    double total = 0;
    for (int i = (1 << p) - 1; i >= 0; --i) {  // from the last on: each interval becomes two
      const int first = i ? end[i - 1] : 0, split = g.place(center[i], first, end[i]);
      total += g.distance(center[i], first, split, end[i]);
      end[2 * i + 1] = end[i], end[2 * i] = split;
      center[2 * i + 1] = center[2 * i] = center[i];
    }
    s.alpha[p] = float(total / g.mass());
    for (int i = 0; i < 2 << p; ++i) center[i] += i % 2 ? s.alpha[p] : -s.alpha[p];
  }
  return s;
}

inline Scales uniform_planes(const SortedGroup &g, int P, bool bias) {
  float low = g.low(), high = g.high();
  if (!bias) high = std::max(std::fabs(high), std::fabs(low)), low = -high;
  const float step = (high - low) / float((1 << P) - 1);
  Scales s;
  for (int p = 0; p < P; ++p) s.alpha[p] = step * std::ldexp(1.0f, P - 2 - p);
  s.z = (low + high) / 2;
  return s;
}

// One plane more, greedily on the residual.
template <int P>
Scales grown(const SortedGroup &g, Scales s) {
  Intervals<SignBook<P>> at;
  at.set(g, s);
  double total = 0;
  for (int i = 0; i < at.kLevels; ++i) {
    const int a = at.bounds[i], b = at.bounds[i + 1];
    total += g.distance(at.level[i], a, g.place(at.level[i], a, b), b);
  }
  s.alpha[P] = float(total / g.mass());
  return s;
}

// P planes from three starts: greedy, uniform, and the best solution of one plane fewer with a greedy plane more.
template <int P>
Scales best_planes(const SortedGroup &g, const Scales &greedy, int rounds, bool bias) {
  Scales starts[3] = {greedy, uniform_planes(g, P, bias)};
  int count = 2;
  if constexpr (P > 1) starts[count++] = grown<P - 1>(g, best_planes<P - 1>(g, greedy, rounds, bias));
  Best<SignBook<P>> best(g);
  for (int i = 0; i < count; ++i) best.add(starts[i]);
  for (int i = 0; i < count; ++i) best.add(alternate<SignBook<P>>(g, starts[i], rounds, bias));
  return best.found;
}

// The parts of a group's range that are tried.
struct GridCandidates {
  const float *shrink;  // [shrinks]
  int shrinks;
};

// An affine grid low + scale * code: the best clipped range, then codes and least squares in turn.
template <int kBits>
void affine_grid(const SortedGroup &g, const GridCandidates &c, int rounds, float *scale, float *low) {
  using Book = UniformBook<kBits>;
  constexpr float top = (1 << kBits) - 1;
  const float middle = (g.low() + g.high()) / 2, width = std::max((g.high() - g.low()) / top, kTinyHalf);
  Best<Book> start(g);
  for (int i = 0; i < c.shrinks; ++i) {
    Scales s;
    s.alpha[0] = width * c.shrink[i];
    s.z = middle - width * c.shrink[i] * (top / 2);
    start.add(s);
  }
  Scales s = alternate<Book>(g, start.found, rounds, true);
  if (s.alpha[0] < 0) s.z += top * s.alpha[0];  // the same levels, the lowest first
  s.alpha[0] = std::max(std::fabs(s.alpha[0]), kTinyHalf);
  Best<Book> best(g);
  best.add(start.found);
  best.add(s);
  *scale = best.found.alpha[0], *low = best.found.z;
}

// Codes in the order of their values; of equals the lower one comes first.
inline void sort_codes(const float *values, int *order, int count) {
  std::iota(order, order + count, 0);
  std::stable_sort(order, order + count, [values](int a, int b) { return values[a] < values[b]; });
}

// The code of the level nearest to each weight of one group; ties go to the lower level. rank: scratch [G].
template <int P>
void nearest_codes(const float *w, int G, const Scales &s, int *rank, uint8_t *codes) {
  constexpr int L = 1 << P;
  float values[L];
  int order[L];
  SignBook<P>::values(s, values);
  sort_codes(values, order, L);
  std::fill(rank, rank + G, 0);
  for (int i = 1; i < L; ++i) {
    const float border = (values[order[i - 1]] + values[order[i]]) / 2;
    for (int k = 0; k < G; ++k) rank[k] += w[k] > border;
  }
  for (int k = 0; k < G; ++k) codes[k] = uint8_t(order[rank[k]]);
}

// Calls f with std::integral_constant<int, bits>: loops over levels then have a fixed length.
template <class F>
void with_bits(int bits, F &&f) {
  switch (bits) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    case 6: return f(std::integral_constant<int, 6>{});
    case 7: return f(std::integral_constant<int, 7>{});
    case 8: return f(std::integral_constant<int, 8>{});
  }
}

}  // namespace crelle::cpu
