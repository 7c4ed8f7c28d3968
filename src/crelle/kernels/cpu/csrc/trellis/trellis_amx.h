// Products with trellis matrices (trellis_weight.h) and many rows of x, as tiles of bytes.
//
//   A   bytes of products   16 outputs x 16 dwords: what trellis_kernel.h decodes from a step of a block, as it is
//   B   integers of x       16 dwords x 16 rows of x: the bytes that meet those of a product
//   C   int32               16 outputs x 16 rows, for each digit of x
//
// A row of x has one scale for a segment, since a tile adds up all lanes: results differ in the last bits from those of
// few rows, as with the other tiles. Sums of a segment are exact.
//
// Included inside a namespace of the including file, after amx_tiles.h, trellis_kernel.h and trellis_avx512.h.

template <int D>
struct TrellisTiles {
  static constexpr float kTopInteger = D == 1 ? 127.0f : 32639.0f;

  static int parts(const TrellisLayout &l) { return l.pair ? 1 : 2; }
  static size_t integers(const TrellisLayout &l) { return size_t(l.steps) * parts(l) * D * kTileBytes; }
  // Of x: integers, then for each segment scales and, for each digit, zero times their sum. Weights: less.
  static size_t bytes(const Weight &w) {
    const TrellisLayout &l = *w.trellis;
    return integers(l) + l.segments * (1 + D) * 64;
  }
  static size_t scales_at(const TrellisLayout &l) { return size_t(l.steps) * parts(l) * 2 * kTileBytes; }

  // [step][32 outputs][part][64], and the outputs' scales.
  static void block(const Weight &w, int b, uint8_t *out) {
    const TrellisLayout &l = *w.trellis;
    with_form(l, [&](auto form) {
      for_passes(form, [&](auto f, auto align, int r0) {
        using Form = decltype(f);
        trellis_decode<TrellisV, Form::kHalfBits, Form::kPair, align>(
            l, w.block(b), r0, 0, l.steps, out + r0 * parts(l) * 64, kTrellisRows * parts(l) * 64);
      });
    });
    __builtin_memcpy(out + scales_at(l), w.block(b), kTrellisHeader);
  }

  static void pack_rows(const Weight &w, const float *x, int M, int tile, uint8_t *out) {
    static thread_local Buffer scratch;
    scratch.grow(sizeof(float) * w.K * kTileRows);
    float *const lanes = floats_of(scratch);
    const int rows = std::min(kTileRows, M - tile * kTileRows);
    x += size_t(tile) * kTileRows * w.K;
    for (int k = 0; k < w.K; ++k)
      for (int m = 0; m < kTileRows; ++m) lanes[k * kTileRows + m] = m < rows ? x[size_t(m) * w.K + k] : 0.0f;
    pack_lanes(w, lanes, out);
  }

  // x [K][16], times the signs and the Hadamard matrices of the weight; `to` has room for that and a block.
  static const float *rotated(const Weight &w, const float *x, float *to) {
    const TrellisLayout &l = *w.trellis;
    const Rotation &r = l.inputs;
    if (r.empty()) return x;
    for (int k = 0; k < w.K; ++k)
      _mm512_storeu_ps(to + k * 16, _mm512_mul_ps(_mm512_loadu_ps(x + k * 16), _mm512_set1_ps(r.signs[k])));
    const __m512 root = _mm512_set1_ps(r.root());
    float *const room = to + size_t(w.K) * 16;
    for (int first = 0; first < w.K; first += r.block) {  // a block stays in L2, or L1
      float *const block = to + size_t(first) * 16;
      for (int step = 1; step < r.step; step *= 2)
        for (int i = 0; i < r.block; i += 2 * step)
          for (int j = i; j < i + step; ++j) {
            const __m512 a = _mm512_loadu_ps(block + j * 16), b = _mm512_loadu_ps(block + (j + step) * 16);
            _mm512_storeu_ps(block + j * 16, _mm512_add_ps(a, b));
            _mm512_storeu_ps(block + (j + step) * 16, _mm512_sub_ps(a, b));
          }
      if (r.order > 1) {
        __builtin_memcpy(room, block, size_t(r.block) * 16 * sizeof(float));
        for (int i = 0; i < r.block; ++i) {
          const float *const p = r.paley.data() + i / r.step * r.order;
          __m512 sum = _mm512_setzero_ps();
          for (int j = 0; j < r.order; ++j)
            sum = _mm512_fmadd_ps(_mm512_loadu_ps(room + (j * r.step + i % r.step) * 16), _mm512_set1_ps(p[j]), sum);
          _mm512_storeu_ps(block + i * 16, sum);
        }
      }
      for (int k = 0; k < r.block; ++k)
        _mm512_storeu_ps(block + k * 16, _mm512_mul_ps(_mm512_loadu_ps(block + k * 16), root));
    }
    return to;
  }

