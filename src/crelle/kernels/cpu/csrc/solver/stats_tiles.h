// The loops of stats.h, over a kind of tiles. A Tile has
//
//   Tile::pair(a, b)       lane i: a_i and b_i as bf16, beside each other, a_i first
//   Tile::transpose(v)     16 x 16 dwords
//   Tile::begin(), end()   around multiply, in each thread
//   Tile::multiply(a, b, steps, y, stride, next)
//                          y [32, 32] += the products of `steps` pairs of tiles; next: the sums that follow, or null
//
// A dword of a tile is a column's values of two neighbouring tokens, so a left factor is the transpose of a right one.
//
// Included inside a namespace of the including file, after simd.h.

constexpr int kStripBlocks = 8;      // 256 rows of outputs, whose left factors (1 MB) stay in L2 while columns pass by
constexpr size_t kAheadBytes = 256;  // 64 rows at once are more streams than a core's own prefetcher follows

template <class Tile>
CRELLE_INLINE void transpose_tile(const uint8_t *from, uint8_t *to) {
  Int v[16];
  __builtin_memcpy(v, from, sizeof v);
  Tile::transpose(v);
  __builtin_memcpy(to, v, sizeof v);
}

// 16 columns of up to 32 tokens, from the pointers on; full: a float or bf16 pointer, or nullptr. Whole: no edge.
template <class Tile, bool Whole, class X, class F>
CRELLE_INLINE void pack_tile(const TokenSums &s, const X *x, const F *full, const float *weight, int tokens,
                             int columns, uint8_t *pairs, uint8_t *rows, uint8_t *difference, float *abssum) {
  const auto read = [&](const auto *p) __attribute__((always_inline)) {
    if constexpr (!Whole) return load_first(p, columns);
    __builtin_prefetch(reinterpret_cast<const char *>(p) + kAheadBytes);
    return load(p);
  };
  Vec sum{};
  for (int i = 0; i < 16; ++i) {
    Vec a[2] = {}, d[2] = {};
    for (int j = 0; j < 2; ++j) {
      const int t = 2 * i + j;
      if (!Whole && t >= tokens) continue;
      const Vec here = read(x + size_t(t) * s.K);
      a[j] = here * weight[t];
      sum += (Vec)((Int)a[j] & 0x7fffffff);
      // Not w full - w x, of which the compiler may fuse one product: equal inputs would have a difference.
      if constexpr (!std::is_null_pointer_v<F>) d[j] = (read(full + size_t(t) * s.K) - here) * weight[t];
    }
    const Int both = Tile::pair(a[0], a[1]);
    __builtin_memcpy(pairs + 64 * i, &both, 64);
    if constexpr (!std::is_null_pointer_v<F>) {
      const Int change = Tile::pair(d[0], d[1]);
      __builtin_memcpy(difference + 64 * i, &change, 64);
    }
  }
  transpose_tile<Tile>(pairs, rows);
  if constexpr (!std::is_null_pointer_v<F>) transpose_tile<Tile>(difference, difference);
  store(abssum, sum);
}

template <class Tile, class X, class F>
void pack_steps(const TokenSums &s, const PackedTokens &p, const X *x, const F *full, int step0, int step1) {
  for (int step = step0; step < step1; ++step) {
    const size_t t = size_t(p.first) + size_t(step) * kStepTokens;
    const int tokens = std::min<int>(kStepTokens, s.T - int(t));
    for (int half = 0; half < 2 * s.blocks(); ++half) {
      const int k = half * 16, columns = std::clamp(s.K - k, 0, 16);
      const size_t at = (size_t(half / 2) * p.steps + step) * kStepBytes + half % 2 * (kStepBytes / 2);
      float *const abssum = p.abssum + size_t(step) * s.blocks() * kBlockColumns + k;
      // The second tile of the last block may be beyond K: zero columns of whatever lies before it.
      const size_t from = t * s.K + (columns ? k : 0);
      const F *f = nullptr;
      if constexpr (!std::is_null_pointer_v<F>) f = full + from;
      if (tokens == kStepTokens && columns == 16)
        pack_tile<Tile, true>(s, x + from, f, s.weight + t, tokens, columns, p.pairs + at, p.rows + at,
                              p.difference + at, abssum);
      else
        pack_tile<Tile, false>(s, x + from, f, s.weight + t, tokens, columns, p.pairs + at, p.rows + at,
                               p.difference + at, abssum);
    }
  }
}

