// Attention of one token per sequence over pages of 16, 8, 4, 3 or 2 bits (formats/kv/pages.py), read as they are.
//
// As in decode_attention.cu, tokens and channels go along the tensor instruction's 16 rows and query heads along its 8
// columns. Codes enter the products as they are (kv_fragments.cuh); scale and zero of a token and group of channels do
// not touch a code. Each pair of head h and group c has a column of its own, with q set to 0 outside of the group:
//
//   S [token, (h, c)] = sum over channels of c of q code              score(h) = sum over c of scale (S - zero sum(q))
//   O [channel, (h, c)] += code (p scale)      z [(h, c)] += zero (p scale)      out(h) = O - z in the channels of c
//
// so K takes 4 multiply-adds for 2 groups of a token where dequantizing takes one for each 2 of their 64 values, and
// V's scales go into P. A step of 16 channels belongs to groups whose columns lie together, so no product is made
// twice: D/16 instructions for K and as many for V, for 1 to 8 heads.
//
// A warp takes 16 U tokens at a time from its own pipeline of STAGES such pieces, has its own running maximum and sums
// and waits for no other; WARPS of them share what a thread block reads, blocks along x share a sequence. Parts are
// added in a fixed order: those of the warps, then, by the last block to arrive, those of the blocks. Then H is undone.
//
// Arithmetic of 4 bits, D = 128, groups of 32: 16 tokens are 2304 bytes. At 4.5 TB/s a multiprocessor of 132 gets that
// many in 119 cycles of 1.76 GHz, so each of its 4 schedulers has 475 cycles for 16 tokens: some 285 instructions with
// four heads (by the disassembly, the usual path), among them 16 tensor instructions and 80 masks and shifts of codes
// (at half rate: 160 cycles of their unit). Under way: 4608 bytes for each stage of a warp.
// Lost on an H200 (128 sequences of 1024, 32/8 heads, an earlier version: 43.8 us): zeros as one more step of both
// products instead of two fused multiply-adds, 5% fewer instructions (43.8: they are not what it waits for), and with
// it 16 tokens at a time (47.5), 3 stages (44.3), 4 warps a block (46.9), registers for 20 or 24 warps (54 to 99).
#include "planes/bitserial.cuh"
#include "attention/kv_loader.cuh"
#include "ptx/semaphore.cuh"
#include "attention/extras.cuh"
#include "mainloop/x_layout.cuh"

namespace crelle {

constexpr int MOST_SPLITS = 128;  // thread blocks that share a sequence
constexpr float RAISED = 2;       // P is 2^2 times as large: f16 has more digits for it, and p scale still fits

__device__ __forceinline__ float largest_of_warp(float v) {
#pragma unroll
  for (int i = 1; i < 32; i *= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, i));
  return v;
}

template <bool YES>
struct Flag {
  static constexpr bool value = YES;
};

// Packed scales of columns 2t and 2t + 1 (of head 2t / PACK) for a token, whose C words begin at `at`.
template <int C, int PACK>
__device__ __forceinline__ uint32 scale_words(const char *at, int n, int token, int t) {
  const unsigned short *w = reinterpret_cast<const unsigned short *>(at) + token * C;
  if constexpr (PACK == 1) {
    return w[n] * 0x10001u;
  } else {
    const int c = n * PACK + 2 * t % PACK;
    if (c >= C) return 0;
    if constexpr (C % 2 == 0) return *reinterpret_cast<const uint32 *>(w + c);
    return w[c] | (c + 1 < C ? (uint32)w[c + 1] << 16 : 0u);
  }
}

// WORDS words of 4 bytes in one load.
template <int WORDS>
struct __align__(4 * WORDS) Vector {
  uint32 word[WORDS];
};

