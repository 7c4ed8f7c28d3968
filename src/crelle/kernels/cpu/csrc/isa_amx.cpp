// AMX bf16 for many rows of x: weights as bf16 tiles, f32 accumulation.
//
// A tile of weights is 16 outputs x 32 inputs, just what `numbers.h` makes of a chunk; a tile of x is 16 input pairs x
// 16 rows. Four accumulators (2 x 2 tiles: 32 outputs, 32 rows of x) give four multiplications for four tile loads.
// Why bf16 and not int8, which multiplies twice as fast: integer sums would have to leave the tiles after every group
// to be scaled, and that costs more than it wins at groups of 128; besides, bf16 keeps the int8 path's error below a
// third. Precision::Exact splits both sides in two (hi + lo) and drops lo * lo: three products, 16 bits each.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "gemm.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace amx {

#include "numbers.h"

constexpr size_t kPanelBytes = size_t{1} << 20;  // numbers of the weights that stay in L2

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  TileConfig() {
    for (int i = 0; i < 8; ++i) bytes[i] = 64, rows[i] = 16;
  }
};

int digits(Precision p) { return static_cast<int>(p); }

size_t tile_bytes(const Weight &w, int D) { return size_t(w.plan.chunks) * D * kTileBytes; }

size_t pack_bytes(const Weight &w, int M, Precision p) { return tiles_of(M) * tile_bytes(w, digits(p)); }

// 16 x 16 dwords.
CRELLE_INLINE void transpose(__m512i (&v)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i) {  // quarters: v[i + 4 k] holds columns i, i + 4, i + 8, i + 12 of rows 4 k ... 4 k + 3
    t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i)
    for (int h = 0; h < 2; ++h) {
      v[i + 4 * h] = _mm512_shuffle_i32x4(t[i + 8 * h], t[i + 8 * h + 4], 0x88);
      v[i + 4 * h + 8] = _mm512_shuffle_i32x4(t[i + 8 * h], t[i + 8 * h + 4], 0xdd);
    }
}

