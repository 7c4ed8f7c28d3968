// Codes of 16 outputs and one chunk to bf16 numbers, row by row: [16 rows][32 inputs], an AMX tile.
//
// A group has at most 2^P different numbers per output. Up to 5 bits these are a register of bf16: a plane's bits load
// as a mask, P masked additions make 32 indices, and one vpermw looks 32 numbers up. Wider codes are computed in f32.
// With D = 2 every number comes as hi + lo, two bf16 that together have 16 bits.
//
// Included inside a namespace of the including file.

constexpr int kTileBytes = 16 * 64;

// The scales of one group for 16 outputs, as f32.
struct GroupScales {
  float alpha[8][16];  // BCQ; uniform: [0] is the scale
  float offset[16];    // BCQ: z; uniform: the zero point
};

CRELLE_INLINE __m512 scales16(const Weight &w, const uint8_t *at, int i) {
  return w.wide_scales ? _mm512_loadu_ps(at + 64 * i)
                       : _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at + 32 * i)));
}

inline void load_scales(const Weight &w, const uint8_t *scales, const uint8_t *zeros, int r, GroupScales &s) {
  const int vectors = w.R / 16, sets = w.kind == Kind::Bcq ? w.P : 1;
  for (int p = 0; p < sets; ++p) _mm512_storeu_ps(s.alpha[p], scales16(w, scales, vectors * p + r));
  __m512 offset = _mm512_setzero_ps();
  if (w.kind == Kind::Bcq) {
    if (w.bias) offset = scales16(w, scales, vectors * w.P + r);
  } else if (w.bias) {
    const __m128i zero = _mm_loadu_si128(reinterpret_cast<const __m128i *>(zeros + 16 * r));
    offset = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(zero));
  } else {
    offset = _mm512_set1_ps(static_cast<float>(1 << (w.P - 1)));
  }
  _mm512_storeu_ps(s.offset, offset);
}

// 32 f32 to bf16: hi, and lo = what hi left over.
template <int D>
CRELLE_INLINE void split(__m512 a, __m512 b, __m512i (&out)[D]) {
  out[0] = (__m512i)_mm512_cvtne2ps_pbh(b, a);
  if constexpr (D == 2) {
    const __m512 ha = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(out[0])), 16));
    const __m512 hb =
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(out[0], 1)), 16));
    out[1] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_sub_ps(b, hb), _mm512_sub_ps(a, ha));
  }
}

// The number of every code 16 i ... 16 i + 15 of output n: plane p is bit P-1-p of a code.
CRELLE_INLINE __m512 numbers_of_codes(const Weight &w, const GroupScales &s, int n, int i) {
  const __m512i iota = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i code = _mm512_add_epi32(iota, _mm512_set1_epi32(16 * i));
  if (w.kind == Kind::Uniform)
    return _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(s.offset[n])),
                         _mm512_set1_ps(s.alpha[0][n]));
  __m512 v = _mm512_setzero_ps();
  for (int p = w.P - 1; p >= 0; --p) {
    const __mmask16 set = _mm512_test_epi32_mask(code, _mm512_set1_epi32(1 << (w.P - 1 - p)));
    const __m512 alpha = _mm512_set1_ps(s.alpha[p][n]);
    v = _mm512_mask_add_ps(_mm512_sub_ps(v, alpha), set, v, alpha);
  }
  return _mm512_add_ps(v, _mm512_set1_ps(s.offset[n]));
}

// Tables of a group's numbers for 16 outputs; used when P <= 5.
template <int D>
struct Tables {
  __m512i of[16][D];

  void fill(const Weight &w, const GroupScales &s) {
    for (int n = 0; n < 16; ++n) {
      const __m512 low = numbers_of_codes(w, s, n, 0);
      split<D>(low, w.P == 5 ? numbers_of_codes(w, s, n, 1) : low, of[n]);
    }
  }
};

CRELLE_INLINE uint32_t dword_at(const uint8_t *p) {
  uint32_t v;
  __builtin_memcpy(&v, p, 4);
  return v;
}

// Quad planes, P <= 5.
template <int P, int D>
CRELLE_INLINE void plane_numbers(const uint8_t *codes, const Tables<D> &t, uint8_t *out) {
  for (int n = 0; n < 16; ++n) {
    __m512i index = _mm512_setzero_si512();
    for (int p = 0; p < P; ++p)
      index = _mm512_mask_add_epi16(index, dword_at(codes + p * 64 + n * 4), index,
                                    _mm512_set1_epi16(static_cast<short>(1 << (P - 1 - p))));
    for (int d = 0; d < D; ++d)
      _mm512_store_si512(out + d * kTileBytes + n * 64, _mm512_permutexvar_epi16(index, t.of[n][d]));
  }
}

