// Products with integer matrices (integer_weight.h) over a vector type V of V::kLanes outputs, a dword each.
//
//   y = sum over spans of (scale of x times scale of W) times the integer sum
//
// with one rounding for the product of the scales and one for the multiply-add, in the order of the spans. The integer
// sums are exact: so a row of x has the same bits in any batch and, wherever V::fma rounds once, on any machine.
//
// V has
//   Bytes, Ints, Floats; Digits, 16 integers of x; Acc, sums of products of nibbles
//   load, digits, low_nibbles, high_nibbles
//   no_sums(), dot<i>(acc, codes, x)     acc + the products of the codes' bytes and integers 4 i ... 4 i + 3 of x
//   sums(acc)                            kNarrow: as int32; Acc is of 16 bits and holds 8 dots. Otherwise Acc is Ints
//   dot_bytes<i>(ints, codes, x)         the same for codes of 8 bits; they count as codes + kByteOffset
//   ints(v), add, mul, expand(p)         int32; bytes, widened
//   floats(v), to_float, mul_floats, fma, load_floats, load_halves, store
//   kLanes, kRegisters
//   kTokens                              rows of x at a time
//   kBlocks                              blocks at a time, for one row of x
//   kRolled                              the loop over vectors stays a loop, for a compiler that has less to do
//
// Included inside a namespace of the including file.

// Sums of N vectors of outputs, N / B of each block, and M rows of x, added to t.
template <class V, int B, int N, int M>
CRELLE_INLINE void nibble_sums(const uint8_t *const (&codes)[B], int words, const uint8_t *const (&x)[M],
                               typename V::Ints (&t)[N][M]) {
  constexpr int kOfBlock = N / B;
  constexpr int kBytes = 4 * V::kLanes, kWords = 2, kRoom = V::kRegisters / 2 / (N * M);
  constexpr int kChains = V::kNarrow || kRoom < 2 ? 1 : kRoom < 4 ? 2 : 4;  // sums that do not wait for one another
  typename V::Acc acc[N][M][kChains];
  const auto begin = [&]() __attribute__((always_inline)) {
    for (int i = 0; i < N; ++i)
      for (int m = 0; m < M; ++m) {
        for (auto &c : acc[i][m]) c = V::no_sums();
        if constexpr (!V::kNarrow) acc[i][m][0] = t[i][m];
      }
  };
  const auto finish = [&]() __attribute__((always_inline)) {
    for (int i = 0; i < N; ++i)
      for (int m = 0; m < M; ++m)
        if constexpr (V::kNarrow) {
          t[i][m] = V::add(t[i][m], V::sums(acc[i][m][0]));
        } else {
          t[i][m] = acc[i][m][0];
          for (int c = 1; c < kChains; ++c) t[i][m] = V::add(t[i][m], acc[i][m][c]);
        }
  };
  const auto word = [&](int k) __attribute__((always_inline)) {
    typename V::Digits d[M];
    for (int m = 0; m < M; ++m) d[m] = V::digits(x[m] + k * kIntegerWord);
    const size_t at = k * kNibbleWordBytes;
    for (int b = 0; b < B; ++b)
      for (int line = 0; line < kOfBlock * kBytes; line += 64) {
        prefetch_stream(codes[b] + at + line);
        prefetch_stream(codes[b] + at + kNibbleWordBytes / 2 + line);
      }
    const auto half = [&](auto h) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        const auto both = V::load(codes[i / kOfBlock] + at + h * (kNibbleWordBytes / 2) + i % kOfBlock * kBytes);
        const auto low = V::low_nibbles(both), high = V::high_nibbles(both);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          auto &first = acc[i][m][2 * h % kChains];
          first = V::template dot<2 * h>(first, low, d[m]);
          auto &second = acc[i][m][(2 * h + 1) % kChains];
          second = V::template dot<2 * h + 1>(second, high, d[m]);
        }
      }
    };
    half(std::integral_constant<int, 0>{});
    half(std::integral_constant<int, 1>{});
  };
  if constexpr (V::kNarrow) {
    for (int k0 = 0; k0 < words; k0 += kWords) {
      begin();
      for (int k = k0; k < words && k < k0 + kWords; ++k) word(k);
      finish();
    }
  } else {
    begin();
    for (int k = 0; k < words; ++k) word(k);
    finish();
  }
}

