// f(x) [M, K] as integers for the next integer GEMM (crelle/formats/activations.py), in one launch: residual add, norm
// or activation, the order of the weight's columns, group maxima, scales and codes.
//
//   sum = x + addend      h = f(sum), rounded to T      s = max|h| factor      q = clamp(round(h / s), least, top)
//
// With HADAMARD, blocks of GROUP channels of h that are no outliers are rotated in between, in f32.
//
// h and q are bit by bit what the reference finds for the same h: one product and one division for a group, one product
// for a value, all IEEE f32. 1.5 * 2^23 + v has the nearest integer, half to even, in its low bits.
//
// A thread has 8 places of the row at a time, 16 bytes of x and 8 of codes, V times. Without a perm it loads the inputs
// that belong to its places and all stays in registers; with one it loads in x's order and gathers from shared memory.
// What no kernel before writes (norm, perm) is loaded before the wait for that kernel. A row's bits do not depend on
// the number of rows.
#include "step/prologue.cuh"

namespace crelle {

constexpr int WHOLE_ROW = -1, ANY_GROUP = 0;  // values of GROUP

// Bytes 0 of four words.
__device__ __forceinline__ uint32 low_bytes(float a, float b, float c, float d) {
  return __byte_perm(__byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040),
                     __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040), 0x5410);
}

// A group's scale from its maximum; 0 below 2^-100, NaN and infinity stay.
__device__ __forceinline__ float scale_of(float most, float factor) {
  const float scale = __fmul_rn(most, factor);
  return scale < 0x1p-100f ? 0 : scale;
}

// 1 / scale, or 0 where all codes are 0.
__device__ __forceinline__ float inverse_of(float scale) {
  return scale > 0 && scale <= 3.4028234e38f ? __frcp_rn(scale) : 0;
}

// A code in the low byte; NaN and infinity times 0 become 0.
__device__ __forceinline__ float code_of(float v, float inverse, float least, float top) {
  const float q = fminf(fmaxf(__fmul_rn(v, inverse), least), top);
  return __fadd_rn(inverse > 0 ? q : 0.0f, 12582912.0f);
}

// H f over blocks of `block` places, at most MOST, of which a thread has 8 in a row; root: 1/sqrt(block). The sums of
// crelle.formats.wrappers.hadamard, in their order. Whole warps call this.
template <int MOST>
__device__ __forceinline__ void rotate(float (&f)[8], int block, float root) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    if (step >= block) break;
#pragma unroll
    for (int e = 0; e < 8; e++) {
      if (e & step) continue;
      const float a = f[e], b = f[e + step];
      f[e] = __fadd_rn(a, b), f[e + step] = __fsub_rn(a, b);
    }
  }
#pragma unroll
  for (int lanes = 1; lanes < MOST / 8; lanes *= 2) {
    const bool within = lanes * 8 < block, upper = threadIdx.x & lanes;
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const float other = __shfl_xor_sync(~0u, f[e], lanes), sum = __fadd_rn(upper ? -f[e] : f[e], other);
      f[e] = within ? sum : f[e];
    }
  }
#pragma unroll
  for (int e = 0; e < 8; e++) f[e] = __fmul_rn(f[e], root);
}

