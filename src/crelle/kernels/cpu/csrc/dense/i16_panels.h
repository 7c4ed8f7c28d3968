// The loops of i16_gemm.h. A block of sums is R rows by a panel: R broadcasts and two loads for 2 R dot products.
//
// Included inside a namespace of the including file, after simd.h.

constexpr int kPanel = 2 * kPartLanes;
constexpr int kBlockRows = kPartLanes == 16 ? 8 : 4;  // sums of a block: 16 of 32 registers, or 8 of 16
constexpr int kStripPanels = 8;  // rows of outputs whose tokens (256 or 512 KB) stay in L2 while columns pass by
static_assert(kPanel % kBlockRows == 0);

// sum + the products of two pairs of 16-bit integers in each dword.
CRELLE_INLINE PartInt dot_pairs(PartInt sum, PartInt a, PartInt b) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
  return (PartInt)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return sum + (PartInt)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
  return (PartInt)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
  return sum + (PartInt)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

CRELLE_INLINE PartInt load_dwords(const int32_t *p) {
  PartInt v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// Magnitudes compare as integers, with what is not finite above all that is.
CRELLE_INLINE PartInt magnitude(Part v) { return (PartInt)v & 0x7fffffff; }
CRELLE_INLINE PartInt larger_int(PartInt a, PartInt b) { return a > b ? a : b; }

struct ChunkScale {
  float scale, inverse;
};
CRELLE_INLINE ChunkScale chunk_scale(int32_t largest) {
  float most;
  __builtin_memcpy(&most, &largest, sizeof most);
  if (largest >= 0x7f800000) return {most - most, 0};  // NaN
  if (most < 1e-30f) return {0, 0};
  return {most / kMostInt, kMostInt / most};
}

// In the low 16 bits: v / scale, rounded to nearest even.
CRELLE_INLINE PartInt to_int(Part v, Part inverse) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  // A chunk that is not finite gives any integers; its scale makes NaN of them.
  return (PartInt)(v * inverse + kRound) & 0xffff;
}