template <class V, int B, int N, int M>
CRELLE_INLINE void byte_sums(const uint8_t *const (&codes)[B], int words, const uint8_t *const (&x)[M],
                             typename V::Ints (&t)[N][M]) {
  constexpr int kBytes = 4 * V::kLanes, kOfBlock = N / B;
  for (int k = 0; k < words; ++k) {
    typename V::Digits d[M];
    for (int m = 0; m < M; ++m) d[m] = V::digits(x[m] + k * kIntegerWord);
    const auto quarter = [&](auto q) __attribute__((always_inline)) {
      const size_t at = k * kByteWordBytes + q * (kByteWordBytes / 4);
      for (int b = 0; b < B; ++b)
        for (int line = 0; line < kOfBlock * kBytes; line += 64) prefetch_stream(codes[b] + at + line);
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        const auto bytes = V::load(codes[i / kOfBlock] + at + i % kOfBlock * kBytes);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) t[i][m] = V::template dot_bytes<q>(t[i][m], bytes, d[m]);
      }
    };
    quarter(std::integral_constant<int, 0>{});
    quarter(std::integral_constant<int, 1>{});
    quarter(std::integral_constant<int, 2>{});
    quarter(std::integral_constant<int, 3>{});
  }
}

// Blocks b and, if B is 2, b + apart for rows [m0, m0 + M) of x. Two blocks far apart are two streams from memory,
// which DRAM serves faster than one, and they share the loads of x.
template <class V, bool Two, int M, int B = 1>
void integer_block(const Weight &w, const Activations &a, int m0, int b, int apart, float *y, size_t ldy) {
  constexpr int kOfBlock = kIntegerRows / V::kLanes, kVectors = B * kOfBlock;
  constexpr int kMost = V::kRegisters / (V::kNarrow ? 4 : 2) / M;
  constexpr int N = B > 1 || kMost >= kVectors ? kVectors : kMost >= 4 ? 4 : kMost >= 2 ? 2 : 1;
  const IntegerLayout &l = *w.integer;
  const uint8_t *block[B], *row[M];
  for (int i = 0; i < B; ++i) block[i] = w.block(b + i * apart);
  for (int m = 0; m < M; ++m) row[m] = a.row(m0 + m);
  typename V::Floats f[kVectors][M];
  [[maybe_unused]] typename V::Ints total[kVectors][M];
  for (int i = 0; i < kVectors; ++i)
    for (int m = 0; m < M; ++m) {
      f[i][m] = V::floats(0);
      if constexpr (Two) total[i][m] = V::ints(0);
    }
  const int spans = static_cast<int>(l.spans.size());
  for (int j = 0; j < spans; ++j) {
    const IntegerSpan &s = l.spans[j];
    const uint8_t *x[M];
    float scale[M];
    int sum[M];
    for (int m = 0; m < M; ++m) {
      x[m] = row[m] + s.word * kIntegerWord;
      scale[m] = reinterpret_cast<const float *>(row[m] + l.scales_at)[j];
      sum[m] = reinterpret_cast<const int32_t *>(row[m] + l.sums_at)[j];
    }
    const int zero = s.bytes ? V::kByteOffset : Two ? 0 : kNibbleZero;
    const auto vectors = [&](int i0) __attribute__((always_inline)) {
      typename V::Ints t[N][M];
      for (int m = 0; m < M; ++m)
        for (int i = 0; i < N; ++i) t[i][m] = V::ints(-zero * sum[m]);
      const uint8_t *codes[B];
      for (int i = 0; i < B; ++i) codes[i] = block[i] + s.codes + i0 * 4 * V::kLanes;
      if (s.bytes)
        byte_sums<V, B, N, M>(codes, s.words, x, t);
      else
        nibble_sums<V, B, N, M>(codes, s.words, x, t);
      for (int i = 0; i < N; ++i) {
        const int at = (i0 + i) % kOfBlock * V::kLanes;
        const uint8_t *const head = block[(i0 + i) / kOfBlock], *const header = head + s.header;
        if constexpr (Two) {
          const auto outputs = V::load_floats(head + 4 * at);
          for (int m = 0; m < M; ++m) {
            auto &all = total[i0 + i][m];
            if (s.bytes) {
              all = V::add(all, t[i][m]);
            } else {
              const auto zeros = V::mul(V::expand(header + kIntegerRows + at), V::ints(-sum[m]));
              all = V::add(V::add(all, zeros), V::mul(V::expand(header + at), t[i][m]));
            }
            if (!s.ends_scale) continue;
            const auto both = V::mul_floats(V::floats(scale[m]), outputs);
            f[i0 + i][m] = V::fma(V::to_float(all), both, f[i0 + i][m]);
            all = V::ints(0);
          }
        } else {
          const auto outputs = l.wide ? V::load_floats(header + 4 * at) : V::load_halves(header + 2 * at);
          for (int m = 0; m < M; ++m) {
            const auto both = V::mul_floats(V::floats(scale[m]), outputs);
            f[i0 + i][m] = V::fma(V::to_float(t[i][m]), both, f[i0 + i][m]);
          }
        }
      }
    };
    if constexpr (V::kRolled) {
#pragma GCC unroll 1
      for (int i0 = 0; i0 < kVectors; i0 += N) vectors(i0);
    } else {
#pragma GCC unroll 8
      for (int i0 = 0; i0 < kVectors; i0 += N) vectors(i0);
    }
  }
  for (int i = 0; i < B; ++i) {
    const int first = (b + i * apart) * kIntegerRows, rows = w.N - first;
    for (int m = 0; m < M; ++m) {
      float *const out = y + (m0 + m) * ldy + first, all[kIntegerRows];
      float *const to = rows >= kIntegerRows ? out : all;
      for (int v = 0; v < kOfBlock; ++v) V::store(to + v * V::kLanes, f[i * kOfBlock + v][m]);
      if (rows < kIntegerRows)
        for (int r = 0; r < rows; ++r) out[r] = all[r];
    }
  }
}

