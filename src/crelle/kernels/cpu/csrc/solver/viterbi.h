// The path through a trellis that is nearest to a sequence of weights, closed to a ring (solver.h: Viterbi).
//
// States are visited in the order place(s) = (s mod J, s / J), J = 2^shift: then the J predecessors of the states with
// the same low bits lie J rows apart, and their minimum is one of vectors. What a step keeps is the least cost of each
// group of predecessors, not the cost of each state: the way back computes the J costs in question once more.
//
// Costs are 16-bit integers that saturate, -32768 the least of a step. A difference x - c that is beyond their range
// counts as the greatest one: such states are on no good path.
//
// Included inside a namespace of the including file.

struct Costs {
#if defined(__AVX512F__)
  using T = __m512i;
  static CRELLE_INLINE T set(int16_t v) { return _mm512_set1_epi16(v); }
  static CRELLE_INLINE T add(T a, T b) { return _mm512_adds_epi16(a, b); }
  static CRELLE_INLINE T sub(T a, T b) { return _mm512_subs_epi16(a, b); }
  static CRELLE_INLINE T min(T a, T b) { return _mm512_min_epi16(a, b); }
  static CRELLE_INLINE T max(T a, T b) { return _mm512_max_epi16(a, b); }
  static CRELLE_INLINE T square(T a) { return _mm512_mulhrs_epi16(a, a); }
#elif defined(__AVX2__)
  using T = __m256i;
  static CRELLE_INLINE T set(int16_t v) { return _mm256_set1_epi16(v); }
  static CRELLE_INLINE T add(T a, T b) { return _mm256_adds_epi16(a, b); }
  static CRELLE_INLINE T sub(T a, T b) { return _mm256_subs_epi16(a, b); }
  static CRELLE_INLINE T min(T a, T b) { return _mm256_min_epi16(a, b); }
  static CRELLE_INLINE T max(T a, T b) { return _mm256_max_epi16(a, b); }
  static CRELLE_INLINE T square(T a) { return _mm256_mulhrs_epi16(a, a); }
#elif defined(__ARM_NEON) && !defined(CRELLE_PORTABLE)
  using T = int16x8_t;
  static CRELLE_INLINE T set(int16_t v) { return vdupq_n_s16(v); }
  static CRELLE_INLINE T add(T a, T b) { return vqaddq_s16(a, b); }
  static CRELLE_INLINE T sub(T a, T b) { return vqsubq_s16(a, b); }
  static CRELLE_INLINE T min(T a, T b) { return vminq_s16(a, b); }
  static CRELLE_INLINE T max(T a, T b) { return vmaxq_s16(a, b); }
  static CRELLE_INLINE T square(T a) { return vqrdmulhq_s16(a, a); }
#else
  struct T {
    int16_t lane[8];
  };
  template <class F>
  static CRELLE_INLINE T each(F f) {
    T r;
    for (int i = 0; i < 8; ++i) r.lane[i] = static_cast<int16_t>(f(i));
    return r;
  }
  static CRELLE_INLINE int clip(int v) { return v < -32768 ? -32768 : v > 32767 ? 32767 : v; }
  static CRELLE_INLINE T set(int16_t v) {
    return each([&](int) { return v; });
  }
  static CRELLE_INLINE T add(const T &a, const T &b) {
    return each([&](int i) { return clip(a.lane[i] + b.lane[i]); });
  }
  static CRELLE_INLINE T sub(const T &a, const T &b) {
    return each([&](int i) { return clip(a.lane[i] - b.lane[i]); });
  }
  static CRELLE_INLINE T min(const T &a, const T &b) {
    return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static CRELLE_INLINE T max(const T &a, const T &b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static CRELLE_INLINE T square(const T &a) {
    return each([&](int i) { return (a.lane[i] * a.lane[i] + 0x4000) >> 15; });
  }
#endif
  static constexpr int kLanes = sizeof(T) / 2;
  static CRELLE_INLINE T load(const int16_t *p) {
    T v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  static CRELLE_INLINE void store(int16_t *p, T v) { __builtin_memcpy(p, &v, sizeof v); }
};

// Shift: bits of its own that a state has; V: weights of a state.
template <int Shift, int V>
struct Trellis {
  // From 3 bits on distances are doubled before they are squared: small ones count more exactly, large ones all alike.
  static constexpr bool kFine = Shift >= 3 * V;
  static constexpr int kGroupBits = 16 - Shift, kGroups = 1 << kGroupBits, J = 1 << Shift;
  static constexpr int kSame = kGroupBits > Shift ? 1 << (kGroupBits - Shift) : 1;  // groups that end on the same bits
  static constexpr int kRun = kSame > Costs::kLanes ? kSame : Costs::kLanes;
  static constexpr int kSteps = 128 / V;

  static int place(int s) { return (s & (J - 1)) << kGroupBits | s >> Shift; }
  static int saturated(int v) { return v < -32768 ? -32768 : v > 32767 ? 32767 : v; }

  static CRELLE_INLINE Costs::T squared(Costs::T d) {
    if constexpr (kFine) d = Costs::add(d, d);
    return Costs::square(Costs::max(d, Costs::set(-32767)));  // the square of -32768 would wrap
  }
  // The same for one state.
  static int distance(const ViterbiStep &step, int at) {
    int sum = 0;
    for (int v = 0; v < V; ++v) {
      int d = saturated(step.x[v] - step.table[v][at]);
      if (kFine) d = saturated(2 * d);
      d = d < -32767 ? -32767 : d;
      sum = saturated(sum + ((d * d + 0x4000) >> 15));
    }
    return sum;
  }

  // [kSame][J] to [J][kRun], repeated where a run is longer.
  static void transpose(const int16_t *best, int16_t *runs) {
    if constexpr (J >= 8 && kSame >= 8) {
      using E = int16_t __attribute__((vector_size(16)));
      const auto pairs = [](const E(&from)[8], E(&to)[8]) __attribute__((always_inline)) {
        for (int k = 0; k < 4; ++k) {
          to[2 * k] = __builtin_shufflevector(from[k], from[k + 4], 0, 8, 1, 9, 2, 10, 3, 11);
          to[2 * k + 1] = __builtin_shufflevector(from[k], from[k + 4], 4, 12, 5, 13, 6, 14, 7, 15);
        }
      };
      for (int i = 0; i < kSame; i += 8)
        for (int j = 0; j < J; j += 8) {
          E a[8], b[8];
          for (int k = 0; k < 8; ++k) __builtin_memcpy(&a[k], best + (i + k) * J + j, 16);
          pairs(a, b);
          pairs(b, a);
          pairs(a, b);
          for (int k = 0; k < 8; ++k)
            for (int w = i; w < kRun; w += kSame) __builtin_memcpy(runs + (j + k) * kRun + w, &b[k], 16);
        }
    } else {
      for (int j = 0; j < J; ++j)
        for (int i = 0; i < kRun; ++i) runs[j * kRun + i] = best[(i & (kSame - 1)) << Shift | j];
    }
  }

  // best[t]: the cost before step t of the states whose low bits are g; best[count]: after the last step.
  static void forward(const ViterbiStep *steps, int count, int start, int16_t *best, int16_t *runs) {
    for (int g = 0; g < kGroups; ++g) best[g] = start < 0 || g == start ? -32768 : 32767;
    for (int t = 0; t < count; ++t) {
      transpose(best, runs);
      best += kGroups;
      const ViterbiStep &step = steps[t];
      Costs::T x[V], least = Costs::set(32767);
      for (int v = 0; v < V; ++v) x[v] = Costs::set(step.x[v]);
      for (int i = 0; i < kGroups; i += Costs::kLanes) {
        Costs::T low = Costs::set(32767);
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) {
          const int at = j * kGroups + i;
          Costs::T cost = squared(Costs::sub(x[0], Costs::load(step.table[0] + at)));
          if constexpr (V == 2) cost = Costs::add(cost, squared(Costs::sub(x[1], Costs::load(step.table[1] + at))));
          low = Costs::min(low, Costs::add(Costs::load(runs + j * kRun + (i & (kRun - 1))), cost));
        }
        Costs::store(best + i, low);
        least = Costs::min(least, low);
      }
      int16_t lane[Costs::kLanes];
      Costs::store(lane, least);
      int down = 32767;
      for (int16_t v : lane) down = v < down ? v : down;
      down += 32768;
      const Costs::T a = Costs::set(down / 2), b = Costs::set(down - down / 2);
      for (int i = 0; i < kGroups; i += Costs::kLanes)
        Costs::store(best + i, Costs::sub(Costs::sub(Costs::load(best + i), a), b));
    }
  }

  // The states of the best path whose last state has the high bits `end` (-1: any).
  static void backward(const ViterbiStep *steps, int count, int end, const int16_t *best, int *states) {
    int g = end;
    if (g < 0) {
      const int16_t *const last = best + size_t(count) * kGroups;
      g = 0;
      for (int i = 1; i < kGroups; ++i)
        if (last[i] < last[g]) g = i;
    }
    for (int t = count - 1; t >= 0; --t) {
      const int16_t *const before = best + size_t(t) * kGroups;
      int found = 0, least = 1 << 30;
      for (int j = 0; j < J; ++j) {
        const int s = g << Shift | j;
        const int cost = saturated(before[s & (kGroups - 1)] + distance(steps[t], place(s)));
        if (cost < least) least = cost, found = s;
      }
      states[t] = found;
      g = found & (kGroups - 1);
    }
  }

  static void ring(const Viterbi &p, int sequence, uint8_t *scratch) {
    int16_t *const best = reinterpret_cast<int16_t *>(scratch), *const runs = best + size_t(kSteps + 1) * kGroups;
    ViterbiStep steps[kSteps], around[kSteps];
    int states[kSteps];
    for (int i = 0; i < kSteps; ++i) {
      steps[i].x = p.x + (size_t(sequence) * kSteps + i) * V;
      for (int v = 0; v < V; ++v) steps[i].table[v] = p.tables + (size_t(i % p.columns) * V + v) * kViterbiStates;
    }
    // Where the ring begins is decided by a run over its end and its beginning, of which the middle is kept.
    const int window = p.window < kSteps ? p.window : kSteps, begin = kSteps - window / 2;
    for (int i = 0; i < window; ++i) around[i] = steps[(begin + i) % kSteps];
    forward(around, window, -1, best, runs);
    backward(around, window, -1, best, states);
    const int overlap = states[window / 2] & (kGroups - 1);
    forward(steps, kSteps, overlap, best, runs);
    backward(steps, kSteps, overlap, best, states);
    for (int i = 0; i < kSteps; ++i) p.states[size_t(sequence) * kSteps + i] = static_cast<uint16_t>(states[i]);
  }

  // Tables [V][states] of one column: values [V][states] times root [V][V]. Rounded by adding 1.5 * 2^23.
  static void tables(const Viterbi &p, int column, int16_t *to) {
    const float *const root = p.roots + size_t(column) * V * V;
    for (int v = 0; v < V; ++v)
      for (int at = 0; at < kViterbiStates; ++at) {
        float c = p.values[at] * root[v];
        if constexpr (V == 2) c += p.values[kViterbiStates + at] * root[V + v];
        c = c < -32767.0f ? -32767.0f : c;
        c = c > 32767.0f ? 32767.0f : c;
        c += 12582912.0f;
        int32_t bits;
        __builtin_memcpy(&bits, &c, sizeof bits);
        to[size_t(v) * kViterbiStates + at] = static_cast<int16_t>(bits);
      }
  }
};

// Calls run(Trellis<...>) for the problem's shift and weights of a state.
template <class F>
void with_trellis(const Viterbi &p, F &&run) {
#define CRELLE_TRELLIS(S, V) \
  if (p.shift == S && p.weights == V) return run(Trellis<S, V>{});
  CRELLE_TRELLIS(2, 2)
  CRELLE_TRELLIS(3, 2)
  CRELLE_TRELLIS(4, 2)
  CRELLE_TRELLIS(5, 2)
  CRELLE_TRELLIS(6, 2)
  CRELLE_TRELLIS(7, 2)
  CRELLE_TRELLIS(8, 2)
  CRELLE_TRELLIS(1, 1)
  CRELLE_TRELLIS(2, 1)
  CRELLE_TRELLIS(3, 1)
  CRELLE_TRELLIS(4, 1)
#undef CRELLE_TRELLIS
}

inline void viterbi_tables(const Viterbi &p, int column, int16_t *to) {
  with_trellis(p, [&](auto trellis) { decltype(trellis)::tables(p, column, to); });
}

inline void viterbi_ring(const Viterbi &p, int sequence, uint8_t *scratch) {
  with_trellis(p, [&](auto trellis) { decltype(trellis)::ring(p, sequence, scratch); });
}