// x [M, K] (gated: [M, 2K], gate then up); addend [M, K] and sum may be null; norm, shift [K] may be null. The row's
// places are its first `normal` channels, padded to a multiple of 128, then the others, padded too: Kp in all. perm
// [orders, Kp]: which input stands where, K rounded up to 8 for none (PERMUTED). codes [orders, rows, Kp], scales
// [orders, groups, rows]. Groups of `group` channels: of those before `split`, then of those behind, which have 8 bits;
// split is normal or K. GROUP: 32, 64 or 128 as `group` (then split is normal, or there are no outliers), WHOLE_ROW:
// one group of each kind, ANY_GROUP. A thread block takes `part` places, all of them where f is a norm, PERMUTED or
// GROUP is none of those numbers; at most 256 WARPS V. HADAMARD (GROUP > 0): behind the last whole group of normal
// channels, blocks of `tail` are rotated; tail_root: 1/sqrt(tail). ALIGNED: K and normal are multiples of 8. Grid (M,
// ceil(Kp / part), orders). Shared: PERMUTED: K values, rounded up to 8, and 8 more; then ANY_GROUP: a word for each
// group.
template <Prologue OP, int GROUP, bool HADAMARD, bool PERMUTED, bool ALIGNED, int WARPS, int V, typename T>
__global__ void __launch_bounds__(WARPS * 32)
    integer_encode(const T *x, const T *addend, const T *__restrict__ norm, const T *__restrict__ shift,
                   const unsigned short *__restrict__ perm, T *sum, char *codes, float *scales, int K, int normal,
                   int split, int rows, int groups, int group, int tail, int part, float tail_root, float factor,
                   float least, float top, float eps) {
  constexpr bool NORM = OP == RMS_NORM || OP == LAYER_NORM, SHIFT = OP == LAYER_NORM;
  constexpr int THREADS = WARPS * 32;
  extern __shared__ __align__(128) char shared[];
  T *const row = reinterpret_cast<T *>(shared);
  const int padded = (normal + 127) / 128 * 128, places = padded + (K - normal + 127) / 128 * 128;
  const int token = blockIdx.x, first = blockIdx.y * part, end = min(first + part, places);
  const size_t at_token = (size_t)token * K;
  launch_dependents();

  const auto place = [&](int i) { return first + (threadIdx.x + i * THREADS) * 8; };
  // The channels of a piece in stored order: from where on, and where their kind ends.
  const auto channel = [&](int p) { return p < padded ? p : normal + p - padded; };
  const auto last = [&](int p) { return p < padded ? normal : K; };
  // What a thread loads.
  const auto from = [&](int i) { return PERMUTED ? (threadIdx.x + i * THREADS) * 8 : channel(place(i)); };
  const auto to = [&](int i) { return PERMUTED ? K : place(i) < end ? last(place(i)) : 0; };

  constexpr bool EARLY = V <= 4;  // there is room for what is loaded before the wait
  const auto loaded = [&](const T *p, int i) { return p ? eight<ALIGNED>(p, from(i), to(i)) : make_uint4(0, 0, 0, 0); };
  uint4 weight[NORM && EARLY ? V : 1], shifts[SHIFT && EARLY ? V : 1], v[V];
  if constexpr (NORM && EARLY) {
#pragma unroll
    for (int i = 0; i < V; i++) {
      weight[i] = loaded(norm, i);
      if constexpr (SHIFT) shifts[i] = loaded(shift, i);
    }
  }
  uint4 order[PERMUTED && EARLY ? V : 1];
  const uint32 zero = (K + 7) / 8 * 8, none = zero << 16 | zero;
  const auto order_of = [&](int i) {
    const size_t at = (size_t)blockIdx.z * places + place(i);
    return place(i) < end ? *reinterpret_cast<const uint4 *>(perm + at) : make_uint4(none, none, none, none);
  };
  if constexpr (PERMUTED && EARLY) {
#pragma unroll
    for (int i = 0; i < V; i++) order[i] = order_of(i);
  }
  grid_dependency_wait_late(K);

  // What is added, or multiplied with.
  const T *const other = is_gated(OP) ? x + 2 * at_token + K : addend ? addend + at_token : nullptr;
  uint4 second[EARLY ? V : 1];
#pragma unroll
  for (int i = 0; i < V; i++) {
    v[i] = loaded(x + (is_gated(OP) ? 2 * at_token : at_token), i);
    if constexpr (EARLY) second[i] = loaded(other, i);
  }
  float total[1] = {}, squares[1] = {};
#pragma unroll
  for (int i = 0; i < V; i++) {
    float f[8], g[8];
    const uint4 also = EARLY ? second[EARLY ? i : 0] : loaded(other, i);
    if (!is_gated(OP) && addend) {
      open<T>(f, v[i]), open<T>(g, also);
#pragma unroll
      for (int e = 0; e < 8; e++) f[e] = __fadd_rn(f[e], g[e]);
      v[i] = closed<T>(f);
      if (sum && blockIdx.z == 0 && from(i) < to(i)) {
        T *const out = sum + at_token + from(i);
        if constexpr (ALIGNED) {
          *reinterpret_cast<uint4 *>(out) = v[i];
        } else {
#pragma unroll
          for (int e = 0; e < 8; e++)
            if (from(i) + e < to(i)) out[e] = from_float<T>(f[e]);
        }
      }
    }
    if constexpr (NORM) {
      open<T>(f, v[i]);
#pragma unroll
      for (int e = 0; e < 8; e++) total[0] += f[e], squares[0] = fmaf(f[e], f[e], squares[0]);
    } else if constexpr (OP != PLAIN) {
      open<T>(f, v[i]);
      activate<OP, T>(f, also);
      v[i] = closed<T>(f);
    }
  }
  if constexpr (NORM) {
    __shared__ float2 sums[1][WARPS];
    block_sums(sums, total, squares);
    const Norm n = norm_of<OP>(make_float2(total[0], squares[0]), K, eps);
#pragma unroll
    for (int i = 0; i < V; i++) {
      float f[8], g[8];
      open<T>(f, v[i]), open<T>(g, EARLY ? weight[EARLY ? i : 0] : loaded(norm, i));
#pragma unroll
      for (int e = 0; e < 8; e++) {
        f[e] = (f[e] - n.mean) * n.scale;
        if (norm) f[e] = (OP == RMS_NORM ? to_float(from_float<T>(f[e])) : f[e]) * g[e];
      }
      if constexpr (SHIFT) {
        open<T>(g, EARLY ? shifts[EARLY ? i : 0] : loaded(shift, i));
#pragma unroll
        for (int e = 0; e < 8; e++) f[e] = from(i) + e < to(i) ? f[e] + g[e] : 0;  // padding stays 0
      }
      v[i] = closed<T>(f);
    }
  }

  if constexpr (PERMUTED) {
#pragma unroll
    for (int i = 0; i < V; i++)
      if (from(i) < K) *reinterpret_cast<uint4 *>(row + from(i)) = v[i];
    if (threadIdx.x == 0) row[zero] = from_float<T>(0);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < V; i++) {
      const uint4 inputs = EARLY ? order[EARLY ? i : 0] : order_of(i);
      const uint32 pairs[4] = {inputs.x, inputs.y, inputs.z, inputs.w};
      T found[8];
#pragma unroll
      for (int e = 0; e < 8; e++) found[e] = row[pairs[e / 2] >> 16 * (e % 2) & 0xffff];
      v[i] = *reinterpret_cast<const uint4 *>(found);
    }
  }

  codes += ((size_t)blockIdx.z * rows + token) * places;
  scales += (size_t)blockIdx.z * groups * rows + token;
  constexpr float OUTLIERS = 1.0 / 127;
  const int plain_groups = (split + group - 1) / group;  // those before the outliers
  if constexpr (GROUP > 0) {
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int p = place(i), k = channel(p);
      if (p - (int)(threadIdx.x % 32) * 8 >= end) break;  // of the whole warp
      float f[8], most = 0;
      open<T>(f, v[i]);
      if constexpr (HADAMARD) {
        constexpr float ROOT = GROUP == 128 ? 0.08838834764831845f : GROUP == 64 ? 0.125f : 0.17677669529663687f;
        const bool outlier = p >= padded, whole = p < normal / GROUP * GROUP;
        rotate<GROUP>(f, outlier ? 1 : whole ? GROUP : tail, outlier ? 1 : whole ? ROOT : tail_root);
      }
#pragma unroll
      for (int e = 0; e < 8; e++) most = max_nan(most, fabsf(f[e]));
#pragma unroll
      for (int lanes = 1; lanes < GROUP / 8; lanes *= 2) most = max_nan(most, __shfl_xor_sync(~0u, most, lanes));
      const bool outlier = p >= padded;
      const float scale = scale_of(most, outlier ? OUTLIERS : factor), inverse = inverse_of(scale);
      const float low = outlier ? -127 : least, high = outlier ? 127 : top;
#pragma unroll
      for (int e = 0; e < 8; e++) f[e] = code_of(f[e], inverse, low, high);
      if (p >= end) continue;
      *reinterpret_cast<uint2 *>(codes + p) =
          make_uint2(low_bytes(f[0], f[1], f[2], f[3]), low_bytes(f[4], f[5], f[6], f[7]));
      const int c = outlier ? plain_groups + (p - padded) / GROUP : p / GROUP;
      if (p % GROUP == 0 && k < last(p)) scales[(size_t)c * rows] = scale;
    }
  } else if constexpr (GROUP == WHOLE_ROW) {
    __shared__ float2 maxima[WARPS];
    float most[2] = {};
#pragma unroll
    for (int i = 0; i < V; i++) {
      float f[8], mine = 0;
      open<T>(f, v[i]);
#pragma unroll
      for (int e = 0; e < 8; e++) mine = max_nan(mine, fabsf(f[e]));
      const bool outlier = channel(place(i)) >= split;
      most[0] = outlier ? most[0] : max_nan(most[0], mine), most[1] = outlier ? max_nan(most[1], mine) : most[1];
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2)
#pragma unroll
      for (int j = 0; j < 2; j++) most[j] = max_nan(most[j], __shfl_xor_sync(~0u, most[j], lanes));
    if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = make_float2(most[0], most[1]);
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++) most[0] = max_nan(most[0], maxima[w].x), most[1] = max_nan(most[1], maxima[w].y);
    const float scale[2] = {scale_of(most[0], factor), scale_of(most[1], OUTLIERS)};
    const float inverse[2] = {inverse_of(scale[0]), inverse_of(scale[1])};
    if (threadIdx.x == 0 && split > 0) scales[0] = scale[0];
    if (threadIdx.x == 0 && split < K) scales[(size_t)plain_groups * rows] = scale[1];
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int p = place(i);
      if (p >= end) break;
      const bool outlier = channel(p) >= split;
      float f[8];
      open<T>(f, v[i]);
