// The loops of bf16_gemm.h, over a kind of tiles. A Tile has
//
//   Tile::round(a, b)      32 bf16: those of a, then those of b
//   Tile::transpose(v)     16 x 16 dwords
//   Tile::begin(), end()   around multiply, in each thread
//   Tile::multiply(x, w, steps, sums, add, ahead)
//                          sums [32, 32] = or += the products of `steps` pairs of tiles
//
// Included inside a namespace of the including file, after simd.h.

constexpr size_t kAheadBytes = 256;  // 16 rows at once are many streams for a core's own prefetcher

// What is needed after a product and can be fetched meanwhile.
struct Ahead {
  const uint8_t *weights;  // some lines of every step of the next chunk: all blocks of a group fetch all of it together
  int lines;
  const uint16_t *y;  // 32 rows that are about to be written, or null
  size_t stride;
};

template <class Tile>
CRELLE_INLINE Int load_32(const float *p) {
  return Tile::round(load(p), load(p + 16));
}

template <class Tile>
CRELLE_INLINE Int load_32(const Bfloat *p) {
  Int v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// One step of up to 16 rows as a tile of bf16, zeros behind what there is; from: the first value.
template <class Tile, class T>
CRELLE_INLINE void copy_rows(const T *from, size_t stride, int rows, int inputs, uint8_t *to) {
  const auto put = [&](int i, Int v) __attribute__((always_inline)) { __builtin_memcpy(to + 64 * i, &v, sizeof v); };
  if (rows >= 16 && inputs >= kStepInputs) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      __builtin_prefetch(reinterpret_cast<const char *>(from + i * stride) + kAheadBytes, 0, 2);
      put(i, load_32<Tile>(from + i * stride));
    }
    return;
  }
  for (int i = 0; i < 16; ++i) {
    T some[kStepInputs] = {};
    if (i < rows) __builtin_memcpy(some, from + i * stride, std::min(inputs, kStepInputs) * sizeof(T));
    put(i, load_32<Tile>(some));
  }
}

template <class F>
CRELLE_INLINE void typed(const Dense &a, F &&use) {
  if (a.type == DType::F32)
    use(reinterpret_cast<const float *>(a.data));
  else
    use(reinterpret_cast<const Bfloat *>(a.data));
}

// Steps [step0, step1) of a block of 32 rows of a; tile(step, half) says where each tile is to lie.
template <class Tile, bool Transpose, class T, class Place>
CRELLE_INLINE void pack_block(const Dense &a, const T *data, int block, int step0, int step1, Place &&tile) {
  for (int half = 0; half < 2; ++half) {
    const int row = block * kBlock + half * 16, rows = a.N - row;
    const T *const from = data + (rows > 0 ? size_t(row) * a.K : 0);  // none left: zeros of whatever lies there
    for (int step = step0; step < step1; ++step) {
      uint8_t *const to = tile(step, half);
      copy_rows<Tile>(from + size_t(step) * kStepInputs, a.K, rows, a.K - step * kStepInputs, to);
      if constexpr (Transpose) {
        Int v[16];
        __builtin_memcpy(v, to, sizeof v);
        Tile::transpose(v);
        __builtin_memcpy(to, v, sizeof v);
      }
    }
  }
}

template <class Tile>
void pack(const Dense &weight, const PackedMatrix &w, int block0, int block1) {
  typed(weight, [&](const auto *data) {
    for (int block = block0; block < block1; ++block)
      pack_block<Tile, true>(weight, data, block, 0, w.steps(),
                             [&](int step, int half) { return w.at(block, step) + half * (kPairBytes / 2); });
  });
}

// Part `i` of `n` of the range [0, count).
CRELLE_INLINE int part_of(int count, int i, int n) { return static_cast<int>(int64_t{count} * i / n); }

// A range of a group: blocks of rows and steps of K.
struct Packed {
  int block0, blocks, step0, steps;
  uint8_t *tiles;  // [chunk][block][step][2 tiles][16 rows][32 inputs]

