// x for a trellis matrix (trellis_weight.h): rotated if the matrix is, then rounded to integers of 8 or 16 bits.
//
// Digits: of 16 bits the high and the low byte (value = 256 hi + lo), for products of bytes; otherwise int16.
//
// Included inside a namespace of the including file, after encode.h and hadamard_blocks.h.

template <bool Digits, int D>
CRELLE_INLINE void store_integers(uint8_t *out, const Ints (&v)[kTrellisInputs / kLanes]) {
  constexpr int kOf16 = 16 / kLanes;
  for (int half = 0; half < 2; ++half) {
    Ints low[kOf16], high[kOf16];
    for (int e = 0; e < kOf16; ++e) {
      low[e] = v[half * kOf16 + e];
      high[e] = (low[e] + 128) >> 8;
    }
    if constexpr (Digits) {
      if constexpr (D == 2) store_low_bytes(out + 16 * half, high);
      store_low_bytes(out + (D - 1) * kTrellisInputs + 16 * half, low);
    } else {
      int all[16];
      int16_t narrow[16];
      __builtin_memcpy(all, low, sizeof all);
      for (int i = 0; i < 16; ++i) narrow[i] = static_cast<int16_t>(all[i]);
      __builtin_memcpy(out + sizeof narrow * half, narrow, sizeof narrow);
    }
  }
}

// x: whole steps. Two passes, as encode_row makes them; it leaves the same rows to the caller.
template <bool Digits, int D>
void encode_trellis_row(const TrellisLayout &l, Activations &a, const float *x, int m) {
  constexpr int kVectors = kTrellisInputs / kLanes;
  uint8_t *const row = a.codes.data() + size_t(m) * a.row_bytes;
  float *const scales = reinterpret_cast<float *>(row + l.scales_at);
  int32_t *const sums = reinterpret_cast<int32_t *>(row + l.sums_at);
  int most = 0;
  for (int s = 0; s < l.segments; ++s) {
    const int end = (s + 1) * l.segment < l.steps ? (s + 1) * l.segment : l.steps;
    Ints tops[kVectors] = {};
    for (int i = s * l.segment; i < end; ++i)
      for (int e = 0; e < kVectors; ++e)
        tops[e] = larger((Ints)magnitude(load(x + i * kTrellisInputs + e * kLanes)), tops[e]);
    int all[kTrellisInputs];
    __builtin_memcpy(all, tops, sizeof all);
    for (int i = 0; i < kTrellisLanes; ++i) {
      const int bits = all[2 * i] > all[2 * i + 1] ? all[2 * i] : all[2 * i + 1];
      float top;
      __builtin_memcpy(&top, &bits, 4);
      most = most > bits ? most : bits;
      scales[s * kTrellisLanes + i] = top / kTop<D>;
    }
  }
  const bool usual = most == 0 || (most >= kLeastTop && most < kMostTop);
  a.factor(m) = usual ? 1.0f : 0.0f;
  if (!usual) return;
  for (int s = 0; s < l.segments; ++s) {
    const int end = (s + 1) * l.segment < l.steps ? (s + 1) * l.segment : l.steps;
    float inverse[kTrellisInputs];
    for (int i = 0; i < kTrellisInputs; ++i) {
      const float scale = scales[s * kTrellisLanes + i / 2];
      inverse[i] = scale > kLeastScale ? 1.0f / scale : 0.0f;
    }
    Ints total[kVectors] = {};
    for (int i = s * l.segment; i < end; ++i) {
      Ints v[kVectors];
      for (int e = 0; e < kVectors; ++e) {
        const Floats scaled = load(x + i * kTrellisInputs + e * kLanes) * load(inverse + e * kLanes);
        v[e] = (Ints)(scaled + kRound) - kRoundBits;
        total[e] += v[e];
      }
      store_integers<Digits, D>(row + i * (Digits ? kTrellisInputs * D : int(kTrellisStepBytes)), v);
    }
    int all[kTrellisInputs];
    __builtin_memcpy(all, total, sizeof all);
    for (int i = 0; i < kTrellisLanes; ++i) sums[s * kTrellisLanes + i] = all[2 * i] + all[2 * i + 1];
  }
}

// x [n] times H of a rotation, without its signs; `room` [block].
CRELLE_INLINE void rotate_inputs(const Rotation &r, float *x, int n, float *room) {
  sylvester_blocks(x, n, r.step);
  if (r.order > 1)
    for (float *block = x; block < x + n; block += r.block) {
      __builtin_memcpy(room, block, r.block * sizeof(float));
      for (int i = 0; i < r.order; i += 4) {  // orders are multiples of 4: four sums share what they load
        const float *const p = r.paley.data() + i * r.order;
        int l = 0;
        for (; l + kLanes <= r.step; l += kLanes) {
          Floats sums[4] = {};
          for (int j = 0; j < r.order; ++j) {
            const Floats v = load(room + j * r.step + l);
            for (int e = 0; e < 4; ++e) sums[e] += v * p[e * r.order + j];
          }
          for (int e = 0; e < 4; ++e) __builtin_memcpy(block + (i + e) * r.step + l, &sums[e], sizeof sums[e]);
        }
        for (; l < r.step; ++l)
          for (int e = 0; e < 4; ++e) {
            float sum = 0;
            for (int j = 0; j < r.order; ++j) sum += room[j * r.step + l] * p[e * r.order + j];
            block[(i + e) * r.step + l] = sum;
          }
      }
    }
  const float root = r.root();
  for (int i = 0; i < n; ++i) x[i] *= root;
}

// x, rotated, with zeros up to a whole step; `to` has room for that and a block.
CRELLE_INLINE const float *trellis_inputs(const TrellisLayout &l, int K, const float *x, float *to) {
  const int end = l.steps * kTrellisInputs;
  if (l.inputs.empty()) {
    if (K == end) return x;
    __builtin_memcpy(to, x, K * sizeof(float));
  } else {
    const float *const signs = l.inputs.signs.data();
    for (int k = 0; k < K; ++k) to[k] = x[k] * signs[k];
    rotate_inputs(l.inputs, to, K, to + end);
  }
  for (int k = K; k < end; ++k) to[k] = 0;
  return to;
}

template <bool Digits>
void encode_trellis(const Weight &w, Activations &a, const float *x, size_t ldx, int m0, int m1) {
  static thread_local Buffer scratch;
  const TrellisLayout &l = *w.trellis;
  scratch.grow((l.steps * kTrellisInputs + l.inputs.block) * sizeof(float));
  for (int m = m0; m < m1; ++m) {
    const float *const inputs = trellis_inputs(l, w.K, x + size_t(m) * ldx, floats_of(scratch));
    if (a.precision == Precision::Int8)
      encode_trellis_row<Digits, 1>(l, a, inputs, m);
    else
      encode_trellis_row<Digits, 2>(l, a, inputs, m);
  }
}