// q [B, heads, D], rotated where pages are (paged_append.cu); codes, words: the layer's pages; table [B, max_pages];
// lengths [B]: tokens of each sequence, this one among them; 0: padding, out is 0. A token sees the last `window`. out
// [B, heads, D], or where there is a `padded`, B rounded up to 8, as `pack_x` (gemm.cu) lays it out: D = 128, heads
// even. DIGITS is 0, or the M of bitserial.cuh: heads of 128 channels are half blocks then and are stored bit-serial,
// `out` and `xscale`. parts [sets, splits, G, D], then [sets, splits, G, 2], semaphores [sets] (zeros): where there are
// splits. Grid (splits, kv_heads * chunks of G query heads, B). E: the type of pages and q; T: that of out. OCCUPANCY:
// warps for which the registers of a multiprocessor shall suffice. EXTRAS (extras.cuh): scores are bounded by
// `softcap`; each head has one more score, sinks f32 [heads].
template <int D, int K_BITS, int K_C, int V_BITS, int V_C, int G, int U, int STAGES, int WARPS, int OCCUPANCY,
          bool ROTATE, int DIGITS, int EXTRAS, typename E, typename T>
__global__ void __launch_bounds__(WARPS * 32, OCCUPANCY / WARPS)
    paged_attend(const E *q, const char *codes, const char *words, const int *table, const int *lengths, T *out,
                 float *xscale, float *parts, int *semaphores, int max_pages, int heads, int kv_heads, int page,
                 int window, int padded, bool stride16, float scale, float softcap, const float *__restrict__ sinks) {
  using Tile = TileOfPages<D, K_BITS, K_C, V_BITS, V_C>;
  using K = typename Tile::Keys;
  using V = typename Tile::Values;
  using KeyColumns = Columns<D, K_BITS, K_C, G>;
  using ValueColumns = Columns<D, V_BITS, V_C, G>;
  constexpr int K_TILES = KeyColumns::TILES, V_TILES = ValueColumns::TILES, PACK = KeyColumns::PACK;
  constexpr int EACH = PACK == 1 ? 2 : 1, STAGE = U * Tile::BYTES, OWN = STAGES * STAGE, ROWS_AHEAD = 32 / U;
  constexpr int PITCH = D + 4;
  static_assert(KeyColumns::fits() && ValueColumns::fits() && D % 16 == 0 && G <= 8 && K::CODED == V::CODED);
  static_assert(!V::CODED || U % 2 == 0, "tiles with values of either sign come in pairs");
  static_assert(G * PITCH * 4 <= OWN, "a warp's result takes the place of its tiles");
  extern __shared__ __align__(128) char shared[];
  __shared__ float tops[WARPS][8], sums[WARPS][8], counts[WARPS][8];
  __shared__ int kept_head, kept_count;  // for the end: the loop has no register to spare

  using Loader = KVLoader<D, K_BITS, K_C, V_BITS, V_C>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane / 4, t = lane % 4, b = blockIdx.z;
  // What this warp reads: every (gridDim.x * WARPS)-th piece. Which ones these are depends on no length, so that the
  // table is read at the same time as the length, and both before anything else.
  const int apart = gridDim.x * (WARPS * U), own = (blockIdx.x * WARPS + warp) * U;  // in tiles
  const int ahead = lane / U * apart + lane % U;  // lane l knows the row of tile l % U of piece i + l / U
  const int length = __ldcg(lengths + b), room = max_pages * page, guessed = min(own + ahead, room / 16 - 1);
  const int *its_table = table + (size_t)b * max_pages;
  const int entry = __ldcg(its_table + Loader::entry_of(guessed, page));
  const int group = heads / kv_heads, chunks = (group + G - 1) / G;
  const int kv = blockIdx.y / chunks, head = kv * group + blockIdx.y % chunks * G;
  const int count = min(G, kv * group + group - head);
  if (threadIdx.x == 0) kept_head = head, kept_count = count;
  launch_dependents();

  // --- the first pieces
  const Loader source(codes, words, its_table, page, kv_heads, kv, lane);
  const int end = min(length, room), first = max(0, end - window), begin = first / 16 + own;
  char *queue = shared + warp * OWN;
  const uint32 queue_at = shared_address(queue);

  const auto rows_from = [&](int tile) { return (tile + ahead) * 16 < end ? source.row(tile + ahead) : 0; };
  uint32 rows = 0, rows_next = first >= 16                ? rows_from(begin)
                               : (own + ahead) * 16 < end ? source.row(guessed, entry)
                                                          : 0;
  const auto issue_load = [&](int i, int tile, int stage) {
    if (i % ROWS_AHEAD == 0) rows = rows_next, rows_next = rows_from(tile + ROWS_AHEAD * apart);
    const int left = end - tile * 16;
    if (left > 0) {
      const uint32 to = queue_at + stage * STAGE;
      if (left >= 16 * U) {
#pragma unroll
        for (int u = 0; u < U; u++)
          source.issue_load(to + u * Tile::BYTES, __shfl_sync(~0u, rows, i % ROWS_AHEAD * U + u));
      } else {
#pragma unroll 1
        for (int u = 0; u < U; u++)
          source.issue_load(to + u * Tile::BYTES, __shfl_sync(~0u, rows, i % ROWS_AHEAD * U + u), left - 16 * u);
      }
    }
    commit_copies();
  };
  // The last token was stored by the kernel before; all others, table and lengths were there when that one began.
  bool late = false;
#pragma unroll
  for (int s = 0; s < STAGES; s++) late = late || (uint32)((end - 1) / 16 - begin - s * apart) < U;
  if (late) grid_dependency_wait();
#pragma unroll
  for (int s = 0; s < STAGES; s++) issue_load(s, begin + s * apart, s);
  if (!late) grid_dependency_wait();

  // --- q as the right side of the products: column g is head g / PACK and one of PACK groups
  uint32 query[K::STEPS][2];
  float minus[K_TILES][2];  // of columns 2t and 2t + 1: - sum of q, for a step of zero
  {
    constexpr int RUN = K::RUN;  // a lane's channels of 16 bytes of codes follow each other
    const E *from = q + ((size_t)b * heads + head + g / PACK) * D + RUN * t;
    float sum_of_q[K_TILES] = {};  // without the factors
#pragma unroll
    for (int unit = 0; unit < K::LOW; unit++) {
      const int n = KeyColumns::tile_of_channel(unit * K::WIDE), channel = unit * K::WIDE + RUN * t;
      union {
        Vector<RUN / 2> words;
        E values[RUN];
      } run = {};
      if (g / PACK < count && channel < D)
        run.words = *reinterpret_cast<const Vector<RUN / 2> *>(from + unit * K::WIDE);
#pragma unroll
      for (int k = 0; k < RUN / 2; k++) {  // two at a time make a register
        float v[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int j = K::key_place(k, i);
          const bool in = !K::CODED || (channel + j) / KeyColumns::GROUP == n * PACK + g % PACK;
          v[i] = to_float(from_float<E>((in ? to_float(run.values[j]) : 0.f) * K::key_factor(k)));
          sum_of_q[n] += v[i] / K::key_factor(k);
        }
        if (K_BITS == 16)
          query[unit / 2][unit % 2] = pair<E>(v[0], v[1]);
        else
          query[unit * (RUN / 4) + k / 2][k % 2] = pair<E>(v[0], v[1]);
      }
    }
#pragma unroll
    for (int n = 0; n < K_TILES; n++) {
      float all = sum_of_q[n];
#pragma unroll
      for (int i = 1; i < 4; i *= 2) all += __shfl_xor_sync(~0u, all, i);
#pragma unroll
      for (int c = 0; c < 2; c++) minus[n][c] = -K::ZERO_STEP * __shfl_sync(~0u, all, 8 * t + 4 * c);
    }
  }
  scale *= LOG2_E / K::UNIT, softcap *= LOG2_E;

  float top[EACH], sum[EACH], o[V::STEPS][4], z[V_TILES][2];
#pragma unroll
  for (int e = 0; e < EACH; e++) top[e] = MASKED, sum[e] = 0;
#pragma unroll
  for (int n = 0; n < V_TILES; n++) z[n][0] = z[n][1] = 0;
#pragma unroll
  for (int step = 0; step < V::STEPS; step++) o[step][0] = o[step][1] = o[step][2] = o[step][3] = 0;

#pragma unroll 1
  for (int i = 0, at = 0, next = begin; next * 16 < end; i++, next += apart, at = at + 1 == STAGES ? 0 : at + 1) {
    wait_for_copies<STAGES - 1>();
    __syncwarp();
    const char *stage = queue + at * STAGE;

    float p[U][2][EACH];  // scores, then exp of them: of tokens g and g + 8
#pragma unroll
    for (int u = 0; u < U; u++) {
      const char *tile = stage + u * Tile::BYTES;
      float s[K_TILES][4];
#pragma unroll
      for (int n = 0; n < K_TILES; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll
      for (int unit = 0; unit < K::LOW; unit += 2) {
        uint32 r[4], a[K::FRAGMENTS][4];
        matrices(r, K::rows(tile, unit, lane));
#pragma unroll
        for (int k = 0; k < (K_BITS == 16 ? 1 : 2); k++) {
          if (unit + k >= K::LOW) break;
          if constexpr (K_BITS == 16)
            K::keys(a, r[0], r[1], r[2], r[3]);
          else
            K::keys(a, r[2 * k], r[2 * k + 1], K::third_of_keys(tile, unit + k, g, t),
                    K::third_of_keys(tile, unit + k, g + 8, t));
#pragma unroll
          for (int m = 0; m < K::MADE; m++) {
            const int step = K_BITS == 16 ? unit / 2 : (unit + k) * K::MADE + m;
            const int n = KeyColumns::tile_of_channel(K::channel_of_step(step));
            multiply<E>(s[n], a[m][0], a[m][1], a[m][2], a[m][3], query[step][0], query[step][1]);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        if constexpr (K::CODED) {
#pragma unroll
          for (int e = 0; e < EACH; e++) p[u][r][e] = 0;
#pragma unroll
          for (int n = 0; n < K_TILES; n++) {
            uint32 scales, zeros;
            K::open(scale_words<K_C, PACK>(tile + Tile::WORDS, n, g + 8 * r, t), scales, zeros);
            const float2 by = both(scales), zero = both(zeros);
            p[u][r][0] = fmaf(by.x, fmaf(zero.x, minus[n][0], s[n][2 * r]), p[u][r][0]);
            p[u][r][EACH - 1] = fmaf(by.y, fmaf(zero.y, minus[n][1], s[n][2 * r + 1]), p[u][r][EACH - 1]);
          }
#pragma unroll
          for (int k = 1; k < PACK / 2; k *= 2) p[u][r][0] += __shfl_xor_sync(~0u, p[u][r][0], k);
        } else {
          p[u][r][0] = s[0][2 * r], p[u][r][EACH - 1] = s[0][2 * r + 1];
        }
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          p[u][r][e] *= scale;
          if (EXTRAS & SOFTCAP) p[u][r][e] = soft_capped(p[u][r][e], softcap);
        }
      }
    }
    const int from = next * 16;
    if (from < first || end < from + 16 * U) {  // not all of these tokens are seen
#pragma unroll
      for (int u = 0; u < U; u++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int token = from + 16 * u + 8 * r + g;
#pragma unroll
          for (int e = 0; e < EACH; e++) p[u][r][e] = first <= token && token < end ? p[u][r][e] : MASKED;
        }
      }
    }

    float factor[EACH];
    bool same = true;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      float most = p[0][0][e];
#pragma unroll
      for (int u = 0; u < U; u++) most = fmaxf(most, fmaxf(p[u][0][e], p[u][1][e]));
      const float now = fmaxf(top[e], max_of_rows(most));
      same = same && now == top[e];
      factor[e] = exp2_approx(top[e] - now), top[e] = now;
      float more = 0;
#pragma unroll
      for (int u = 0; u < U; u++) {
#pragma unroll
        for (int r = 0; r < 2; r++) more += p[u][r][e] = exp2_approx(p[u][r][e] - (now - RAISED));
      }
      sum[e] = fmaf(sum[e], factor[e], more);
    }
    if (!__all_sync(~0u, same)) {
#pragma unroll
      for (int n = 0; n < V_TILES; n++) z[n][0] *= factor[0], z[n][1] *= factor[EACH - 1];
#pragma unroll
      for (int step = 0; step < V::STEPS; step++) {
        o[step][0] *= factor[0], o[step][2] *= factor[0];
        o[step][1] *= factor[EACH - 1], o[step][3] *= factor[EACH - 1];
      }
    }

    const auto add_values = [&](int u, auto negative) {
      constexpr bool NEGATIVE = decltype(negative)::value;
      const char *tile = stage + u * Tile::BYTES;
      uint32 share_of[V_TILES][2];  // P as the right side: tokens 2t, 2t + 1 (and 8 more) of column g
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const uint32 plain = pair<E>(p[u][r][0], p[u][r][EACH - 1]);
        if constexpr (V::CODED) {
#pragma unroll
          for (int n = 0; n < V_TILES; n++) {
            uint32 scales, zeros;
            V::template open<NEGATIVE>(scale_words<V_C, PACK>(tile + Tile::VALUE_WORDS, n, g + 8 * r, t), scales,
                                       zeros);
            const half2 by_scale = *reinterpret_cast<half2 *>(&scales);
            const half2 scaled =
                __hmul2(*reinterpret_cast<const half2 *>(&plain), NEGATIVE ? __hneg2(by_scale) : by_scale);
            const uint32 bits = *reinterpret_cast<const uint32 *>(&scaled);
            const float2 by = both(bits), zero = both(zeros);
            z[n][0] = fmaf(by.x, zero.x, z[n][0]), z[n][1] = fmaf(by.y, zero.y, z[n][1]);
            share_of[n][r] = transposed(bits);
          }
        } else {
          share_of[0][r] = transposed(plain);
        }
      }
#pragma unroll
      for (int unit = 0; unit < V::LOW; unit += 2) {
        uint32 r[4], a[V::FRAGMENTS][4];
        transposed(r, V::rows(tile + Tile::VALUES, unit, lane));
#pragma unroll
        for (int k = 0; k < (V_BITS == 16 ? 1 : 2); k++) {
          if (unit + k >= V::LOW) break;
          if constexpr (V_BITS == 16)
            V::template values<NEGATIVE>(a, r[0], r[1], r[2], r[3]);
          else
            V::template values<NEGATIVE>(a, r[2 * k], r[2 * k + 1],
                                         V::third_of_values(tile + Tile::VALUES, unit + k, 2 * t, g),
                                         V::third_of_values(tile + Tile::VALUES, unit + k, 2 * t + 8, g));
#pragma unroll
          for (int m = 0; m < V::MADE; m++) {
            const int step = V_BITS == 16 ? unit / 2 : (unit + k) * V::MADE + m;
            const int n = ValueColumns::tile_of_channel(V::channel_of_step(step));
            multiply<E>(o[step], a[m][0], a[m][1], a[m][2], a[m][3], share_of[n][0], share_of[n][1]);
          }
        }
      }
    };
#pragma unroll
    for (int u = 0; u < U; u += 2) {
      add_values(u, Flag<false>());
      if (u + 1 < U) add_values(u + 1, Flag<V::CODED>());
    }
    __syncwarp();
    issue_load(i + STAGES, next + STAGES * apart, at);
  }

  // --- this warp's part, in place of its tiles
  float *result = reinterpret_cast<float *>(queue);
  __syncwarp();
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const float all = sum_of_rows(sum[e]);
    const int h = PACK == 1 ? 2 * t + e : 2 * t / PACK;
    if (g == 0 && (PACK == 1 || 2 * t % PACK == 0)) tops[warp][h] = top[e], sums[warp][h] = all;
  }
