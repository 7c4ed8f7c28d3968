// AMX tiles for kernels over blocks of 32 x 32 sums: stats.h, bf16_gemm.h, bf16_attention.h.
//
// Included inside a namespace amx of the including file, after simd.h and amx_tiles.h.

struct AmxTile {
  static constexpr int kPair = 2 * kTileBytes;  // a step of 32 rows, or of 32 columns

  static CRELLE_INLINE Int round(Vec a, Vec b) { return (Int)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }

  static CRELLE_INLINE void transpose(Int (&v)[16]) {
    __m512i turned[16];
    for (int i = 0; i < 16; ++i) turned[i] = (__m512i)v[i];
    amx::transpose(turned);
    for (int i = 0; i < 16; ++i) v[i] = (Int)turned[i];
  }

  static CRELLE_INLINE void begin() {
    const TileConfig config;
    compiler_fence();
    _tile_loadconfig(&config);
  }

  static CRELLE_INLINE void end() { _tile_release(); }

  // y [32, 32] = or += the products of `steps` pairs of tiles: four for four tile loads. fetch(step, i) is called
  // behind product i of four, for what is to be fetched meanwhile. Tiles 0 ... 3: sums; 4, 5: left factors; 6, 7: right
  // ones.
  template <class F>
  static CRELLE_INLINE void multiply_blocks(const uint8_t *a, const uint8_t *b, int steps, float *y, size_t stride,
                                            bool add, F &&fetch) {
    const size_t pitch = stride * sizeof(float);
    float *const low = y + 16 * stride;
    compiler_fence();
    if (add) {
      _tile_loadd(0, y, pitch);
      _tile_loadd(1, y + 16, pitch);
      _tile_loadd(2, low, pitch);
      _tile_loadd(3, low + 16, pitch);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int step = 0; step < steps; ++step, a += kPair, b += kPair) {
      _tile_loadd(6, b, 64);
      _tile_loadd(4, a, 64);
      _tile_dpbf16ps(0, 4, 6);
      fetch(step, 0);
      _tile_loadd(7, b + kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
      fetch(step, 1);
      _tile_loadd(5, a + kTileBytes, 64);
      _tile_dpbf16ps(2, 5, 6);
      fetch(step, 2);
      _tile_dpbf16ps(3, 5, 7);
      fetch(step, 3);
    }
    _tile_stored(0, y, pitch);
    _tile_stored(1, y + 16, pitch);
    _tile_stored(2, low, pitch);
    _tile_stored(3, low + 16, pitch);
    compiler_fence();
  }

  // A quarter of a step of a factor that comes from L2, two steps ahead: about as many cycles away as a product takes.
  static CRELLE_INLINE void fetch_ahead(const uint8_t *factor, int step, int quarter) {
    const uint8_t *const from = factor + size_t(step + 2) * kPair + quarter * (kPair / 4);
#pragma GCC unroll 8
    for (int line = 0; line < kPair / 4; line += 64) __builtin_prefetch(from + line);
  }
};
