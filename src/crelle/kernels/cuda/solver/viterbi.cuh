// The path through a trellis that is nearest to a sequence of 128 weights, closed to a ring: what viterbi.h does on a
// CPU, with the same integers, so the states are the same.
//
//   cost_t+1[g] = min over j < J of  cost_t[s mod GROUPS] + distance_t(s)     s = g J + j: a state, J = 2^SHIFT
//
// A thread block has a sequence, a thread 64 states. Costs of a step are 16 bits in shared memory, from 0 (the least)
// to 65535. Those of all steps go to a workspace in global memory; the way back computes J of the sums again.
//
// Distances are squares of 15-bit fractions, (d d + 2^14) >> 15, d = x - c clamped to 32767. A table holds c + 32768 in
// 16 bits; with 0x4b00 above them they are the float 2^23 + c + 32768, so one byte permute makes a number, and one FMA
// that rounds down the square: its bits are SQUARE more than the integer. Two weights a state take 10 instructions, 6
// of them on the integer units, whose rate of 64 a cycle bounds the search at 10.7 states a cycle; one weight takes 5.
//
// A table has 2^16 states for each of the COLUMNS states of a row, 512 KB. KEPT sixteenths of it stay in shared memory;
// others are read from L2 in every step, 2.5 bytes a state with KEPT = 6, of the 24 or so that a multiprocessor gets
// a cycle when all of them read. The order of a table is that of the threads (`place`), so that a warp reads 512 bytes.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

constexpr int THREADS = 1024, STATES = 1 << 16, UNITS = 16;  // of a thread: units of 4 states
constexpr uint32 SQUARE = 0x527fffff;                        // bits of ROUNDING
constexpr float ROUNDING = 8388607.5f * 32768.0f;
constexpr float OFFSET = 8388608.0f + 32768.0f;
constexpr uint32 MOST_COST = 65535;

__device__ __forceinline__ uint32 least(uint32 a, uint32 b) { return a < b ? a : b; }
__device__ __forceinline__ uint32 warp_least(uint32 v) { return ~__reduce_max_sync(~0u, ~v); }

// Four states of a table: one or two values of 16 bits each.
template <int V>
struct Four;
template <>
struct Four<1> {
  uint2 words;
  template <int E, int>
  __device__ __forceinline__ uint32 word() const {
    return E / 2 ? words.y : words.x;
  }
};
template <>
struct Four<2> {
  uint4 words;
  template <int E, int>
  __device__ __forceinline__ uint32 word() const {
    return E == 0 ? words.x : E == 1 ? words.y : E == 2 ? words.z : words.w;
  }
};

// SHIFT: bits of its own that a state has; V: weights of a state.
template <int SHIFT, int V>
struct Trellis {
  static constexpr int J = 1 << SHIFT, GROUPS = STATES >> SHIFT, STEPS = 128 / V, COLUMNS = 4 / V;
  static constexpr bool FINE = SHIFT >= 3 * V;                // distances are doubled before they are squared
  static constexpr uint32 MOST_SUM = V == 2 ? 32767 : 32766;  // two squares saturate, one is of 32767 at most
  // Groups that are SAME apart have the same predecessors; a thread has EACH such groups, OUTER times.
  static constexpr int SAME = SHIFT < 8 ? STATES >> 2 * SHIFT : 1;
  static constexpr int PARTS = GROUPS < THREADS ? THREADS / GROUPS : 1;  // threads that share a group
  static constexpr int OUTER = SAME > THREADS ? SAME / THREADS : 1;
  static constexpr int EACH = GROUPS > THREADS ? GROUPS / THREADS / OUTER : 1;
  static constexpr int NEAR = J < 4 ? J : 4, FAR = 4 / NEAR;  // a unit: NEAR predecessors of FAR groups
  static constexpr int CHUNKS = J / PARTS / NEAR, INNER = EACH / FAR;
  static_assert(OUTER * CHUNKS * INNER == UNITS);
  static constexpr int BYTES = 4 * STATES * 2;  // of a table, all columns

  // Where the table of a column has a state: its first value, in values.
  static __device__ __forceinline__ int place(int column, int state) {
    const int g = state >> SHIFT, j = state & (J - 1), part = j / (J / PARTS), jj = j % (J / PARTS);
    const int thread = PARTS > 1 ? g * PARTS + part : g % THREADS, k = PARTS > 1 ? 0 : g / THREADS;
    const int a = k % OUTER, b = k / OUTER;
    const int unit = (a * CHUNKS + jj / NEAR) * INNER + b / FAR, e = b % FAR * NEAR + jj % NEAR;
    return (((column * UNITS + unit) * THREADS + thread) * 4 + e) * V;
  }

  // x as the search takes it.
  static __device__ __forceinline__ float prepared(int x) {
    return FINE ? 2.0f * (OFFSET + (float)x) : OFFSET + (float)x;
  }

