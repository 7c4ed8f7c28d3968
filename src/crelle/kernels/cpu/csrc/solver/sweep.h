// Error feedback and coordinate descent over the columns of 16 rows, and over their scales (solver.h).
//
// Errors stay where they are and a column gathers what reaches it when its turn comes, so an error is read often and
// written once: 16 rows of errors stay in the L2 cache, and a row of `mix` is read once for all of them.
//
// Included inside a namespace of the including file, after simd.h.

// sum_k by[k] x[k], for n vectors x.
CRELLE_INLINE Vec weighted_sum(const float *by, const float *x, int n) {
  constexpr int kChains = 4;
  Part sums[kChains][kParts] = {};
  const auto add = [&](int i, int k) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      const Part v = load_part(x + size_t(k) * kLanes + p * kPartLanes);
      sums[i][p] += by[k] * v;
    }
  };
  int k = 0;
  for (; k + kChains <= n; k += kChains)
#pragma GCC unroll 4
    for (int i = 0; i < kChains; ++i) add(i, k + i);
  for (; k < n; ++k) add(0, k);
  Vec sum;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) {
    const Part all = (sums[0][p] + sums[1][p]) + (sums[2][p] + sums[3][p]);
    __builtin_memcpy(reinterpret_cast<char *>(&sum) + p * sizeof all, &all, sizeof all);
  }
  return sum;
}

// How many rows of `mix` or of the Hessian, and how many tiles of rows, are worked on at once: a value of either side
// that is loaded serves all of the other. With AVX-512 a tile is one vector, of which there are 32.
#if defined(__AVX512F__)
constexpr int kColumns = 8, kTiles = 3;
#else
constexpr int kColumns = 4, kTiles = 1;
#endif

// sums[r][c] = sum_k rows[c ld + k] x[k] for kColumns rows and R tiles, x of tile r being `plane` floats behind x.
template <int R>
CRELLE_INLINE void weighted_sums(const float *rows, size_t ld, const float *x, size_t plane, int n,
                                 Vec (*sums)[kColumns]) {
  Part total[R][kColumns][kParts] = {};
  for (int k = 0; k < n; ++k)
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      Part v[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) v[r] = load_part(x + r * plane + size_t(k) * kLanes + p * kPartLanes);
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) total[r][c][p] += rows[c * ld + k] * v[r];
    }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p)
        __builtin_memcpy(reinterpret_cast<char *>(&sums[r][c]) + p * sizeof(Part), &total[r][c][p], sizeof(Part));
}

// Calls run(constant R) with the number of tiles, at most kTiles.
template <class F>
CRELLE_INLINE void with_tiles(int tiles, F &&run) {
  if constexpr (kTiles > 2)
    if (tiles == 3) return run(std::integral_constant<int, 3>{});
  if constexpr (kTiles > 1)
    if (tiles == 2) return run(std::integral_constant<int, 2>{});
  run(std::integral_constant<int, 1>{});
}

CRELLE_INLINE float as_half(float f) { return float_of_half(half_of_float(f)); }

CRELLE_INLINE int rows_of(int row0, int N) { return N - row0 < kLanes ? N - row0 : kLanes; }

// Lanes of [rows, N] from row0 on: zeros behind N.
CRELLE_INLINE Vec lanes_of(const float *row, int row0, int N) {
  return row0 + kLanes <= N ? load(row + row0) : load_first(row + row0, N - row0);
}
CRELLE_INLINE void store_lanes(float *row, int row0, int N, Vec v) { store_first(row + row0, v, rows_of(row0, N)); }

// The nearest of `count` ascending levels, 16 rows side by side and `next` floats from one to the next, and its place.
CRELLE_INLINE void nearest_level(const Vec &want, const float *levels, size_t next, int count, Vec &value, Int &place) {
  for (int p = 0; p < kParts; ++p) {
    Part w;
    __builtin_memcpy(&w, reinterpret_cast<const char *>(&want) + p * sizeof w, sizeof w);
    Part low = load_part(levels + p * kPartLanes), found = low;
    PartInt at = {};
    for (int l = 1; l < count; ++l) {
      const Part high = load_part(levels + l * next + p * kPartLanes);
      const PartInt above = w > (low + high) * 0.5f;
      found = above ? high : found;
      at -= above;
      low = high;
    }
    __builtin_memcpy(reinterpret_cast<char *>(&value) + p * sizeof found, &found, sizeof found);
    __builtin_memcpy(reinterpret_cast<char *>(&place) + p * sizeof at, &at, sizeof at);
  }
}

