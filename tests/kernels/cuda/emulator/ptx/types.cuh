// CUDA on a CPU, for tests: a thread block is as many fibers, which take turns at barriers, shuffles and matrix
// instructions. Stands in for ptx/types.cuh; only what the tested kernels use is here.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static
#define __restrict__
#define __grid_constant__
#define __cluster_dims__(...)
#define __CUDA_ARCH__ ARCH

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct int4 {
  int x, y, z, w;
};
struct int2 {
  int x, y;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
inline int2 make_int2(int a, int b) { return {a, b}; }
inline float2 make_float2(float a, float b) { return {a, b}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }

template <typename To, typename From>
inline To bits_as(From v) {
  To to;
  static_assert(sizeof to == sizeof v);
  memcpy(&to, &v, sizeof to);
  return to;
}
inline float __uint_as_float(unsigned v) { return bits_as<float>(v); }
inline float __int_as_float(int v) { return bits_as<float>(v); }
inline unsigned __float_as_uint(float v) { return bits_as<unsigned>(v); }

// IEEE half precision, rounded to nearest even; denormals are kept.
struct __half {
  uint16_t bits = 0;
  __half() = default;
  explicit __half(float v) {
    const uint32_t u = bits_as<uint32_t>(v), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000) {
      bits = sign | 0x7e00;
    } else if (magnitude >= 0x477ff000) {
      bits = sign | 0x7c00;
    } else if (magnitude < 0x38800000) {  // denormal: steps of 2^-24
      bits = sign | static_cast<uint16_t>(std::nearbyint(bits_as<float>(magnitude) * 0x1p24f));
    } else {
      const uint32_t half = magnitude - 0x38000000;
      bits = sign | (half + 0xfff + (half >> 13 & 1)) >> 13;
    }
  }
  operator float() const {
    const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
    if (exponent == 0) return bits_as<float>(sign | bits_as<uint32_t>(mantissa * 0x1p-24f));
    if (exponent == 31) return bits_as<float>(sign | 0x7f800000 | mantissa << 13);
    return bits_as<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  }
};
struct __half2 {
  __half x, y;
};
struct __nv_bfloat16 {
  uint16_t bits = 0;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float v) {
    const uint32_t u = bits_as<uint32_t>(v);
    bits = v != v ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  }
  operator float() const { return bits_as<float>((uint32_t)bits << 16); }
};
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline float __half2float(__half v) { return v; }
inline __half __ushort_as_half(unsigned v) {
  __half h;
  h.bits = static_cast<uint16_t>(v);
  return h;
}

