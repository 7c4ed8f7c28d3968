// Which experts the tokens of a batch take, the batch's slots sorted by expert, and the sum of what they made.
#include "experts/choice.cuh"
#include "ptx/global_loads.cuh"

namespace crelle {

// logits f32 [M, count] = x [M, K] W.T (+ bias) for plain weights [count, K]: a warp for an expert and ROWS tokens, so
// that the order of a sum is always the same. Grid (ceil(count / 8), ceil(M / ROWS)), 256 threads.
template <int ROWS, typename X>
__global__ void __launch_bounds__(256)
    router_logits(const X *x, const X *__restrict__ weight, const X *__restrict__ bias, float *logits, int count, int K,
                  int M) {
  const int lane = threadIdx.x & 31, e = blockIdx.x * 8 + (threadIdx.x >> 5), row = blockIdx.y * ROWS;
  const X *const w = weight + (size_t)e * K;
  launch_dependents();
  for (int k = lane * 64; e < count && k < K; k += 2048) prefetch_line(w + k);
  grid_dependency_wait();
  if (e >= count) return;
  float sums[ROWS] = {};
  const int vectors = K % 8 ? 0 : K / 8;
#pragma unroll 4
  for (int i = lane; i < vectors; i += 32) {
    float a[8], b[8];
    open<X>(a, *(reinterpret_cast<const uint4 *>(w) + i));
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
      open<X>(b, *(reinterpret_cast<const uint4 *>(x + (size_t)min(row + m, M - 1) * K) + i));
#pragma unroll
      for (int j = 0; j < 8; j++) sums[m] = fmaf(a[j], b[j], sums[m]);
    }
  }
  for (int k = vectors * 8 + lane; k < K; k += 32)
#pragma unroll
    for (int m = 0; m < ROWS; m++)
      sums[m] = fmaf(to_float(w[k]), to_float(x[(size_t)min(row + m, M - 1) * K + k]), sums[m]);
#pragma unroll
  for (int m = 0; m < ROWS; m++) {
    const float sum = warp_sum(sums[m]);
    if (lane == 0 && row + m < M) logits[(size_t)(row + m) * count + e] = sum + (bias ? to_float(bias[e]) : 0);
  }
}

// chosen int [M, top] and weights f32 [M, top] of logits [M, pitch]: a warp for a token. Grid (ceil(M / 8)), 256
// threads.
template <int E>
__global__ void __launch_bounds__(256)
    route(const float *logits, int *chosen, float *weights, int M, int count, int pitch, int top, int normalize) {
  const int lane = threadIdx.x & 31, row = blockIdx.x * 8 + (threadIdx.x >> 5);
  launch_dependents();
  grid_dependency_wait();
  if (row >= M) return;
  int expert;
  float weight;
  choose<E>(logits + (size_t)row * pitch, count, top, normalize, lane, expert, weight);
  if (lane < top) chosen[(size_t)row * top + lane] = expert, weights[(size_t)row * top + lane] = weight;
}