#pragma unroll
      for (int e = 0; e < 8; e++)
        f[e] = code_of(f[e], outlier ? inverse[1] : inverse[0], outlier ? -127 : least, outlier ? 127 : top);
      *reinterpret_cast<uint2 *>(codes + p) =
          make_uint2(low_bytes(f[0], f[1], f[2], f[3]), low_bytes(f[4], f[5], f[6], f[7]));
    }
  } else {
    uint32 *const most_of = reinterpret_cast<uint32 *>(shared + (PERMUTED ? (zero + 8) * 2 : 0));
    float *const inverses = reinterpret_cast<float *>(most_of);
    const auto group_of = [&](int k) { return k < split ? k / group : plain_groups + (k - split) / group; };
    const auto record = [&](int c, float most) {  // |v| of floats is ordered as its bits are, NaN above all
      atomicMax(most_of + c, __float_as_uint(fabsf(most)));
    };
    for (int c = threadIdx.x; c < groups; c += THREADS) most_of[c] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int p = place(i), k = channel(p), stop = last(p);
      if (p - (int)(threadIdx.x % 32) * 8 >= end) break;  // of the whole warp
      float f[8], most = 0;
      open<T>(f, v[i]);
#pragma unroll
      for (int e = 0; e < 8; e++) most = max_nan(most, fabsf(f[e]));
#pragma unroll
      for (int lanes = 8; lanes; lanes /= 2) most = max_nan(most, __shfl_xor_sync(~0u, most, lanes));
      if (p >= end) continue;
      const int half = k - (int)(threadIdx.x % 16) * 8, c = half < stop ? group_of(half) : groups;  // 128 channels
      if (c == groups) continue;
      if (c == group_of(min(half + 127, stop - 1))) {
        if (threadIdx.x % 16 == 0) record(c, most);
      } else {
#pragma unroll
        for (int e = 0; e < 8; e++)
          if (k + e < stop) record(group_of(k + e), f[e]);
      }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < groups; c += THREADS) {
      const float scale = scale_of(__uint_as_float(most_of[c]), c < plain_groups ? factor : OUTLIERS);
      scales[(size_t)c * rows] = scale, inverses[c] = inverse_of(scale);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int p = place(i), k = channel(p), stop = last(p);
      if (p >= end) break;
      float f[8];
      open<T>(f, v[i]);
      // Padding is 0 with any scale.
      const int begin = group_of(min(k, stop - 1));
      const float low = k < split ? least : -127, high = k < split ? top : 127;
      if (begin == group_of(min(k + 7, stop - 1))) {
#pragma unroll
        for (int e = 0; e < 8; e++) f[e] = code_of(f[e], inverses[begin], low, high);
      } else {
#pragma unroll
        for (int e = 0; e < 8; e++) f[e] = code_of(f[e], inverses[group_of(min(k + e, stop - 1))], low, high);
      }
      *reinterpret_cast<uint2 *>(codes + p) =
          make_uint2(low_bytes(f[0], f[1], f[2], f[3]), low_bytes(f[4], f[5], f[6], f[7]));
    }
  }
}

}  // namespace crelle
