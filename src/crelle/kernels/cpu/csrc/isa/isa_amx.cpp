// AMX for many rows of x: weights and x as tiles, in one of two ways.
//
//   bf16_tiles.h   any weight: its values as bf16, f32 accumulation. Precision::Exact splits both sides in two.
//   int8_tiles.h   Precision::Int8, uniform grids: codes and rounded x as int8, int32 sums scaled segment by segment.
//   integer_amx.h  integer matrices and integer activations.
//   trellis_amx.h  trellis matrices: bytes of products and rounded x, int32 sums.
//   amx_codes.h    4 and 8 bits, few rows: what vnni_codes.h computes, as tiles.
//
// A tile of weights is 16 outputs, of x 16 rows; a result has outputs down and rows of x across. Four results (2 x 2
// tiles: 32 outputs, 32 rows of x) give four multiplications for four tile loads. A way W of doing it has
//
//   W::bytes(w)                          of 16 outputs, or 16 rows of x, over all inputs
//   W::block(w, b, out)                  block b of the weights, vector by vector of 16 outputs
//   W::pack_rows(w, x, M, tile, out)     16 rows of x [M, K]
//   W::pack_lanes(w, x, out)             the same of x [K][16]
//   W::multiply<Two>(w, w0, w1, x0, x1, y0, y1, add)
//                                        32 outputs x 16 or (Two) 32 rows, to y0[0, 1] and y1[0, 1] or added to them
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "tiles/gemm.h"
#include "isa/isa.h"
#include "base/prefetch.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace amx {

#include "isa/amx_tiles.h"

constexpr size_t kPanelBytes = size_t{1} << 20;  // tiles of the weights that stay in L2

using Sums = float[16][16];  // one result, 1 KB in one piece

template <bool Two>
CRELLE_INLINE void begin_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (Two) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <bool Two>
CRELLE_INLINE void load_sums(const Sums *y0, const Sums *y1) {
  _tile_loadd(0, y0, 64);
  _tile_loadd(1, y0 + 1, 64);
  if constexpr (Two) {
    _tile_loadd(2, y1, 64);
    _tile_loadd(3, y1 + 1, 64);
  }
}

template <bool Two>
CRELLE_INLINE void store_sums(Sums *y0, Sums *y1) {
  _tile_stored(0, y0, 64);
  _tile_stored(1, y0 + 1, 64);
  if constexpr (Two) {
    _tile_stored(2, y1, 64);
    _tile_stored(3, y1 + 1, 64);
  }
  compiler_fence();
}

#include "planes/unpack_codes.h"
#include "planes/dequant_bf16.h"
#include "tiles/bf16_tiles.h"
#include "tiles/int8_tiles.h"
#include "planes/amx_codes.h"
#include "integer/integer_amx.h"
#include "trellis/trellis_kernel.h"
#include "trellis/trellis_avx512.h"
#include "trellis/trellis_amx.h"

Tiles tiles(const Weight &w, Precision p) {
  if (w.stream == Stream::Trellis) return Tiles::Int8;
  const int least = w.isa->gemm->int8_group;
  const bool fits = w.kind == Kind::Uniform && (w.partition.groups == 1 || w.partition.G % kStep == 0);
  return p == Precision::Int8 && fits && least && w.partition.G >= least ? Tiles::Int8 : Tiles::Bf16;
}

// Calls use(way) with the way of w.
template <class F>
CRELLE_INLINE auto choose(const Weight &w, Precision p, F &&use) {
  if (w.stream == Stream::Trellis) return p == Precision::Exact ? use(TrellisTiles<2>{}) : use(TrellisTiles<1>{});
  if (p == Precision::Exact) return use(Bf16Tiles<2>{});
  if (tiles(w, p) == Tiles::Bf16) return use(Bf16Tiles<1>{});
  return w.P == 8 && w.bias ? use(Int8Tiles<true>{}) : use(Int8Tiles<false>{});
}

bool takes(const Weight &w, Precision) { return w.stream != Stream::Mixed && w.stream != Stream::Integer; }

size_t pack_bytes(const Weight &w, int M, Precision p) {
  return choose(w, p, [&](auto way) { return tiles_of(M) * way.bytes(w); });
}

void pack(const Weight &w, const float *x, int M, Precision p, uint8_t *out, int tile0, int tile1) {
  choose(w, p, [&](auto way) {
    for (int tile = tile0; tile < tile1; ++tile) way.pack_rows(w, x, M, tile, out + tile * way.bytes(w));
  });
}

void pack_tile(const Weight &w, const float *x, Precision p, uint8_t *out) {
  choose(w, p, [&](auto way) { way.pack_lanes(w, x, out); });
}

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

