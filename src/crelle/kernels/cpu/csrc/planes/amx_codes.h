// 4- and 8-bit codes times the digits of several rows of x as tiles: the very sums of vnni_codes.h, to the last bit.
//
// Sums of a segment are integers, so whoever adds them up gets the same; they are scaled here with the roundings that
// they have there. So a row of x has the same bits alone, where vnni_codes.h is faster, and in a batch.
//
//   A   digits of x       16 rows x 64 inputs, int8, one tile per digit
//   B   codes             16 quads of inputs x 16 outputs, uint8: what a vector of the stream is, once it is unpacked
//   C   int32             16 rows x 16 outputs, one tile per digit: a vector of outputs for each row of x
//
// Three things are under way at any time, each on other data, because a tile that was just multiplied takes long to be
// stored, and a vector that was just stored takes long to be a tile:
//
//   unpack     codes of a segment, three segments ahead
//   multiply   a few segments one after the other, two sets of tiles in turn: a part
//   scale      the sums of the part before
//
// All of it must stay in L1 beside the digits (18 KB of 48 for 576 inputs), which is why parts are short: sums of nine
// segments instead of three made it a third slower.
//
// Included inside a namespace of the including file, after unpack_codes.h.

struct Stretch {  // a segment: where it lies in a block
  int codes, scales, chunks, group;
  bool ends_group;
};

constexpr int kRing = 4;  // segments of codes that are unpacked, the one that multiplies included
constexpr int kPart = 3;  // segments whose sums are scaled together; more would not stay in L1

// Rows [m0, m0 + M) of x, M <= 16, packed for tiles. Buffers grow once and stay.
struct PackedDigits {
  std::vector<Stretch> segments;
  Buffer buffer;
  uint8_t *tiles = nullptr;                // [step of 64 inputs][digit][16][64]
  float *scale = nullptr, *sum = nullptr;  // [segment][16], [group][16]
  uint8_t *codes = nullptr;                // [kRing] segments of B
  int *sums = nullptr;                     // two parts of C, in turn
  int codes_bytes = 0;                     // of a segment

