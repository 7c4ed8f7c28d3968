// x as the integers that crelle.formats.activations defines, in the order of an integer matrix (integer_weight.h).
//
// Every step is the one operation of f32 that the format names: one division for a group, one product for a value. To
// clamp before rounding gives the same integers, and keeps a compiler from fusing the product with the rounding.
//
// Included inside a namespace of the including file, after encode.h and hadamard_blocks.h.

constexpr float kLeastIntegerScale = 0x1p-100f;

// The bits of the largest magnitude of n values: finite < infinity < NaN.
CRELLE_INLINE int top_magnitude(const float *x, int n) {
  Ints tops[2] = {};
  int k = 0;
  for (; k + 2 * kLanes <= n; k += 2 * kLanes) {
    tops[0] = larger((Ints)magnitude(load(x + k)), tops[0]);
    tops[1] = larger((Ints)magnitude(load(x + k + kLanes)), tops[1]);
  }
  int top = fold(larger(tops[0], tops[1]), larger);
  for (; k < n; ++k) {
    int bits;
    __builtin_memcpy(&bits, x + k, 4);
    bits &= 0x7fffffff;
    top = top > bits ? top : bits;
  }
  return top;
}

// Words of int8; returns their sum.
CRELLE_INLINE int round_words(const float *x, int width, float inverse, float least, float top, uint8_t *out) {
  const Floats low = Floats{} + least, high = Floats{} + top;
  Ints total = {};
  const auto word = [&](const float *from, uint8_t *to) __attribute__((always_inline)) {
    Ints bits[16 / kLanes];
    for (int e = 0; e < 16 / kLanes; ++e) {
      Floats v = load(from + e * kLanes) * inverse;
      v = v > high ? high : v;
      v = v < low ? low : v;
      bits[e] = (Ints)(v + kRound);
      total += bits[e] - kRoundBits;
    }
    store_low_bytes(to, bits);
  };
  int k = 0;
  for (; k + kIntegerWord <= width; k += kIntegerWord) word(x + k, out + k);
  if (k < width) {
    float rest[kIntegerWord] = {};
    for (int i = 0; k + i < width; ++i) rest[i] = x[k + i];
    word(rest, out + k);
  }
  return fold(total, plus<Ints>);
}

void encode_integer_row(const IntegerLayout &l, const float *x, uint8_t *row) {
  float *const scales = reinterpret_cast<float *>(row + l.scales_at);
  int32_t *const sums = reinterpret_cast<int32_t *>(row + l.sums_at);
  for (const IntegerGroup &g : l.groups) {
    const int bits = top_magnitude(x + g.begin, g.width);
    float scale;
    __builtin_memcpy(&scale, &bits, 4);
    scale *= g.factor;
    if (scale < kLeastIntegerScale) scale = 0.0f;
    const bool usable = scale > 0.0f && scale < __builtin_inff();  // neither 0 nor NaN
    const float inverse = usable ? 1.0f / scale : 0.0f;
    for (int i = g.span0; i < g.span1; ++i) {
      const IntegerSpan &s = l.spans[i];
      uint8_t *const out = row + s.word * kIntegerWord;
      scales[i] = scale;
      if (usable) {
        sums[i] = round_words(x + s.begin, s.width, inverse, g.least, g.top, out);
      } else {
        __builtin_memset(out, 0, s.words * kIntegerWord);
        sums[i] = 0;
      }
    }
  }
}

void encode_integer(const Weight &w, Activations &a, const float *x, size_t ldx, int m0, int m1) {
  static thread_local Buffer scratch;
  const IntegerLayout &l = *w.integer;
  float *stored = nullptr;
  if (!l.perm.empty() || l.rotated) scratch.grow(w.K * sizeof(float)), stored = floats_of(scratch);
  for (int m = m0; m < m1; ++m) {
    const float *from = x + size_t(m) * ldx;
    if (stored) {
      const int32_t *const perm = l.perm.data();
      for (int k = 0; k < w.K; ++k) stored[k] = from[l.perm.empty() ? k : perm[k]];
      from = stored;
    }
    if (l.rotated) {
      const int whole = l.rotated - l.rotated % l.block;
      rotate_blocks(stored, whole, l.block);
      rotate_blocks(stored + whole, l.rotated - whole, l.tail);
    }
    encode_integer_row(l, from, a.codes.data() + size_t(m) * a.row_bytes);
    a.factor(m) = 1.0f;  // NaN and infinities are in the scales
  }
}
