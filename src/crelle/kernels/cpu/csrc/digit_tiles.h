// 4- and 8-bit codes times the digits of several rows of x as tiles: the very sums of fields.h, to the last bit.
//
// Sums of a segment are integers, so whoever adds them up gets the same; scaling them is done here operation by
// operation as it is done there. So a row of x has the same bits alone, where fields.h is faster, and in a batch.
//
//   A   digits of x       16 rows x 64 inputs, int8, one tile per digit
//   B   codes             16 quads of inputs x 16 outputs, uint8: what a vector of the stream is, once it is unpacked
//   C   int32             16 rows x 16 outputs, one tile per digit: a vector of outputs for each row of x
//
// While the tiles of a segment multiply, the sums of the one before are stored, those of the one before that are
// scaled, and the codes of the next are unpacked.
//
// Included inside a namespace of the including file, after codes.h.

struct Stretch {  // a segment: where it lies in a block
  int codes, scales, chunks, group;
  bool ends_group;
};

// Rows [m0, m0 + M) of x, M <= 16, packed for tiles. Buffers grow once and stay.
struct PackedDigits {
  std::vector<Stretch> segments;
  Buffer buffer;
  uint8_t *tiles = nullptr;                // [step of 64 inputs][digit][16][64]
  float *scale = nullptr, *sum = nullptr;  // [segment][16], [group][16]
  uint8_t *codes = nullptr;                // two segments of B, in turn
  int *sums = nullptr;                     // two segments of C

  void pack(const Weight &w, const Activations &a, int m0, int M) {
    const Plan &p = w.plan;
    const int D = a.digits();
    segments.clear();
    int at = static_cast<int>(w.zeros_bytes), steps = 0;
    for (int g = 0; g < p.groups; ++g) {
      const int scales = at;
      at += static_cast<int>(w.scale_bytes);
      for (int left = p.chunks_of(g); left > 0; left -= kSegmentChunks) {
        const int n = std::min(left, kSegmentChunks);
        segments.push_back({at, scales, n, g, left <= kSegmentChunks});
        at += n * static_cast<int>(w.chunk_bytes);
        steps += (n + 1) / 2;
      }
    }
    const size_t tile_bytes = size_t(steps) * D * kTileBytes;
    buffer.grow(tile_bytes + (p.segments + p.groups) * 64 + 8 * kTileBytes);
    codes = buffer.data();
    sums = reinterpret_cast<int *>(codes + 4 * kTileBytes);
    tiles = codes + 8 * kTileBytes;
    scale = reinterpret_cast<float *>(tiles + tile_bytes), sum = scale + p.segments * 16;
    for (int m = 0; m < M; ++m) {
      for (int s = 0; s < p.segments; ++s) scale[s * 16 + m] = a.scales(m0 + m)[s];
      for (int g = 0; g < p.groups; ++g) sum[g * 16 + m] = a.sums(m0 + m)[g];
      const uint8_t *from = a.row(m0 + m);
      uint8_t *to = tiles + m * 64;
      const auto half = [](const uint8_t *at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)); };
      for (const Stretch &s : segments)
        for (int c = 0; c < s.chunks; c += 2) {
          for (int d = 0; d < D; ++d, to += kTileBytes) {
            const __m256i first = half(from + d * 32);
            const __m256i second = c + 1 < s.chunks ? half(from + (D + d) * 32) : _mm256_setzero_si256();
            _mm256_store_si256(reinterpret_cast<__m256i *>(to), first);
            _mm256_store_si256(reinterpret_cast<__m256i *>(to + 32), second);
          }
          from += std::min(2, s.chunks - c) * D * 32;
        }
    }
  }
};

