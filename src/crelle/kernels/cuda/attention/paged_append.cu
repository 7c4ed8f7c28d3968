// New tokens into pages: q and k are normed (where the model does that) and rotated by position, then q, k, v rotated
// by H, the keys' centre taken off, and keys and values quantized and stored where the block table says.
//
// A warp takes one head of one token, a lane two channels next to each other of each 64. What formats/kv/pages.py
// computes is computed in the same steps with the same roundings (division, not a product with the inverse; nothing
// contracted), so codes and packed scales are the same bits. A norm and a rotation round to T where the model's own
// layers do.
#include "attention/append_8lane.cuh"

namespace crelle {

// A head of T: normed where there is a weight, its first R channels rotated where there is a cos.
template <int D, int R, typename T>
__device__ __forceinline__ void prepared(float (&v)[Head<D>::SIZE], const T *from, const T *weight, float eps,
                                         const float *cos, const float *sin, int lane) {
  using H = Head<D>;
  static_assert(R % 4 == 0 && R <= D);
  float other[H::SIZE];  // the channels that these are rotated with, R / 2 away
  const auto rotates = [&](int i) { return R == D || i < R; };
  H::load(v, from, lane);
#pragma unroll
  for (int p = 0; p < H::PAIRS; p++) {
    const int i = H::channel(p, lane);
    other[2 * p] = other[2 * p + 1] = 0;
    if (!cos || !H::has(p, lane) || !rotates(i)) continue;
    const Neighbours<T> two = *reinterpret_cast<const Neighbours<T> *>(from + (i < R / 2 ? i + R / 2 : i - R / 2));
    other[2 * p] = to_float(two.first), other[2 * p + 1] = to_float(two.second);
  }
  if (weight) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < H::SIZE; i++) squares = fmaf(v[i], v[i], squares);
    const float scale = rsqrtf(warp_sum(squares) / D + eps);
    const auto apply_norm = [&](float x, int i) {
      return to_float(from_float<T>(__fmul_rn(to_float(from_float<T>(__fmul_rn(x, scale))), to_float(weight[i]))));
    };
#pragma unroll
    for (int j = 0; j < H::SIZE; j++) {
      const int i = H::channel(j / 2, lane) + j % 2;
      if (!H::has(j / 2, lane)) continue;
      v[j] = apply_norm(v[j], i);
      if (cos && rotates(i)) other[j] = apply_norm(other[j], i < R / 2 ? i + R / 2 : i - R / 2);
    }
  }
  if (cos) {
#pragma unroll
    for (int p = 0; p < H::PAIRS; p++) {
      const int i = H::channel(p, lane), angle = i < R / 2 ? i : i - R / 2;
      if (!H::has(p, lane) || !rotates(i)) continue;
      const Neighbours<float> c = *reinterpret_cast<const Neighbours<float> *>(cos + angle);
      const Neighbours<float> s = *reinterpret_cast<const Neighbours<float> *>(sin + angle);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float along = __fmul_rn(v[2 * p + j], j ? c.second : c.first);
        const float across = __fmul_rn(other[2 * p + j], j ? s.second : s.first);
        v[2 * p + j] = to_float(from_float<T>(i < R / 2 ? __fsub_rn(along, across) : __fadd_rn(along, across)));
      }
    }
  }
}