// Lanes of all columns of [K, N], to [K][16].
CRELLE_INLINE void load_lanes(const float *from, int K, int row0, int N, float *to) {
  for (int k = 0; k < K; ++k) store(to + size_t(k) * kLanes, lanes_of(from + size_t(k) * N, row0, N));
}

// Column i of a tile takes the level nearest to target + reached + what comes from columns [begin, end) of its block.
CRELLE_INLINE void round_column(const Sweep &s, int i, int row0, Vec reached, int begin, int end, float *error) {
  const int N = s.N, rows = rows_of(row0, N);
  const float *const mix = s.mix + size_t(i) * s.K;
  const size_t at = size_t(i) * N + row0;
  const Vec target = lanes_of(s.target + size_t(i) * N, row0, N);
  Vec want = target;
  want += reached;
  for (int j = begin; j < end; ++j) want += mix[j] * load(error + size_t(j) * kLanes);
  const int g = s.group[i], first = s.first[g], count = s.count[g];
  const float *levels = s.levels + size_t(first) * N + row0;
  size_t next = N;           // floats to the next level
  float tail[256 * kLanes];  // levels of a tile of fewer rows
  if (rows < kLanes) {
    for (int l = 0; l < count; ++l) store(tail + l * kLanes, load_first(levels + size_t(l) * N, rows));
    levels = tail, next = kLanes;
  }
  Vec value;
  Int place;
  nearest_level(want, levels, next, count, value, place);
  if (!s.level_codes && !s.kept) {
    using Bytes = uint8_t __attribute__((vector_size(kLanes)));
    const Bytes codes = __builtin_convertvector(place, Bytes);
    __builtin_memcpy(s.codes + at, &codes, rows);
  } else {
    for (int r = 0; r < rows; ++r) {
      s.codes[at + r] = s.level_codes ? s.level_codes[size_t(first + place[r]) * N + row0 + r] : uint8_t(place[r]);
      if (s.kept) s.kept[at + r] = 0;
      if (s.outliers && s.outliers[at + r]) s.kept[at + r] = value[r] = as_half(want[r]);
    }
  }
  store(error + size_t(i) * kLanes, target - value);
}

