// Levels of one group by alternating least squares, by a team of lanes: what group_solver.h does on a CPU, with a lane
// for each level.
//
// The weights nearest to a level are an interval of the sorted group. A lane finds where its own begins (a binary
// search), and the sums of the interval are differences of running sums; a round costs one such search, a sort of
// levels that are nearly sorted, and a system of a few unknowns, which each lane solves for itself. Values of a group
// (scales, errors) are the same in all lanes of its team. Teams of a warp stay together: one that has converged waits.
#pragma once
#include "solver/sorted_group.cuh"

namespace crelle {

constexpr float TINY_HALF = 0x1p-24f;  // the smallest positive f16

__device__ __forceinline__ float stored(float v) { return to_float(from_float<half>(v)); }

template <int COUNT>
struct Scales {
  float alpha[COUNT], z;

  __device__ __forceinline__ Scales as_stored() const {
    Scales s;
#pragma unroll
    for (int p = 0; p < COUNT; p++) s.alpha[p] = stored(alpha[p]);
    s.z = stored(z);
    return s;
  }
};

// Solve A x = b by Cholesky, A given as its lower triangle; a tiny ridge where it is singular. x replaces b.
template <int U>
__device__ __forceinline__ void solve_small(double (&A)[U][U], double (&b)[U], double ridge) {
  double inverse[U];
#pragma unroll
  for (int j = 0; j < U; j++) {
    double pivot = A[j][j];
#pragma unroll
    for (int k = 0; k < j; k++) pivot -= A[j][k] * A[j][k];
    inverse[j] = rsqrt(fmax(pivot + ridge, 1e-12));
#pragma unroll
    for (int i = j + 1; i < U; i++) {
      double v = A[i][j];
#pragma unroll
      for (int k = 0; k < j; k++) v -= A[i][k] * A[j][k];
      A[i][j] = v * inverse[j];
    }
#pragma unroll
    for (int k = 0; k < j; k++) b[j] -= A[j][k] * b[k];
    b[j] *= inverse[j];
  }
#pragma unroll
  for (int j = U - 1; j >= 0; j--) {
#pragma unroll
    for (int i = j + 1; i < U; i++) b[j] -= A[i][j] * b[i];
    b[j] *= inverse[j];
  }
}

// Binary coding: level  z + sum of alpha_p times the sign of plane p,  which is bit P-1-p of the code. With fewer
// `planes` than P they are the last ones of `alpha`, and the others are 0.
template <int P>
struct SignBook {
  using Team = crelle::Team<P>;
  using Scales = crelle::Scales<P>;
  int planes;
  bool bias;
  double *scratch;  // [2 LEVELS], of this team

  __device__ __forceinline__ int levels() const { return 1 << planes; }
  __device__ __forceinline__ bool has(int p) const { return p >= P - planes; }

  __device__ __forceinline__ float value(const Scales &s, int code) const {
    float v = 0;
#pragma unroll
    for (int p = P - 1; p >= 0; p--) v += code >> (P - 1 - p) & 1 ? s.alpha[p] : -s.alpha[p];
    return v + s.z;
  }

  // Least squares for alpha and z, from the sums of h and h w at this lane's codes: a Walsh-Hadamard transform has the
  // sums of the products of any two signs.
  __device__ __forceinline__ void solve(const double (&mass)[Team::SLOTS], const double (&total)[Team::SLOTS],
                                        const int (&code)[Team::SLOTS], double ridge, Scales &s) const {
    double *const masses = scratch, *const totals = scratch + Team::LEVELS;
    __syncwarp();  // all have read what lay there
#pragma unroll
    for (int j = 0; j < Team::SLOTS; j++) masses[code[j]] = mass[j], totals[code[j]] = total[j];
    __syncwarp();
    transform(masses), transform(totals);
    __syncwarp();
    double A[P + 1][P + 1], b[P + 1];
#pragma unroll
    for (int p = 0; p < P; p++) {
      const int at = 1 << (P - 1 - p);
#pragma unroll
      for (int q = 0; q < p; q++) A[p][q] = has(q) ? masses[at | 1 << (P - 1 - q)] : 0;
      A[p][p] = has(p) ? masses[0] : 1;
      A[P][p] = bias && has(p) ? masses[at] : 0;
      b[p] = has(p) ? totals[at] : 0;
    }
    A[P][P] = bias ? masses[0] : 1, b[P] = bias ? totals[0] : 0;
    solve_small(A, b, ridge);
#pragma unroll
    for (int p = 0; p < P; p++) s.alpha[p] = has(p) ? (float)b[p] : 0.0f;
    if (bias) s.z = (float)b[P];
  }

private:
  static __device__ __forceinline__ void transform(double *at) {
    constexpr int LANES = Team::LANES, SLOTS = Team::SLOTS;
    double t[SLOTS];
#pragma unroll
    for (int j = 0; j < SLOTS; j++) t[j] = at[j * LANES + Team::lane()];
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2)
#pragma unroll
      for (int j = 0; j < SLOTS; j++) {
        const double other = __shfl_xor_sync(~0u, t[j], bit);
        t[j] = Team::lane() & bit ? t[j] - other : other + t[j];
      }
#pragma unroll
    for (int bit = 1; bit < SLOTS; bit *= 2)
#pragma unroll
      for (int j = 0; j < SLOTS; j++)
        if (!(j & bit)) {
          const double minus = t[j], plus = t[j | bit];
          t[j] = plus + minus, t[j | bit] = plus - minus;
        }
#pragma unroll
    for (int j = 0; j < SLOTS; j++) at[j * LANES + Team::lane()] = t[j];
  }
};