// The least and the greatest of the group of each pair of channels, and whether some channel of it is NaN.
template <int D, int GROUP>
__device__ __forceinline__ void ranges(const float (&v)[Head<D>::SIZE], float (&low)[Head<D>::PAIRS],
                                       float (&high)[Head<D>::PAIRS], bool (&broken)[Head<D>::PAIRS], int lane) {
  using H = Head<D>;
  constexpr int LANES = GROUP / 2;  // that hold a group
  const auto widen = [&](int p, float l, float h, bool b) {
    low[p] = fminf(low[p], l), high[p] = fmaxf(high[p], h), broken[p] |= b;
  };
  const auto around = [&](int p, int apart) {
    widen(p, __shfl_xor_sync(~0u, low[p], apart), __shfl_xor_sync(~0u, high[p], apart),
          __shfl_xor_sync(~0u, static_cast<int>(broken[p]), apart));
  };
#pragma unroll
  for (int p = 0; p < H::PAIRS; p++) {
    low[p] = high[p] = 0, broken[p] = v[2 * p] != v[2 * p] || v[2 * p + 1] != v[2 * p + 1];  // the range holds 0
    low[p] = fminf(low[p], fminf(v[2 * p], v[2 * p + 1])), high[p] = fmaxf(high[p], fmaxf(v[2 * p], v[2 * p + 1]));
  }
  if constexpr (LANES < 32 && (LANES & LANES - 1) == 0) {
#pragma unroll
    for (int p = 0; p < H::PAIRS; p++) {
#pragma unroll
      for (int i = 1; i < LANES; i *= 2) around(p, i);
    }
  } else if constexpr (GROUP % 64 == 0 || GROUP == D) {
#pragma unroll
    for (int p = 0; p < H::PAIRS; p++) {
#pragma unroll
      for (int k = p + 1; k < H::PAIRS; k++)
        if (GROUP == D || k * 64 / GROUP == p * 64 / GROUP) widen(p, low[k], high[k], broken[k]);
#pragma unroll
      for (int i = 1; i < 32; i *= 2) around(p, i);
#pragma unroll
      for (int k = p + 1; k < H::PAIRS; k++)
        if (GROUP == D || k * 64 / GROUP == p * 64 / GROUP) low[k] = low[p], high[k] = high[p], broken[k] = broken[p];
    }
  } else {  // lanes in no such order: one group after the other
    float all_low[H::PAIRS], all_high[H::PAIRS];
    bool all_broken[H::PAIRS];
#pragma unroll
    for (int p = 0; p < H::PAIRS; p++) all_low[p] = low[p], all_high[p] = high[p], all_broken[p] = broken[p];
#pragma unroll
    for (int group = 0; group < D / GROUP; group++) {
      float l = 0, h = 0;
      bool b = false;
#pragma unroll
      for (int p = 0; p < H::PAIRS; p++)
        if (H::channel(p, lane) / GROUP == group)
          l = fminf(l, all_low[p]), h = fmaxf(h, all_high[p]), b |= all_broken[p];
#pragma unroll
      for (int i = 1; i < 32; i *= 2)
        l = fminf(l, __shfl_xor_sync(~0u, l, i)), h = fmaxf(h, __shfl_xor_sync(~0u, h, i));
      b = __any_sync(~0u, b);
#pragma unroll
      for (int p = 0; p < H::PAIRS; p++)
        if (H::channel(p, lane) / GROUP == group) low[p] = l, high[p] = h, broken[p] = b;
    }
  }
}

// Quantize a head that a warp holds; all lanes must come.
template <int D, int BITS, int C>
__device__ __forceinline__ void store_codes(const float (&x)[Head<D>::SIZE], unsigned char *codes,
                                            unsigned short *words, int lane) {
  using H = Head<D>;
  constexpr int GROUP = D / C;
  float low[H::PAIRS], high[H::PAIRS];
  bool broken[H::PAIRS];
  ranges<D, GROUP>(x, low, high, broken, lane);
#pragma unroll
  for (int p = 0; p < H::PAIRS; p++) {
    const int first = H::channel(p, lane);
    float safe, shift;
    const int word = word_of<BITS>(low[p], high[p], broken[p], safe, shift);
    int code[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float found = rintf(__fadd_rn(__fdiv_rn(x[2 * p + j], safe), shift));
      code[j] = static_cast<int>(fminf(fmaxf(found, 0.f), (1 << BITS) - 1));  // NaN: 0
    }
    if constexpr (BITS < 4) {  // a byte is of two lanes, of the third bits of four
      uint32 two = ((code[0] & 3) | (code[1] & 3) << 2) << lane % 2 * 4;
      two |= __shfl_xor_sync(~0u, two, 1);
      uint32 third = (code[0] >> 2 | code[1] >> 2 << 1) << lane % 4 * 2;
      if (BITS == 3) third |= __shfl_xor_sync(~0u, third, 1), third |= __shfl_xor_sync(~0u, third, 2);
      if (H::has(p, lane) && lane % 2 == 0) codes[first / 4] = static_cast<unsigned char>(two);
      if (BITS == 3 && H::has(p, lane) && lane % 4 == 0) codes[D / 4 + first / 8] = static_cast<unsigned char>(third);
    }
    if (!H::has(p, lane)) continue;
    if (first % GROUP == 0) words[first / GROUP] = static_cast<unsigned short>(word);
    if constexpr (BITS == 4)
      codes[first / 2] = static_cast<unsigned char>(code[0] | code[1] << 4);
    else if constexpr (BITS == 8)
      *reinterpret_cast<unsigned short *>(codes + first) = static_cast<unsigned short>(code[0] | code[1] << 8);
  }
}

