// Tiles of bf16: weights as bf16, f32 accumulation in the tiles from the first input to the last.
//
// A tile of weights is 16 outputs x 32 inputs, just what dequant_bf16.h makes of a chunk; a tile of x is 16 input pairs
// x 16 rows. D = 2 (Precision::Exact) splits both sides in two (hi + lo) and drops lo * lo: three products, 16 bits
// each.
//
// Included inside a namespace of the including file, after amx_tiles.h and dequant_bf16.h.

template <int D>
struct Bf16Tiles {
  static size_t bytes(const Weight &w) { return size_t(w.partition.chunks) * D * kTileBytes; }

  static void block(const Weight &w, int b, uint8_t *out) { dequantize_block<D>(w, b, out); }

  // A tile of x: [chunk][D][16 pairs][16 rows][2] bf16, zero beyond M and beyond a group's end.
  static void pack_rows(const Weight &w, const float *x, int M, int tile, uint8_t *out) {
    for (int g = 0; g < w.partition.groups; ++g)
      for (int c = 0; c < w.partition.chunks_of(g); ++c, out += D * kTileBytes) {
        const int left = w.partition.inputs_of(g) - c * kChunk;
        const __mmask16 low = left >= 16 ? 0xffff : (1u << left) - 1;
        const __mmask16 high = left >= 32 ? 0xffff : left > 16 ? (1u << (left - 16)) - 1 : 0;
        __m512i v[D][16];
        for (int i = 0; i < 16; ++i) {
          const int m = tile * kTileRows + i;
          __m512i parts[D] = {};
          if (m < M) {
            const float *at = x + size_t(m) * w.K + size_t(g) * w.partition.G + c * kChunk;
            split<D>(_mm512_maskz_loadu_ps(low, at), _mm512_maskz_loadu_ps(high, at + 16), parts);
          }
          for (int d = 0; d < D; ++d) v[d][i] = parts[d];
        }
        for (int d = 0; d < D; ++d) {
          transpose(v[d]);
          for (int i = 0; i < 16; ++i) _mm512_store_si512(out + d * kTileBytes + i * 64, v[d][i]);
        }
      }
  }

  static void pack_lanes(const Weight &w, const float *x, uint8_t *out) {
    for (int g = 0; g < w.partition.groups; ++g)
      for (int c = 0; c < w.partition.chunks_of(g); ++c, out += D * kTileBytes) {
        const int left = w.partition.inputs_of(g) - c * kChunk;
        const float *at = x + (size_t(g) * w.partition.G + c * kChunk) * kTileRows;
        for (int i = 0; i < 16; ++i, at += 2 * kTileRows) {
          const __m512 a = 2 * i < left ? _mm512_loadu_ps(at) : _mm512_setzero_ps();
          const __m512 b = 2 * i + 1 < left ? _mm512_loadu_ps(at + kTileRows) : _mm512_setzero_ps();
          const __m512i hi = pair_up(a, b);
          _mm512_store_si512(out + i * 64, hi);
          if constexpr (D == 2) {
            const __m512 ha = _mm512_castsi512_ps(_mm512_slli_epi32(hi, 16));
            const __m512 hb =
                _mm512_castsi512_ps(_mm512_and_si512(hi, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
            _mm512_store_si512(out + kTileBytes + i * 64, pair_up(_mm512_sub_ps(a, ha), _mm512_sub_ps(b, hb)));
          }
        }
      }
  }

  // Tiles 0 ... 3: sums; 4, 5: weights; 6, 7: x.
  template <bool Two>
  static CRELLE_INLINE void multiply(const Weight &w, const uint8_t *w0, const uint8_t *w1, const uint8_t *x0,
                                     const uint8_t *x1, Sums *y0, Sums *y1, bool add) {
    const auto products = [&](size_t wd, size_t xd) __attribute__((always_inline)) {
      _tile_loadd(4, w0 + wd, 64);
      _tile_loadd(6, x0 + xd, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, w1 + wd, 64);
      _tile_dpbf16ps(1, 5, 6);
      if constexpr (Two) {
        _tile_loadd(7, x1 + xd, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    };
    add ? load_sums<Two>(y0, y1) : begin_sums<Two>();
    for (size_t at = 0; at < bytes(w); at += D * kTileBytes) {
      products(at, at);
      if constexpr (D == 2) {
        products(at, at + kTileBytes);
        products(at + kTileBytes, at);
      }
    }
    store_sums<Two>(y0, y1);
  }
};