// Levels  z + alpha * (0 … 2^BITS - 1).
template <int BITS>
struct UniformBook {
  using Team = crelle::Team<BITS>;
  using Scales = crelle::Scales<1>;

  __device__ __forceinline__ int levels() const { return Team::LEVELS; }
  __device__ __forceinline__ float value(const Scales &s, int code) const {
    return __fadd_rn(__fmul_rn(s.alpha[0], (float)code), s.z);
  }

  __device__ __forceinline__ void solve(const double (&mass)[Team::SLOTS], const double (&total)[Team::SLOTS],
                                        const int (&code)[Team::SLOTS], double ridge, Scales &s) const {
    double A[2][2] = {}, b[2] = {};
#pragma unroll
    for (int j = 0; j < Team::SLOTS; j++) {
      const double c = code[j];
      A[0][0] += mass[j] * c * c, A[1][0] += mass[j] * c, A[1][1] += mass[j];
      b[0] += total[j] * c, b[1] += total[j];
    }
    A[0][0] = Team::sum(A[0][0]), A[1][0] = Team::sum(A[1][0]), A[1][1] = Team::sum(A[1][1]);
    b[0] = Team::sum(b[0]), b[1] = Team::sum(b[1]);
    solve_small(A, b, ridge);
    s.alpha[0] = (float)b[0], s.z = (float)b[1];
  }
};

// The levels in ascending order, SLOTS neighbours in a lane, and where the weights nearest to each begin. Codes that
// the book does not have are last, with no weights.
template <class Book>
struct Intervals {
  using Team = typename Book::Team;
  static constexpr int SLOTS = Team::SLOTS, LANES = Team::LANES;
  float level[SLOTS];
  int code[SLOTS], first[SLOTS + 1];

  __device__ __forceinline__ Intervals() {
#pragma unroll
    for (int j = 0; j < SLOTS; j++) code[j] = place(j);
  }

  static __device__ __forceinline__ int place(int slot) { return Team::lane() * SLOTS + slot; }

  __device__ __forceinline__ void sort_levels(const Book &book, const typename Book::Scales &s) {
#pragma unroll
    for (int j = 0; j < SLOTS; j++) level[j] = place(j) < book.levels() ? book.value(s, code[j]) : infinity();
    sort();
  }

  // The middle between a slot's level and the one below it.
  __device__ __forceinline__ void borders(float (&border)[SLOTS]) const {
    const float below = __shfl_up_sync(~0u, level[SLOTS - 1], 1);
#pragma unroll
    for (int j = 0; j < SLOTS; j++) border[j] = ((j ? level[j ? j - 1 : 0] : below) + level[j]) / 2;
  }

  __device__ __forceinline__ void set(const SortedGroup &g, const Book &book, const typename Book::Scales &s) {
    sort_levels(book, s);
    float border[SLOTS];
    int at[SLOTS];
    borders(border);
    g.places(border, at);
#pragma unroll
    for (int j = 0; j < SLOTS; j++) first[j] = place(j) == 0 ? 0 : place(j) < book.levels() ? at[j] : g.n;
    const int next = __shfl_down_sync(~0u, first[0], 1);
    first[SLOTS] = Team::lane() == LANES - 1 ? g.n : next;
  }