// Values [from, from + count) of a row as integers, then zeros up to whole pairs of `pairs`; returns the scale.
inline float pack_chunk(const float *from, int count, int pairs, int32_t *to) {
  PartInt most{};
  int k = 0;
  for (; k + kPartLanes <= count; k += kPartLanes) most = larger_int(most, magnitude(load_part(from + k)));
  int32_t largest = 0;
  for (int i = 0; i < kPartLanes; ++i) largest = most[i] > largest ? most[i] : largest;
  for (; k < count; ++k) {
    int32_t bits;
    __builtin_memcpy(&bits, from + k, sizeof bits);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  const ChunkScale s = chunk_scale(largest);
  const Part inverse = Part{} + s.inverse;
  using Short = int16_t __attribute__((vector_size(sizeof(Part) / 2)));
  auto *out = reinterpret_cast<char *>(to);
  for (k = 0; k < 2 * pairs; k += kPartLanes) {
    Part v;
    if (k + kPartLanes <= count) {
      v = load_part(from + k);
    } else {
      float some[kPartLanes] = {};
      if (k < count) __builtin_memcpy(some, from + k, (count - k) * sizeof(float));
      v = load_part(some);
    }
    const Short ints = __builtin_convertvector(to_int(v, inverse), Short);
    const int left = 2 * pairs - k;
    if (left >= kPartLanes)
      __builtin_memcpy(out + 2 * k, &ints, sizeof ints);
    else
      __builtin_memcpy(out + 2 * k, &ints, 2 * left);
  }
  return s.scale;
}

inline void pack_weight(const float *weight, const I16Panels &w, int panel0, int panel1) {
  const int K = w.sum.count;
  int32_t row[kChunkPairs];
  for (int panel = panel0; panel < panel1; ++panel)
    for (int i = 0; i < kPanel; ++i) {
      const int n = panel * kPanel + i;
      for (int c = 0; c < w.sum.chunks(); ++c) {
        const int first = w.sum.at(c), pairs = w.sum.at(c + 1) - first;
        int32_t *const to = w.panel(panel) + size_t(first) * kPanel + i;
        float &scale = w.scales[panel * w.panel_scales() + size_t(c) * kPanel + i];
        if (n >= w.N) {
          for (int p = 0; p < pairs; ++p) to[p * kPanel] = 0;
          scale = 0;
          continue;
        }
        const int left = K - 2 * first;
        scale = pack_chunk(weight + size_t(n) * K + 2 * first, left < 2 * pairs ? left : 2 * pairs, pairs, row);
        for (int p = 0; p < pairs; ++p) to[p * kPanel] = row[p];
      }
    }
}

// Sums over `pairs` of the rows of a by the panel b: the pairs of a row are Step dwords apart.
template <int Step>
CRELLE_INLINE void block_sums(const int32_t *a, size_t row, const int32_t *b, int pairs,
                              PartInt (&sums)[kBlockRows][2]) {
  PartInt low[kBlockRows] = {}, high[kBlockRows] = {};
  for (int p = 0; p < pairs; ++p, a += Step, b += kPanel) {
    const PartInt left = load_dwords(b), right = load_dwords(b + kPartLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kBlockRows; ++r) {
      const PartInt x = PartInt{} + a[r * row];
      low[r] = dot_pairs(low[r], x, left);
      high[r] = dot_pairs(high[r], x, right);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kBlockRows; ++r) sums[r][0] = low[r], sums[r][1] = high[r];
}

CRELLE_INLINE void store_outputs(float *y, Part low, Part high, int columns) {
  if (columns >= kPanel) {
    store_part(y, low);
    store_part(y + kPartLanes, high);
    return;
  }
  float some[kPanel];
  store_part(some, low);
  store_part(some + kPartLanes, high);
  __builtin_memcpy(y, some, columns * sizeof(float));
}

inline void multiply(const I16Product &p, int row0, int row1, uint8_t *room) {
  const I16Panels &w = p.w;
  const int pairs = w.sum.pairs(), chunks = w.sum.chunks(), K = w.sum.count, N = w.N;
  const int group = i16_group(w.sum, kBlockRows);
  auto *const ints = reinterpret_cast<int32_t *>(room);
  auto *const scales = reinterpret_cast<float *>(ints + size_t(group) * pairs);
  alignas(64) float sums[kMostRows][kPanel];
  for (int first = row0; first < row1; first += group) {
    const int rows = row1 - first < group ? row1 - first : group;
    const int blocks = (rows + kBlockRows - 1) / kBlockRows;
    for (int m = 0; m < blocks * kBlockRows; ++m)
      for (int c = 0; c < chunks; ++c) {
        const int at = w.sum.at(c), count = w.sum.at(c + 1) - at, left = K - 2 * at;
        // Rows beyond the last one repeat it; their sums are not stored.
        const float *const x = p.x + size_t(first + (m < rows ? m : rows - 1)) * K + 2 * at;
        scales[size_t(m) * chunks + c] =
            pack_chunk(x, left < 2 * count ? left : 2 * count, count, ints + size_t(m) * pairs + at);
      }
    for (int panel = 0; panel < w.panels(); ++panel) {
      const int n = panel * kPanel;
      for (int c = 0; c < chunks; ++c) {
        const int at = w.sum.at(c), count = w.sum.at(c + 1) - at;
        const int32_t *const b = w.panel(panel) + size_t(at) * kPanel;
        const Part left = load_part(w.scale(panel, c)), right = load_part(w.scale(panel, c) + kPartLanes);
        for (int block = 0; block < blocks; ++block) {
          const int m = block * kBlockRows;
          PartInt found[kBlockRows][2];
          block_sums<1>(ints + size_t(m) * pairs + at, pairs, b, count, found);
          for (int r = 0; r < kBlockRows; ++r) {
            const float scale = scales[size_t(m + r) * chunks + c];
            float *const sum = sums[m + r];
            const Part low = c ? load_part(sum) : load_part(p.bias + n);
            const Part high = c ? load_part(sum + kPartLanes) : load_part(p.bias + n + kPartLanes);
            const Part l = low + __builtin_convertvector(found[r][0], Part) * (left * scale);
            const Part h = high + __builtin_convertvector(found[r][1], Part) * (right * scale);
            if (c + 1 < chunks) {
              store_part(sum, l);
              store_part(sum + kPartLanes, h);
            } else if (m + r < rows) {
              store_outputs(p.y + size_t(first + m + r) * N + n, l, h, N - n);
            }
          }
        }
      }
    }
  }
}

// One vector of channels of two tokens, times the tokens' weights; zeros beyond the last channel or token.
struct TokenPair {
  const float *x, *full;
  size_t stride;
  const float *weight;
  int tokens, channels;

  CRELLE_INLINE Part read(const float *from, int t) const {
    if (t >= tokens) return Part{};
    from += t * stride;
    if (channels >= kPartLanes) return load_part(from);
    float some[kPartLanes] = {};
    if (channels > 0) __builtin_memcpy(some, from, channels * sizeof(float));
    return load_part(some);
  }
  CRELLE_INLINE float weight_of(int t) const { return t < tokens ? weight[t] : 0.0f; }
  CRELLE_INLINE Part value(int t) const { return read(x, t) * weight_of(t); }
  // Not w full - w x, of which the compiler may fuse one product: equal inputs would have a difference.
  CRELLE_INLINE Part difference(int t) const { return (read(full, t) - read(x, t)) * weight_of(t); }
};

template <class Value>
CRELLE_INLINE void pack_vector(int tokens, int pairs, Value &&value, int32_t *to, float *scales, float *abssum) {
  PartInt most{};
  Part sum{};
  for (int t = 0; t < tokens; ++t) {
    const PartInt bits = magnitude(value(t));
    most = larger_int(most, bits);
    sum += (Part)bits;
  }
  if (abssum) store_part(abssum, sum);
  alignas(64) float inverse[kPartLanes];
  for (int i = 0; i < kPartLanes; ++i) {
    const ChunkScale s = chunk_scale(most[i]);
    scales[i] = s.scale;
    inverse[i] = s.inverse;
  }
  const Part by = load_part(inverse);
  for (int p = 0; p < pairs; ++p, to += kPanel) {
    const PartInt first = to_int(value(2 * p), by), second = to_int(value(2 * p + 1), by), both = first | second << 16;
    __builtin_memcpy(to, &both, sizeof both);
  }
}

inline void pack_tokens(const I16Sums &s, const I16Tokens &t, int panel0, int panel1) {
  const I16Chunks &sum = t.a.sum;
  for (int panel = panel0; panel < panel1; ++panel)
    for (int c = 0; c < sum.chunks(); ++c)
      for (int half = 0; half < 2; ++half) {
        const int k = panel * kPanel + half * kPartLanes, first = sum.at(c), pairs = sum.at(c + 1) - first;
        const int left = sum.count - 2 * first, tokens = left < 2 * pairs ? left : 2 * pairs,
                  from = t.first + 2 * first;
        const size_t at = size_t(from) * s.K + (k < s.K ? k : 0);
        const TokenPair pair{s.x + at, s.full ? s.full + at : nullptr, size_t(s.K), s.weight + from, tokens, s.K - k};
        const size_t ints = size_t(first) * kPanel + half * kPartLanes;
        const size_t scales = panel * t.a.panel_scales() + size_t(c) * kPanel + half * kPartLanes;
        pack_vector(
            tokens, pairs, [&](int i) __attribute__((always_inline)) { return pair.value(i); }, t.a.panel(panel) + ints,
            t.a.scales + scales, t.abssum + size_t(c) * t.a.panels() * kPanel + k);
        if (s.full)
          pack_vector(
              tokens, pairs, [&](int i) __attribute__((always_inline)) { return pair.difference(i); },
              t.d.panel(panel) + ints, t.d.scales + scales, nullptr);
      }
}

// Outputs of panel i of `left` by panel j of `right`.
inline void add_block(const I16Panels &left, int i, const I16Panels &right, int j, float *to, int K) {
  alignas(64) float sums[kPanel][kPanel];
  const I16Chunks &sum = left.sum;
  for (int c = 0; c < sum.chunks(); ++c) {
    const size_t at = size_t(sum.at(c)) * kPanel;
    const int pairs = sum.at(c + 1) - sum.at(c);
    const float *const rows = left.scale(i, c), *const columns = right.scale(j, c);
    const Part low = load_part(columns), high = load_part(columns + kPartLanes);
    for (int m = 0; m < kPanel; m += kBlockRows) {
      PartInt found[kBlockRows][2];
      block_sums<kPanel>(left.panel(i) + at + m, 1, right.panel(j) + at, pairs, found);
      for (int r = 0; r < kBlockRows; ++r) {
        float *const here = sums[m + r];
        const Part a = __builtin_convertvector(found[r][0], Part) * (low * rows[m + r]);
        const Part b = __builtin_convertvector(found[r][1], Part) * (high * rows[m + r]);
        store_part(here, c ? load_part(here) + a : a);
        store_part(here + kPartLanes, c ? load_part(here + kPartLanes) + b : b);
      }
    }
  }
  const int row0 = i * kPanel, column0 = j * kPanel;
  const int rows = K - row0 < kPanel ? K - row0 : kPanel, columns = K - column0;
  for (int m = 0; m < rows; ++m) {
    float *const y = to + size_t(row0 + m) * K + column0;
    if (columns >= kPanel) {
      for (int h = 0; h < kPanel; h += kPartLanes) store_part(y + h, load_part(y + h) + load_part(sums[m] + h));
    } else {
      for (int n = 0; n < columns; ++n) y[n] += sums[m][n];
    }
  }
}

// In order: strips of rows, in them columns, in these the strip's blocks of H, then those of the cross products.
inline void add_products(const I16Sums &s, const I16Tokens &t, int64_t begin, int64_t end) {
  const int panels = t.a.panels();
  int64_t done = 0;
  for (int strip = 0; strip < panels && done < end; strip += kStripPanels) {
    const int rows = panels - strip < kStripPanels ? panels - strip : kStripPanels;
    for (int j = 0; j < panels && done < end; ++j) {
      const int upper = j + 1 - strip < 0 ? 0 : j + 1 - strip < rows ? j + 1 - strip : rows;
      for (int i = 0; i < upper; ++i, ++done)
        if (done >= begin && done < end) add_block(t.a, strip + i, t.a, j, s.hessian, s.K);
      for (int i = 0; s.full && i < rows; ++i, ++done)
        if (done >= begin && done < end) add_block(t.d, strip + i, t.a, j, s.cross, s.K);
    }
  }
}

constexpr I16Kernel kKernel{kPanel, kBlockRows, pack_weight, multiply, pack_tokens, add_products};
