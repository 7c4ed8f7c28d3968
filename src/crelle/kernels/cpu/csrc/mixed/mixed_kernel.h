// Products with mixed matrices (mixed_weight.h) over a vector type V of V::kLanes outputs, a dword each.
//
// The codes of 4 inputs of an output are the bytes of a dword, after a mask (4 bits) or a shift and a mask (2 bits):
// what dot products of bytes take (sdot, vpdpbusd, or vpmaddubsw). The sums of a 2-bit group are integers until its
// zero is subtracted, and are multiplied by the decoded scale and added as floats: once for 16 inputs and 16 outputs.
// Outliers multiply x itself. Rows of x share the decoding and have the bits they have alone.
//
// V has
//   Acc, Ints, Floats, Digits, Seconds
//   no_sums()                   Acc of zero
//   digits(p)                   16 digits of x
//   field<f>(codes)             the f-th of the four 2-bit codes in each byte;  low_nibbles, high_nibbles
//   dot<i>(acc, codes, x)       acc + the products of the codes' bytes and digits 4 i ... 4 i + 3 of x
//   sums(acc)                   as int32. kNarrow: Acc is of 16 bits and holds 8 dots of 4-bit codes
//   zero(), add(a, b), digit_sums(hi, lo)                    digit_sums: 256 hi + lo
//   begin<j, D>(acc, header, i, zeros)      kNarrow: not needed;  minus zero times half of the sum of x, as digits
//   minus_zero<j>(sums, header, i, zeros)   kNarrow only;  the same from sums
//   seconds(header, scales)                                  second-order scales times those of x
//   add_scaled<j>(f, sums, header, i, seconds)               f + sums * first-order scale of group j; rows of vector i
//   floats, to_float, mul, fma, load_floats, load_halves, load_bytes, store
//   gather(x, columns)                                       x at kLanes 16-bit columns
//   kRolled                     loops over vectors and words stay loops: code that compiles in a third of the time
//
// Included inside a namespace of the including file, after V's parts are known.

// f(0) ... f(N - 1), N of 4 at most.
template <bool Rolled, int N, class F>
CRELLE_INLINE void mixed_loop(F &&f) {
  if constexpr (Rolled) {
#pragma GCC unroll 1
    for (int i = 0; i < N; ++i) f(i);
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) f(i);
  }
}

// Of a group and a row of x: see MixedInputs.
struct MixedZeros {
  const int32_t *table;
  const int16_t *halves;
};

template <class V, int D, int M>
struct MixedSums {
  typename V::Acc of[M][D];

  CRELLE_INLINE void clear() {
    for (auto &m : of)
      for (auto &d : m) d = V::no_sums();
  }
  template <int I, class Codes>
  CRELLE_INLINE void dot(Codes codes, const typename V::Digits (&x)[M][D]) {
    for (int m = 0; m < M; ++m)
      for (int d = 0; d < D; ++d) of[m][d] = V::template dot<I>(of[m][d], codes, x[m][d]);
  }
  CRELLE_INLINE typename V::Ints total(int m) const {
    if constexpr (D == 1)
      return V::sums(of[m][0]);
    else
      return V::digit_sums(V::sums(of[m][0]), V::sums(of[m][D - 1]));
  }
};

// Digits of word `at` of M rows.
template <class V, int D, int M>
CRELLE_INLINE void load_digits(const uint8_t *const (&row)[M], int at, typename V::Digits (&x)[M][D]) {
  for (int m = 0; m < M; ++m)
    for (int d = 0; d < D; ++d) x[m][d] = V::digits(row[m] + (at * D + d) * kWord);
}

