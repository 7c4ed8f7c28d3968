// Scales and codes of 16 outputs out of the streams of VBMI: the common start of all tiles of weights.
//
// Codes come as bytes, 32 inputs of an output at a time. Plane p is bit P-1-p, of a BCQ matrix as well.
//
// Included inside a namespace of the including file.

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

// Calls use(g, chunks of group g, scales) for every group of vector r (16 outputs) of block b.
template <class F>
CRELLE_INLINE void for_groups(const Weight &w, int b, int r, F &&use) {
  const uint8_t *at = w.block(b), *zeros = at;
  at += w.zeros_bytes;
  for (int g = 0; g < w.partition.groups; ++g, zeros += w.R) {
    GroupScales s;
    load_scales(w, at, zeros, r, s);
    at += w.scale_bytes;
    use(g, at, s);
    at += w.partition.chunks_of(g) * w.chunk_bytes;
  }
}

CRELLE_INLINE uint32_t dword_at(const uint8_t *p) {
  uint32_t v;
  __builtin_memcpy(&v, p, 4);
  return v;
}

// Quad planes: a plane's dword of an output is a mask of its 32 inputs.
template <int P, class F>
CRELLE_INLINE void plane_codes(const uint8_t *planes, F &&use) {
  for (int n = 0; n < 16; ++n) {
    __m256i codes = _mm256_setzero_si256();
    for (int p = 0; p < P; ++p)
      codes = _mm256_mask_add_epi8(codes, dword_at(planes + p * 64 + n * 4), codes,
                                   _mm256_set1_epi8(static_cast<char>(1 << (P - 1 - p))));
    use(n, codes);
  }
}

// Nibbles: dwords of four steps, `stride` apart. A 4 x 4 transpose inside each quarter brings an output's 16 bytes
// together.
template <class F>
CRELLE_INLINE void nibble_codes(const uint8_t *at, int stride, F &&use) {
  __m512i v[4];
  for (int j = 0; j < 4; ++j) v[j] = _mm512_load_si512(at + j * stride);
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
    for (int i = 0; i < 4; ++i)
      use(4 * i + k, _mm256_set_m128i(_mm_load_si128(reinterpret_cast<const __m128i *>(second + 16 * i)),
                                      _mm_load_si128(reinterpret_cast<const __m128i *>(first + 16 * i))));
  }
}

// Bytes: dwords of eight steps, `stride` apart.
template <class F>
CRELLE_INLINE void byte_codes(const uint8_t *at, int stride, F &&use) {
  for (int n = 0; n < 16; ++n) {
    alignas(32) uint8_t row[kChunk];
    for (int j = 0; j < 8; ++j) __builtin_memcpy(row + 4 * j, at + j * stride + n * 4, 4);
    use(n, _mm256_load_si256(reinterpret_cast<const __m256i *>(row)));
  }
}

// use(n, 32 codes) for outputs 16 r + n, n = 0 ... 15, of the chunk at `chunk`.
template <class F>
CRELLE_INLINE void for_codes(const Weight &w, const uint8_t *chunk, int r, F &&use) {
  if (w.stream == Stream::Nibbles) return nibble_codes(chunk + r * 64, w.R * 4, use);
  if (w.stream == Stream::Bytes) return byte_codes(chunk + r * 64, w.R * 4, use);
  const uint8_t *planes = chunk + size_t(r) * w.P * 64;
  switch (w.P) {
    case 1: return plane_codes<1>(planes, use);
    case 2: return plane_codes<2>(planes, use);
    case 3: return plane_codes<3>(planes, use);
    case 4: return plane_codes<4>(planes, use);
    case 5: return plane_codes<5>(planes, use);
    case 6: return plane_codes<6>(planes, use);
    case 7: return plane_codes<7>(planes, use);
    default: return plane_codes<8>(planes, use);
  }
}