// Counting sort of slots by expert, stable: order [slots], the slot at each place; passes [.., 10] of up to NT slots of
// one expert with its addresses (expert_gemm.cu), and how many there are. One thread block of 1024 threads: a warp
// counts a range of slots by itself, 32 at a time. Shared: 32 count ints. At most 1024 experts.
template <int NT>
__global__ void __launch_bounds__(1024) sort_slots(const int *chosen, const Address *table, int *order, Address *passes,
                                                   int *pass_count, int slots, int count) {
  extern __shared__ __align__(128) char shared[];
  int *const seen = reinterpret_cast<int *>(shared);  // [warp, expert]: slots in ranges before the warp's
  __shared__ int firsts[1024];                        // slots of the experts before this one
  __shared__ int2 totals[32];                         // slots and passes of a warp's experts
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, e = threadIdx.x;
  const int range = (slots + 1023) / 1024 * 32, begin = min(slots, warp * range), end = min(slots, begin + range);
  launch_dependents();
  Address own[COLUMNS];
#pragma unroll
  for (int k = 0; k < COLUMNS; k++) own[k] = e < count ? __ldcg(table + e * COLUMNS + k) : 0;
  for (int i = threadIdx.x; i < 32 * count; i += 1024) seen[i] = 0;
  grid_dependency_wait();
  __syncthreads();
  const auto each = [&](auto use) {  // slot, expert, lanes that have the same one
    for (int i = begin; i < end; i += 32) {
      const int slot = i + lane, mine = slot < end ? __ldcg(chosen + slot) : -1;
      const unsigned same = __match_any_sync(~0u, mine);
      use(slot, mine, same);
      __syncwarp();
    }
  };
  each([&](int, int mine, unsigned same) {
    if (mine >= 0 && lane == __ffs(same) - 1) seen[warp * count + mine] += __popc(same);
  });
  __syncthreads();
  int sum = 0;
  if (e < count)
#pragma unroll
    for (int w = 0; w < 32; w += 8) {
      int here[8];
#pragma unroll
      for (int i = 0; i < 8; i++) here[i] = seen[(w + i) * count + e];
#pragma unroll
      for (int i = 0; i < 8; i++) seen[(w + i) * count + e] = sum, sum += here[i];
    }
  const int mine = (sum + NT - 1) / NT;  // passes
  const auto up_to_this = [&](int2 v) {  // sums over the lanes up to this one
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int x = __shfl_sync(~0u, v.x, max(lane - by, 0)), y = __shfl_sync(~0u, v.y, max(lane - by, 0));
      if (lane >= by) v.x += x, v.y += y;
    }
    return v;
  };
  int2 upto = up_to_this(make_int2(sum, mine));
  if (lane == 31) totals[warp] = upto;
  __syncthreads();
  const int2 all = up_to_this(totals[lane]);
  const int before = max(warp - 1, 0), x = __shfl_sync(~0u, all.x, before), y = __shfl_sync(~0u, all.y, before);
  if (warp > 0) upto.x += x, upto.y += y;
  firsts[e] = upto.x - sum;
  if (e == 1023) *pass_count = upto.y;
  for (int i = 0; i < mine; i++) {
    Address *const to = passes + (size_t)(upto.y - mine + i) * 10;
    to[0] = (Address)min(NT, sum - i * NT) << 32 | (unsigned)(upto.x - sum + i * NT);
#pragma unroll
    for (int k = 0; k < COLUMNS; k++) to[1 + k] = own[k];
  }
  __syncthreads();
  each([&](int slot, int expert, unsigned same) {
    int at = 0;
    if (expert >= 0) at = seen[warp * count + expert];
    __syncwarp();
    if (expert < 0) return;
    order[firsts[expert] + at + __popc(same & ((1u << lane) - 1))] = slot;
    if (lane == __ffs(same) - 1) seen[warp * count + expert] = at + __popc(same);
  });
}

// y [M, N] = x + sum over a token's slots, in their order, of weight * made [M, top, N], + sigmoid(gate) * shared [M,
// N] where there is one (gate: logit [M, pitch] at `count`). Grid (ceil(N / 256), M), 256 threads.
template <typename X>
__global__ void __launch_bounds__(256) combine(const X *made, const float *weights, const X *x, const X *shared_made,
                                               const float *logits, X *y, int N, int top, int count, int pitch) {
  const int n = blockIdx.x * 256 + threadIdx.x;
  const size_t row = blockIdx.y;
  launch_dependents();
  grid_dependency_wait();
  if (n >= N) return;
  float v = x ? to_float(x[row * N + n]) : 0;
  for (int k = 0; k < top; k++) v = fmaf(weights[row * top + k], to_float(made[(row * top + k) * N + n]), v);
  if (shared_made) v += to_float(shared_made[row * N + n]) / (1 + __expf(-logits[row * pitch + count]));
  y[row * N + n] = from_float<X>(v);
}

}  // namespace crelle
