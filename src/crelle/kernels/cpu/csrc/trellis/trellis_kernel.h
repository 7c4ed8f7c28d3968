// Products with trellis matrices (trellis_weight.h) over a vector type V of V::kSequences lanes of 64 bits.
//
// A lane holds 64 bits of a ring. Two states of it (of the code `pair` all that an output needs of 4 inputs) become the
// dwords of the lane, which are multiplied; the bytes of the products are one factor of a dot product of bytes, as they
// are, and x is the other. What they are too large by is taken from the sums: zero times the integers of x.
//
// V has
//   Word, Ints, Floats; X, the inputs of a vector of states
//   load(p)
//   middle(a, b)                        64 bits from bit 32 on, of two neighbours of a ring
//   states<A, B>(word)                  16 bits from bit A and from bit B on, in dwords; B - A is at most 16
//   ints(v), load_ints, add, times(a, b), minus_zero<Pair>(sums)
//   inputs<Pair, Part>(p)               x for the states of two inputs each (Pair), or the even or odd ones
//   factor<Pair>(products)              the other factor of a dot product
//   dot(acc, factor, x)
//   digit_sums(hi, lo)                  256 hi + lo
//   floats(v), to_float, fma, load_floats, store, store_ints
//   kDigits                             x comes as digits of 8 bits, each with a sum of its own; otherwise as int16
//
// One row of x: states are decoded and multiplied in registers, 8 outputs at a time. More rows: the factors of a block
// are decoded once for a segment of the inputs, into memory that stays in the cache, and multiplied by every row.
//
// Sums are exact, scaled with one rounding each and folded in one order: a row of x has the same bits in any batch and
// on any machine whose fma rounds once.
//
// Included inside a namespace of the including file.

// 16 lanes, halves first.
CRELLE_INLINE float fold_lanes(const float *v) {
  float a[8], b[4];
  for (int i = 0; i < 8; ++i) a[i] = v[i] + v[i + 8];
  for (int i = 0; i < 4; ++i) b[i] = a[i] + a[i + 4];
  return (b[0] + b[2]) + (b[1] + b[3]);
}

// Calls use(std::integral_constant<int, i>) for i = 0 ... N - 1.
template <int N, class F>
CRELLE_INLINE void unrolled(F &&use) {
  const auto all = [&]<int... i>(std::integer_sequence<int, i...>)
                       __attribute__((always_inline)) { (use(std::integral_constant<int, i>{}), ...); };
  all(std::make_integer_sequence<int, N>{});
}

constexpr int kTrellisPass = 8;  // outputs

// Outputs [r0, r0 + 8) of a block: where their bits lie. Align: the bit of a run of 64 bits at which they begin, known
// when it is compiled, so that shifts are.
template <int HalfBits, bool Pair, int Align>
struct TrellisBits {
  static constexpr int kShift = Pair ? HalfBits : HalfBits / 2, kParts = Pair ? 1 : 2;
  static constexpr int kWindow = (Pair ? 1 : 3) * kShift + 16, kRow = 2 * HalfBits;
  static constexpr int kWords = (Align + (kTrellisPass - 1) * kRow + kWindow - 1) / 64 + 1;

  const uint8_t *run[kWords];

  TrellisBits(const TrellisLayout &l, const uint8_t *block, int r0) {
    for (int i = 0; i < kWords; ++i) run[i] = block + kTrellisHeader + (r0 * kRow / 64 + i) % HalfBits * l.run_bytes;
  }