template <class V, bool Two>
void integer_blocks(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  if constexpr (V::kBlocks == 2)
    if (a.M == 1) {
      const int apart = (b1 - b0) / 2;
      for (int b = b0; b < b0 + apart; ++b) integer_block<V, Two, 1, 2>(w, a, 0, b, apart, y, ldy);
      b0 += 2 * apart;
    }
  for (int b = b0; b < b1; ++b) {  // all rows of x while the block is in the cache
    int m = 0;
    for (; m + V::kTokens <= a.M; m += V::kTokens) integer_block<V, Two, V::kTokens>(w, a, m, b, 0, y, ldy);
    if constexpr (V::kTokens > 4)
      for (; m + 4 <= a.M; m += 4) integer_block<V, Two, 4>(w, a, m, b, 0, y, ldy);
    if constexpr (V::kTokens > 2)
      for (; m + 2 <= a.M; m += 2) integer_block<V, Two, 2>(w, a, m, b, 0, y, ldy);
    for (; m < a.M; ++m) integer_block<V, Two, 1>(w, a, m, b, 0, y, ldy);
  }
}

template <class V>
void integer_matmul(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1) {
  (w.integer->two_level ? integer_blocks<V, true> : integer_blocks<V, false>)(w, a, y, ldy, b0, b1);
}
