// Scales of 16 rows by least squares, and the rows' errors (solver.h).
//
// Included inside a namespace of the including file, after sweep.h.

// result[i] = sum_j hessian[first_row + i][j] x[j] for columns [begin, end) of the Hessian, rows [first, last).
CRELLE_INLINE void products(const float *hessian, int K, int first, int last, int begin, int end, const float *x,
                            float *result) {
  int i = first;
  for (; i + kColumns <= last; i += kColumns) {
    Vec sums[kColumns];
    weighted_sums(hessian + size_t(i) * K + begin, K, x + size_t(begin) * kLanes, end - begin, sums);
    for (int c = 0; c < kColumns; ++c) store(result + size_t(i + c) * kLanes, sums[c]);
  }
  for (; i < last; ++i)
    store(result + size_t(i) * kLanes,
          weighted_sum(hessian + size_t(i) * K + begin, x + size_t(begin) * kLanes, end - begin));
}

inline void row_errors_tile(const RowErrors &s, int tile, float *scratch) {
  const int N = s.N, K = s.K, row0 = tile * kLanes;
  float *const error = scratch;
  for (int k = 0; k < K; ++k) store(error + size_t(k) * kLanes, lanes_of(s.error + size_t(k) * N, row0, N));
  Vec total = {};
  for (int i = 0; i < K; i += kColumns) {  // one triangle, twice, and the diagonal
    const int count = K - i < kColumns ? K - i : kColumns;
    Vec before[kColumns] = {};
    if (count == kColumns)
      weighted_sums(s.hessian + size_t(i) * K, K, error, i, before);
    else
      for (int c = 0; c < count; ++c) before[c] = weighted_sum(s.hessian + size_t(i + c) * K, error, i);
    for (int c = 0; c < count; ++c) {
      const float *const h = s.hessian + size_t(i + c) * K;
      const Vec own = load(error + size_t(i + c) * kLanes);
      for (int j = i; j < i + c; ++j) before[c] += h[j] * load(error + size_t(j) * kLanes);
      total += own * (2.0f * before[c] + h[i + c] * own);
    }
  }
  store_lanes(s.result, row0, N, total);
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

// scratch, wide: as many floats and doubles as ScaleSolve says.
inline void solve_scales_tile(const ScaleSolve &s, int tile, float *scratch, double *wide) {
  const int N = s.N, K = s.K, U = s.U, C = s.groups(), n = s.unknowns(), row0 = tile * kLanes;
  const size_t plane = size_t(K) * kLanes;
  float *const error = scratch, *const features = error + plane, *const reached = features + U * plane;
  Lanes *const A = reinterpret_cast<Lanes *>(wide), *const b = A + triangle(n);
  __builtin_memset(wide, 0, s.doubles() * sizeof(double));
  for (int k = 0; k < K; ++k) store(error + size_t(k) * kLanes, lanes_of(s.error + size_t(k) * N, row0, N));
  for (int k = 0; k < U * K; ++k) store(features + size_t(k) * kLanes, lanes_of(s.features + size_t(k) * N, row0, N));
  const auto end_of = [&](int c) { return (c + 1) * s.G < K ? (c + 1) * s.G : K; };
  const auto along = [&](int c, int u, const float *by) {  // sum over a group of features times `by`
    Vec sum = {};
    for (int i = c * s.G; i < end_of(c); ++i)
      sum += load(features + u * plane + size_t(i) * kLanes) * load(by + size_t(i) * kLanes);
    return sum;
  };
  products(s.hessian, K, 0, K, 0, K, error, reached);
  for (int c = 0; c < C; ++c)
    for (int u = 0; u < U; ++u) add_lanes(b[c * U + u], along(c, u, reached));
  for (int d = 0; d < C; ++d) {  // group d with itself and the later ones
    for (int v = 0; v < U; ++v)
      products(s.hessian, K, d * s.G, K, d * s.G, end_of(d), features + v * plane, reached + v * plane);
    for (int c = d; c < C; ++c)
      for (int u = 0; u < U; ++u)
        for (int v = 0; v < (c == d ? u + 1 : U); ++v)
          add_lanes(A[triangle(c * U + u) + d * U + v], along(c, u, reached + v * plane));
  }
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
    store_lanes(s.change + size_t(j) * N, row0, N, x);
  }
}