// Whose token n is, and where it stands; a whole warp must come.
struct Token {
  int b = 0, at = 0, before;

  __device__ __forceinline__ Token(const int *position, const int *starts, int B, int n, int lane) {
    if (starts) {
      for (int i = lane; i - lane < B - 1; i += 32)  // sequences that end before it or with it
        b += __popc(__ballot_sync(~0u, i < B - 1 && __ldcg(starts + 1 + i) <= n));
      at = n - __ldcg(starts + b);
    } else {
      const int each = gridDim.x / B;
      b = n / each, at = n % each;
    }
    before = position ? __ldcg(position + b) : 0;
    at += before;
  }
};

// q [N, heads, D], k and v [N, kv_heads, D], whose tokens are so many values apart; position [B]: where the first new
// token of each sequence stands, < 0: nowhere; starts [B + 1], null: N / B new tokens for each; table [B, max_pages];
// cos, sin f32 [context, R/2], the norms' weights [D] and the keys' centre f32 [kv_heads, D] may be null;
// rotated [N, heads, D]: q as paged_attention.cu wants it. codes, words: the layer's pages; E: the type of 16-bit
// pages. Grid (N, heads + 2 stored over 8), 8 warps; stored: kv_heads, or 0 where only q is to be rotated.
template <int D, int K_BITS, int K_C, int V_BITS, int V_C, bool ROTATE, int R, typename T, typename E>
__global__ void __launch_bounds__(256)
    paged_append(const T *q, const T *k, const T *v, int q_apart, int k_apart, int v_apart, const int *position,
                 const int *starts, const int *table, const float *cos, const float *sin, const T *q_norm,
                 const T *k_norm, const float *center, E *rotated, unsigned char *codes, unsigned short *words, int B,
                 int max_pages, int pages, int page, int context, int heads, int kv_heads, int stored, float eps) {
  constexpr bool CODED = K_BITS < 16;
  using At = PagePlaces<D, K_BITS, K_C, V_BITS, V_C>;
  using H = Head<D>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = blockIdx.x, r = blockIdx.y * 8 + warp;
  launch_dependents();
  grid_dependency_wait();
  if (r >= heads + 2 * stored) return;

  const Token token(position, starts, B, n, lane);
  const int b = token.b, at = token.at;
  if (token.before < 0 || (cos && at >= context)) return;
  const size_t angle = (size_t)at * (R / 2);
  const float *c = cos ? cos + angle : nullptr, *s = sin ? sin + angle : nullptr;

  float x[H::SIZE];
  if (r < heads) {
    prepared<D, R, T>(x, q + (size_t)n * q_apart + r * D, q_norm, eps, c, s, lane);
    if (ROTATE) H::hadamard(x, lane);
    H::store(x, rotated + ((size_t)n * heads + r) * D, lane);
    return;
  }
  const int kind = r - heads >= stored, head = r - heads - kind * stored;
  const int found = at / page < max_pages ? __ldcg(table + (size_t)b * max_pages + at / page) : -1;
  if (found < 0 || found >= pages) return;
  const int index = head * page + at % page;
  codes += At::codes(found, kind, kv_heads * page, index);
  if (kind == 0)
    prepared<D, R, T>(x, k + (size_t)n * k_apart + head * D, k_norm, eps, c, s, lane);
  else
    H::load(x, v + (size_t)n * v_apart + head * D, lane);

  if constexpr (!CODED) {
    H::store(x, reinterpret_cast<E *>(codes), lane);
  } else {
    if (kind == 0 && center) {
#pragma unroll
      for (int i = 0; i < H::SIZE; i++)
        if (H::has(i / 2, lane)) x[i] = __fsub_rn(x[i], __ldg(center + head * D + H::channel(i / 2, lane) + i % 2));
    }
    if (ROTATE) H::hadamard(x, lane);
    words += At::words(found, kind, kv_heads * page, index);
    if (kind == 0)
      store_codes<D, K_BITS, K_C>(x, codes, words, lane);
    else
      store_codes<D, V_BITS, V_C>(x, codes, words, lane);
  }
}