// The 4-bit part: f = row scale (sum of codes times x - zero sum of x). One function for all groups.
template <class V, int D, int M>
__attribute__((noinline)) void mixed_four(const MixedLayout &l, const MixedInputs &in, const uint8_t *head,
                                          const uint8_t *const (&row)[M], typename V::Floats (&f)[16 / V::kLanes][M]) {
  constexpr int kVectors = 16 / V::kLanes, kBytes = 4 * V::kLanes, kMost = V::kRegisters / 2 / (M * D);
  constexpr int kAtOnce = kMost >= kVectors ? kVectors : kMost >= 2 ? 2 : 1;
  constexpr int kWords = V::kNarrow ? 2 : 8;  // that an Acc holds
  for (auto &v : f)
    for (auto &m : v) m = V::floats(0);
  if (!l.C4) return;
  const uint8_t *codes = head + l.head_bytes();
  for (int segment = 0, left = l.words4; left > 0; ++segment, left -= 8) {
    const int words = left < 8 ? left : 8;
    mixed_loop<V::kRolled, kVectors / kAtOnce>([&](int at_once) __attribute__((always_inline)) {
      const int i0 = at_once * kAtOnce;
      typename V::Ints all[kAtOnce][M];
      for (auto &v : all)
        for (auto &m : v) m = V::zero();
      for (int from = 0; from < words; from += kWords) {
        MixedSums<V, D, M> sums[kAtOnce];
        for (auto &s : sums) s.clear();
        const int to = from + kWords < words ? from + kWords : words;
        for (int k = from; k < to; ++k) {
          typename V::Digits x[M][D];
          load_digits<V, D, M>(row, l.words2 + segment * 8 + k, x);
          const uint8_t *at = codes + k * kWord4Bytes + i0 * kBytes;
          prefetch_stream(at);
          prefetch_stream(at + 64);
#pragma GCC unroll 4
          for (int i = 0; i < kAtOnce; ++i) {
            const auto first = V::load(at + i * kBytes), second = V::load(at + 64 + i * kBytes);
            sums[i].template dot<0>(V::low_nibbles(first), x);
            sums[i].template dot<1>(V::high_nibbles(first), x);
            sums[i].template dot<2>(V::low_nibbles(second), x);
            sums[i].template dot<3>(V::high_nibbles(second), x);
          }
        }
        for (int i = 0; i < kAtOnce; ++i)
          for (int m = 0; m < M; ++m) all[i][m] = V::add(all[i][m], sums[i].total(m));
      }
      for (int m = 0; m < M; ++m) {
        const auto unit = V::floats(reinterpret_cast<const float *>(row[m] + in.scales4)[segment]);
        for (int i = 0; i < kAtOnce; ++i) f[i0 + i][m] = V::fma(V::to_float(all[i][m]), unit, f[i0 + i][m]);
      }
    });
    codes += words * kWord4Bytes;
  }
  for (int i = 0; i < kVectors; ++i) {
    const uint8_t *at = head + i * V::kLanes * (l.wide ? 4 : 2);
    const auto scale = l.wide ? V::load_floats(at) : V::load_halves(at);
    const auto zero = V::load_bytes(head + l.zeros_at() + i * V::kLanes);
    for (int m = 0; m < M; ++m) {
      const float sum = *reinterpret_cast<const float *>(row[m] + in.sum4);
      f[i][m] = V::mul(V::fma(zero, V::floats(-sum), f[i][m]), scale);
    }
  }
}

// Group j of a unit, whose codes begin with word `first` of x: added to f. G: inputs of a group, or 0, which stands for
// any number of whole words: loops are compiled once for all of them.
template <class V, int G, int D, int M, bool Decoded, int j>
CRELLE_INLINE void mixed_group(int words, const uint8_t *header, const uint8_t *codes, const MixedInputs &in, int unit,
                               int first, const uint8_t *const (&row)[M], const typename V::Seconds (&seconds)[M],
                               typename V::Floats (&f)[16 / V::kLanes][M]) {
  constexpr int kVectors = 16 / V::kLanes, kBytes = 4 * V::kLanes;
  const auto zeros = [&](int m) __attribute__((always_inline)) {
    const int group = unit * kUnitGroups + j;
    return MixedZeros{reinterpret_cast<const int32_t *>(row[m] + in.zeros) + group * 4,
                      reinterpret_cast<const int16_t *>(row[m] + in.halves) + group * 2};
  };
  constexpr bool kRolled = V::kRolled && G != 8;  // in small groups the loop would take a tenth of the time
  mixed_loop<kRolled, kVectors>([&](int i) __attribute__((always_inline)) {
    MixedSums<V, D, M> sums;
    if constexpr (V::kNarrow)
      sums.clear();
    else
      for (int m = 0; m < M; ++m) V::template begin<j, D>(sums.of[m], header, i, zeros(m));
    typename V::Digits x[M][D];
    if constexpr (G == 8) {
      load_digits<V, D, M>(row, first + j / 2, x);
      const auto bits = V::load(codes + j / 2 * kWord2Bytes + i * kBytes);
      sums.template dot<j % 2 * 2>(V::template field<j % 2 * 2>(bits), x);
      sums.template dot<j % 2 * 2 + 1>(V::template field<j % 2 * 2 + 1>(bits), x);
    } else {
      const auto word = [&](int k) __attribute__((always_inline)) {
        load_digits<V, D, M>(row, first + k, x);
        const auto bits = V::load(codes + k * kWord2Bytes + i * kBytes);
        sums.template dot<0>(V::template field<0>(bits), x);
        sums.template dot<1>(V::template field<1>(bits), x);
        sums.template dot<2>(V::template field<2>(bits), x);
        sums.template dot<3>(V::template field<3>(bits), x);
      };
      if constexpr (G == kWord) {
        word(j);
      } else {
#pragma GCC unroll 1
        for (int k = 0; k < words; ++k) word(j * words + k);
      }
    }
    for (int m = 0; m < M; ++m) {
      auto t = sums.total(m);
      if constexpr (V::kNarrow) t = V::template minus_zero<j>(t, header, i, zeros(m));
      if constexpr (Decoded) {
        const auto scale = V::load_floats(header + kUnitHeader + 4 * (j * kMixedRows + i * V::kLanes));
        const float unit_x = reinterpret_cast<const float *>(row[m] + in.scales2)[unit * kUnitGroups + j];
        f[i][m] = V::fma(V::mul(V::to_float(t), scale), V::floats(unit_x), f[i][m]);
      } else {
        f[i][m] = V::template add_scaled<j>(f[i][m], t, header, i, seconds[m]);
      }
    }
  });
}

