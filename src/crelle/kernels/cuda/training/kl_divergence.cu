// sum_v p log(p / p^) of rows of logits, p = softmax(theirs), p^ = softmax(mine), and its gradient for `mine`.
//
// A thread block has a row, which it reads once: sums of exponentials are relative to the largest logit so far, and
//
//   sum_v p log(p / p^) = sum_v p (theirs - mine) - log sum exp(theirs) + log sum exp(mine)
#include "ptx/types.cuh"
#include "ptx/vector.cuh"

namespace crelle {

constexpr int KL_THREADS = 256;
// Below every logit, and yet not infinite: the difference of two of them is a number.
constexpr float NOTHING = -3e38f;

// Sums over logits relative to the largest of them.
struct Partial {
  float most_mine, mine, most_theirs, theirs, apart;

  // Make the largest logits at least these.
  __device__ __forceinline__ void raise(float m, float t) {
    if (m > most_mine) mine *= __expf(most_mine - m), most_mine = m;
    if (t > most_theirs) {
      const float less = __expf(most_theirs - t);
      theirs *= less, apart *= less, most_theirs = t;
    }
  }
  __device__ __forceinline__ void add(float m, float t) {
    const float weight = __expf(t - most_theirs);
    mine += __expf(m - most_mine), theirs += weight, apart += weight * (t - m);
  }
  __device__ __forceinline__ void join(Partial other) {
    other.raise(most_mine, most_theirs);
    raise(other.most_mine, other.most_theirs);
    mine += other.mine, theirs += other.theirs, apart += other.apart;
  }
};

template <int VEC, typename T>
__global__ void __launch_bounds__(KL_THREADS)
    kl_divergence(const T *__restrict__ mine, const T *__restrict__ theirs, float *__restrict__ divergence,
                  float *__restrict__ log_mine, float *__restrict__ log_theirs, int V) {
  __shared__ Partial of_thread[KL_THREADS];
  const long long row = static_cast<long long>(blockIdx.x) * V;
  Partial sums{NOTHING, 0, NOTHING, 0, 0};
  for (int i = threadIdx.x * VEC; i < V; i += KL_THREADS * VEC) {
    const auto m = *reinterpret_cast<const Vector<VEC, T> *>(mine + row + i);
    const auto t = *reinterpret_cast<const Vector<VEC, T> *>(theirs + row + i);
    float most_m = to_float(m.v[0]), most_t = to_float(t.v[0]);
#pragma unroll
    for (int e = 1; e < VEC; e++) most_m = fmaxf(most_m, to_float(m.v[e])), most_t = fmaxf(most_t, to_float(t.v[e]));
    sums.raise(most_m, most_t);
#pragma unroll
    for (int e = 0; e < VEC; e++) sums.add(to_float(m.v[e]), to_float(t.v[e]));
  }
  of_thread[threadIdx.x] = sums;
  for (int half = KL_THREADS / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) of_thread[threadIdx.x].join(of_thread[threadIdx.x + half]);
  }
  if (threadIdx.x) return;
  sums = of_thread[0];
  const float m = sums.most_mine + logf(sums.mine), t = sums.most_theirs + logf(sums.theirs);
  divergence[blockIdx.x] = sums.apart / sums.theirs - t + m;
  log_mine[blockIdx.x] = m;
  log_theirs[blockIdx.x] = t;
}

// (p^ - p) by[0] of a row for each block of the grid's y, VEC logits a thread.
template <int VEC, typename T>
__global__ void __launch_bounds__(KL_THREADS)
    kl_divergence_backward(const T *__restrict__ mine, const T *__restrict__ theirs, const float *__restrict__ log_mine,
                           const float *__restrict__ log_theirs, const float *__restrict__ by, T *__restrict__ gradient,
                           int V) {
  const int i = (blockIdx.y * KL_THREADS + threadIdx.x) * VEC;
  if (i >= V) return;
  const long long at = static_cast<long long>(blockIdx.x) * V + i;
  const float of_mine = log_mine[blockIdx.x], of_theirs = log_theirs[blockIdx.x], factor = by[0];
  const auto m = *reinterpret_cast<const Vector<VEC, T> *>(mine + at);
  const auto t = *reinterpret_cast<const Vector<VEC, T> *>(theirs + at);
  Vector<VEC, T> d;
#pragma unroll
  for (int e = 0; e < VEC; e++)
    d.v[e] = from_float<T>((__expf(to_float(m.v[e]) - of_mine) - __expf(to_float(t.v[e]) - of_theirs)) * factor);
  *reinterpret_cast<Vector<VEC, T> *>(gradient + at) = d;
}

}  // namespace crelle
