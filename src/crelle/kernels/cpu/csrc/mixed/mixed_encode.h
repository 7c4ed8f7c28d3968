// x for a mixed matrix (mixed_weight.h): gathered group by group in the order of the weight, then digits, as encode.h
// makes them, [16 inputs of the first digit][16 of the second] for every word.
//
// Zeros of 2-bit groups are in half steps: sum (q - zero) x needs half of the group's sum of integers. So an odd sum is
// made even; the input that lay closest to the middle between two integers is rounded the other way, which adds less
// than a tenth to the error of rounding.
//
// Included inside a namespace of the including file, after encode.h.

// 128 inputs as integers; returns what a unit is worth.
template <int D>
CRELLE_INLINE float round_inputs(const float *x, int *out, float &inverse, int &most) {
  const int bits = measure_digits(x, kSegmentChunks);
  most = most > bits ? most : bits;
  float top;
  __builtin_memcpy(&top, &bits, 4);
  const float scale = top / kTop<D>;
  inverse = scale > kLeastScale ? 1.0f / scale : 0.0f;
  for (int k = 0; k < kSegment; k += kLanes) {
    const Ints v = (Ints)(load(x + k) * inverse + kRound) - kRoundBits;
    __builtin_memcpy(out + k, &v, sizeof v);
  }
  return scale;
}

// An even sum of `count` integers.
template <int D>
CRELLE_INLINE int make_even(const float *x, int *v, int count, float inverse) {
  int sum = 0;
  for (int k = 0; k < count; ++k) sum += v[k];
  if (sum % 2 == 0) return sum;
  int at = 0;
  float most = -1.0f;
  for (int k = 0; k < count; ++k) {
    const float off = x[k] * inverse - static_cast<float>(v[k]), size = off < 0 ? -off : off;
    if (size > most) most = size, at = k;
  }
  constexpr int kEnd = static_cast<int>(kTop<D>);
  bool up = x[at] * inverse > static_cast<float>(v[at]);
  if (v[at] >= kEnd) up = false;
  if (v[at] <= -kEnd) up = true;
  v[at] += up ? 1 : -1;
  return up ? sum + 1 : sum - 1;
}

template <int D>
CRELLE_INLINE void store_digits(const int *v, int words, uint8_t *out) {
  for (int i = 0; i < words; ++i, v += kWord, out += kWord * D) {
    Ints bits[16 / kLanes], high[16 / kLanes];
    for (int e = 0; e < 16 / kLanes; ++e) {
      __builtin_memcpy(&bits[e], v + e * kLanes, sizeof(Ints));
      high[e] = (bits[e] + 128) >> 8;
    }
    if constexpr (D == 2) store_low_bytes(out, high);
    store_low_bytes(out + (D - 1) * kWord, bits);
  }
}

template <int D>
void encode_mixed_row(const Weight &w, Activations &a, const float *x, int m) {
  const MixedLayout &l = *w.mixed;
  const MixedInputs in(w.K, l.G, D);
  uint8_t *const row = a.codes.data() + size_t(m) * a.row_bytes, *digits = row;
  int32_t *zeros = reinterpret_cast<int32_t *>(row + in.zeros);
  int16_t *halves = reinterpret_cast<int16_t *>(row + in.halves);
  float *scale2 = reinterpret_cast<float *>(row + in.scales2), *scale4 = reinterpret_cast<float *>(row + in.scales4);
  float *const copy = reinterpret_cast<float *>(row + in.x);
  __builtin_memcpy(copy, x, sizeof(float) * w.K);
  const int groups_at_once = kSegment / l.G, groups2 = l.units * kUnitGroups;
  int most = 0;
  float sum4 = 0, inverse;
  const auto gather = [&](int from, int to, float *v) {  // groups [from, to) as they lie
    for (int i = from; i < to; ++i, v += l.G) {
      const int64_t at = int64_t(l.order[i]) * l.G;
      const int n = w.K - at < l.G ? static_cast<int>(w.K - at) : l.G;
      for (int k = 0; k < n; ++k) v[k] = x[at + k];
    }
  };
  for (int c = 0; c < groups2; c += groups_at_once) {
    float v[kSegment] = {};
    int rounded[kSegment];
    const int n = groups2 - c < groups_at_once ? groups2 - c : groups_at_once;
    gather(c, c + n < l.C2 ? c + n : l.C2, v);
    const float scale = round_inputs<D>(v, rounded, inverse, most);
    for (int i = 0; i < n; ++i, zeros += 4) {
      const int half = make_even<D>(v + i * l.G, rounded + i * l.G, l.G, inverse) / 2;
      for (int z = 0; z < 4; ++z) zeros[z] = -half * (z + 1);
      const int high = D == 2 ? (128 - half) >> 8 : 0;
      *halves++ = static_cast<int16_t>(high);
      *halves++ = static_cast<int16_t>(-half - 256 * high);
      *scale2++ = scale;
    }
    const int words = n * l.G / kWord;
    store_digits<D>(rounded, words, digits);
    digits += words * kWord * D;
  }
  for (int c = 0; c < l.C4; c += groups_at_once) {
    float v[kSegment] = {};
    int rounded[kSegment], sum = 0;
    const int n = l.C4 - c < groups_at_once ? l.C4 - c : groups_at_once, words = (n * l.G + kWord - 1) / kWord;
    gather(l.C2 + c, l.C2 + c + n, v);
    const float scale = round_inputs<D>(v, rounded, inverse, most);
    for (int k = 0; k < kSegment; ++k) sum += rounded[k];
    store_digits<D>(rounded, words, digits);
    digits += words * kWord * D;
    *scale4++ = scale;
    sum4 += static_cast<float>(sum) * scale;
  }
  __builtin_memcpy(row + in.sum4, &sum4, sizeof sum4);
  a.factor(m) = most == 0 || (most >= kLeastTop && most < kMostTop) ? 1.0f : 0.0f;  // see encode_row
}

void encode_mixed(const Weight &w, Activations &a, const float *x, size_t ldx, int m0, int m1) {
  for (int m = m0; m < m1; ++m)
    if (a.precision == Precision::Int8)
      encode_mixed_row<1>(w, a, x + size_t(m) * ldx, m);
    else
      encode_mixed_row<2>(w, a, x + size_t(m) * ldx, m);
}