  // Calls use(r, part, factor) for the states at offset `at` of the runs.
  template <class V, class F>
  CRELLE_INLINE void decode(size_t at, typename V::Ints multiplier, F &&use) const {
    typename V::Word word[kWords], middle[kWords];
    for (int j = 0; j < kWords; ++j) word[j] = V::load(run[j] + at);
    for (int j = 0; j + 1 < kWords; ++j) middle[j] = V::middle(word[j], word[j + 1]);
    unrolled<kTrellisPass>([&](auto r) __attribute__((always_inline)) {
      unrolled<kParts>([&](auto part) __attribute__((always_inline)) {
        constexpr int kBegin = Align + r * kRow, kIn = kBegin / 64, kAt = kBegin % 64;
        constexpr bool kWhole = kAt + kWindow <= 64;
        constexpr int kBit = (kWhole ? kAt : kAt - 32) + part * kShift;
        const auto states = V::template states<kBit, kBit + kParts * kShift>(kWhole ? word[kIn] : middle[kIn]);
        use(r, part, V::template factor<Pair>(V::times(states, multiplier)));
      });
    });
  }
};

template <class V, bool Pair>
CRELLE_INLINE auto trellis_multiplier() {
  return V::ints(static_cast<int>(trellis_code(Pair).multiplier));
}

// Where the integers of slice i (V::kSequences sequences) lie in a row of x.
template <class V, int D>
CRELLE_INLINE size_t trellis_inputs_at(int i, int digit) {
  constexpr int kSlices = kTrellisStep / V::kSequences, kBytes = V::kDigits ? kTrellisColumns : 2 * kTrellisColumns;
  constexpr int kStepBytes = V::kDigits ? kTrellisInputs * D : int(kTrellisStepBytes);
  return i / kSlices * kStepBytes + digit * kTrellisInputs + i % kSlices * V::kSequences * kBytes;
}

// Sums of a segment as floats: + scale * sum.
template <class V, int Digits>
CRELLE_INLINE auto add_scaled(const typename V::Ints (&acc)[Digits], typename V::Floats scale, typename V::Floats f) {
  auto sum = acc[0];
  if constexpr (Digits == 2) sum = V::digit_sums(sum, acc[1]);
  return V::fma(V::to_float(sum), scale, f);
}

// One row of x, 8 outputs.
template <class V, int HalfBits, bool Pair, int D, int Align>
__attribute__((noinline)) void trellis_pass(const TrellisLayout &l, const uint8_t *block, int r0, const uint8_t *row,
                                            float *out) {
  constexpr int R = kTrellisPass, kDigits = V::kDigits ? D : 1, kSlices = kTrellisStep / V::kSequences;
  constexpr int kFloats = 2 * V::kSequences, kParts = Pair ? 1 : 2, kPassBytes = HalfBits * 2 * R;
  const TrellisBits<HalfBits, Pair, Align> bits(l, block, r0);
  // Every pass asks for its share of what comes, a run ahead: the first one reads two runs.
  const uint8_t *const ahead = block + kTrellisHeader + l.run_bytes + size_t(r0 / R) * l.steps * kPassBytes + kFar;
  const auto multiplier = trellis_multiplier<V, Pair>();
  alignas(64) float lanes[R][kTrellisLanes];
  for (int slice = 0; slice < kSlices; ++slice) {
    typename V::Floats f[R];
    for (auto &each : f) each = V::floats(0);
    for (int s = 0, i = 0; s < l.segments; ++s) {
      const int end = i + l.segment < l.steps ? i + l.segment : l.steps;
      const size_t lane = 4 * (s * kTrellisLanes + slice * kFloats);
      const auto start = V::template minus_zero<Pair>(V::load_ints(row + l.sums_at + lane));
      typename V::Ints acc[R][kDigits];
      for (auto &each : acc) {
        each[0] = V::ints(0);
        each[kDigits - 1] = start;
      }
      for (; i < end; ++i) {
        if (slice == 0)
          for (int line = 0; line < kPassBytes; line += 64) __builtin_prefetch(ahead + i * kPassBytes + line, 0, 2);
        typename V::X x[kParts][kDigits];
        for (int d = 0; d < kDigits; ++d) {
          const uint8_t *const from = row + trellis_inputs_at<V, D>(i * kSlices + slice, d);
          x[0][d] = V::template inputs<Pair, 0>(from);
          if constexpr (!Pair) x[1][d] = V::template inputs<Pair, 1>(from);
        }
        bits.template decode<V>((i * kSlices + slice) * V::kSequences * sizeof(uint64_t), multiplier,
                                [&](auto r, auto part, auto factor) __attribute__((always_inline)) {
                                  for (int d = 0; d < kDigits; ++d) acc[r][d] = V::dot(acc[r][d], factor, x[part][d]);
                                });
      }
      const auto scale = V::load_floats(row + l.scales_at + lane);
      for (int r = 0; r < R; ++r) f[r] = add_scaled<V, kDigits>(acc[r], scale, f[r]);
    }
    for (int r = 0; r < R; ++r) V::store(lanes[r] + slice * kFloats, f[r]);
  }
  for (int r = 0; r < R; ++r) {
    float scale;
    __builtin_memcpy(&scale, block + (r0 + r) * sizeof scale, sizeof scale);
    out[r0 + r] = fold_lanes(lanes[r]) * scale;
  }
}