  // SQUARE more than the square of the distance of x from the value in a half of a word.
  template <int HALF>
  static __device__ __forceinline__ uint32 squared(float x, uint32 word) {
    const float c = __uint_as_float(__byte_perm(word, 0x4b000000, HALF ? 0x7632 : 0x7610));
    const float d = FINE ? __fmaf_rn(-2.0f, c, x) : __fsub_rn(x, c);
    const float near = V == 2 ? fminf(fabsf(d), 32767.0f) : d;  // of one weight, `MOST_SUM` does it
    return __float_as_uint(__fmaf_rd(near, near, ROUNDING));
  }

  // V SQUARE more than the distance of state E of four, before it saturates.
  template <int E>
  static __device__ __forceinline__ uint32 distance(const float (&x)[V], const Four<V> &four) {
    const uint32 word = four.template word<E, 0>();
    if constexpr (V == 2) return squared<0>(x[0], word) + squared<1>(x[1], word);
    return squared<E % 2>(x[0], word);
  }

  // That of one state whose values are given.
  static __device__ __forceinline__ uint32 distance(const float *x, const unsigned short *values) {
    uint32 sum = 0;
#pragma unroll
    for (int v = 0; v < V; v++) sum += squared<0>(x[v], values[v]) - SQUARE;
    return least(sum, MOST_SUM);
  }
};

// Shared memory of a search.
template <class T, int KEPT, int V>
struct SearchMemory {
  Four<V> table[T::COLUMNS][KEPT][THREADS];
  unsigned short costs[2][T::GROUPS];
  float x[128], want[128];
  uint32 least[T::STEPS];  // subtracted from the costs before a step
  uint32 warps[2][32];
  int states[T::STEPS];
  int sequence, block;  // that the thread block works on: not in registers, of which the search has none to spare
};

template <int SHIFT, int V, int KEPT>
struct Search {
  using T = Trellis<SHIFT, V>;
  using Memory = SearchMemory<T, KEPT, V>;
  static constexpr int STEPS = T::STEPS, GROUPS = T::GROUPS, J = T::J;

  Memory &m;
  const Four<V> *const table;   // [COLUMNS][UNITS][THREADS]
  unsigned short *const every;  // [STEPS + 1][GROUPS]: costs after each step, of this thread block; the first unused

  static constexpr bool kept(int unit) { return unit * KEPT / UNITS != (unit + 1) * KEPT / UNITS; }
  static constexpr int slot(int unit) { return unit * KEPT / UNITS; }

  __device__ __forceinline__ Four<V> load(int column, int unit) const {
    if (kept(unit)) return m.table[column][slot(unit)][threadIdx.x];
    const auto *from = &table[(column * UNITS + unit) * THREADS + threadIdx.x].words;
    return {__ldg(from)};
  }

  // Copy what stays in shared memory: each thread reads what it copied.
  __device__ __forceinline__ void keep() const {
#pragma unroll
    for (int column = 0; column < T::COLUMNS; column++)
#pragma unroll
      for (int unit = 0; unit < UNITS; unit++)
        if (kept(unit))
          m.table[column][slot(unit)][threadIdx.x].words =
              __ldg(&table[(column * UNITS + unit) * THREADS + threadIdx.x].words);
  }