// The codes of a segment for 16 outputs, as B tiles. Half a tile that is left holds what was there before: the digits
// for it are 0.
template <int Bits>
CRELLE_INLINE void unpack_codes(const Weight &w, const uint8_t *from, int chunks, int r, uint8_t *to) {
  constexpr int kSteps = Bits == 4 ? 4 : 8;
  const int stride = w.R * 4;
  const __m512i low = _mm512_set1_epi8(0x0f);
  for (int c = 0; c < chunks; ++c, from += w.chunk_bytes, to += kTileBytes / 2)
#pragma GCC unroll 8
    for (int j = 0; j < kSteps; ++j) {
      const uint8_t *at = from + j * stride + r * 64;
      prefetch_stream(at);
      const __m512i codes = load_once(at);
      if constexpr (Bits == 4) {
        _mm512_store_si512(to + 128 * j, _mm512_and_si512(codes, low));
        _mm512_store_si512(to + 128 * j + 64, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low));
      } else {
        _mm512_store_si512(to + 64 * j, codes);
      }
    }
}

// Segments take turns with two sets of tiles: sums of the first and of the second digit, codes, digits. The intrinsics
// want the tiles' numbers as they are written, hence the macro.
template <int Set, int D>
struct TileSet;

#define CRELLE_TILE_SET(SET, FIRST, SECOND, CODES, DIGITS)                                        \
  template <int D>                                                                                \
  struct TileSet<SET, D> {                                                                        \
    static CRELLE_INLINE void multiply(const uint8_t *codes, const uint8_t *digits, int chunks) { \
      _tile_zero(FIRST);                                                                          \
      if constexpr (D == 2) _tile_zero(SECOND);                                                   \
      for (int c = 0; c < chunks; c += 2, codes += kTileBytes, digits += D * kTileBytes) {        \
        _tile_loadd(CODES, codes, 64);                                                            \
        _tile_loadd(DIGITS, digits, 64);                                                          \
        _tile_dpbsud(FIRST, DIGITS, CODES);                                                       \
        if constexpr (D == 2) {                                                                   \
          _tile_loadd(DIGITS, digits + kTileBytes, 64);                                           \
          _tile_dpbsud(SECOND, DIGITS, CODES);                                                    \
        }                                                                                         \
      }                                                                                           \
    }                                                                                             \
    static CRELLE_INLINE void store(int *sums) {                                                  \
      _tile_stored(FIRST, sums, 64);                                                              \
      if constexpr (D == 2) _tile_stored(SECOND, sums + 256, 64);                                 \
      settle_memory();                                                                            \
    }                                                                                             \
  }
CRELLE_TILE_SET(0, 0, 1, 2, 3);
CRELLE_TILE_SET(1, 4, 5, 6, 7);
#undef CRELLE_TILE_SET

// Calls use(m) for m = 0 ... 15, each a constant: an array that is only indexed by constants stays in registers.
template <class F>
CRELLE_INLINE void each_row(F &&use) {
  const auto all = [&]<int... m>(std::integer_sequence<int, m...>)
                       __attribute__((always_inline)) { (use(std::integral_constant<int, m>{}), ...); };
  all(std::make_integer_sequence<int, 16>{});
}

// Add the sums of segment s, scaled, to f: operation by operation as field_block does it.
template <int Bits, int D>
CRELLE_INLINE void add_scaled(const Weight &w, const PackedDigits &x, const uint8_t *block, int r, int s,
                              __m512 (&f)[16]) {
  const Stretch at = x.segments[s];
  const __m512 scale = scales16(w, block + at.scales, r);
  const int *hi = x.sums + (s & 1) * 512, *lo = hi + 256;
  const float *unit = x.scale + s * 16, *sum = x.sum + at.group * 16;
  each_row([&](auto m) __attribute__((always_inline)) {
    __m512i total = _mm512_load_si512(hi + m * 16);
    if constexpr (D == 2) total = _mm512_add_epi32(_mm512_slli_epi32(total, 8), _mm512_load_si512(lo + m * 16));
    const __m512 t = _mm512_mul_ps(_mm512_cvtepi32_ps(total), _mm512_set1_ps(unit[m]));
    f[m] = _mm512_fmadd_ps(t, scale, f[m]);
  });
  if (!at.ends_group) return;
  __m512 zero = _mm512_set1_ps(1 << (Bits - 1));
  if (w.bias) {
    const __m128i stored = _mm_load_si128(reinterpret_cast<const __m128i *>(block + at.group * w.R + 16 * r));
    zero = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(stored));
  }
  const __m512 offset = _mm512_mul_ps(zero, scale);
  each_row([&](auto m)
               __attribute__((always_inline)) { f[m] = _mm512_fnmadd_ps(offset, _mm512_set1_ps(sum[m]), f[m]); });
}