// The factors of 8 outputs for slices [i0, i1): [slice][output][part], a slice `pitch` bytes after the one before.
template <class V, int HalfBits, bool Pair, int Align>
__attribute__((noinline)) void trellis_decode(const TrellisLayout &l, const uint8_t *block, int r0, int i0, int i1,
                                              uint8_t *out, size_t pitch) {
  constexpr int kBytes = sizeof(typename V::Ints), kParts = Pair ? 1 : 2;
  const TrellisBits<HalfBits, Pair, Align> bits(l, block, r0);
  const auto multiplier = trellis_multiplier<V, Pair>();
  for (int i = i0; i < i1; ++i, out += pitch)
    bits.template decode<V>(i * V::kSequences * sizeof(uint64_t), multiplier,
                            [&](auto r, auto part, auto factor) __attribute__((always_inline)) {
                              V::store_ints(out + (r * kParts + part) * kBytes, factor);
                            });
}

template <int HalfBits, bool Pair>
struct TrellisForm {
  static constexpr int kHalfBits = HalfBits;
  static constexpr bool kPair = Pair;
};

// Calls use(form, std::integral_constant<int, Align>, r0) for the four passes of a block.
template <class Form, class F>
CRELLE_INLINE void for_passes(Form form, F &&use) {
  unrolled<kTrellisRows / kTrellisPass>([&](auto pass) {
    constexpr int kBit = pass * kTrellisPass * 2 * Form::kHalfBits;
    use(form, std::integral_constant<int, kBit % 64>{}, pass * kTrellisPass);
  });
}

// Calls use(form) with the form of l.
template <class F>
void with_form(const TrellisLayout &l, F &&use) {
  switch (l.half_bits + (l.pair ? 0 : 10)) {
    case 2: return use(TrellisForm<2, true>{});
    case 3: return use(TrellisForm<3, true>{});
    case 4: return use(TrellisForm<4, true>{});
    case 5: return use(TrellisForm<5, true>{});
    case 6: return use(TrellisForm<6, true>{});
    case 7: return use(TrellisForm<7, true>{});
    case 8: return use(TrellisForm<8, true>{});
    case 12: return use(TrellisForm<2, false>{});
    case 14: return use(TrellisForm<4, false>{});
    case 16: return use(TrellisForm<6, false>{});
    case 18: return use(TrellisForm<8, false>{});
  }
}

template <class V, int D>
void trellis_one_row(const Weight &w, const uint8_t *row, float *y, int b0, int b1) {
  const TrellisLayout &l = *w.trellis;
  with_form(l, [&](auto form) {
    for (int b = b0; b < b1; ++b) {
      const int first = b * kTrellisRows, rows = w.N - first < kTrellisRows ? w.N - first : kTrellisRows;
      float out[kTrellisRows];
      for_passes(form, [&](auto f, auto align, int r0) {
        if (r0 < rows)
          trellis_pass<V, decltype(f)::kHalfBits, decltype(f)::kPair, D, align>(l, w.block(b), r0, row, out);
      });
      for (int r = 0; r < rows; ++r) y[first + r] = out[r];
    }
  });
}