#pragma unroll
  for (int n = 0; n < V_TILES; n++)
    z[n][0] = sum_of_rows(z[n][0]) * (V::ZERO_STEP / V::UNIT),
    z[n][1] = sum_of_rows(z[n][1]) * (V::ZERO_STEP / V::UNIT);
#pragma unroll
  for (int step = 0; step < V::STEPS; step++) {
    const int n = ValueColumns::tile_of_channel(V::channel_of_step(step));
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int c = j % 2, h = PACK == 1 ? 2 * t + c : 2 * t / PACK, channel = V::channel(step, g, j / 2);
      const bool its = PACK == 1 || n * PACK + 2 * t % PACK + c == channel / ValueColumns::GROUP;
      if (h < G && channel < D && its)
        result[h * PITCH + channel] =
            V::CODED ? fmaf(o[step][j], 1 / V::value_factor(step, j / 2), -z[n][c]) : o[step][j];
    }
  }
  __syncthreads();

  // --- the block's part: its warps' parts, added in order; then the same with the blocks'
  constexpr int THREADS = WARPS * 32, EVERY = (G * D + THREADS - 1) / THREADS;
  // Four channels a thread; threads that are left over share the splits.
  constexpr int QUADS = G * D / 4, WAYS = QUADS < THREADS ? THREADS / QUADS : 1, EACH_QUADS = (EVERY + 3) / 4;
  constexpr int LOADS = WAYS < 4 ? 16 / WAYS : 4;  // under way in a thread: their latency is what all wait for
  static_assert(G * MOST_SPLITS * 4 <= WARPS * OWN && WAYS * G * D * 4 <= WARPS * OWN);
  float found[EVERY];
  const int set = b * gridDim.y + blockIdx.y;
  float *part = parts + (size_t)set * gridDim.x * (G * D);  // of the set
  float *stats = parts + (size_t)gridDim.z * gridDim.y * gridDim.x * (G * D) + (size_t)set * gridDim.x * (G * 2);
  // Sums of P are RAISED, and so is what a sink adds to them.
  const auto sink_of = [&](int h) { return sinks[kept_head + min(h, kept_count - 1)] + RAISED / LOG2_E; };
  if (threadIdx.x < G * WARPS) {  // what the part of each warp counts
    const int h = threadIdx.x / WARPS, mine = threadIdx.x % WARPS;
    float most = MASKED, total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) most = fmaxf(most, tops[w][h]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) total = fmaf(exp2_approx(tops[w][h] - most), sums[w][h], total);
    float by = exp2_approx(tops[mine][h] - most);
    if (EXTRAS & SINKS && gridDim.x == 1) by *= add_sink(sink_of(h), most, total);
    if (gridDim.x == 1)
      counts[mine][h] = total == 0 ? 0 : __fdividef(by, total);
    else
      counts[mine][h] = by, stats[(blockIdx.x * G + h) * 2] = most, stats[(blockIdx.x * G + h) * 2 + 1] = total;
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < EVERY; k++) {
    const int j = threadIdx.x + k * WARPS * 32, h = j / D, d = j % D;
    found[k] = 0;
    if (j >= G * D) break;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      found[k] = fmaf(counts[w][h], reinterpret_cast<const float *>(shared + w * OWN)[h * PITCH + d], found[k]);
    if (gridDim.x > 1) part[blockIdx.x * (G * D) + j] = found[k];
  }
  if (gridDim.x > 1) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {  // it orders what the other threads wrote, too: they have met at the barrier
      last = add_acq_rel(semaphores + set, 1) == gridDim.x - 1;
      if (last) semaphores[set] = 0;
    }
    __syncthreads();
    if (!last) return;
    const int way = WAYS == 1 ? 0 : threadIdx.x / QUADS, place = WAYS == 1 ? threadIdx.x : threadIdx.x % QUADS;
    float4 loaded[LOADS];
    const auto load_parts = [&](int quad, int from) {
#pragma unroll
      for (int n = 0; n < LOADS; n++) {
        const int split = from + n * WAYS;
        loaded[n] = make_float4(0, 0, 0, 0);
        if (way < WAYS && quad < QUADS && split < gridDim.x)
          loaded[n] = __ldcg(reinterpret_cast<const float4 *>(part + (size_t)split * (G * D)) + quad);
      }
    };
    load_parts(place, way);
    float *weights = reinterpret_cast<float *>(shared);  // [G, MOST_SPLITS]: what the part of each block counts
    for (int h = warp; h < G; h += WARPS) {
      float most[MOST_SPLITS / 32], by[MOST_SPLITS / 32], top_of_all = MASKED, total = 0;
#pragma unroll
      for (int k = 0; k < MOST_SPLITS / 32; k++) {
        const int split = lane + 32 * k;
        most[k] = split < gridDim.x ? __ldcg(stats + (split * G + h) * 2) : MASKED;
        by[k] = split < gridDim.x ? __ldcg(stats + (split * G + h) * 2 + 1) : 0;
        top_of_all = fmaxf(top_of_all, most[k]);
      }
      top_of_all = largest_of_warp(top_of_all);
#pragma unroll
      for (int k = 0; k < MOST_SPLITS / 32; k++) {
        most[k] = exp2_approx(most[k] - top_of_all), total = fmaf(most[k], by[k], total);
      }
      total = warp_sum(total);
      const float factor = EXTRAS & SINKS ? add_sink(sink_of(h), top_of_all, total) : 1;
#pragma unroll
      for (int k = 0; k < MOST_SPLITS / 32; k++)
        weights[h * MOST_SPLITS + lane + 32 * k] = total == 0 ? 0 : __fdividef(most[k] * factor, total);
    }
    __syncthreads();
    float4 sum_of[EACH_QUADS];