// Tiles [tile0, tile1) of x: [tile][chunk][D][16 pairs][16 rows][2] bf16, zero beyond M and beyond a group's end.
template <int D>
void pack_tiles(const Weight &w, const float *x, int M, uint8_t *out, int tile0, int tile1) {
  out += tile0 * tile_bytes(w, D);
  for (int tile = tile0; tile < tile1; ++tile)
    for (int g = 0; g < w.plan.groups; ++g)
      for (int c = 0; c < w.plan.chunks_of(g); ++c, out += D * kTileBytes) {
        const int left = w.plan.inputs_of(g) - c * kChunk;
        const __mmask16 low = left >= 16 ? 0xffff : (1u << left) - 1;
        const __mmask16 high = left >= 32 ? 0xffff : left > 16 ? (1u << (left - 16)) - 1 : 0;
        __m512i v[D][16];
        for (int i = 0; i < 16; ++i) {
          const int m = tile * kTileRows + i;
          __m512i parts[D] = {};
          if (m < M) {
            const float *at = x + size_t(m) * w.K + size_t(g) * w.plan.G + c * kChunk;
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

void pack(const Weight &w, const float *x, int M, Precision p, uint8_t *out, int tile0, int tile1) {
  (p == Precision::Int8 ? pack_tiles<1> : pack_tiles<2>)(w, x, M, out, tile0, tile1);
}

// Pairs (a, b) of 16 rows: what a row's two numbers round to, beside each other, and what is left of both.
CRELLE_INLINE __m512i pair_up(__m512 a, __m512 b) {
  const __m512i interleave =
      _mm512_add_epi32(_mm512_mullo_epi32(_mm512_set1_epi32(0x10001),
                                          _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)),
                       _mm512_set1_epi32(0x100000));
  return _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

template <int D>
void pack_lanes(const Weight &w, const float *x, uint8_t *out) {
  for (int g = 0; g < w.plan.groups; ++g)
    for (int c = 0; c < w.plan.chunks_of(g); ++c, out += D * kTileBytes) {
      const int left = w.plan.inputs_of(g) - c * kChunk;
      const float *at = x + (size_t(g) * w.plan.G + c * kChunk) * kTileRows;
      for (int i = 0; i < 16; ++i, at += 2 * kTileRows) {
        const __m512 a = 2 * i < left ? _mm512_loadu_ps(at) : _mm512_setzero_ps();
        const __m512 b = 2 * i + 1 < left ? _mm512_loadu_ps(at + kTileRows) : _mm512_setzero_ps();
        const __m512i hi = pair_up(a, b);
        _mm512_store_si512(out + i * 64, hi);
        if constexpr (D == 2) {
          const __m512 ha = _mm512_castsi512_ps(_mm512_slli_epi32(hi, 16));
          const __m512 hb = _mm512_castsi512_ps(_mm512_and_si512(hi, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
          _mm512_store_si512(out + kTileBytes + i * 64, pair_up(_mm512_sub_ps(a, ha), _mm512_sub_ps(b, hb)));
        }
      }
    }
}

void pack_tile(const Weight &w, const float *x, Precision p, uint8_t *out) {
  (p == Precision::Int8 ? pack_lanes<1> : pack_lanes<2>)(w, x, out);
}

// GCC's tile intrinsics do not tell the compiler which memory they read and write: everything in memory is settled
// here.
CRELLE_INLINE void settle_memory() { __asm__ volatile("" ::: "memory"); }

using Sums = float[16][16];  // one result tile, outputs down and rows of x across

// Turn a result and store what exists of it.
inline void store_tile(const Weight &w, const Sums &sums, int n0, int m0, int M, float *y, size_t ldy) {
  if (n0 >= w.N) return;
  __m512i v[16];
  for (int i = 0; i < 16; ++i) v[i] = _mm512_load_si512(sums[i]);
  transpose(v);
  const int outputs = w.N - n0;
  const __mmask16 mask = outputs >= 16 ? 0xffff : (1u << outputs) - 1;
  for (int i = 0; i < 16 && m0 + i < M; ++i) _mm512_mask_storeu_epi32(y + size_t(m0 + i) * ldy + n0, mask, v[i]);
}

// 32 outputs x 16 or 32 rows of x over all inputs, added to tiles 0...3. Tiles 4, 5: weights; 6, 7: x.
template <int D, bool Two>
CRELLE_INLINE void multiply(const uint8_t *w0, const uint8_t *w1, const uint8_t *x0, const uint8_t *x1, int chunks) {
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
  for (size_t at = 0; at < size_t(chunks) * D * kTileBytes; at += D * kTileBytes) {
    products(at, at);
    if constexpr (D == 2) {
      products(at, at + kTileBytes);
      products(at + kTileBytes, at);
    }
  }
}

template <bool Two>
CRELLE_INLINE void begin_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (Two) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

// Outputs n0 ... n0 + 31 of one or two tiles of y, a result tile being 1 KB in one piece.
template <bool Two>
CRELLE_INLINE void load_sums(const float *y0, const float *y1) {
  _tile_loadd(0, y0, 64);
  _tile_loadd(1, y0 + 256, 64);
  if constexpr (Two) {
    _tile_loadd(2, y1, 64);
    _tile_loadd(3, y1 + 256, 64);
  }
}

template <bool Two>
CRELLE_INLINE void store_sums(float *y0, float *y1) {
  _tile_stored(0, y0, 64);
  _tile_stored(1, y0 + 256, 64);
  if constexpr (Two) {
    _tile_stored(2, y1, 64);
    _tile_stored(3, y1 + 256, 64);
  }
  settle_memory();
}

// Calls to_y(tile, block, weights) for all tiles of x, two at a time, and blocks [b0, b1), whose numbers it makes.
template <int D, class F>
CRELLE_INLINE void for_blocks(const Weight &w, int tiles, int b0, int b1, F &&to_y) {
  static thread_local Buffer scratch;
  const size_t block_bytes = w.R / 16 * tile_bytes(w, D);
  const int at_once = static_cast<int>(std::max<size_t>(1, kPanelBytes / block_bytes));
  scratch.grow(at_once * block_bytes);
  const TileConfig config;
  settle_memory();
  _tile_loadconfig(&config);
  for (int b = b0; b < b1; b += at_once) {
    const int end = std::min(b + at_once, b1);
    for (int i = b; i < end; ++i) block_numbers<D>(w, i, scratch.data() + (i - b) * block_bytes);
    settle_memory();
    for (int t = 0; t < tiles; t += 2)
      for (int i = b; i < end; ++i) to_y(t, i, scratch.data() + (i - b) * block_bytes);
  }
  _tile_release();
}

template <int D>
void run_blocks(const Weight &w, const uint8_t *packed, int M, float *y, size_t ldy, int b0, int b1) {
  const size_t vector_bytes = tile_bytes(w, D);
  const int tiles = tiles_of(M);
  alignas(64) Sums sums[4];
  for_blocks<D>(w, tiles, b0, b1, [&](int t, int i, const uint8_t *w0) __attribute__((always_inline)) {
    const uint8_t *x0 = packed + t * vector_bytes;
    const bool two = t + 1 < tiles;
    if (two) {
      begin_sums<true>();
      multiply<D, true>(w0, w0 + vector_bytes, x0, x0 + vector_bytes, w.plan.chunks);
      store_sums<true>(sums[0][0], sums[2][0]);
    } else {
      begin_sums<false>();
      multiply<D, false>(w0, w0 + vector_bytes, x0, x0, w.plan.chunks);
      store_sums<false>(sums[0][0], nullptr);
    }
    for (int j = 0; j < (two ? 4 : 2); ++j)
      store_tile(w, sums[j], i * w.R + j % 2 * 16, (t + j / 2) * kTileRows, M, y, ldy);
  });
}

void run(const Weight &w, const uint8_t *packed, int M, Precision p, float *y, size_t ldy, int b0, int b1) {
  (p == Precision::Int8 ? run_blocks<1> : run_blocks<2>)(w, packed, M, y, ldy, b0, b1);
}

template <int D>
void run_lanes(const Weight &w, const uint8_t *packed, int tiles, float *y, size_t pitch, bool add, int b0, int b1) {
  const size_t vector_bytes = tile_bytes(w, D);
  for_blocks<D>(w, tiles, b0, b1, [&](int t, int i, const uint8_t *w0) __attribute__((always_inline)) {
    const uint8_t *x0 = packed + t * vector_bytes;
    float *y0 = y + t * pitch + size_t(i) * w.R * kTileRows, *y1 = y0 + pitch;
    if (t + 1 < tiles) {
      add ? load_sums<true>(y0, y1) : begin_sums<true>();
      multiply<D, true>(w0, w0 + vector_bytes, x0, x0 + vector_bytes, w.plan.chunks);
      store_sums<true>(y0, y1);
    } else {
      add ? load_sums<false>(y0, y0) : begin_sums<false>();
      multiply<D, false>(w0, w0 + vector_bytes, x0, x0, w.plan.chunks);
      store_sums<false>(y0, y0);
    }
  });
}

void run_tiles(const Weight &w, const uint8_t *packed, int tiles, Precision p, float *y, size_t pitch, bool add, int b0,
               int b1) {
  (p == Precision::Int8 ? run_lanes<1> : run_lanes<2>)(w, packed, tiles, y, pitch, add, b0, b1);
}

}  // namespace amx
}  // namespace

bool request_amx() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

const Gemm kAmxGemm{24, amx::pack_bytes, amx::pack, amx::run, amx::pack_tile, amx::run_tiles};

}  // namespace crelle::cpu