  void pack(const Weight &w, const Activations &a, int m0, int M) {
    const KPartition &p = w.partition;
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
    codes_bytes = (std::min(kSegmentChunks, p.full_chunks) + 1) / 2 * kTileBytes;
    const size_t ring = kRing * codes_bytes + 2 * kPart * 2 * kTileBytes;
    buffer.grow(tile_bytes + (p.segments + p.groups) * 64 + ring);
    codes = buffer.data();
    sums = reinterpret_cast<int *>(codes + kRing * codes_bytes);
    tiles = codes + ring;
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
      __builtin_prefetch(at + kFar, 0, 2);
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
// want the tiles' indices as literals, hence the macro.
template <int Set, int D>
struct TileSet;

#define CRELLE_TILE_SET(SET, FIRST, SECOND, CODES, DIGITS)                            \
  template <int D>                                                                    \
  struct TileSet<SET, D> {                                                            \
    static CRELLE_INLINE void begin() {                                               \
      _tile_zero(FIRST);                                                              \
      if constexpr (D == 2) _tile_zero(SECOND);                                       \
    }                                                                                 \
    static CRELLE_INLINE void multiply(const uint8_t *codes, const uint8_t *digits) { \
      _tile_loadd(CODES, codes, 64);                                                  \
      _tile_loadd(DIGITS, digits, 64);                                                \
      _tile_dpbsud(FIRST, DIGITS, CODES);                                             \
      if constexpr (D == 2) {                                                         \
        _tile_loadd(DIGITS, digits + kTileBytes, 64);                                 \
        _tile_dpbsud(SECOND, DIGITS, CODES);                                          \
      }                                                                               \
    }                                                                                 \
    static CRELLE_INLINE void store(int *sums) {                                      \
      _tile_stored(FIRST, sums, 64);                                                  \
      if constexpr (D == 2) _tile_stored(SECOND, sums + 256, 64);                     \
    }                                                                                 \
  }
CRELLE_TILE_SET(0, 0, 1, 2, 3);
CRELLE_TILE_SET(1, 4, 5, 6, 7);
#undef CRELLE_TILE_SET

// Calls use(m) for m = 0 ... Rows - 1, each a constant: an array that is only indexed by constants stays in registers.
template <int Rows, class F>
CRELLE_INLINE void each_row(F &&use) {
  const auto all = [&]<int... m>(std::integer_sequence<int, m...>)
                       __attribute__((always_inline)) { (use(std::integral_constant<int, m>{}), ...); };
  all(std::make_integer_sequence<int, Rows>{});
}

// Adds the sums of a segment, scaled, to f: with the roundings of field_block.
//
// Integers become floats by additions alone, because for some 150 cycles after a tile instruction every other
// conversion, product and multiply-add has to wait (they share a port with the tiles; sums do not). An integer added to
// the bits of 1.5 * 2^23 counts units of that float, and 256ths of it added to those of 1.5 * 2^31: what is subtracted
// is exact, so that 256 hi + lo is rounded once, as a conversion rounds it.
template <int D>
constexpr int kBits = D == 2 ? 0x4f400000 : 0x4b400000;
template <int D>
constexpr float kValue = D == 2 ? 3221225472.0f : 12582912.0f;

template <int Bits, int D>
struct Scaling {
  const int *hi, *lo;
  const float *unit, *sum;
  __m512 scale, offset;
  bool ends_group;

  CRELLE_INLINE Scaling(const Weight &w, const PackedDigits &x, const uint8_t *block, int r, int s, const int *sums) {
    const Stretch &at = x.segments[s];
    hi = sums, lo = sums + 256;
    unit = x.scale + s * 16, sum = x.sum + at.group * 16;
    scale = scales16(w, block + at.scales, r);
    ends_group = at.ends_group;
    __m512 zero = _mm512_set1_ps(1 << (Bits - 1));
    if (w.bias) {
      const __m128i stored = _mm_load_si128(reinterpret_cast<const __m128i *>(block + at.group * w.R + 16 * r));
      zero = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(stored));
    }
    offset = _mm512_mul_ps(zero, scale);
  }

  template <int Rows>
  CRELLE_INLINE void add_to(__m512 (&f)[Rows]) const {
    each_row<Rows>([&](auto m) __attribute__((always_inline)) {
      const __m512i high = _mm512_add_epi32(_mm512_load_si512(hi + m * 16), _mm512_set1_epi32(kBits<D>));
      __m512 total;
      if constexpr (D == 2) {
        const __m512i low = _mm512_add_epi32(_mm512_load_si512(lo + m * 16), _mm512_set1_epi32(kBits<1>));
        const __m512 rest = _mm512_sub_ps(_mm512_castsi512_ps(high), _mm512_set1_ps(kValue<2> + kValue<1>));
        total = _mm512_add_ps(rest, _mm512_castsi512_ps(low));
      } else {
        total = _mm512_sub_ps(_mm512_castsi512_ps(high), _mm512_set1_ps(kValue<1>));
      }
      f[m] = _mm512_fmadd_ps(_mm512_mul_ps(total, _mm512_set1_ps(unit[m])), scale, f[m]);
    });
    if (!ends_group) return;
    each_row<Rows>(
        [&](auto m) __attribute__((always_inline)) { f[m] = _mm512_fnmadd_ps(offset, _mm512_set1_ps(sum[m]), f[m]); });
  }
};

// A segment of 16 outputs of a block.
struct Place {
  const Weight &w;
  const int count;  // segments
  int b, r = 0, s = 0;
  const uint8_t *block = w.block(b);

