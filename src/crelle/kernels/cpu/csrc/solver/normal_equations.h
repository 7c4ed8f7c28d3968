// Scales of rows by least squares, and the rows' errors (solver.h).
//
// Included inside a namespace of the including file, after sweep.h.

// result[i] = sum_j hessian[i][j] x[j] over columns [begin, end) of the Hessian, for rows [first, last) of it and R
// tiles, `plane` floats from tile to tile.
template <int R>
CRELLE_INLINE void products(const float *hessian, int K, int first, int last, int begin, int end, const float *x,
                            size_t plane, float *result) {
  int i = first;
  for (; i + kColumns <= last; i += kColumns) {
    Vec sums[R][kColumns];
    weighted_sums<R>(hessian + size_t(i) * K + begin, K, x + size_t(begin) * kLanes, plane, end - begin, sums);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kColumns; ++c) store(result + r * plane + size_t(i + c) * kLanes, sums[r][c]);
  }
  for (; i < last; ++i)
    for (int r = 0; r < R; ++r)
      store(result + r * plane + size_t(i) * kLanes,
            weighted_sum(hessian + size_t(i) * K + begin, x + r * plane + size_t(begin) * kLanes, end - begin));
}

template <int R>
CRELLE_INLINE void errors_of_rows(const RowErrors &s, int tile, float *scratch) {
  const int N = s.N, K = s.K, row0 = tile * kLanes;
  const size_t plane = size_t(K) * kLanes;
  for (int r = 0; r < R; ++r) load_lanes(s.error, K, row0 + r * kLanes, N, scratch + r * plane);
  Vec total[R] = {};
  for (int i = 0; i < K; i += kColumns) {  // one triangle, twice, and the diagonal
    const int count = K - i < kColumns ? K - i : kColumns;
    Vec before[R][kColumns] = {};
    if (count == kColumns) weighted_sums<R>(s.hessian + size_t(i) * K, K, scratch, plane, i, before);
    for (int r = 0; r < R; ++r) {
      const float *const error = scratch + r * plane;
      for (int c = 0; c < count; ++c) {
        const float *const h = s.hessian + size_t(i + c) * K;
        const Vec own = load(error + size_t(i + c) * kLanes);
        Vec reached = count == kColumns ? before[r][c] : weighted_sum(h, error, i);
        for (int j = i; j < i + c; ++j) reached += h[j] * load(error + size_t(j) * kLanes);
        total[r] += own * (2.0f * reached + h[i + c] * own);
      }
    }
  }
  for (int r = 0; r < R; ++r) store_lanes(s.result, row0 + r * kLanes, N, total[r]);
}

inline void row_errors_tiles(const RowErrors &s, int tile, int tiles, float *scratch) {
  with_tiles(tiles, [&](auto R) { errors_of_rows<R>(s, tile, scratch); });
}

using Lanes = double[kLanes];

CRELLE_INLINE void add_lanes(Lanes &to, Vec v) {
  for (int l = 0; l < kLanes; ++l) to[l] += double(v[l]);
}

// Row i of the lower triangle.
CRELLE_INLINE size_t triangle(int i) { return size_t(i) * (i + 1) / 2; }

// Cholesky of n unknowns in 16 lanes, A being its lower triangle, with a unit diagonal but for the ridge; b becomes x.
inline void solve_lanes(Lanes *A, Lanes *b, int n) {
  for (int j = 0; j < n; ++j) {
    Lanes *const row = A + triangle(j);
    for (int k = 0; k <= j; ++k) {
      const Lanes *const other = A + triangle(k);
      Lanes v;
      for (int l = 0; l < kLanes; ++l) v[l] = row[k][l];
      for (int m = 0; m < k; ++m)
        for (int l = 0; l < kLanes; ++l) v[l] -= row[m][l] * other[m][l];
      if (k < j)
        for (int l = 0; l < kLanes; ++l) row[k][l] = v[l] * other[k][l];
      else  // the inverse of the pivot; that of a matrix that is not positive is NaN
        for (int l = 0; l < kLanes; ++l) row[j][l] = 1 / __builtin_sqrt(v[l]);
    }
    for (int m = 0; m < j; ++m)
      for (int l = 0; l < kLanes; ++l) b[j][l] -= row[m][l] * b[m][l];
    for (int l = 0; l < kLanes; ++l) b[j][l] *= row[j][l];
  }
  for (int j = n - 1; j >= 0; --j) {
    const Lanes *const row = A + triangle(j);
    for (int l = 0; l < kLanes; ++l) b[j][l] *= row[j][l];
    for (int m = 0; m < j; ++m)
      for (int l = 0; l < kLanes; ++l) b[m][l] -= row[m][l] * b[j][l];
  }
}