template <class V, int G, int D, int M, bool Decoded>
void mixed_block(const Weight &w, const Activations &a, int m0, int b, float *y, size_t ldy) {
  constexpr int kVectors = 16 / V::kLanes;
  const MixedLayout &l = *w.mixed;
  const MixedInputs in(w.K, l.G, D);
  const uint8_t *const head = w.block(b), *at = head + l.head_bytes() + l.words4 * kWord4Bytes, *row[M];
  for (int m = 0; m < M; ++m) row[m] = a.row(m0 + m);
  typename V::Floats f[kVectors][M];
  mixed_four<V, D, M>(l, in, head, row, f);
  constexpr size_t kHeader = kUnitHeader + (Decoded ? kDecodedScales : 0);
  const int group = G ? G : l.G, words = group / kWord, unit_words = kUnitGroups * group / kWord;
  const size_t unit_bytes = kHeader + size_t(unit_words) * kWord2Bytes;
  for (int u = 0; u < l.units; ++u, at += unit_bytes) {
    const uint8_t *codes = at + kHeader;
    for (size_t line = 0; line < unit_bytes; line += 64) prefetch_stream(at + line);
    typename V::Seconds seconds[M];
    if constexpr (!Decoded)
      for (int m = 0; m < M; ++m)
        seconds[m] = V::seconds(at, reinterpret_cast<const float *>(row[m] + in.scales2) + u * kUnitGroups);
    const int first = u * unit_words;
    mixed_group<V, G, D, M, Decoded, 0>(words, at, codes, in, u, first, row, seconds, f);
    mixed_group<V, G, D, M, Decoded, 1>(words, at, codes, in, u, first, row, seconds, f);
    mixed_group<V, G, D, M, Decoded, 2>(words, at, codes, in, u, first, row, seconds, f);
    mixed_group<V, G, D, M, Decoded, 3>(words, at, codes, in, u, first, row, seconds, f);
  }
  uint32_t slots;
  __builtin_memcpy(&slots, head + l.slots_at(), 4);
  for (; slots > 0; --slots, at += l.slot_bytes())
    for (int i = 0; i < kVectors; ++i) {
      const uint8_t *values = at + 2 * kMixedRows + i * V::kLanes * (l.wide ? 4 : 2);
      const auto value = l.wide ? V::load_floats(values) : V::load_halves(values);
      for (int m = 0; m < M; ++m) {
        const float *x = reinterpret_cast<const float *>(row[m] + in.x);
        f[i][m] = V::fma(V::gather(x, at + 2 * i * V::kLanes), value, f[i][m]);
      }
    }
  const int rows = w.N - b * kMixedRows;
  for (int m = 0; m < M; ++m) {
    float *out = y + (m0 + m) * ldy + size_t(b) * kMixedRows, all[kMixedRows];
    float *to = rows >= kMixedRows ? out : all;
    for (int i = 0; i < kVectors; ++i) V::store(to + i * V::kLanes, f[i][m]);
    if (rows < kMixedRows)
      for (int r = 0; r < rows; ++r) out[r] = all[r];
  }
}

template <class V, int G, int D, bool Decoded>
void mixed_blocks(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  for (int b = b0; b < b1; ++b) {  // all rows of x while the block is in the cache
    int m = 0;
    if constexpr (!Decoded)
      for (; m + V::kRowsOfX <= a.M; m += V::kRowsOfX) mixed_block<V, G, D, V::kRowsOfX, Decoded>(w, a, m, b, y, ldy);
    for (; m < a.M; ++m) mixed_block<V, G, D, 1, Decoded>(w, a, m, b, y, ldy);
  }
}

template <class V, int G>
void mixed_of_group(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  using Run = void (*)(const Weight &, const Activations &, float *, size_t, int, int);
  constexpr int kOfDecoded = G == 8 ? 8 : 0;  // they are rare
  static constexpr Run kRun[2][2] = {{mixed_blocks<V, G, 1, false>, mixed_blocks<V, kOfDecoded, 1, true>},
                                     {mixed_blocks<V, G, 2, false>, mixed_blocks<V, kOfDecoded, 2, true>}};
  kRun[a.digits() - 1][w.mixed->decoded](w, a, y, ldy, b0, b1);
}

template <class V>
void mixed_matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  switch (w.mixed->G) {
    case 8: return mixed_of_group<V, 8>(w, a, y, ldy, b0, b1);
    case 16: return mixed_of_group<V, 16>(w, a, y, ldy, b0, b1);
    default: return mixed_of_group<V, 0>(w, a, y, ldy, b0, b1);
  }
}
