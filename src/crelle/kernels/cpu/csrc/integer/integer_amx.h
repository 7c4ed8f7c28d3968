// Products with integer matrices (integer_weight.h) and many rows of x, as tiles of int8: the sums and roundings of
// integer_kernel.h, hence the same bits.
//
//   A   integers of x     16 rows x 64 inputs, where they lie in the encoded rows
//   B   codes             16 quads of inputs x 16 outputs, signed, unpacked block by block; zero beyond a span's end
//   C   int32             16 rows x 16 outputs
//
// Four results (2 x 2 tiles: 32 rows of x, the 32 outputs of a block) give four products for four tile loads. The sums
// of a run of spans with one scale leave their tiles one by one, each just before the next run's first product takes
// its place, and are scaled while the tiles multiply (as int8_tiles.h does it).
//
// Included inside a namespace of the including file.

constexpr int kIntegerTileRows = 8;  // of x from which on this is the faster way

struct IntegerStep {  // 64 inputs of a span
  int x;              // bytes, in an encoded row
  bool ends_scale;
  int span;
};

inline std::vector<IntegerStep> integer_steps(const IntegerLayout &l) {
  std::vector<IntegerStep> steps;
  for (size_t i = 0; i < l.spans.size(); ++i) {
    const IntegerSpan &s = l.spans[i];
    for (int k = 0; k < s.words; k += 4)
      steps.push_back({(s.word + k) * kIntegerWord, s.ends_scale && k + 4 >= s.words, static_cast<int>(i)});
  }
  return steps;
}

// Block b as B tiles, [step][16 outputs of 32][1 KB].
inline void unpack_integers(const Weight &w, int b, uint8_t *out) {
  const IntegerLayout &l = *w.integer;
  const uint8_t *const block = w.block(b);
  const __m512i low = _mm512_set1_epi8(15), even = _mm512_set1_epi16(0x00ff);
  for (const IntegerSpan &s : l.spans) {
    const uint8_t *const header = block + s.header, *const codes = block + s.codes;
    for (int v = 0; v < 2; ++v) {
      __m512i times = _mm512_setzero_si512(), zero = _mm512_set1_epi8(kNibbleZero);
      if (l.two_level && !s.bytes) {
        const auto expand = [&](const uint8_t *at) __attribute__((always_inline)) {
          return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
        };
        times = expand(header + 16 * v);
        times = _mm512_or_si512(times, _mm512_slli_epi32(times, 16));
        zero = _mm512_mullo_epi32(expand(header + kIntegerRows + 16 * v), _mm512_set1_epi32(0x01010101));
      }
      // A product of at most 240 fits its byte, so that even and odd bytes can be multiplied as halves of 16 bits.
      const auto value = [&](__m512i q) __attribute__((always_inline)) {
        if (l.two_level) {
          const __m512i first = _mm512_mullo_epi16(_mm512_and_si512(q, even), times);
          q = _mm512_or_si512(first, _mm512_mullo_epi16(_mm512_andnot_si512(even, q), times));
        }
        return _mm512_sub_epi8(q, zero);
      };
      uint8_t *to = out + v * kTileBytes;
      for (int k = 0; k < s.words; ++k) {
        uint8_t *const quads = to + k / 4 * 2 * kTileBytes + k % 4 * 256;
        if (s.bytes) {
          for (int j = 0; j < 4; ++j)
            _mm512_store_si512(quads + 64 * j, _mm512_load_si512(codes + k * kByteWordBytes + 128 * j + 64 * v));
          continue;
        }
        for (int j = 0; j < 2; ++j) {
          const __m512i both = load_once(codes + k * kNibbleWordBytes + 128 * j + 64 * v);
          _mm512_store_si512(quads + 128 * j, value(_mm512_and_si512(both, low)));
          _mm512_store_si512(quads + 128 * j + 64, value(_mm512_and_si512(_mm512_srli_epi16(both, 4), low)));
        }
      }
      for (int k = s.words; k % 4; ++k)
        for (int j = 0; j < 4; ++j)
          _mm512_store_si512(to + k / 4 * 2 * kTileBytes + k % 4 * 256 + 64 * j, _mm512_setzero_si512());
    }
    out += (s.words + 3) / 4 * 2 * kTileBytes;
  }
}

using IntegerSums = int[16][16];

// Scale the sums of a run that ended with span j: of rows from m on and outputs 16 v ... 16 v + 15.
CRELLE_INLINE void scale_integers(const Weight &w, const Activations &a, const uint8_t *block, int j, int m, int v,
                                  const IntegerSums &sums, Sums &f) {
  const IntegerLayout &l = *w.integer;
  const uint8_t *const header = block + l.spans[j].header;
  const __m512 outputs = l.two_level ? _mm512_loadu_ps(block + 64 * v)
                         : l.wide
                             ? _mm512_loadu_ps(header + 64 * v)
                             : _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(header + 32 * v)));
  const uint8_t *x = a.row(m) + l.scales_at + 4 * j;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i, x += a.row_bytes) {
    const __m512 both = _mm512_mul_ps(_mm512_set1_ps(*reinterpret_cast<const float *>(x)), outputs);
    const __m512 total = _mm512_cvtepi32_ps(_mm512_load_si512(sums[i]));
    _mm512_store_ps(f[i], _mm512_fmadd_ps(total, both, _mm512_load_ps(f[i])));
  }
}