// A x = b of one tile, scaled to a unit diagonal; x goes to the tile's rows of s.change.
inline void solve_equations(const ScaleSolve &s, int row0, Lanes *A, Lanes *b) {
  const int n = s.unknowns();
  Lanes *const unit = b + n;
  for (int j = 0; j < n; ++j)
    for (int l = 0; l < kLanes; ++l) {
      const double size = __builtin_sqrt(A[triangle(j) + j][l]);
      unit[j][l] = 1 / (size > 1e-30 ? size : 1e-30);
    }
  for (int j = 0; j < n; ++j) {
    for (int k = 0; k <= j; ++k)
      for (int l = 0; l < kLanes; ++l) A[triangle(j) + k][l] *= unit[j][l] * unit[k][l];
    for (int l = 0; l < kLanes; ++l) A[triangle(j) + j][l] += s.ridge, b[j][l] *= unit[j][l];
  }
  solve_lanes(A, b, n);
  for (int j = 0; j < n; ++j) {
    Vec x;
    for (int l = 0; l < kLanes; ++l) x[l] = float(b[j][l] * unit[j][l]);
    store_lanes(s.change + size_t(j) * s.N, row0, s.N, x);
  }
}

template <int R>
CRELLE_INLINE void solve_some(const ScaleSolve &s, int tile, float *scratch, double *wide) {
  const int N = s.N, K = s.K, U = s.U, C = s.groups(), row0 = tile * kLanes;
  const size_t plane = size_t(K) * kLanes;
  float *const error = scratch, *const features = error + R * plane, *const reached = features + U * R * plane;
  __builtin_memset(wide, 0, R * s.doubles() * sizeof(double));
  const auto matrix = [&](int r) { return reinterpret_cast<Lanes *>(wide + r * s.doubles()); };
  const auto right = [&](int r) { return matrix(r) + triangle(s.unknowns()); };
  for (int r = 0; r < R; ++r) {
    load_lanes(s.error, K, row0 + r * kLanes, N, error + r * plane);
    for (int u = 0; u < U; ++u)
      load_lanes(s.features + size_t(u) * K * N, K, row0 + r * kLanes, N, features + (u * R + r) * plane);
  }
  const auto end_of = [&](int c) { return (c + 1) * s.G < K ? (c + 1) * s.G : K; };
  // Sum over a group of tile r's features times those of plane `by`.
  const auto along = [&](int r, int c, int u, const float *by) {
    Vec sum = {};
    for (int i = c * s.G; i < end_of(c); ++i)
      sum += load(features + (u * R + r) * plane + size_t(i) * kLanes) * load(by + r * plane + size_t(i) * kLanes);
    return sum;
  };
  products<R>(s.hessian, K, 0, K, 0, K, error, plane, reached);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      for (int u = 0; u < U; ++u) add_lanes(right(r)[c * U + u], along(r, c, u, reached));
  for (int d = 0; d < C; ++d) {  // group d with itself and the later ones
    for (int v = 0; v < U; ++v)
      products<R>(s.hessian, K, d * s.G, K, d * s.G, end_of(d), features + v * R * plane, plane,
                  reached + v * R * plane);
    for (int r = 0; r < R; ++r)
      for (int c = d; c < C; ++c)
        for (int u = 0; u < U; ++u)
          for (int v = 0; v < (c == d ? u + 1 : U); ++v)
            add_lanes(matrix(r)[triangle(c * U + u) + d * U + v], along(r, c, u, reached + v * R * plane));
  }
  for (int r = 0; r < R; ++r) solve_equations(s, row0 + r * kLanes, matrix(r), right(r));
}

// scratch, wide: as many floats and doubles for each tile as ScaleSolve says.
inline void solve_scales_tiles(const ScaleSolve &s, int tile, int tiles, float *scratch, double *wide) {
  with_tiles(tiles, [&](auto R) { solve_some<R>(s, tile, scratch, wide); });
}
