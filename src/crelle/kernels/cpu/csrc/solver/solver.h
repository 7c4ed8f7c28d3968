// Inner loops of quantizers that minimise tr((T - W) H (T - W)'): a weight matrix is worked on in tiles of 16 rows,
// which are the lanes of a vector, since rows are independent of one another (crelle.quantizers.solvers.gptq_solver).
#pragma once

#include <cstddef>
#include <cstdint>

namespace crelle::cpu {

constexpr int kSweepRows = 16;

// One pass over the columns, in the order in which everything here lies: column i takes the level nearest to
// target_i + sum_j mix[i][j] error_j, and leaves the error target_i - level.
struct Sweep {
  int N, K;
  bool triangular;               // row i of mix is 0 from i on
  const float *target;           // [K, N]
  const float *mix;              // [K, K]
  const float *levels;           // [all levels, N], ascending within a group
  const uint8_t *level_codes;    // [all levels, N], or null: the code of a level is its place in the group
  const int32_t *first, *count;  // [groups]: which levels are a group's
  const int32_t *group;          // [K]
  const uint8_t *outliers;       // [K, N] or null: not 0 where the weight takes what it wants, as f16
  float *error;                  // [K, N], changed
  uint8_t *codes;                // [K, N], written
  float *kept;                   // [K, N] or null, written: the outliers' weights, 0 elsewhere
};

// The same with error feedback on affine grids, low + scale * (0 … top), that differ from row to row.
struct AffineSweep {
  int N, K;
  const float *target;       // [K, N]
  const float *mix;          // [K, K], row i of it is 0 from i on
  const float *scale, *low;  // [K, N]
  const float *top;          // [N]
  float *error;              // [K, N], written
};

// The same with one code for several precisions: precision p of P stands for low_p + scale_p (code >> (P - 1 - p)),
// each has errors of its own, and the code minimises the sum of root_p^2 (value_p - want_p)^2.
struct NestedSweep {
  static constexpr int kMost = 8;  // precisions
  int N, K, P, coarse;             // coarse: levels of the coarsest precision
  bool triangular;                 // row i of mix is 0 from i on
  const float *target;             // [K, N]
  const float *mix;                // [K, K], or null: columns do not see each other's errors
  const float *grids;              // [groups, P, 2, N]: scale and low
  const float *roots;              // [P]
  const int32_t *group;            // [K]
  const float *error;              // [K, P, N] before the pass, or null: none
  uint8_t *codes;                  // [K, N], written
};

// Scales of 2-bit groups, scale2[tile][j] (code[j] + zero2[tile][j]) with codes of 0 … top[j], set group by group to
// the best values that can be stored, the codes of weights fixed: weight = scale * factor.
struct ScaleDescent {
  int N, K, G, groups;
  const float *hessian;    // [K, K]
  const int32_t *columns;  // [groups]: the first column of each
  const float *factor;     // [K, N]
  const float *zero2;      // [tiles, groups]
  const float *top;        // [groups]
  float *error;            // [K, N], target - weight, changed
  float *scale2;           // [tiles, groups], values of f16, changed
  float *codes;            // [groups, N], changed
};

// The uniform grid scale * (code - zero), codes of 0 … 2^bits - 1, with the least weighted error for each group; the
// scale is one of `tries` shares of the one that covers the group's range and 0.
struct UniformGrids {
  int R, G, C, bits, tries;
  bool symmetric, aside;    // zero: in the middle; one step to either side is tried too
  const float *weight;      // [R, G]
  const float *importance;  // [C, G], of group r: row r modulo C; 0: does not count. Or null: all 1
  const float *shrink;      // [tries]
  float *scale, *zero;      // [R], written; scale: values of f16
};

// The 2-bit grid scale * (0 … 3 - zero) with the least weighted error for each row and each G columns; zero is 0.5, 1,
// 1.5 or 2, and the scale one of `tries` shares of the one that covers all weights.
struct GridSearch {
  int N, K, G, tries;
  const float *weight, *importance;  // [K, N]; of importance 0: does not count
  const float *shrink;               // [tries]
  float *scale, *zero;               // [groups, N], written
};

// Scales of 2-bit groups as scale2[tile][j] (code + zero2[tile][j]), codes of 0 … top[j]: the zero of kSecondZeros and
// the share of the scale that covers all 16 rows with the least weighted error.
constexpr int kSecondZeros = 16;
struct SecondOrderSearch {
  int N, groups, tries;
  const float *scale, *importance;  // [groups, N]
  const float *top;                 // [groups]
  const float *shrink;              // [tries]
  float *scale2, *zero2;            // [tiles, groups], written; scale2: values of f16
};

// Least squares for the scales of a row, the codes fixed: weight k is sum_u scale[group of k][u] features[u][k], and
// the change of all scales that lowers error' H error most solves  A x = b,
//   A[cu][dv] = sum_{i in c, j in d} features[u][i] H[i][j] features[v][j]     b[cu] = sum_i features[u][i] (H
//   error)[i]
struct ScaleSolve {
  int N, K, G, U;
  const float *hessian;   // [K, K], symmetric
  const float *error;     // [K, N]
  const float *features;  // [U, K, N]
  double ridge;           // added to the diagonal, which is scaled to 1
  float *change;          // [groups, U, N], written; NaN where A is not positive

  int groups() const { return (K + G - 1) / G; }
  int unknowns() const { return groups() * U; }
  size_t floats() const { return size_t(2 * U + 1) * K * kSweepRows; }  // of scratch
  size_t doubles() const { return size_t(unknowns()) * (unknowns() + 5) / 2 * kSweepRows; }
};

// error' H error of each row.
struct RowErrors {
  int N, K;
  const float *hessian;  // [K, K], symmetric
  const float *error;    // [K, N]
  float *result;         // [N], written
};

// Rings of states of 16 bits (crelle.formats.trellis), each the nearest to 128 weights: state i takes the place of the
// weights V i ... V i + V - 1, at the distance |x_i - value root|^2, where root is that of column i mod `columns`.
constexpr int kViterbiStates = 1 << 16;

struct Viterbi {
  int shift, weights, columns;  // bits of its own that a state has; weights of a state: V
  int window;                   // steps of the run that decides where a ring begins
  const int16_t *values;        // [V, states], in the order of viterbi.h
  const float *roots;           // [columns, V, V]
  const int16_t *tables;        // [columns, V, states]: values times roots
  const int16_t *x;             // [sequences, 128]: the weights times roots
  uint16_t *states;             // [sequences, 128 / V], written

  int steps() const { return 128 / weights; }
  size_t scratch() const {  // bytes for one sequence
    return 2 * ((size_t(steps() + 1) << (16 - shift)) + kViterbiStates);
  }
};

struct ViterbiStep {
  const int16_t *x;         // [V]
  const int16_t *table[2];  // [states] each
};

}  // namespace crelle::cpu