// 16 outputs of block b, from 16 r on, for all packed rows.
template <int Bits, int D>
CRELLE_INLINE void digit_block(const Weight &w, const PackedDigits &x, int M, int b, int r, float *y, size_t ldy) {
  const uint8_t *block = w.block(b), *digits = x.tiles;
  const int count = static_cast<int>(x.segments.size());
  __m512 f[16];
  each_row([&](auto m) __attribute__((always_inline)) { f[m] = _mm512_setzero_ps(); });
  const auto codes = [&](int s) __attribute__((always_inline)) { return x.codes + (s & 1) * 2 * kTileBytes; };
  const auto unpack = [&](int s) __attribute__((always_inline)) {
    unpack_codes<Bits>(w, block + x.segments[s].codes, x.segments[s].chunks, r, codes(s));
  };
  const auto sums = [&](int s) __attribute__((always_inline)) { return x.sums + (s & 1) * 512; };
  const auto step = [&](auto set, int s) __attribute__((always_inline)) {
    if (s < count) {
      const int chunks = x.segments[s].chunks;
      TileSet<set, D>::multiply(codes(s), digits, chunks);
      digits += (chunks + 1) / 2 * D * kTileBytes;
    }
    if (s > 0 && s <= count) TileSet<1 - set, D>::store(sums(s - 1));
    if (s + 1 < count) unpack(s + 1);
    if (s > 1 && s <= count + 1) add_scaled<Bits, D>(w, x, block, r, s - 2, f);
  };
  unpack(0);
  settle_memory();
  for (int s = 0; s < count + 2; s += 2) {
    step(std::integral_constant<int, 0>{}, s);
    step(std::integral_constant<int, 1>{}, s + 1);
  }

  const int left = w.N - b * w.R - 16 * r;
  const __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
  each_row([&](auto m) __attribute__((always_inline)) {
    if (m < M) _mm512_mask_storeu_ps(y + m * ldy + size_t(b) * w.R + 16 * r, mask, f[m]);
  });
}

// Apart from its caller, so that the thread's own memory is found once and not, by a call, in every loop.
template <int Bits, int D>
__attribute__((noipa)) void digit_rows(PackedDigits &x, const Weight &w, const Activations &a, int m0, float *y,
                                       size_t ldy, int b0, int b1) {
  const int M = std::min(16, a.M - m0);
  x.pack(w, a, m0, M);
  TileConfig config;
  for (const int tile : {0, 1, 3, 4, 5, 7}) config.rows[tile] = static_cast<uint8_t>(M);
  settle_memory();
  _tile_loadconfig(&config);
  for (int b = b0; b < b1; ++b)
    for (int r = 0; r < w.R / 16; ++r) digit_block<Bits, D>(w, x, M, b, r, y + m0 * ldy, ldy);
  _tile_release();
}

template <int Bits, int D>
void digit_blocks(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  static thread_local PackedDigits x;
  for (int m0 = 0; m0 < a.M; m0 += 16) digit_rows<Bits, D>(x, w, a, m0, y, ldy, b0, b1);
}

constexpr int kDigitRows = 5;  // of x from which on tiles are the faster way

void matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  if (takes_tables(w.stream) || a.M < kDigitRows) return kVbmi.matmul(w, a, y, ldy, b0, b1);
  const bool one = a.precision == Precision::Int8;
  if (w.stream == Stream::Nibbles)
    (one ? digit_blocks<4, 1> : digit_blocks<4, 2>)(w, a, y, ldy, b0, b1);
  else
    (one ? digit_blocks<8, 1> : digit_blocks<8, 2>)(w, a, y, ldy, b0, b1);
}