// The same as paged_append for heads that are octets and rotated as a whole, four to a warp: a third of the
// instructions. Grid (N, heads + 2 stored over 32), 8 warps.
template <int D, int BITS, int C, bool ROTATE, typename T, typename E>
__global__ void __launch_bounds__(256)
    paged_append_8lane(const T *q, const T *k, const T *v, int q_apart, int k_apart, int v_apart, const int *position,
                       const int *starts, const int *table, const float *cos, const float *sin, const T *q_norm,
                       const T *k_norm, const float *center, E *rotated, unsigned char *codes, unsigned short *words,
                       int B, int max_pages, int pages, int page, int context, int heads, int kv_heads, int stored,
                       float eps) {
  using O = HeadIn8Lanes<D>;
  static_assert(O::FITS);
  const int lane = threadIdx.x & 31, j = lane % 8, n = blockIdx.x, last = heads + 2 * stored - 1;
  const int asked = blockIdx.y * 32 + threadIdx.x / 8, r = min(asked, last);
  launch_dependents();
  grid_dependency_wait();

  const int kind = r < heads ? -1 : r - heads >= stored, head = kind < 0 ? r : r - heads - kind * stored;
  const T *from = kind < 0    ? q + (size_t)n * q_apart + head * D
                  : kind == 0 ? k + (size_t)n * k_apart + head * D
                              : v + (size_t)n * v_apart + head * D;
  float x[O::SIZE];
  O::load(x, from, j);  // under way while the token is looked up
  const Token token(position, starts, B, n, lane);
  if (token.before < 0 || (cos && token.at >= context)) return;  // all of the block
  const int place = token.at / page;
  const int found = kind >= 0 && place < max_pages ? __ldcg(table + (size_t)token.b * max_pages + place) : -1;
  if (q_norm || k_norm) O::template apply_norm<T>(x, kind < 0 ? q_norm : kind == 0 ? k_norm : nullptr, eps, j);
  if (cos && kind < 1)
    O::template apply_rope<T>(x, cos + (size_t)token.at * (D / 2), sin + (size_t)token.at * (D / 2), j);
  if (BITS < 16 && kind == 0 && center) {
    float c[O::SIZE];
    O::load(c, center + head * D, j);
#pragma unroll
    for (int i = 0; i < O::SIZE; i++) x[i] = __fsub_rn(x[i], c[i]);
  }
  if (ROTATE) O::hadamard(x, j);
  if (kind < 0 && asked <= last) O::store(x, rotated + ((size_t)n * heads + head) * D, j);
  if (!__any_sync(~0u, kind >= 0)) return;
  const bool stores = asked <= last && found >= 0 && found < pages;
  const size_t row = stores ? (((size_t)found * 2 + kind) * kv_heads + head) * page + token.at % page : 0;
  if constexpr (BITS == 16) {
    if (stores) O::store(x, reinterpret_cast<E *>(codes) + row * D, j);
  } else {
    O::template quantize<BITS, C>(x, codes + row * (D * BITS / 8), words + row * C, stores, j);
  }
}