template <int R>
CRELLE_INLINE void sweep_some(const Sweep &s, int tile, float *error) {
  const int N = s.N, K = s.K, row0 = tile * kLanes;
  const size_t plane = size_t(K) * kLanes;
  for (int r = 0; r < R; ++r) load_lanes(s.error, K, row0 + r * kLanes, N, error + r * plane);
  Vec before[R][kColumns] = {}, behind[R][kColumns] = {};  // what reaches the columns of a block from outside it
  for (int i = 0; i < K; ++i) {
    const int column = i % kColumns, begin = i - column, end = begin + kColumns;
    const bool blocked = end <= K;
    const float *const mix = s.mix + size_t(i) * K;
    if (blocked && column == 0) {
      weighted_sums<R>(mix, K, error, plane, begin, before);
      if (!s.triangular) weighted_sums<R>(mix + end, K, error + size_t(end) * kLanes, plane, K - end, behind);
    }
    for (int r = 0; r < R; ++r) {
      float *const own = error + r * plane;
      const int row = row0 + r * kLanes;
      if (blocked)
        round_column(s, i, row, before[r][column] + behind[r][column], begin, s.triangular ? i : end, own);
      else
        round_column(s, i, row, weighted_sum(mix, own, s.triangular ? i : K), 0, 0, own);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < K; ++k)
      store_lanes(s.error + size_t(k) * N, row0 + r * kLanes, N, load(error + r * plane + size_t(k) * kLanes));
}

// error: scratch of 16 K floats for each tile.
inline void sweep_tiles(const Sweep &s, int tile, int tiles, float *error) {
  with_tiles(tiles, [&](auto R) { sweep_some<R>(s, tile, error); });
}

// To the nearest integer, ties to even, for values within 2^22.
template <class V>
CRELLE_INLINE V rounded(V v) {
  constexpr float kShift = 0x1.8p23f;
  return (v + kShift) - kShift;
}

// error: scratch of 16 K floats.
inline void affine_sweep_tile(const AffineSweep &s, int tile, float *error) {
  const int N = s.N, K = s.K, row0 = tile * kLanes;
  const Vec top = lanes_of(s.top, row0, N);
  Vec before[1][kColumns] = {};
  for (int i = 0; i < K; ++i) {
    const int column = i % kColumns, begin = i - column;
    const bool blocked = begin + kColumns <= K;
    const float *const mix = s.mix + size_t(i) * K;
    if (blocked && column == 0) weighted_sums<1>(mix, K, error, 0, begin, before);
    const Vec target = lanes_of(s.target + size_t(i) * N, row0, N);
    Vec want = target + (blocked ? before[0][column] : weighted_sum(mix, error, begin));
    for (int j = begin; j < i; ++j) want += mix[j] * load(error + size_t(j) * kLanes);
    const Vec low = lanes_of(s.low + size_t(i) * N, row0, N), given = lanes_of(s.scale + size_t(i) * N, row0, N);
    const Vec scale = given > 0 ? given : all(1.0f);  // behind the last row it is 0
    const Vec code = rounded(smaller(larger((want - low) / scale, all(0.0f)), top));
    const Vec left = target - (low + scale * code);
    store(error + size_t(i) * kLanes, left);
    store_lanes(s.error + size_t(i) * N, row0, N, left);
  }
}

inline void descend_scales_tile(const ScaleDescent &s, int tile, float *error) {
  constexpr float kTiny = 0x1p-24f;
  const int N = s.N, K = s.K, row0 = tile * kLanes;
  load_lanes(s.error, K, row0, N, error);
  for (int j = 0; j < s.groups; ++j) {
    const int begin = s.columns[j], end = begin + s.G < K ? begin + s.G : K;
    Vec num = {}, den = {}, factor[64];
    for (int c = begin; c < end; ++c) factor[c - begin] = lanes_of(s.factor + size_t(c) * N, row0, N);
    for (int c = begin; c < end; ++c) {
      const float *h = s.hessian + size_t(c) * K;
      num += factor[c - begin] * weighted_sum(h, error, K);
      Vec across = {};
      for (int d = begin; d < end; ++d) across += h[d] * factor[d - begin];
      den += factor[c - begin] * across;
    }
    float &scale2 = s.scale2[size_t(tile) * s.groups + j];
    const float zero = s.zero2[size_t(tile) * s.groups + j], top = s.top[j], least = zero == 0;  // a scale is never 0
    const Vec code = lanes_of(s.codes + size_t(j) * N, row0, N), multiple = code + zero, old = scale2 * multiple;
    const Vec best = old + num / larger(den, all(1e-30f));
    const float pulled = sum_of(multiple * multiple * den);
    float moved = scale2 + sum_of(multiple * num) / (pulled > 1e-30f ? pulled : 1e-30f);
    moved = as_half(moved > kTiny ? moved : scale2);
    Vec found = code;
    float found_scale = scale2, found_gain = 0;
    for (const float step : {scale2, moved}) {
      if (!(step > 0) || step > 65504.0f) continue;
      Vec other = rounded(smaller(larger(best / step - zero, all(least)), all(top)));
      const Vec change = step * (other + zero) - old;
      const float gain = sum_of(2.0f * change * num - change * change * den);
      if (gain > found_gain) found = other, found_scale = step, found_gain = gain;
    }
    const Vec change = found_scale * (found + zero) - old;
    for (int c = begin; c < end; ++c) {
      float *const e = error + size_t(c) * kLanes;
      store(e, load(e) - change * factor[c - begin]);
    }
    scale2 = found_scale;
    store_lanes(s.codes + size_t(j) * N, row0, N, found);
  }
  for (int k = 0; k < K; ++k) store_lanes(s.error + size_t(k) * N, row0, N, load(error + size_t(k) * kLanes));
}