// Factors of 8 outputs and a segment times the integers of M rows of x, both as they are multiplied: added to
// f [M][32 outputs][16 lanes]. Not inlined: there are a dozen callers.
template <class V, bool Pair, int Digits, int M>
__attribute__((noinline)) void trellis_dots(const uint8_t *factors, int steps, const uint8_t *const (&x)[M],
                                            const uint8_t *const (&row)[M], size_t sums, size_t scales, float *f) {
  constexpr int R = 4, kBytes = sizeof(typename V::Ints), kParts = Pair ? 1 : 2;
  constexpr int kSlices = kTrellisStep / V::kSequences, kFloats = 2 * V::kSequences;
  for (int slice = 0; slice < kSlices; ++slice)
    for (int r0 = 0; r0 < kTrellisPass; r0 += R) {
      typename V::Ints acc[M][R][Digits];
      for (int m = 0; m < M; ++m)
        for (auto &each : acc[m]) {
          each[0] = V::ints(0);
          each[Digits - 1] = V::template minus_zero<Pair>(V::load_ints(row[m] + sums + 4 * slice * kFloats));
        }
      const uint8_t *at = factors + (slice * kTrellisPass + r0) * kParts * kBytes;
      size_t from = slice * kParts * Digits * sizeof(typename V::X);
      for (int i = 0; i < steps; ++i) {
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
          typename V::X v[M][Digits];
          for (int m = 0; m < M; ++m)
            for (int d = 0; d < Digits; ++d)
              __builtin_memcpy(&v[m][d], x[m] + from + (part * Digits + d) * sizeof(typename V::X), sizeof v[m][d]);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            const auto factor = V::load_ints(at + (r * kParts + part) * kBytes);
            for (int m = 0; m < M; ++m)
              for (int d = 0; d < Digits; ++d) acc[m][r][d] = V::dot(acc[m][r][d], factor, v[m][d]);
          }
        }
        at += kSlices * kTrellisPass * kParts * kBytes;
        from += kSlices * kParts * Digits * sizeof(typename V::X);
      }
      for (int m = 0; m < M; ++m) {
        const auto scale = V::load_floats(row[m] + scales + 4 * slice * kFloats);
        for (int r = 0; r < R; ++r) {
          float *const to = f + (m * kTrellisRows + r0 + r) * kTrellisLanes + slice * kFloats;
          V::store(to, add_scaled<V, Digits>(acc[m][r], scale, V::load_floats(reinterpret_cast<uint8_t *>(to))));
        }
      }
    }
}

// Slices of a segment of x as they are multiplied by W: [slice][part][digit].
template <class V, class W, bool Pair, int D>
CRELLE_INLINE void trellis_spread(const uint8_t *row, int i0, int i1, uint8_t *out) {
  constexpr int kDigits = W::kDigits ? D : 1;
  for (int i = i0; i < i1; ++i)
    unrolled<Pair ? 1 : 2>([&](auto part) __attribute__((always_inline)) {
      for (int d = 0; d < kDigits; ++d, out += sizeof(typename W::X)) {
        const uint8_t *const from = row + trellis_inputs_at<V, D>(i, d);
        typename W::X x;
        if constexpr (V::kDigits && !W::kDigits)
          x = W::template joined<Pair, part>(from, row + trellis_inputs_at<V, D>(i, 1));
        else
          x = W::template inputs<Pair, part>(from);
        __builtin_memcpy(out, &x, sizeof x);
      }
    });
}

// Rows of x that share what is decoded: their sums stay in L1 and L2.
template <class V>
constexpr int kTrellisTokens = sizeof(typename V::Ints) == 64 ? 32 : 16;