// Nibbles: dwords of four steps, `stride` apart. A 4 x 4 transpose inside each quarter brings an output's 16 bytes
// together.
template <int D>
CRELLE_INLINE void nibble_numbers(const uint8_t *codes, int stride, const Tables<D> &t, uint8_t *out) {
  __m512i v[4];
  for (int j = 0; j < 4; ++j) v[j] = _mm512_load_si512(codes + j * stride);
  const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
  const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
  const __m512i rows[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, d),
                           _mm512_unpackhi_epi64(b, d)};  // quarter i of rows[k]: output 4 i + k
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int k = 0; k < 4; ++k) {
    const __m512i low = _mm512_and_si512(rows[k], nibble),
                  high = _mm512_and_si512(_mm512_srli_epi16(rows[k], 4), nibble);
    alignas(64) uint8_t first[64], second[64];  // steps 0, 1 and steps 2, 3 of four outputs
    _mm512_store_si512(first, _mm512_unpacklo_epi32(low, high));
    _mm512_store_si512(second, _mm512_unpackhi_epi32(low, high));
    for (int i = 0; i < 4; ++i) {
      const int n = 4 * i + k;
      const __m256i bytes = _mm256_set_m128i(_mm_load_si128(reinterpret_cast<const __m128i *>(second + 16 * i)),
                                             _mm_load_si128(reinterpret_cast<const __m128i *>(first + 16 * i)));
      const __m512i index = _mm512_cvtepu8_epi16(bytes);
      for (int e = 0; e < D; ++e)
        _mm512_store_si512(out + e * kTileBytes + n * 64, _mm512_permutexvar_epi16(index, t.of[n][e]));
    }
  }
}

// Quad planes and bytes of more than 5 bits: in f32.
template <int D>
inline void wide_numbers(const Weight &w, const uint8_t *codes, int r, const GroupScales &s, uint8_t *out) {
  for (int n = 0; n < 16; ++n) {
    __m512 v[2];
    if (w.stream == Stream::Bytes) {
      alignas(64) uint8_t row[32];
      for (int j = 0; j < 8; ++j) __builtin_memcpy(row + 4 * j, codes + ((j * w.R) + 16 * r + n) * 4, 4);
      for (int h = 0; h < 2; ++h) {
        const __m512i q = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i *>(row + 16 * h)));
        v[h] = _mm512_sub_ps(_mm512_cvtepi32_ps(q), _mm512_set1_ps(s.offset[n]));
        v[h] = _mm512_mul_ps(v[h], _mm512_set1_ps(s.alpha[0][n]));
      }
    } else {
      const uint8_t *planes = codes + size_t(r) * w.P * 64 + n * 4;
      for (int h = 0; h < 2; ++h) {
        v[h] = _mm512_setzero_ps();
        for (int p = w.P - 1; p >= 0; --p) {
          const __mmask16 set = static_cast<__mmask16>(dword_at(planes + p * 64) >> (16 * h));
          if (w.kind == Kind::Uniform) {
            v[h] = _mm512_mask_add_ps(v[h], set, v[h], _mm512_set1_ps(static_cast<float>(1 << (w.P - 1 - p))));
          } else {
            const __m512 alpha = _mm512_set1_ps(s.alpha[p][n]);
            v[h] = _mm512_mask_add_ps(_mm512_sub_ps(v[h], alpha), set, v[h], alpha);
          }
        }
        if (w.kind == Kind::Uniform)
          v[h] = _mm512_mul_ps(_mm512_sub_ps(v[h], _mm512_set1_ps(s.offset[n])), _mm512_set1_ps(s.alpha[0][n]));
        else
          v[h] = _mm512_add_ps(v[h], _mm512_set1_ps(s.offset[n]));
      }
    }
    __m512i parts[D];
    split<D>(v[0], v[1], parts);
    for (int d = 0; d < D; ++d) _mm512_store_si512(out + d * kTileBytes + n * 64, parts[d]);
  }
}

// All of block b: out [R/16][chunks][D][16][32] bf16.
template <int D>
inline void block_numbers(const Weight &w, int b, uint8_t *out) {
  const size_t vector_bytes = size_t(w.plan.chunks) * D * kTileBytes;
  for (int r = 0; r < w.R / 16; ++r) {
    const uint8_t *at = w.block(b), *zeros = at;
    at += w.zeros_bytes;
    uint8_t *tile = out + r * vector_bytes;
    for (int g = 0; g < w.plan.groups; ++g, zeros += w.R) {
      const int chunks = w.plan.chunks_of(g);
      GroupScales s;
      load_scales(w, at, zeros, r, s);
      at += w.scale_bytes;
      Tables<D> t;
      if (w.P <= 5) t.fill(w, s);
      for (int c = 0; c < chunks; ++c, at += w.chunk_bytes, tile += D * kTileBytes) {
        const uint8_t *planes = at + size_t(r) * w.P * 64;
        if (w.stream == Stream::Nibbles)
          nibble_numbers<D>(at + r * 64, w.R * 4, t, tile);
        else if (w.P == 1)
          plane_numbers<1, D>(planes, t, tile);
        else if (w.P == 2)
          plane_numbers<2, D>(planes, t, tile);
        else if (w.P == 3)
          plane_numbers<3, D>(planes, t, tile);
        else if (w.P == 4)
          plane_numbers<4, D>(planes, t, tile);
        else if (w.P == 5)
          plane_numbers<5, D>(planes, t, tile);
        else
          wide_numbers<D>(w, at, r, s, tile);
      }
    }
  }
}