#pragma unroll
    for (int k = 0; k < EACH_QUADS; k++) {
      const int quad = place + k * THREADS;
      const float *weight = weights + min(quad / (D / 4), G - 1) * MOST_SPLITS;
      sum_of[k] = make_float4(0, 0, 0, 0);
#pragma unroll 1
      for (int from = way; from < gridDim.x; from += LOADS * WAYS) {
        if (k > 0 || from > way) load_parts(quad, from);
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
          const float by = weight[min(from + n * WAYS, MOST_SPLITS - 1)];
          sum_of[k].x = fmaf(by, loaded[n].x, sum_of[k].x), sum_of[k].y = fmaf(by, loaded[n].y, sum_of[k].y);
          sum_of[k].z = fmaf(by, loaded[n].z, sum_of[k].z), sum_of[k].w = fmaf(by, loaded[n].w, sum_of[k].w);
        }
      }
    }
    __syncthreads();  // all have read the weights
#pragma unroll
    for (int k = 0; k < EACH_QUADS; k++) {
      const int quad = place + k * THREADS;
      if (way < WAYS && quad < QUADS) reinterpret_cast<float4 *>(shared)[way * QUADS + quad] = sum_of[k];
    }
  }

  // --- rotated back, a head to a warp
  float *all = reinterpret_cast<float *>(shared);
  if (gridDim.x == 1) {
    __syncthreads();  // all have read the warps' parts
#pragma unroll
    for (int k = 0; k < EVERY; k++) {
      const int j = threadIdx.x + k * WARPS * 32;
      if (j < G * D) all[j] = found[k];
    }
  }
  __syncthreads();
  for (int h = warp; h < kept_count; h += WARPS) {
    float v[Head<D>::SIZE];
    Head<D>::load(v, all + h * D, lane);
    if (gridDim.x > 1) {
#pragma unroll 1
      for (int way = 1; way < WAYS; way++) {
        float more[Head<D>::SIZE];
        Head<D>::load(more, all + (way * G + h) * D, lane);
#pragma unroll
        for (int i = 0; i < Head<D>::SIZE; i++) v[i] += more[i];
      }
    }
    if (ROTATE) Head<D>::hadamard(v, lane);
    if constexpr (DIGITS) {
      static_assert(D == 128, "a head is half a block");
      Head<D>::store(v, all + h * D, lane);
      __syncwarp();
      float half[4];
#pragma unroll
      for (int i = 0; i < 4; i++) half[i] = to_float(from_float<T>(all[h * D + lane + 32 * i]));
      write_bitserial<1, DIGITS>(half, reinterpret_cast<uint32 *>(out), xscale, kept_head + h, b, lane);
      continue;
    }
    if constexpr (D == 128 && !DIGITS) {
      if (padded) {
        Head<D>::store(v, all + h * D, lane);
        __syncwarp();
        if (lane < 16) {  // a head is half a block
          T unit[8];
#pragma unroll
          for (int p = 0; p < 8; p++) unit[p] = from_float<T>(all[h * D + input_at(lane, p, stride16)]);
          const size_t line = ((size_t)(kept_head + h) * 2 + lane / 8) * padded + b;
          reinterpret_cast<uint4 *>(out)[line * 8 + (lane ^ b) % 8] = *reinterpret_cast<const uint4 *>(unit);
        }
        continue;
      }
    }
    Head<D>::store(v, out + ((size_t)b * heads + kept_head + h) * D, lane);
  }
}

}  // namespace crelle