  // The states of the ring nearest to m.x, to m.states. All threads; m.x must be visible to all.
  __device__ __forceinline__ void ring() const {
    // Where the ring begins is decided by a run over the ring opened elsewhere, of which the middle is kept.
    int start = -1;
#pragma unroll 1
    for (int first = STEPS / 2; first >= 0; first -= STEPS / 2) {
      forward(first, start, first);
      backward(first, start, start < 0 ? best_group() : start, first);
      start = m.states[STEPS / 2] & (GROUPS - 1);
      __syncthreads();
    }
  }

private:
  // All steps from step `first` of the ring on; those before step `from` and later ones are stored.
  __device__ __forceinline__ void forward(int first, int start, int from) const {
    const int thread = threadIdx.x, group = thread / T::PARTS, part = thread % T::PARTS;
    for (int g = thread; g < GROUPS; g += THREADS) m.costs[0][g] = start < 0 || g == start ? 0 : MOST_COST;
    Four<V> ahead = load(first % T::COLUMNS, 0);
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < STEPS; t++) {
      const int step = (t + first) % STEPS, column = step % T::COLUMNS, next = (step + 1) % T::COLUMNS;
      const unsigned short *const before = m.costs[t % 2];
      unsigned short *const after = m.costs[(t + 1) % 2], *const stored = every + (size_t)(t + 1) * GROUPS;
      const uint32 down = t == 0 ? 0 : warp_least(m.warps[t % 2][thread % 32]);
      if (thread == 0) m.least[t] = down;
      float x[V];
#pragma unroll
      for (int v = 0; v < V; v++) x[v] = m.x[step * V + v];
      uint32 lowest = ~0u;
#pragma unroll
      for (int a = 0; a < T::OUTER; a++) {
        uint32 best[T::EACH], reach = ~0u;
#pragma unroll
        for (int b = 0; b < T::EACH; b++) best[b] = ~0u;
        const int from_group = ((group + THREADS * a) << SHIFT & (GROUPS - 1)) + part * (J / T::PARTS);
#pragma unroll
        for (int c = 0; c < T::CHUNKS; c++) {
          uint32 cost[T::NEAR];
          predecessors(before + from_group + c * T::NEAR, cost);
#pragma unroll
          for (int j = 0; j < T::NEAR; j++) {
            cost[j] -= down;
            reach = least(reach, cost[j]);
            cost[j] -= V * SQUARE;
          }
#pragma unroll
          for (int i = 0; i < T::INNER; i++) {
            const int unit = (a * T::CHUNKS + c) * T::INNER + i;
            const Four<V> four = ahead;
            ahead = unit + 1 < UNITS ? load(column, unit + 1) : load(next, 0);
            add<0>(x, four, cost, best, i);
            add<1>(x, four, cost, best, i);
            add<2>(x, four, cost, best, i);
            add<3>(x, four, cost, best, i);
          }
        }
#pragma unroll
        for (int by = 1; by < T::PARTS; by *= 2) {
          best[0] = least(best[0], __shfl_xor_sync(~0u, best[0], by));
          reach = least(reach, __shfl_xor_sync(~0u, reach, by));
        }
        const uint32 most = least(reach + T::MOST_SUM, MOST_COST);
#pragma unroll
        for (int b = 0; b < T::EACH; b++) {
          const int g = group + THREADS * (a + T::OUTER * b);
          const uint32 cost = least(best[b], most);
          lowest = least(lowest, cost);
          if (part) continue;
          after[g] = cost;
          if (t + 1 >= from) __stcg(stored + g, (unsigned short)cost);
        }
      }
      lowest = warp_least(lowest);
      if (thread % 32 == 0) m.warps[(t + 1) % 2][thread / 32] = lowest;
      __syncthreads();
    }
  }

  static __device__ __forceinline__ void predecessors(const unsigned short *from, uint32 (&cost)[T::NEAR]) {
    if constexpr (T::NEAR == 4) {
      const uint2 two = *reinterpret_cast<const uint2 *>(from);
      cost[0] = two.x & 0xffff, cost[1] = two.x >> 16, cost[2] = two.y & 0xffff, cost[3] = two.y >> 16;
    } else {
      const uint32 one = *reinterpret_cast<const uint32 *>(from);
      cost[0] = one & 0xffff, cost[1] = one >> 16;
    }
  }

  template <int E>
  static __device__ __forceinline__ void add(const float (&x)[V], const Four<V> &four, const uint32 (&cost)[T::NEAR],
                                             uint32 (&best)[T::EACH], int i) {
    constexpr int j = E % T::NEAR, far = E / T::NEAR;
    uint32 &to = best[i * T::FAR + far];
    to = least(to, T::template distance<E>(x, four) + cost[j]);
  }

  // The group with the least cost after the last step, of several the first.
  __device__ __forceinline__ int best_group() const {
    uint32 found = ~0u;
    for (int g = threadIdx.x; g < GROUPS; g += THREADS) found = least(found, (uint32)m.costs[STEPS % 2][g] << 16 | g);
    found = warp_least(found);
    if (threadIdx.x % 32 == 0) m.warps[(STEPS + 1) % 2][threadIdx.x / 32] = found;
    __syncthreads();
    return warp_least(m.warps[(STEPS + 1) % 2][threadIdx.x % 32]) & 0xffff;
  }

  // The states of steps `until` … STEPS - 1 of the best path that ends in group g.
  __device__ __forceinline__ void backward(int first, int start, int g, int until) const {
    const auto *const values = reinterpret_cast<const unsigned short *>(table);
    for (int t = STEPS - 1; threadIdx.x < 32 && t >= until; t--) {
      const int step = (t + first) % STEPS;
      uint32 best = ~0u;
      for (int j = threadIdx.x; j < J; j += 32) {
        const int state = g << SHIFT | j, of = state & (GROUPS - 1);
        uint32 cost = start < 0 || of == start ? 0 : MOST_COST;
        if (t) cost = __ldcg(every + (size_t)t * GROUPS + of) - m.least[t];
        cost += T::distance(m.x + step * V, values + T::place(step % T::COLUMNS, state));
        best = least(best, least(cost, MOST_COST) << 8 | j);
      }
      g = g << SHIFT | (warp_least(best) & 255);
      if (threadIdx.x == 0) m.states[t] = g;
      g &= GROUPS - 1;
    }
    __syncthreads();
  }
};

}  // namespace crelle
