// Tiles of int8, for uniform grids and x rounded to int8: twice the multiplications of bf16 in a tile.
//
// A tile of weights is 16 outputs x 64 inputs, codes less their zero points; a tile of x is 16 input quads x 16 rows.
// x has one scale per row and segment (k_partition.h), so that after at most two tiles the int32 sums have to leave the
// tile registers, to be scaled by x and by W and added up in f32. That is as much work for the vector units as the
// products are for the tiles; it is done for one segment while the tiles multiply the next, or it would eat up what
// int8 wins. BCQ stays with bf16: its values are sums of P scales, each plane would need a product and a scaling of
// its own.
//
// Included inside a namespace of the including file, after unpack_codes.h.

constexpr int kStep = 64;  // inputs of a tile
static_assert(kSegment == 2 * kStep && kStep == 2 * kChunk);

// 16 outputs of W or 16 rows of x, over all inputs; zero beyond a group's end.
struct Int8Side {
  uint8_t *tiles;  // [step][16][64]
  float *scale;    // [segment][16]: what a unit of the integers is worth
  float *rest;     // [segment][16]: W: what its codes lack of q - zero;  x: the sum of its integers

  static int steps(int inputs) { return (inputs + kStep - 1) / kStep; }
  static size_t tiles_bytes(const KPartition &p) {
    return size_t((p.groups - 1) * steps(p.G) + steps(p.inputs_of(p.groups - 1))) * kTileBytes;
  }
  static size_t bytes(const KPartition &p) { return tiles_bytes(p) + 2 * p.segments * 64; }

  Int8Side(const KPartition &p, const uint8_t *at) : tiles(const_cast<uint8_t *>(at)) {
    scale = reinterpret_cast<float *>(tiles + tiles_bytes(p));
    rest = scale + p.segments * 16;
  }
  void next(int steps) { tiles += steps * kTileBytes, scale += 16, rest += 16; }
};

// Calls use(g, first input, inputs) for every segment.
template <class F>
CRELLE_INLINE void for_each_segment(const KPartition &p, F &&use) {
  for (int g = 0; g < p.groups; ++g)
    for (int k = 0; k < p.inputs_of(g); k += kSegment) use(g, k, std::min(kSegment, p.inputs_of(g) - k));
}

// A segment of x [n][16], the rows side by side: the integers of activations.h, four neighbours to a dword.
inline void pack_segment(const float *x, int n, const Int8Side &out) {
  // The largest magnitude by its bits: a maximum of floats would forget a NaN. Where it is not finite, the scale is not
  // either, and with it all sums of the row; what becomes of the integers does not matter then.
  __m512i top = _mm512_setzero_si512();
  for (int i = 0; i < n; ++i)
    top = _mm512_max_epi32(top, _mm512_castps_si512(_mm512_abs_ps(_mm512_loadu_ps(x + i * 16))));
  const __m512 scale = _mm512_div_ps(_mm512_castsi512_ps(top), _mm512_set1_ps(127.0f));
  const __mmask16 some = _mm512_cmp_ps_mask(scale, _mm512_setzero_ps(), _CMP_GT_OQ);
  const __m512 inverse = _mm512_maskz_div_ps(some, _mm512_set1_ps(1.0f), scale);
  const auto rounded = [&](int i) __attribute__((always_inline)) {
    return i < n ? _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i * 16), inverse)) : _mm512_setzero_si512();
  };
  __m512i sum = _mm512_setzero_si512();
  for (int i = 0; i < Int8Side::steps(n) * kStep; i += 4) {
    __m512i quad = rounded(i);
    quad = _mm512_mask_blend_epi8(0x2222222222222222, quad, _mm512_slli_epi32(rounded(i + 1), 8));
    quad = _mm512_mask_blend_epi8(0x4444444444444444, quad, _mm512_slli_epi32(rounded(i + 2), 16));
    quad = _mm512_mask_blend_epi8(0x8888888888888888, quad, _mm512_slli_epi32(rounded(i + 3), 24));
    sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), quad);
    _mm512_store_si512(out.tiles + i * 16, quad);
  }
  _mm512_store_ps(out.scale, scale);
  _mm512_store_ps(out.rest, _mm512_cvtepi32_ps(sum));
}