  static void pack_lanes(const Weight &w, const float *given, uint8_t *out) {
    static thread_local Buffer scratch;
    const TrellisLayout &l = *w.trellis;
    scratch.grow(sizeof(float) * (w.K + l.inputs.block) * 16);
    const float *const x = rotated(w, given, floats_of(scratch));
    uint8_t *tail = out + integers(l);
    const __m512i absolute = _mm512_set1_epi32(0x7fffffff), byte = _mm512_set1_epi32(255);
    const __m512i four = _mm512_set1_epi32(0x01010101), two = _mm512_set1_epi32(0x00010001);
    for (int s = 0; s < l.segments; ++s, tail += (1 + D) * 64) {
      const int end = std::min((s + 1) * l.segment, l.steps), k1 = std::min(end * kTrellisInputs, w.K);
      // By the bits: a maximum of floats would forget a NaN, which makes the scale NaN.
      __m512i top = _mm512_setzero_si512();
      for (int k = s * l.segment * kTrellisInputs; k < k1; ++k)
        top = _mm512_max_epi32(top, _mm512_and_si512(_mm512_loadu_si512(x + k * 16), absolute));
      const __m512 scale = _mm512_div_ps(_mm512_castsi512_ps(top), _mm512_set1_ps(kTopInteger));
      const __mmask16 usable = _mm512_cmp_ps_mask(scale, _mm512_set1_ps(0x1p-120f), _CMP_GT_OQ);
      const __m512 inverse = _mm512_maskz_div_ps(usable, _mm512_set1_ps(1.0f), scale);
      __m512i sums[D] = {};
      // Integers of input k: digit d, as a byte.
      const auto digits = [&](int k, __m512i(&to)[D]) __attribute__((always_inline)) {
        const __m512i v =
            k < k1 ? _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k * 16), inverse)) : _mm512_setzero_si512();
        if constexpr (D == 2) {
          const __m512i hi = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(128)), 8);
          const __m512i lo = _mm512_sub_epi32(v, _mm512_slli_epi32(hi, 8));
          sums[0] = _mm512_add_epi32(sums[0], hi), sums[1] = _mm512_add_epi32(sums[1], lo);
          to[0] = _mm512_and_si512(hi, byte), to[1] = _mm512_and_si512(lo, byte);
        } else {
          sums[0] = _mm512_add_epi32(sums[0], v);
          to[0] = _mm512_and_si512(v, byte);
        }
      };
      for (int i = s * l.segment; i < end; ++i, out += parts(l) * D * kTileBytes)
        for (int j = 0; j < 16; ++j) {
          __m512i even[D], odd[D];
          digits(i * kTrellisInputs + 2 * j, even);
          digits(i * kTrellisInputs + 2 * j + 1, odd);
          for (int d = 0; d < D; ++d) {
            uint8_t *const to = out + d * kTileBytes + j * 64;
            if (l.pair) {
              const __m512i both = _mm512_or_si512(even[d], _mm512_slli_epi32(odd[d], 8));
              _mm512_store_si512(to, _mm512_mullo_epi32(both, two));
            } else {
              _mm512_store_si512(to, _mm512_mullo_epi32(even[d], four));
              _mm512_store_si512(to + D * kTileBytes, _mm512_mullo_epi32(odd[d], four));
            }
          }
        }
      _mm512_storeu_ps(tail, scale);
      for (int d = 0; d < D; ++d)
        _mm512_storeu_si512(tail + 64 + 64 * d,
                            _mm512_mullo_epi32(sums[d], _mm512_set1_epi32(trellis_code(l.pair).zero)));
    }
  }

  // Tiles 0, 1: sums of the high digit, or all; 2, 3: of the low digit; 4, 5: weights; 6, 7: x.
  static void multiply_one(const Weight &w, const uint8_t *weights, const uint8_t *x, Sums *y, bool add) {
    const TrellisLayout &l = *w.trellis;
    const int P = parts(l), stride = P * 64;
    const uint8_t *tail = x + integers(l), *at = weights;
    alignas(64) Sums f[2];
    alignas(64) int sums[D][2][16][16];
    for (auto &half : f)
      for (auto &row : half) _mm512_store_ps(row, _mm512_setzero_ps());
    for (int s = 0; s < l.segments; ++s, tail += (1 + D) * 64) {
      const int steps = std::min(l.segment, l.steps - s * l.segment);
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (D == 2) {
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int i = 0; i < steps; ++i, at += 32 * stride)
        for (int part = 0; part < P; ++part, x += D * kTileBytes) {
          _tile_loadd(4, at + part * 64, stride);
          _tile_loadd(6, x, 64);
          _tile_dpbusd(0, 4, 6);
          _tile_loadd(5, at + part * 64 + 16 * stride, stride);
          _tile_dpbusd(1, 5, 6);
          if constexpr (D == 2) {
            _tile_loadd(7, x + kTileBytes, 64);
            _tile_dpbusd(2, 4, 7);
            _tile_dpbusd(3, 5, 7);
          }
        }
      _tile_stored(0, sums[0][0], 64);
      _tile_stored(1, sums[0][1], 64);
      if constexpr (D == 2) {
        _tile_stored(2, sums[1][0], 64);
        _tile_stored(3, sums[1][1], 64);
      }
      compiler_fence();
      const __m512 scale = _mm512_loadu_ps(tail), high = D == 2 ? _mm512_mul_ps(scale, _mm512_set1_ps(256.0f)) : scale;
      for (int half = 0; half < 2; ++half)
        for (int r = 0; r < 16; ++r) {
          __m512 v = _mm512_load_ps(f[half][r]);
          for (int d = 0; d < D; ++d) {
            const __m512i sum =
                _mm512_sub_epi32(_mm512_load_si512(sums[d][half][r]), _mm512_loadu_si512(tail + 64 + 64 * d));
            v = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), d ? scale : high, v);
          }
          _mm512_store_ps(f[half][r], v);
        }
      compiler_fence();
    }
    const float *const scales = reinterpret_cast<const float *>(weights + scales_at(l));
    for (int half = 0; half < 2; ++half)
      for (int r = 0; r < 16; ++r) {
        const __m512 scale = _mm512_set1_ps(scales[half * 16 + r]), v = _mm512_load_ps(f[half][r]);
        _mm512_store_ps(y[half][r],
                        add ? _mm512_fmadd_ps(v, scale, _mm512_load_ps(y[half][r])) : _mm512_mul_ps(v, scale));
      }
  }

  template <bool Two>
  static CRELLE_INLINE void multiply(const Weight &w, const uint8_t *w0, const uint8_t *, const uint8_t *x0,
                                     const uint8_t *x1, Sums *y0, Sums *y1, bool add) {
    multiply_one(w, w0, x0, y0, add);
    if constexpr (Two) multiply_one(w, w0, x1, y1, add);
  }
};