// Rows [m, m + 16) or (Two) [m, m + 32) of x, block b whose tiles lie at w0: results f[tile of x * 2 + half].
template <bool Two>
CRELLE_INLINE void multiply_integers(const Weight &w, const Activations &a, const std::vector<IntegerStep> &steps,
                                     int b, int m, const uint8_t *w0, Sums (&f)[4]) {
  alignas(64) IntegerSums sums[4];  // of the run before
  const size_t stride = a.row_bytes;
  const uint8_t *const x0 = a.row(m), *const x1 = x0 + 16 * stride, *const block = w.block(b);
  for (int t = 0; t < (Two ? 4 : 2); ++t)
    for (auto &row : f[t]) _mm512_store_ps(row, _mm512_setzero_ps());
  const auto scale = [&](int span) __attribute__((always_inline)) {
    compiler_fence();
    for (int t = 0; t < (Two ? 4 : 2); ++t) scale_integers(w, a, block, span, m + t / 2 * 16, t % 2, sums[t], f[t]);
    compiler_fence();
  };
  begin_sums<Two>();
  int before = -1;  // the span that ended the run before
  bool leave = false;
  for (const IntegerStep &step : steps) {
    _tile_loadd(4, w0, 64);
    _tile_loadd(6, x0 + step.x, stride);
    if (leave) {
      _tile_stored(0, sums[0], 64);
      _tile_zero(0);
    }
    _tile_dpbssd(0, 6, 4);
    _tile_loadd(5, w0 + kTileBytes, 64);
    if (leave) {
      _tile_stored(1, sums[1], 64);
      _tile_zero(1);
    }
    _tile_dpbssd(1, 6, 5);
    if constexpr (Two) {
      _tile_loadd(7, x1 + step.x, stride);
      if (leave) {
        _tile_stored(2, sums[2], 64);
        _tile_zero(2);
      }
      _tile_dpbssd(2, 7, 4);
      if (leave) {
        _tile_stored(3, sums[3], 64);
        _tile_zero(3);
      }
      _tile_dpbssd(3, 7, 5);
    }
    w0 += 2 * kTileBytes;
    // In the last step of a run: its products are under way, and all of the run before has left.
    if (step.ends_scale && before >= 0) scale(before);
    leave = step.ends_scale;
    if (leave) before = step.span;
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  if constexpr (Two) {
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  }
  scale(before);
}

void integer_matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  if (a.M < kIntegerTileRows) return kVbmi.integer->matmul(w, a, y, ldy, b0, b1);
  static thread_local Buffer scratch;
  const std::vector<IntegerStep> steps = integer_steps(*w.integer);
  const size_t block_bytes = steps.size() * 2 * kTileBytes;
  const int at_once = static_cast<int>(std::max<size_t>(1, kPanelBytes / block_bytes)), tiles = tiles_of(a.M);
  scratch.grow(std::min(at_once, b1 - b0) * block_bytes);
  uint8_t *const panel = scratch.data();
  alignas(64) Sums f[4];
  const TileConfig config;
  compiler_fence();
  _tile_loadconfig(&config);
  for (int b = b0; b < b1; b += at_once) {
    const int end = std::min(b + at_once, b1);
    for (int i = b; i < end; ++i) unpack_integers(w, i, panel + (i - b) * block_bytes);
    compiler_fence();
    for (int t = 0; t < tiles; t += 2)
      for (int i = b; i < end; ++i) {
        const bool two = t + 1 < tiles;
        const uint8_t *const w0 = panel + (i - b) * block_bytes;
        if (two)
          multiply_integers<true>(w, a, steps, i, t * kTileRows, w0, f);
        else
          multiply_integers<false>(w, a, steps, i, t * kTileRows, w0, f);
        for (int j = 0; j < (two ? 4 : 2); ++j) {
          const int n = i * kIntegerRows + j % 2 * 16, m0 = (t + j / 2) * kTileRows;
          const __mmask16 mask = w.N - n >= 16 ? 0xffff : w.N > n ? (1u << (w.N - n)) - 1 : 0;
          for (int r = 0; r < 16 && m0 + r < a.M; ++r)
            _mm512_mask_storeu_ps(y + size_t(m0 + r) * ldy + n, mask, _mm512_load_ps(f[j][r]));
        }
      }
  }
  _tile_release();
}