// Rest: the codes are q - 128, and the zero points are not all 128 (8 bits with zero points, where q - zero is 9 bits).
template <bool Rest>
struct Int8Tiles {
  static size_t bytes(const Weight &w) { return Int8Side::bytes(w.partition); }

  static void block(const Weight &w, int b, uint8_t *out) {
    for (int r = 0; r < w.R / 16; ++r) {
      Int8Side side(w.partition, out + r * bytes(w));
      for_groups(w, b, r, [&](int g, const uint8_t *chunk, const GroupScales &s) {
        const __m512 zero = _mm512_loadu_ps(s.offset), subtracted = Rest ? _mm512_set1_ps(128.0f) : zero;
        uint8_t less[16];
        _mm_storeu_si128(reinterpret_cast<__m128i *>(less), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(subtracted)));
        const int chunks = w.partition.chunks_of(g);
        for (int c = 0; c < chunks; ++c, chunk += w.chunk_bytes) {
          for_codes(w, chunk, r, [&](int n, __m256i codes) __attribute__((always_inline)) {
            uint8_t *to = side.tiles + n * 64 + c % 2 * kChunk;
            codes = _mm256_sub_epi8(codes, _mm256_set1_epi8(static_cast<char>(less[n])));
            _mm256_store_si256(reinterpret_cast<__m256i *>(to), codes);
            if (c % 2 == 0 && c + 1 == chunks)  // half a tile is left
              _mm256_store_si256(reinterpret_cast<__m256i *>(to + kChunk), _mm256_setzero_si256());
          });
          if (c % 2 || c + 1 == chunks) side.tiles += kTileBytes;
          if (c % kSegmentChunks) continue;
          _mm512_store_ps(side.scale, _mm512_loadu_ps(s.alpha[0]));
          _mm512_store_ps(side.rest, _mm512_sub_ps(subtracted, zero));
          side.next(0);
        }
      });
    }
  }

  static void pack_lanes(const Weight &w, const float *x, uint8_t *out) {
    Int8Side side(w.partition, out);
    for_each_segment(w.partition, [&](int g, int k, int n) {
      pack_segment(x + (size_t(g) * w.partition.G + k) * kTileRows, n, side);
      side.next(Int8Side::steps(n));
    });
  }

  static void pack_rows(const Weight &w, const float *x, int M, int tile, uint8_t *out) {
    Int8Side side(w.partition, out);
    alignas(64) float lanes[kSegment][16];
    for_each_segment(w.partition, [&](int g, int k, int n) {
      const float *from = x + size_t(tile) * kTileRows * w.K + size_t(g) * w.partition.G + k;
      for (int j = 0; j < n; j += 16) {
        const __mmask16 mask = n - j >= 16 ? 0xffff : (1u << (n - j)) - 1;
        __m512i v[16] = {};
        for (int i = 0; i < 16 && tile * kTileRows + i < M; ++i)
          v[i] = _mm512_maskz_loadu_epi32(mask, from + size_t(i) * w.K + j);
        transpose(v);
        for (int i = 0; i < 16; ++i) _mm512_store_si512(lanes[j + i], v[i]);
      }
      pack_segment(lanes[0], n, side);
      side.next(Int8Side::steps(n));
    });
  }

  // Sums of 16 outputs and one or two tiles of x, at sums[0] and sums[2], are scaled and added to (or become) y0 and
  // y1.
  template <bool Two, bool Add>
  static CRELLE_INLINE void scale(const Int8Side &w, const Int8Side &x0, const Int8Side &x1, int segment,
                                  const Sums *sums, Sums &y0, Sums &y1) {
    const int at = segment * 16;
    const __m512 unit[2] = {_mm512_load_ps(x0.scale + at), _mm512_load_ps(x1.scale + at)};
    [[maybe_unused]] const __m512 rest[2] = {_mm512_load_ps(x0.rest + at), _mm512_load_ps(x1.rest + at)};
#pragma GCC unroll 16
    for (int n = 0; n < 16; ++n)
#pragma GCC unroll 2
      for (int t = 0; t < (Two ? 2 : 1); ++t) {
        float *y = t ? y1[n] : y0[n];
        __m512 v = _mm512_cvtepi32_ps(_mm512_load_si512(sums[2 * t][n]));
        if constexpr (Rest) v = _mm512_fmadd_ps(rest[t], _mm512_set1_ps(w.rest[at + n]), v);  // an integer below 2^24
        v = _mm512_mul_ps(v, unit[t]);
        const __m512 scale = _mm512_set1_ps(w.scale[at + n]);
        _mm512_store_ps(y, Add ? _mm512_fmadd_ps(v, scale, _mm512_load_ps(y)) : _mm512_mul_ps(v, scale));
      }
  }

  // Tiles 0 ... 3: sums; 4, 5: weights; 6, 7: x. The sums of a segment leave their tiles one by one, each just before
  // the next segment's first product takes its place: it is finished by then, and nothing waits.
  template <bool Two>
  static CRELLE_INLINE void multiply(const Weight &w, const uint8_t *w0, const uint8_t *w1, const uint8_t *x0,
                                     const uint8_t *x1, Sums *y0, Sums *y1, bool add) {
    const Int8Side sides[4] = {{w.partition, w0}, {w.partition, w1}, {w.partition, x0}, {w.partition, x1}};
    alignas(64) Sums sums[4];  // int32, of the segment before
    const auto first = [&](size_t at, bool leave) __attribute__((always_inline)) {
      _tile_loadd(4, w0 + at, 64);
      _tile_loadd(6, x0 + at, 64);
      if (leave) {
        _tile_stored(0, sums[0], 64);
        _tile_zero(0);
      }
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(5, w1 + at, 64);
      if (leave) {
        _tile_stored(1, sums[1], 64);
        _tile_zero(1);
      }
      _tile_dpbssd(1, 5, 6);
    };
    const auto second = [&](size_t at, bool leave) __attribute__((always_inline)) {
      if constexpr (Two) {
        _tile_loadd(7, x1 + at, 64);
        if (leave) {
          _tile_stored(2, sums[2], 64);
          _tile_zero(2);
        }
        _tile_dpbssd(2, 4, 7);
        if (leave) {
          _tile_stored(3, sums[3], 64);
          _tile_zero(3);
        }
        _tile_dpbssd(3, 5, 7);
      }
    };
    const auto scale_half = [&](int half, int segment) __attribute__((always_inline)) {
      if (add || segment)
        scale<Two, true>(sides[half], sides[2], sides[3], segment, sums + half, y0[half], y1[half]);
      else
        scale<Two, false>(sides[half], sides[2], sides[3], segment, sums + half, y0[half], y1[half]);
    };
    for (int half = 0; half < 2; ++half)  // y comes from far away, and is written once per segment
      for (int n = 0; n < 16; ++n) {
        __builtin_prefetch(y0[half][n], 1);
        if (Two) __builtin_prefetch(y1[half][n], 1);
      }
    int segment = 0;
    size_t at = 0;
    begin_sums<Two>();
    for_each_segment(w.partition, [&](int, int, int n) __attribute__((always_inline)) {
      const bool before = segment > 0, more = n > kStep;
      first(at, before);
      second(at, before);
      at += kTileBytes;
      compiler_fence();
      if (more) first(at, false);
      if (before) scale_half(0, segment - 1);
      if (more) second(at, false);
      if (before) scale_half(1, segment - 1);
      compiler_fence();
      if (more) at += kTileBytes;
      ++segment;
    });
    store_sums<Two>(sums, sums + 2);
    scale_half(0, segment - 1);
    scale_half(1, segment - 1);
    compiler_fence();
  }
};