template <class Tile>
void pack(const TokenSums &s, const PackedTokens &p, int step0, int step1) {
  const auto typed = [](const uint8_t *data, DType type, auto &&use) {
    type == DType::F32 ? use(reinterpret_cast<const float *>(data)) : use(reinterpret_cast<const Bfloat *>(data));
  };
  typed(s.x, s.x_type, [&](const auto *x) {
    if (s.full)
      typed(s.full, s.full_type, [&](const auto *full) { pack_steps<Tile>(s, p, x, full, step0, step1); });
    else
      pack_steps<Tile, std::remove_const_t<std::remove_pointer_t<decltype(x)>>, std::nullptr_t>(s, p, x, nullptr, step0,
                                                                                                step1);
  });
}

// A block of outputs: rows and columns from `row` and `column` on; whole: all of them exist.
struct Output {
  const uint8_t *left;
  float *sums;
  int row, column;
  bool whole;
};

template <class Tile>
CRELLE_INLINE void add_block(const TokenSums &s, const PackedTokens &p, const Output &o, const uint8_t *right,
                             const float *next) {
  if (o.whole) return Tile::multiply(o.left, right, p.steps, o.sums, s.K, next);
  alignas(64) float some[kBlockColumns * kBlockColumns] = {};
  const int rows = std::min(kBlockColumns, s.K - o.row), columns = std::min(kBlockColumns, s.K - o.column);
  for (int i = 0; i < rows; ++i)
    __builtin_memcpy(some + i * kBlockColumns, o.sums + size_t(i) * s.K, columns * sizeof(float));
  Tile::multiply(o.left, right, p.steps, some, kBlockColumns, nullptr);
  for (int i = 0; i < rows; ++i)
    __builtin_memcpy(o.sums + size_t(i) * s.K, some + i * kBlockColumns, columns * sizeof(float));
}

// Products in order: strips of rows, in them columns, in these the strip's blocks of H, then those of C - H.
template <class Tile>
void multiply(const TokenSums &s, const PackedTokens &p, int64_t begin, int64_t end) {
  const int blocks = s.blocks();
  const size_t bytes = p.steps * kStepBytes;
  Tile::begin();
  int64_t done = 0;
  for (int strip = 0; strip < blocks && done < end; strip += kStripBlocks) {
    const int rows = std::min(kStripBlocks, blocks - strip);
    for (int j = 0; j < blocks; ++j) {
      const int upper = std::clamp(j + 1 - strip, 0, rows), all = upper + (s.full ? rows : 0);
      const auto output = [&](int i) {
        const bool hessian = i < upper;
        const int block = strip + (hessian ? i : i - upper), row = block * kBlockColumns, column = j * kBlockColumns;
        return Output{(hessian ? p.rows : p.difference) + block * bytes,
                      (hessian ? s.hessian : s.cross) + size_t(row) * s.K + column, row, column,
                      std::max(row, column) + kBlockColumns <= s.K};
      };
      const int first = static_cast<int>(std::clamp<int64_t>(begin - done, 0, all));
      const int last = static_cast<int>(std::clamp<int64_t>(end - done, 0, all));
      for (int i = first; i < last; ++i) {
        const Output next = output(std::min(i + 1, last - 1));
        add_block<Tile>(s, p, output(i), p.pairs + j * bytes, next.whole ? next.sums : nullptr);
      }
      done += all;
    }
  }
  Tile::end();
}