// x is encoded for V; W multiplies it.
template <class V, class W, bool Pair, int D>
void trellis_rows(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  constexpr int kDigits = W::kDigits ? D : 1, kParts = Pair ? 1 : 2, kSlices = kTrellisStep / W::kSequences;
  constexpr size_t kPitch = size_t(kTrellisPass) * kParts * sizeof(typename W::Ints);
  constexpr size_t kFactors = kTrellisSegment * kSlices * kPitch;
  constexpr size_t kSpread = size_t(kTrellisSegment) * kSlices * kParts * kDigits * sizeof(typename W::X);
  constexpr int kAtOnce = kDigits == 1 && sizeof(typename W::Ints) == 64 ? 4 : 2;  // as the registers allow
  constexpr size_t kSums = sizeof(float) * kTrellisRows * kTrellisLanes;
  static thread_local Buffer scratch;
  const TrellisLayout &l = *w.trellis;
  const size_t sums = kFactors + kSpread * kTrellisTokens<W>;
  scratch.grow(sums + kSums * kTrellisTokens<W>);
  uint8_t *const factors = scratch.data(), *const x = factors + kFactors;
  float *const f = reinterpret_cast<float *>(factors + sums);
  for (int b = b0; b < b1; ++b)
    for (int m0 = 0; m0 < a.M; m0 += kTrellisTokens<W>) {
      const int M = a.M - m0 < kTrellisTokens<W> ? a.M - m0 : kTrellisTokens<W>;
      __builtin_memset(f, 0, kSums * M);
      for (int s = 0; s < l.segments; ++s) {
        const int i0 = s * l.segment, steps = l.steps - i0 < l.segment ? l.steps - i0 : l.segment;
        const int slice0 = i0 * kSlices, slice1 = (i0 + steps) * kSlices;
        for (int m = 0; m < M; ++m) trellis_spread<V, W, Pair, D>(a.row(m0 + m), slice0, slice1, x + m * kSpread);
        const size_t sums_at = l.sums_at + s * kTrellisLanes * 4, scales_at = l.scales_at + s * kTrellisLanes * 4;
        const auto multiply = [&]<int N>(int m, int r0, std::integral_constant<int, N>) {
          const uint8_t *from[N], *row[N];
          for (int i = 0; i < N; ++i) from[i] = x + (m + i) * kSpread, row[i] = a.row(m0 + m + i);
          trellis_dots<W, Pair, kDigits, N>(factors, steps, from, row, sums_at, scales_at,
                                            f + (m * kTrellisRows + r0) * kTrellisLanes);
        };
        with_form(l, [&](auto form) {
          if constexpr (decltype(form)::kPair == Pair)
            for_passes(form, [&](auto f_, auto align, int r0) {
              trellis_decode<W, decltype(f_)::kHalfBits, Pair, align>(l, w.block(b), r0, slice0, slice1, factors,
                                                                      kPitch);
              int m = 0;
              for (; m + kAtOnce <= M; m += kAtOnce) multiply(m, r0, std::integral_constant<int, kAtOnce>{});
              for (; m + 2 <= M; m += 2) multiply(m, r0, std::integral_constant<int, 2>{});
              if (m < M) multiply(m, r0, std::integral_constant<int, 1>{});
            });
        });
      }
      const int first = b * kTrellisRows, rows = w.N - first < kTrellisRows ? w.N - first : kTrellisRows;
      for (int m = 0; m < M; ++m)
        for (int r = 0; r < rows; ++r) {
          float scale;
          __builtin_memcpy(&scale, w.block(b) + r * sizeof scale, sizeof scale);
          y[size_t(m0 + m) * ldy + first + r] = fold_lanes(f + (m * kTrellisRows + r) * kTrellisLanes) * scale;
        }
    }
}

// W: what multiplies several rows of 16 bits.
template <class V, class W, int D>
void trellis_matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  if (a.M == 1) return trellis_one_row<V, D>(w, a.row(0), y, b0, b1);
  (w.trellis->pair ? trellis_rows<V, W, true, D> : trellis_rows<V, W, false, D>)(w, a, y, ldy, b0, b1);
}

template <class V, class W = V>
void trellis_matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  if constexpr (V::kDigits)
    if (a.precision == Precision::Int8) return trellis_matmul<V, V, 1>(w, a, y, ldy, b0, b1);
  trellis_matmul<V, W, 2>(w, a, y, ldy, b0, b1);
}