inline __half __float2half_rn(float v) { return __half(v); }
inline unsigned short __half_as_ushort(__half v) { return v.bits; }
inline __half2 __float2half2_rn(float v) { return {__half(v), __half(v)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {__half(a.x - (float)b.x), __half(a.y - (float)b.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__half(a.x * (float)b.x), __half(a.y * (float)b.y)}; }
inline __half2 __hneg2(__half2 a) { return {__half(-(float)a.x), __half(-(float)a.y)}; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
template <typename T>
inline T __ldcg(const T *p) {
  return *p;
}
template <typename T>
inline void __stcg(T *p, T v) {
  *p = v;
}
inline int atomicAdd(int *at, int by) { return *at += by, *at - by; }
inline unsigned atomicMax(unsigned *at, unsigned v) { return *at = v > *at ? v : *at, v; }
inline void __threadfence() {}

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = (uint64_t)b << 32 | a;
  unsigned to = 0;
  for (int i = 0; i < 4; i++) to |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return to;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>(((uint64_t)high << 32 | low) >> (by & 31));
}
template <typename T>
inline T __ldg(const T *p) {
  return *p;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

// --- fibers

struct Index {
  unsigned x, y, z;
};
inline Index threadIdx, blockIdx, gridDim, blockDim;

// The same in all kernels: a process has one of it, however many libraries it has loaded.
struct Emulator {
  static constexpr int MOST = 1024, STACK = 1 << 16, CLUSTER = 4;
  ucontext_t home, fiber[MOST];
  bool done[MOST];
  int current, count, alive, cluster = 1;  // count: threads of a block
  int cluster_arrived;                     // threads of the cluster, at `cluster_arrive`
  int arrived[CLUSTER] = {}, generation[CLUSTER] = {}, first_block;
  int warp_arrived[MOST / 32] = {}, warp_generation[MOST / 32] = {};
  uint64_t in[MOST][6], out[MOST][2];
  std::vector<char> stacks = std::vector<char>((size_t)MOST * STACK);
  std::function<void()> body;
};
inline Emulator emulator;

// Blocks of a cluster run side by side; this one is the how-manieth.
inline int block_rank() { return emulator.current / emulator.count; }
inline void set_indices(int fiber) {
  emulator.current = fiber, threadIdx.x = fiber % emulator.count;
  if (emulator.cluster > 1) blockIdx.x = emulator.first_block + fiber / emulator.count;
}

inline void yield() {
  const int me = emulator.current;
  swapcontext(&emulator.fiber[me], &emulator.home);
  set_indices(me);
}
inline void enter_fiber() {
  emulator.body();
  emulator.done[emulator.current] = true, emulator.alive--;
  swapcontext(&emulator.fiber[emulator.current], &emulator.home);
}
inline void run_block(int block_threads, std::function<void()> body, int cluster = 1) {
  Emulator &e = emulator;
  const int threads = block_threads * cluster;
  e.body = body, e.count = block_threads, e.alive = threads, e.cluster = cluster, e.first_block = blockIdx.x;
  for (int &n : e.arrived) n = 0;
  e.cluster_arrived = 0;
  for (int i = 0; i < threads; i++) {
    getcontext(&e.fiber[i]);
    e.fiber[i].uc_stack.ss_sp = e.stacks.data() + (size_t)i * Emulator::STACK;
    e.fiber[i].uc_stack.ss_size = Emulator::STACK;
    e.fiber[i].uc_link = nullptr, e.done[i] = false;
    makecontext(&e.fiber[i], enter_fiber, 0);
  }
  for (long turn = 0; e.alive; turn++) {
    if (turn > 10000000) fprintf(stderr, "threads wait for each other\n"), abort();
    for (int i = 0; i < threads; i++) {
      if (e.done[i]) continue;
      set_indices(i);
      swapcontext(&e.home, &e.fiber[i]);
    }
  }
}
// The last of a warp to come does `work`.
template <typename F>
inline void with_warp(F work) {
  const int w = emulator.current / 32, generation = emulator.warp_generation[w];
  if (++emulator.warp_arrived[w] == 32) {
    work(32 * w);
    emulator.warp_arrived[w] = 0, emulator.warp_generation[w]++;
  } else {
    while (emulator.warp_generation[w] == generation) yield();
  }
}
inline void __syncwarp() {
  with_warp([](int) {});
}
inline void __syncthreads() {
  const int b = block_rank(), generation = emulator.generation[b];
  if (++emulator.arrived[b] == emulator.count) {
    emulator.arrived[b] = 0, emulator.generation[b]++;
  } else {
    while (emulator.generation[b] == generation) yield();
  }
}
template <typename T, typename F>
inline T shuffled(T v, F source) {
  const int me = emulator.current;
  memcpy(emulator.in[me], &v, sizeof v);
  emulator.in[me][1] = source(me % 32);
  with_warp([](int first) {
    for (int i = 0; i < 32; i++) {
      const int from = static_cast<int>(emulator.in[first + i][1]);
      emulator.out[first + i][0] = emulator.in[first + (from < 0 || from > 31 ? i : from)][0];
    }
  });
  memcpy(&v, emulator.out[me], sizeof v);
  return v;
}
inline unsigned __reduce_or_sync(unsigned, unsigned mine) {
  const int me = emulator.current;
  emulator.in[me][0] = mine;
  with_warp([](int first) {
    uint64_t any = 0;
    for (int i = 0; i < 32; i++) any |= emulator.in[first + i][0];
    for (int i = 0; i < 32; i++) emulator.out[first + i][0] = any;
  });
  return emulator.out[me][0];
}
inline unsigned __ballot_sync(unsigned, bool mine) {
  const unsigned bit = (unsigned)mine << emulator.current % 32;
  return __reduce_or_sync(~0u, bit);
}
inline unsigned __match_any_sync(unsigned, int mine) {
  const int me = emulator.current;
  emulator.in[me][0] = static_cast<unsigned>(mine);
  with_warp([](int first) {
    for (int i = 0; i < 32; i++) {
      unsigned same = 0;
      for (int j = 0; j < 32; j++) same |= (emulator.in[first + i][0] == emulator.in[first + j][0]) << j;
      emulator.out[first + i][0] = same;
    }
  });
  return emulator.out[me][0];
}
inline int __ffs(unsigned v) { return __builtin_ffs(v); }
inline bool __any_sync(unsigned, bool mine) { return __ballot_sync(~0u, mine) != 0; }
inline bool __all_sync(unsigned, bool mine) { return __ballot_sync(~0u, mine) == ~0u; }
template <typename T>
inline T __shfl_xor_sync(unsigned, T v, int mask) {
  return shuffled(v, [=](int i) { return i ^ mask; });
}
template <typename T>
inline T __shfl_up_sync(unsigned, T v, int by) {
  return shuffled(v, [=](int i) { return i - by; });
}
template <typename T>
inline T __shfl_down_sync(unsigned, T v, int by) {
  return shuffled(v, [=](int i) { return i + by; });
}
template <typename T>
inline T __shfl_sync(unsigned, T v, int from) {
  return shuffled(v, [=](int) { return from; });
}

namespace crelle {

using half = __half;
using half2 = __half2;
using bfloat16 = __nv_bfloat16;
using uint32 = unsigned int;
constexpr int SHARED = 256 * 1024;
inline __attribute__((aligned(128))) char shared[SHARED * Emulator::CLUSTER];  // dynamic shared memory
inline char *block_shared() { return shared + block_rank() * SHARED; }

enum Prologue { PLAIN, RMS_NORM, LAYER_NORM, SILU_MUL, RELU, GELU, GELU_TANH, GELU_MUL, GELU_TANH_MUL };
constexpr bool is_gated(Prologue op) { return op == SILU_MUL || op == GELU_MUL || op == GELU_TANH_MUL; }
constexpr bool is_gelu(Prologue op) { return op == GELU || op == GELU_TANH || op == GELU_MUL || op == GELU_TANH_MUL; }

inline float to_float(half v) { return v; }
inline float to_float(bfloat16 v) { return v; }
inline float to_float(float v) { return v; }
template <typename T>
inline T from_float(float v) {
  return T(v);
}
inline bool below(float a, float b) { return a < b || (a == b && std::signbit(a) && !std::signbit(b)); }  // -0 < 0
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : below(a, b) ? b : a; }
inline float min_nan(float a, float b) { return a != a || b != b ? NAN : below(a, b) ? a : b; }
inline float relu(float v) { return max_nan(v, 0); }
template <Prologue OP>
inline float gelu_of(float v) {
  return 0.5f * v * (1 + erff(v * 0.70710678118654752f));
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmaf_rd(float a, float b, float c) {  // of products and sums that f64 holds
  const double exact = (double)a * b + c;
  const float near = static_cast<float>(exact);
  return near > exact ? std::nextafter(near, -INFINITY) : near;
}
inline float __frcp_rn(float v) { return 1 / v; }
inline float __expf(float v) { return expf(v); }
inline float rsqrtf(float v) { return 1 / sqrtf(v); }
inline double rsqrt(double v) { return 1 / std::sqrt(v); }
inline uint32 kept(uint32 v) { return v; }
template <bool YES, typename A, typename B>
struct Conditional {
  using type = A;
};
template <typename A, typename B>
struct Conditional<false, A, B> {
  using type = B;
};
inline int __float2int_rn(float v) { return static_cast<int>(std::nearbyint(v)); }
template <int WORDS>
inline void take(uint32 (&to)[WORDS], const uint32 *from) {
  memcpy(to, from, sizeof to);
}
template <typename T, typename F>
inline T reduced(T v, F both) {
  for (int i = 16; i; i /= 2) v = both(v, __shfl_xor_sync(~0u, v, i));
  return v;
}
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
  return reduced(v, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline int __reduce_add_sync(unsigned, int v) {
  return reduced(v, [](int a, int b) { return a + b; });
}
inline void grid_dependency_wait() {}
inline void grid_dependency_wait_late(int) {}
inline void launch_dependents() {}

}  // namespace crelle