  int chunks() const { return parts_of(steps, kChunkSteps); }
  int chunk(int c) const { return part_of(steps, c, chunks()); }  // its first step, from step0 on
  uint8_t *at(int c, int block) const {
    return tiles + (size_t(chunk(c)) * blocks + size_t(block) * (chunk(c + 1) - chunk(c))) * kPairBytes;
  }
};

template <class Tile>
void pack_rows(const Dense &x, const Packed &p) {
  typed(x, [&](const auto *data) {
    for (int i = 0; i < p.blocks; ++i)
      for (int c = 0; c < p.chunks(); ++c) {
        const int first = p.step0 + p.chunk(c);
        pack_block<Tile, false>(x, data, p.block0 + i, first, p.step0 + p.chunk(c + 1), [&](int step, int half) {
          return p.at(c, i) + (step - first) * kPairBytes + half * (kPairBytes / 2);
        });
      }
  });
}

// The sums of a block become outputs.
template <class Tile>
CRELLE_INLINE void finish(const PackedProduct &p, const float *sums, int row, int column) {
  const int rows = std::min(kBlock, p.x.N - row), columns = std::min(kBlock, p.w.N - column);
  const Vec low = load(p.bias + column), high = load(p.bias + column + 16);
  uint16_t *y = p.y + size_t(row) * p.w.N + column;
  for (int i = 0; i < rows; ++i, y += p.w.N, sums += kBlock) {
    const Int both = Tile::round(load(sums) + low, load(sums + 16) + high);
    if (columns == kBlock)
      __builtin_memcpy(y, &both, sizeof both);
    else
      __builtin_memcpy(y, &both, columns * sizeof(uint16_t));
  }
}

// A chunk of the block `column` of outputs times all rows of a group. sums: the group's, of this block.
template <class Tile>
CRELLE_INLINE void multiply_chunk(const PackedProduct &p, const Packed &x, int c, int column, const uint8_t *next,
                                  float *sums) {
  const int begin = x.step0 + x.chunk(c), end = x.step0 + x.chunk(c + 1);
  const bool last = end == p.w.steps();
  for (int i = 0; i < x.blocks; ++i, sums += kSums) {
    const int row = (x.block0 + i) * kBlock;
    const bool whole = row + kBlock <= p.x.N;
    const int line0 = part_of(kPairBytes / 64, i, x.blocks), line1 = part_of(kPairBytes / 64, i + 1, x.blocks);
    const Ahead ahead{next + line0 * 64, line1 - line0,
                      last && whole ? p.y + size_t(row) * p.w.N + size_t(column) * kBlock : nullptr, size_t(p.w.N)};
    Tile::multiply(x.at(c, i), p.w.at(column, begin), end - begin, sums, begin > 0, ahead);
    if (last) finish<Tile>(p, sums, row, column * kBlock);
  }
}

template <class Tile>
void multiply(const PackedProduct &p, const BlockRange &r, uint8_t *room) {
  const int steps = p.w.steps(), ranges = p.ranges(), rows = r.row1 - r.row0;
  const int groups = parts_of(rows, p.group_blocks());
  Tile::begin();
  for (int g = 0; g < groups; ++g) {
    const int begin = part_of(rows, g, groups), end = part_of(rows, g + 1, groups);
    for (int range = 0; range < ranges; ++range) {
      const int step0 = part_of(steps, range, ranges), step1 = part_of(steps, range + 1, ranges);
      const Packed x{r.row0 + begin, end - begin, step0, step1 - step0, room};
      pack_rows<Tile>(p.x, x);
      float *const sums = reinterpret_cast<float *>(room + size_t(x.blocks) * p.range_steps() * kPairBytes);
      for (int column = r.column0; column < r.column1; ++column) {
        float *const own = ranges == 1 ? sums : sums + size_t(column - r.column0) * x.blocks * kSums;
        for (int c = 0; c < x.chunks(); ++c) {
          const bool more = c + 1 < x.chunks();
          const int following = more ? column : std::min(column + 1, r.column1 - 1);
          multiply_chunk<Tile>(p, x, c, column, p.w.at(following, step0 + (more ? x.chunk(c + 1) : 0)), own);
        }
      }
    }
  }
  Tile::end();
}