  __device__ __forceinline__ double squared_error(const SortedGroup &g, const Book &book) const {
    double error = 0;
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
      if (place(j) >= book.levels()) continue;
      const double v = level[j];
      error += v * (v * g.mass(first[j], first[j + 1]) - 2 * g.sum(first[j], first[j + 1]));
    }
    return g.squares + Team::sum(error);
  }

private:
  // Odd-even transposition: levels are nearly in the order of the round before, and of equals the order stays.
  __device__ __forceinline__ void sort() {
    const bool lowest = Team::lane() == 0, highest = Team::lane() == LANES - 1;
    for (;;) {
      const float next = __shfl_down_sync(~0u, level[0], 1);
      bool wrong = !highest && next < level[SLOTS - 1];
#pragma unroll
      for (int j = 0; j + 1 < SLOTS; j++) wrong |= level[j + 1] < level[j];
      if (!__any_sync(~0u, wrong)) return;
      if constexpr (SLOTS == 1) {
        const bool odd = Team::lane() % 2;
        exchange(odd ? -1 : 1, true);
        exchange(odd ? 1 : -1, odd ? !highest : !lowest);
      } else {
#pragma unroll
        for (int j = 0; j < SLOTS; j += 2) order(j);
#pragma unroll
        for (int j = 1; j + 1 < SLOTS; j += 2) order(j);
        const float above = __shfl_down_sync(~0u, level[0], 1), below = __shfl_up_sync(~0u, level[SLOTS - 1], 1);
        const int code_above = __shfl_down_sync(~0u, code[0], 1), code_below = __shfl_up_sync(~0u, code[SLOTS - 1], 1);
        if (!highest && above < level[SLOTS - 1]) level[SLOTS - 1] = above, code[SLOTS - 1] = code_above;
        if (!lowest && level[0] < below) level[0] = below, code[0] = code_below;
      }
    }
  }

  // Put the lane's only level in order with that of the lane `by` away.
  __device__ __forceinline__ void exchange(int by, bool there) {
    const int from = threadIdx.x % 32 + (there ? by : 0);
    const float other = __shfl_sync(~0u, level[0], from);
    const int other_code = __shfl_sync(~0u, code[0], from);
    if (there && (by > 0 ? other < level[0] : level[0] < other)) level[0] = other, code[0] = other_code;
  }

  __device__ __forceinline__ void order(int j) {
    if (!(level[j + 1] < level[j])) return;
    const float v = level[j];
    const int c = code[j];
    level[j] = level[j + 1], code[j] = code[j + 1];
    level[j + 1] = v, code[j + 1] = c;
  }
};

// Codes and scales in turn until the codes no longer change.
template <class Book>
__device__ __forceinline__ void alternate(const SortedGroup &g, const Book &book, int rounds,
                                          typename Book::Scales &s) {
  using Team = typename Book::Team;
  constexpr int SLOTS = Team::SLOTS;
  Intervals<Book> at;
  int code[SLOTS], first[SLOTS];  // of the round before
#pragma unroll
  for (int j = 0; j < SLOTS; j++) code[j] = first[j] = -1;
  bool done = false;
  for (int round = 0; round < rounds; round++) {
    at.set(g, book, s);
    bool changed = false;
    double mass[SLOTS], total[SLOTS];
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
      changed |= code[j] != at.code[j] || first[j] != at.first[j];
      code[j] = at.code[j], first[j] = at.first[j];
      mass[j] = g.mass(at.first[j], at.first[j + 1]), total[j] = g.sum(at.first[j], at.first[j + 1]);
    }
    done |= !Team::any(changed);
    if (__all_sync(~0u, done)) return;
    typename Book::Scales next = s;
    book.solve(mass, total, at.code, 1e-9 * g.mass(), next);
    if (!done) s = next;
  }
}

// The best of several solutions as f16 stores them; NaN is the worst, and of equals the first wins.
template <class Book>
struct Best {
  typename Book::Scales found;
  double error;
  bool none = true;

  __device__ __forceinline__ void add(const SortedGroup &g, const Book &book, const typename Book::Scales &s) {
    const typename Book::Scales as_stored = s.as_stored();
    Intervals<Book> at;
    at.set(g, book, as_stored);
    double e = at.squared_error(g, book);
    if (!(e == e)) e = infinity();
    if (none || e < error) found = as_stored, error = e, none = false;
  }
};

}  // namespace crelle