// Calls to_y(tile, block, weights) for all tiles of x, two at a time, and blocks [b0, b1), whose tiles it makes.
template <class Way, class F>
CRELLE_INLINE void for_blocks(const Weight &w, int tiles, int b0, int b1, F &&to_y) {
  static thread_local Buffer scratch;
  const size_t block_bytes = w.R / 16 * Way::bytes(w);
  const int at_once = static_cast<int>(std::max<size_t>(1, kPanelBytes / block_bytes));
  scratch.grow(at_once * block_bytes);
  const TileConfig config;
  compiler_fence();
  _tile_loadconfig(&config);
  for (int b = b0; b < b1; b += at_once) {
    const int end = std::min(b + at_once, b1);
    for (int i = b; i < end; ++i) Way::block(w, i, scratch.data() + (i - b) * block_bytes);
    compiler_fence();
    for (int t = 0; t < tiles; t += 2)
      for (int i = b; i < end; ++i) to_y(t, i, scratch.data() + (i - b) * block_bytes);
  }
  _tile_release();
}

// Outputs of a block at w0 for tiles t and, if there is one, t + 1 of x.
template <class Way>
CRELLE_INLINE void multiply(const Weight &w, const uint8_t *w0, const uint8_t *packed, int t, int tiles, Sums *y0,
                            Sums *y1, bool add) {
  const size_t bytes = Way::bytes(w);
  const uint8_t *x0 = packed + t * bytes;
  if (t + 1 < tiles)
    Way::template multiply<true>(w, w0, w0 + bytes, x0, x0 + bytes, y0, y1, add);
  else
    Way::template multiply<false>(w, w0, w0 + bytes, x0, x0, y0, y0, add);
}

void run(const Weight &w, const uint8_t *packed, int M, Precision p, float *y, size_t ldy, int b0, int b1) {
  const int tiles = tiles_of(M);
  alignas(64) Sums sums[4];
  choose(w, p, [&](auto way) {
    using Way = decltype(way);
    for_blocks<Way>(w, tiles, b0, b1, [&](int t, int i, const uint8_t *w0) __attribute__((always_inline)) {
      multiply<Way>(w, w0, packed, t, tiles, sums, sums + 2, false);
      for (int j = 0; j < (t + 1 < tiles ? 4 : 2); ++j)
        store_tile(w, sums[j], i * w.R + j % 2 * 16, (t + j / 2) * kTileRows, M, y, ldy);
    });
  });
}

void run_tiles(const Weight &w, const uint8_t *packed, int tiles, Precision p, float *y, size_t pitch, bool add, int b0,
               int b1) {
  choose(w, p, [&](auto way) {
    using Way = decltype(way);
    for_blocks<Way>(w, tiles, b0, b1, [&](int t, int i, const uint8_t *w0) __attribute__((always_inline)) {
      float *y0 = y + t * pitch + size_t(i) * w.R * kTileRows;
      multiply<Way>(w, w0, packed, t, tiles, reinterpret_cast<Sums *>(y0), reinterpret_cast<Sums *>(y0 + pitch), add);
    });
  });
}

}  // namespace amx
}  // namespace

const IntegerKernel kIntegerAmx{[](const Weight &w, Activations &a, const float *x, size_t ldx, int m0, int m1) {
                                  kVbmi.integer->encode(w, a, x, ldx, m0, m1);
                                },
                                amx::integer_matmul, 1024};

void matmul_digits(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  amx::matmul(w, a, y, ldy, b0, b1);
}

bool request_amx() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

namespace {
constexpr int kRows = 24;

constexpr Gemm amx_gemm(int int8_group, int (*rows_of)(const Weight &, Precision) = nullptr) {
  return {kRows,     int8_group, amx::takes,     amx::tiles,     amx::pack_bytes,
          amx::pack, amx::run,   amx::pack_tile, amx::run_tiles, rows_of};
}

// amx_codes.h unpacks codes anew for every 16 rows of x and scales sums group by group, but splits nothing into two
// bf16. 24 to 64 rows of 3072 x 576 take 0.3 to 0.5 of the time of tiles, groups of 64, exact; from these rows on as
// long.
int rows_of_codes(const Weight &w, Precision p) {
  if (w.stream != Stream::Nibbles && w.stream != Stream::Bytes) return kRows;
  const bool nibbles = w.stream == Stream::Nibbles, wide = w.partition.G >= 64;
  if (p == Precision::Int8) return nibbles && wide ? 64 : 32;
  return !nibbles ? 96 : wide ? 256 : 128;
}
}  // namespace

// Groups of 64 lose as int8 (2 to 22%): their sums are scaled twice as often.
const Gemm kAmxGemm = amx_gemm(kSegment, rows_of_codes), kAmxInt8Gemm = amx_gemm(1), kAmxBf16Gemm = amx_gemm(0);

}  // namespace crelle::cpu
