// Trellis codes: tables of the Viterbi search (viterbi.cuh), rings for given sequences, and LDLQ over 128 inputs
// (crelle.quantizers.solvers.trellis_solver, which is the reference).
#include "solver/viterbi.cuh"

namespace crelle {

// The values of all states times the roots of some columns [V, V], rounded, in the order of the search. values f32
// [states, V], times which the sums go up to 32767 in size. Grid: 256 blocks for each column.
template <int SHIFT, int V>
__global__ void __launch_bounds__(256)
    viterbi_tables(const float *__restrict__ values, const float *__restrict__ roots, unsigned short *tables) {
  const int state = blockIdx.x % 256 * 256 + threadIdx.x, column = blockIdx.x / 256;
  const float *const root = roots + (size_t)column * V * V;
  using T = Trellis<SHIFT, V>;
  tables += column / T::COLUMNS * (T::BYTES / sizeof(short)) + T::place(column % T::COLUMNS, state);
#pragma unroll
  for (int v = 0; v < V; v++) {
    float c = __fmul_rn(values[state * V], root[v]);
    if constexpr (V == 2) c = __fmaf_rn(values[state * V + 1], root[V + v], c);
    tables[v] = (unsigned short)(__float2int_rn(fminf(fmaxf(c, -32767.0f), 32767.0f)) + 32768);
  }
}

// The states uint16 [S, 128 / V] of the rings nearest to x int16 [S, 128]; every: a workspace, of each thread block.
template <int SHIFT, int V, int KEPT>
__global__ void __launch_bounds__(THREADS, 1)
    viterbi_rings(const short *__restrict__ x, const Four<V> *__restrict__ table, unsigned short *every,
                  unsigned short *states, int S) {
  extern __shared__ __align__(128) char shared[];
  using T = Trellis<SHIFT, V>;
  using Search = crelle::Search<SHIFT, V, KEPT>;
  auto &m = *reinterpret_cast<typename Search::Memory *>(shared);
  const Search search{m, table, every + (size_t)blockIdx.x * (T::STEPS + 1) * T::GROUPS};
  search.keep();
  for (int s = blockIdx.x; s < S; s += gridDim.x) {
    __syncthreads();
    if (threadIdx.x < 128) m.x[threadIdx.x] = T::prepared(x[(size_t)s * 128 + threadIdx.x]);
    __syncthreads();
    search.ring();
    if (threadIdx.x < T::STEPS) states[(size_t)s * T::STEPS + threadIdx.x] = m.states[threadIdx.x];
  }
}

// What LDLQ works on: B blocks of 4 inputs of a matrix [N, K], N a multiple of 32. All of [.., K] begin at the first of
// these inputs; mix at its diagonal element.
struct Columns {
  const float *wanted;  // [N, 4 B]: target, with what inputs before these contribute
  const float *target;  // [N, K], in units of values
  const float *mix;     // [.., K]
  const float *roots;   // [B, COLUMNS, V, V]
  const float *values;  // [states, V]
  const char *tables;   // [B]
  unsigned short *every;
  float *left, *found;   // [N, K], written: errors and values
  unsigned char *codes;  // [N / 32, blocks of all inputs, bytes of a ring], from the first block on
  long long K, ring;     // ring: bytes from a row block to the next one
  int N, B;
};

// Codes of some inputs, 4 at a time, each with the errors of those before. A thread block has 32 rows, which no others
// concern, so nothing waits for another block or for the host.
template <int SHIFT, int V, int KEPT>
__global__ void __launch_bounds__(THREADS, 1) encode_columns(const __grid_constant__ Columns p) {
  extern __shared__ __align__(128) char shared[];
  using T = Trellis<SHIFT, V>;
  using Search = crelle::Search<SHIFT, V, KEPT>;
  auto &m = *reinterpret_cast<typename Search::Memory *>(shared);
  constexpr int RING = T::STEPS * SHIFT / 8;
  const int thread = threadIdx.x;
  const auto next = [&] {  // the next block of inputs, after the last one the next rows
    if (thread == 0 && ++m.block == p.B) m.block = 0, m.sequence += gridDim.x;
    __syncthreads();
  };
  if (thread == 0) m.sequence = blockIdx.x, m.block = -1;
#pragma unroll 1
  for (next(); m.sequence < p.N / 32; next()) {
    const Search search{m, reinterpret_cast<const Four<V> *>(p.tables + (size_t)m.block * T::BYTES),
                        p.every + (size_t)blockIdx.x * (T::STEPS + 1) * T::GROUPS};
    search.keep();
    {
      const int i = thread / 8, row = m.sequence * 32 + i / 4, column = 4 * m.block + i % 4;
      float sum = 0;
      for (int k = thread % 8; k < 4 * m.block; k += 8)
        sum = fmaf(__ldcg(p.left + row * p.K + k), p.mix[k * p.K + column], sum);
#pragma unroll
      for (int by = 1; by < 8; by *= 2) sum += __shfl_xor_sync(~0u, sum, by);
      if (thread % 8 == 0) m.want[i] = p.wanted[(size_t)row * 4 * p.B + column] + sum;
    }
    __syncthreads();
    if (thread < 128) {
      const float *const root = p.roots + (m.block * T::COLUMNS + thread % 4 / V) * V * V + thread % V;
      const float *const want = m.want + thread / V * V;
      float x = want[0] * root[0];
      if constexpr (V == 2) x = fmaf(want[1], root[V], x);
      m.x[thread] = T::prepared(__float2int_rn(fminf(fmaxf(x, -32767.0f), 32767.0f)));
    }
    __syncthreads();
    search.ring();
    if (thread < 128) {
      const size_t at = (m.sequence * 32 + thread / 4) * p.K + 4 * m.block + thread % 4;
      const float value = p.values[m.states[thread / V] * V + thread % V];
      p.found[at] = value;
      __stcg(p.left + at, p.target[at] - value);
    }
    if (thread < RING) {
      int byte = 0;
#pragma unroll
      for (int bit = 0; bit < 8; bit++) {
        const int at = thread * 8 + bit;
        byte |= (m.states[at / SHIFT] >> at % SHIFT & 1) << bit;
      }
      p.codes[m.sequence * p.ring + m.block * RING + thread] = byte;
    }
    __syncthreads();  // all have read where they are
  }
}

}  // namespace crelle