// Eight channels from `first` on, a multiple of eight.
template <int D, int BITS, int C>
__device__ __forceinline__ void read_codes(float (&v)[8], const unsigned char *codes, const unsigned short *words,
                                           int first) {
  constexpr int GROUP = D / C, ZERO_BITS = BITS == 8 ? 8 : 6, EACH = BITS == 3 ? 2 : BITS;
  uint32 packed[2] = {}, third = 0;
  if constexpr (BITS < 4)
    packed[0] = __ldcg(reinterpret_cast<const unsigned short *>(codes + first / 4));
  else
    packed[0] = __ldcg(reinterpret_cast<const uint32 *>(codes + first * BITS / 8));
  if constexpr (BITS == 8) packed[1] = __ldcg(reinterpret_cast<const uint32 *>(codes + first) + 1);
  if constexpr (BITS == 3) third = __ldcg(codes + D / 4 + first / 8);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const int word = __ldcg(words + (first + j) / GROUP);
    const float scale = __half2float(__ushort_as_half(word >> ZERO_BITS << (ZERO_BITS - 1)));
    const float zero = (word & (1 << ZERO_BITS) - 1) / static_cast<float>(1 << (ZERO_BITS - BITS));
    const int code = (packed[j * EACH / 32] >> j * EACH % 32 & (1 << EACH) - 1) | (third >> j & 1) << 2;
    v[j] = __fmul_rn(__fsub_rn(code, zero), scale);
  }
}

// The values of the first tokens of B sequences, rotated and centred as they are stored, those of sequence b at
// starts[b] … starts[b + 1]: out [2, total, kv_heads, D], of which starts[B] tokens are written. For prompts, whose
// tokens share them. table [B, max_pages]. Grid (8 values of a head a thread, kv_heads over READ_HEADS, 2): finding the
// page of a token takes four loads, each of which waits for the one before, so a thread reads several of its heads.
constexpr int READ_HEADS = 4;
template <int D, int K_BITS, int K_C, int V_BITS, int V_C, typename E>
__global__ void __launch_bounds__(256)
    paged_read(const unsigned char *codes, const unsigned short *words, const int *table, const int *starts, E *out,
               int B, int max_pages, int page, int kv_heads, int total) {
  constexpr int RUNS = D / 8, EACH = READ_HEADS;
  using At = PagePlaces<D, K_BITS, K_C, V_BITS, V_C>;
  const int i = blockIdx.x * 256 + threadIdx.x, n = i / RUNS, first = i % RUNS * 8;
  launch_dependents();
  grid_dependency_wait();
  if (n >= min(total, __ldcg(starts + B))) return;
  int b = 0;
  for (int end = B; end - b > 1;) {  // starts[b] <= n < starts[end]
    const int middle = (b + end) / 2;
    __ldcg(starts + middle) <= n ? b = middle : end = middle;
  }
  const int token = n - __ldcg(starts + b), place = __ldcg(table + (size_t)b * max_pages + token / page);
  const int kind = blockIdx.z, begin = blockIdx.y * EACH;
  const auto index = [&](int e) { return min(begin + e, kv_heads - 1) * page + token % page; };
  uint4 found[EACH];  // all loads come before the first store, which the compiler could not know to be elsewhere
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const unsigned char *from = codes + At::codes(place, kind, kv_heads * page, index(e));
    if constexpr (K_BITS == 16) {
      found[e] = __ldcg(reinterpret_cast<const uint4 *>(reinterpret_cast<const E *>(from) + first));
    } else {
      const unsigned short *scales = words + At::words(place, kind, kv_heads * page, index(e));
      float v[8];
      if (kind == 0)
        read_codes<D, K_BITS, K_C>(v, from, scales, first);
      else
        read_codes<D, V_BITS, V_C>(v, from, scales, first);
      found[e] = closed<E>(v);
    }
  }
  uint4 *to = reinterpret_cast<uint4 *>(out + (((size_t)kind * total + n) * kv_heads + begin) * D + first);
#pragma unroll
  for (int e = 0; e < EACH; e++)
    if (begin + e < kv_heads) to[e * RUNS] = found[e];
}

}  // namespace crelle