  CRELLE_INLINE void next() {
    if (++s < count) return;
    s = 0;
    if (++r < w.R / 16) return;
    r = 0;
    block = w.block(++b);
  }
};

struct Part {  // segments [s0, s1) of 16 outputs, and where their sums lie
  int b, r, s0, s1;
  int *sums;
};

// Blocks [b0, b1) for all packed rows.
template <int Bits, int D, int Rows>
CRELLE_INLINE void digit_panel(const Weight &w, const PackedDigits &x, int M, int b0, int b1, float *y, size_t ldy) {
  const int count = static_cast<int>(x.segments.size());
  int left = (b1 - b0) * (w.R / 16) * count;  // segments that are not unpacked yet
  Place ahead{w, count, b0};
  const auto codes = [&](int u) __attribute__((always_inline)) { return x.codes + (u % kRing) * x.codes_bytes; };
  const auto unpack = [&](int u) __attribute__((always_inline)) {
    if (--left < 0) return;
    const Stretch &at = x.segments[ahead.s];
    unpack_codes<Bits>(w, ahead.block + at.codes, at.chunks, ahead.r, codes(u));
    ahead.next();
  };
  for (int u = 0; u < kRing - 1; ++u) unpack(u);
  compiler_fence();

  const uint8_t *digits = x.tiles;
  const auto multiply = [&](auto set, int u, int s, int *sums, bool first) __attribute__((always_inline)) {
    using Now = TileSet<set, D>;
    const int chunks = x.segments[s].chunks;
    const uint8_t *from = codes(u);
    Now::begin();
    for (int c = 0; c < chunks; c += 2, digits += D * kTileBytes, from += kTileBytes) Now::multiply(from, digits);
    if (!first) TileSet<1 - set, D>::store(sums - 512);
    compiler_fence();
    unpack(u + kRing - 1);
  };

  __m512 f[Rows];
  const auto scale = [&](const Part &p) __attribute__((always_inline)) {
    const int n = p.b * w.R + 16 * p.r, outputs = w.N - n;
    if (p.s0 == 0) each_row<Rows>([&](auto m) __attribute__((always_inline)) { f[m] = _mm512_setzero_ps(); });
    if (p.s1 == count)
      each_row<Rows>([&](auto m) __attribute__((always_inline)) { __builtin_prefetch(y + m * ldy + n, 1); });
    for (int s = p.s0; s < p.s1; ++s) Scaling<Bits, D>(w, x, w.block(p.b), p.r, s, p.sums + (s - p.s0) * 512).add_to(f);
    if (p.s1 < count) return;
    const __mmask16 mask = outputs >= 16 ? 0xffff : outputs > 0 ? (1u << outputs) - 1 : 0;
    each_row<Rows>([&](auto m) __attribute__((always_inline)) {
      if (m < M) _mm512_mask_storeu_ps(y + m * ldy + n, mask, f[m]);
    });
  };

  constexpr std::integral_constant<int, 0> even;
  constexpr std::integral_constant<int, 1> odd;
  Part now{b0, 0, 0, 0, x.sums}, before{};
  for (int u = 0; now.b < b1;) {
    now.s1 = std::min(count, now.s0 + kPart);
    if (now.s0 == 0) digits = x.tiles;
    int s = now.s0, *sums = now.sums;
    for (; s + 2 <= now.s1; s += 2, u += 2, sums += 1024) {
      multiply(even, u, s, sums, s == now.s0);
      multiply(odd, u + 1, s + 1, sums + 512, false);
    }
    if (s < now.s1) {
      multiply(even, u++, s, sums, s == now.s0);
      TileSet<0, D>::store(sums);
    } else {
      TileSet<1, D>::store(sums - 512);
    }
    compiler_fence();
    if (before.sums) scale(before);
    before = now;
    now.sums = now.sums == x.sums ? x.sums + kPart * 512 : x.sums;
    now.s0 = now.s1 < count ? now.s1 : 0;
    if (now.s0 == 0 && ++now.r == w.R / 16) now.r = 0, ++now.b;
  }
  if (before.sums) scale(before);
}

// Apart from its caller, so that the thread's own memory is found once and not, by a call, in every loop.
template <int Bits, int D>
__attribute__((noipa)) void digit_rows(PackedDigits &x, const Weight &w, const Activations &a, int m0, float *y,
                                       size_t ldy, int b0, int b1) {
  const int M = std::min(16, a.M - m0);
  x.pack(w, a, m0, M);
  TileConfig config;
  for (const int tile : {0, 1, 3, 4, 5, 7}) config.rows[tile] = static_cast<uint8_t>(M);
  compiler_fence();
  _tile_loadconfig(&config);
  if (M <= 8)
    digit_panel<Bits, D, 8>(w, x, M, b0, b1, y + m0 * ldy, ldy);
  else
    digit_panel<Bits, D, 16>(w, x, M, b0, b1, y + m0 * ldy, ldy);
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
