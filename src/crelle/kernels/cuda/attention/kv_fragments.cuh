// Pages of keys and values as formats/kv/pages.py lays them out, seen from a warp: the rotation H, the packed scale and
// zero, and 16 tokens of codes as the tensor cores' fragments.
//
// 16 tokens of a head lie in one run of memory, and in the same order in shared memory, but for the 8 pieces of 16
// bytes in each line of 128: piece i of line l is at i ^ (some of l), so that 8 tokens of a column (piece u of each)
// fill the 32 banks once. Pieces next to each other stay in one line: a copy of two that share a sector of 32 bytes
// into two lines asks for that sector twice (seen on an H200: half the speed). `ldmatrix` takes a column as a matrix of
// 16-bit values, whatever it holds. With g = lane / 4, t = lane % 4 a lane gets
//
//   keys    (as they lie)    token g, bytes 4t … 4t+3                8 channels of 4 bits, 4 of 8, 2 of 16
//   values  (transposed)     tokens 2t and 2t+1, bytes 2g and 2g+1   4 channels of 4 bits, 2 of 8, 1 of 16
//
// so values come with two tokens of a channel in one register, as a product over tokens wants them. Which channel is
// which row of the product is free: q is laid out to match (`key_place`), and the result is read so (`channel`).
//
// Codes become f16 without arithmetic and without an offset: as bits of a subnormal number, which is that many times
// 2^-24 (the first exponent goes on with the same step, so 11 bits can be used). Tensor cores take subnormal numbers as
// they are. A code that is not at the lowest bits is 4, 16, … times as large: keys have a q that is divided by that,
// values a result. So a word of 8 codes of 4 bits is 1 shift and 4 masks.
//
// Values are added up over thousands of tokens, and the tensor cores cut sums off instead of rounding them: what grows
// with the tokens makes every channel too small by the same amount, and H, which is undone at the end, gathers that in
// channel 0, sqrt(D) times as large (seen on an H200 with 64 + code: 2.5e-3 of the largest result over 32768 tokens).
// So every other tile has the other sign: -P times the complement of the code. What is cut off cancels.
#pragma once
#include "ptx/tensorcore.cuh"
#include "ptx/warp.cuh"

namespace crelle {

template <typename T>
struct __align__(2 * sizeof(T)) Neighbours {
  T first, second;
};

// A head of D channels in a warp: v[2 p] and v[2 p + 1] are channels 64 p + 2 lane and the next one; 0 behind the last.
template <int D>
struct Head {
  static constexpr int PAIRS = (D + 63) / 64, SIZE = 2 * PAIRS, BLOCK = D & -D;

  static __device__ constexpr float norm() {  // 1/sqrt(BLOCK)
    double even = 1;
    int n = BLOCK;
    while (n >= 4) even /= 2, n /= 4;
    return static_cast<float>(n == 2 ? even * 0.70710678118654752440 : even);
  }
  static __device__ __forceinline__ int channel(int pair, int lane) { return 64 * pair + 2 * lane; }
  static __device__ __forceinline__ bool has(int pair, int lane) { return D % 64 == 0 || channel(pair, lane) < D; }

  // v = H v, by the same sums and differences in the same order as formats/kv/pages.py: the same bits.
  static __device__ __forceinline__ void hadamard(float (&v)[SIZE], int lane) {
#pragma unroll
    for (int step = 1; step < BLOCK; step *= 2) {
#pragma unroll
      for (int i = 0; i < SIZE; i++) {
        if (step > 1 && step < 64) {
          const float other = __shfl_xor_sync(~0u, v[i], step / 2 & 31);
          v[i] = lane & step / 2 ? __fsub_rn(other, v[i]) : __fadd_rn(v[i], other);
        } else if (!(i & (step == 1 ? 1 : step / 32))) {
          const int apart = step == 1 ? 1 : step / 32, k = i + apart < SIZE ? i + apart : i;  // it always is
          const float a = v[i], b = v[k];
          v[i] = __fadd_rn(a, b), v[k] = __fsub_rn(a, b);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < SIZE; i++) v[i] = __fmul_rn(v[i], norm());
  }

  template <typename T>
  static __device__ __forceinline__ void load(float (&v)[SIZE], const T *from, int lane) {
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
      v[2 * p] = v[2 * p + 1] = 0;
      if (!has(p, lane)) continue;
      const Neighbours<T> two = *reinterpret_cast<const Neighbours<T> *>(from + channel(p, lane));
      v[2 * p] = to_float(two.first), v[2 * p + 1] = to_float(two.second);
    }
  }
  template <typename T>
  static __device__ __forceinline__ void store(const float (&v)[SIZE], T *to, int lane) {
#pragma unroll
    for (int p = 0; p < PAIRS; p++)
      if (has(p, lane))
        *reinterpret_cast<Neighbours<T> *>(to + channel(p, lane)) = {from_float<T>(v[2 * p]),
                                                                     from_float<T>(v[2 * p + 1])};
  }
};

// How many query heads of a key head may share a read where a head has C groups: each group and head has a column of
// the product, and the groups of 16 bytes of codes must be among the same 8 columns.
template <int D, int BITS, int C, int G>
struct Columns {
  static constexpr bool CODED = BITS < 16;
  static constexpr int WIDE = BITS == 3 ? 64 : 128 / BITS;                      // channels in 16 bytes
  static constexpr int PACK = !CODED || G > 4 ? 1 : G > 2 ? 2 : G > 1 ? 4 : 8;  // groups of a head in 8 columns
  static constexpr int TILES = CODED ? (C + PACK - 1) / PACK : 1;               // of 8 columns
  static constexpr int GROUP = CODED ? D / C : D;

  static __device__ constexpr int tile_of_channel(int channel) {
    return (channel < D ? channel : D - 1) / GROUP / PACK;
  }
  static __device__ constexpr bool fits() {
    for (int u = 0; u * WIDE < D; u++)
      if (tile_of_channel(u * WIDE) != tile_of_channel(u * WIDE + WIDE - 1)) return false;
    return true;
  }
};

template <int D, int BITS, int C>
struct Pages {
  static constexpr bool CODED = BITS < 16;
  static constexpr int ROW = BITS == 3 ? D / 4 + D / 8 : D * BITS / 8;  // bytes of a token
  static constexpr int UNITS = (ROW + 15) / 16;                         // columns of 16 bytes
  static constexpr int WIDE = BITS == 3 ? 64 : 128 / BITS;              // channels in 16 bytes
  static constexpr int LOW = BITS == 3 ? D / 64 : UNITS;                // columns of codes; 3 bits: of their low two
  static constexpr int STEPS = (LOW * WIDE + 15) / 16;                  // products of 16 channels
  static constexpr int RUN = WIDE / 4,
                       MADE = WIDE < 16 ? 1 : WIDE / 16;  // a lane's channels of keys; steps of a column
  static constexpr int FRAGMENTS = MADE > 2 ? MADE : 2;
  static_assert(BITS > 3 || D % 64 == 0);
  static constexpr int PIECE = ROW % 16 ? 8 : 16;                        // bytes of a copy
  static constexpr int CODES = UNITS * 256, WORDS = CODED ? 32 * C : 0;  // bytes of 16 tokens in shared memory
  static constexpr float UNIT = CODED ? 0x1p-24f : 1;                    // what a code of 1 is
  static constexpr float ZERO_STEP = BITS == 8 ? 1 : BITS == 4 ? 0.25f : BITS == 3 ? 0.125f : 0.0625f;  // in codes

  static __device__ __forceinline__ constexpr int swapped(int line) {
    constexpr int EVEN = UNITS & -UNITS;  // tokens 8 / EVEN apart would meet
    return EVEN <= 8 ? line % EVEN : line / (EVEN / 8) % 8;
  }
  static __device__ __forceinline__ int place(int piece) {
    return piece / 8 * 128 + (piece % 8 ^ swapped(piece / 8)) * 16;
  }
  static __device__ __forceinline__ int place(int unit, int token) { return place(token * UNITS + unit); }
  // place(lane + 32 j) from place(lane): 32 pieces are 4 lines.
  static __device__ __forceinline__ int place_behind(int place_of_lane, int j) {
    return (place_of_lane ^ swapped(4 * j) * 16) + 512 * j;
  }

  // Which of a lane's RUN channels of keys make register k, low and high half, and what their q is multiplied with.
  static __device__ constexpr int key_place(int k, int half) { return BITS < 8 ? k + RUN / 2 * half : 2 * k + half; }
  static __device__ constexpr float key_factor(int k) {
    if (BITS == 4) return k % 2 ? 0.0625f : 1;
    return BITS > 4 ? 1 : k % 4 == 0 ? 1 : k % 4 == 1 ? 0.25f : k % 4 == 2 ? 0.0625f : 0.015625f;
  }

  // Where the code of a lane's channel j of values lies; 3 and 2 bits: those of channels 5, 6 and 7 after a shift
  // by 10.
  static __device__ constexpr int value_bit(int j) { return BITS < 4 ? (j < 5 ? 2 * j : 2 * j - 10) : j % 2 * 4; }
  // How many times too large a step's results are, for rows g (half 0) and g + 8 (half 1).
  static __device__ constexpr float value_factor(int step, int half) {
    if (BITS > 4) return UNIT;
    return UNIT * (1 << value_bit(BITS < 4 ? step % 4 * 2 + half : half));
  }

  // The channel of rows g (half 0) and g + 8 (half 1) of a step's result.
  static __device__ __forceinline__ int channel(int step, int g, int half) {
    if (BITS < 4) return step / 4 * 64 + 8 * g + step % 4 * 2 + half;
    if (BITS == 4) return step / 2 * 32 + 4 * g + step % 2 * 2 + half;
    if (BITS == 8) return step * 16 + 2 * g + half;
    return step * 16 + g + 8 * half;
  }
  static __device__ constexpr int channel_of_step(int step) {
    return BITS < 4 ? step / 4 * 64 : BITS == 4 ? step / 2 * 32 : step * 16;
  }  // the first

  // Columns `unit` and `unit + 1` (where there is one): tokens 0-7 and 8-15 of the first, then of the second.
  static __device__ __forceinline__ const char *rows(const char *codes, int unit, int lane) {
    if constexpr (UNITS > 1 && (UNITS & -UNITS) == UNITS)  // the same, from one place for all units
      return codes + (place(lane / 16, lane % 16) ^ unit % 8 * 16) + unit / 8 * 128;
    const int second = unit + lane / 16;
    return codes + place(UNITS % 2 && second >= UNITS ? UNITS - 1 : second, lane % 16);
  }

  // 3 bits: where the third bits of a column's 64 channels lie for a token, 8 bytes.
  static __device__ __forceinline__ const unsigned char *third(const char *codes, int unit, int token) {
    const int at = D / 4 + unit * 8;
    return reinterpret_cast<const unsigned char *>(codes) + place(at / 16, token) + at % 16;
  }
  // Those of a lane's 16 channels of keys, the first 8 in the low half; of its 8 channels of values, a token in each
  // half.
  static __device__ __forceinline__ uint32 third_of_keys(const char *codes, int unit, int token, int t) {
    if constexpr (BITS != 3) return 0;
    return __byte_perm(*reinterpret_cast<const unsigned short *>(third(codes, unit, token) + 2 * t), 0, 0x4140);
  }
  static __device__ __forceinline__ uint32 third_of_values(const char *codes, int unit, int token, int g) {
    if constexpr (BITS != 3) return 0;
    return third(codes, unit, token)[g] | (uint32)third(codes, unit, token + 1)[g] << 16;
  }
  static __device__ __forceinline__ constexpr uint32 moved(uint32 v, int left) {
    return left < 0 ? v >> -left : v << left;
  }

  // The fragments [16 tokens, 16 channels] of keys that a column (8 bits: one, 4: two) or two columns (16: one) hold.
  // r: what tokens 0-7, 8-15 have in it, then in the next one.
  static __device__ __forceinline__ void keys(uint32 (&a)[FRAGMENTS][4], uint32 r0, uint32 r1, uint32 r2, uint32 r3) {
    if constexpr (BITS < 4) {  // r2, r3: the third bits
      const uint32 r[2] = {r0, r1}, third[2] = {r2, r3};
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int k = 0; k < 8; k++) {
          const uint32 mask = 0x00030003u << 2 * (k % 4);
          uint32 code = (k < 4 ? r[i] : r[i] >> 8) & mask;
          if (BITS == 3) code = masked(moved(third[i], 2 * (k % 4) + 2 - k), 0x00040004u << 2 * (k % 4), code);
          a[k / 2][i + k % 2 * 2] = code;
        }
      }
    } else if constexpr (BITS == 4) {
      const uint32 r[2] = {r0, r1};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32 low = r[i], high = low >> 8;
        a[0][i] = low & 0x000f000f, a[0][i + 2] = low & 0x00f000f0;
        a[1][i] = high & 0x000f000f, a[1][i + 2] = high & 0x00f000f0;
      }
    } else if constexpr (BITS == 8) {
      a[0][0] = __byte_perm(r0, 0, 0x4140), a[0][1] = __byte_perm(r1, 0, 0x4140);
      a[0][2] = __byte_perm(r0, 0, 0x4342), a[0][3] = __byte_perm(r1, 0, 0x4342);
    } else {
      a[0][0] = r0, a[0][1] = r1, a[0][2] = r2, a[0][3] = r3;
    }
  }
  // The same of values, [16 channels, 16 tokens]; the complement of codes where P is NEGATIVE.
  template <bool NEGATIVE>
  static __device__ __forceinline__ void values(uint32 (&a)[FRAGMENTS][4], uint32 r0, uint32 r1, uint32 r2, uint32 r3) {
    const auto add = [](uint32 v, uint32 mask, uint32 to) {
      return NEGATIVE ? masked_not(v, mask, to) : masked(v, mask, to);
    };
    if constexpr (BITS < 4) {  // r2, r3: the third bits
      const uint32 r[2] = {r0, r1}, third[2] = {r2, r3};
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
          uint32 code = add(j < 5 ? r[i] : r[i] >> 10, 0x00030003u << value_bit(j), 0);
          if (BITS == 3) code = add(moved(third[i], value_bit(j) + 2 - j), 0x00040004u << value_bit(j), code);
          a[j / 2][2 * i + j % 2] = code;
        }
      }
    } else if constexpr (BITS == 4) {
      const uint32 r[2] = {r0, r1};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32 low = r[i], high = low >> 8;
        a[0][2 * i] = add(low, 0x000f000f, 0), a[0][2 * i + 1] = add(low, 0x00f000f0, 0);
        a[1][2 * i] = add(high, 0x000f000f, 0), a[1][2 * i + 1] = add(high, 0x00f000f0, 0);
      }
    } else if constexpr (BITS == 8) {
      if (NEGATIVE) r0 = ~r0, r1 = ~r1;
      a[0][0] = __byte_perm(r0, 0, 0x4240), a[0][1] = __byte_perm(r0, 0, 0x4341);
      a[0][2] = __byte_perm(r1, 0, 0x4240), a[0][3] = __byte_perm(r1, 0, 0x4341);
    } else {
      a[0][0] = r0, a[0][1] = r2, a[0][2] = r1, a[0][3] = r3;
    }
  }

  // Two packed scales: their scales, and their zeros, in steps of ZERO_STEP times 2^-24; those of the complement where
  // P is NEGATIVE.
  template <bool NEGATIVE = false>
  static __device__ __forceinline__ void open(uint32 words, uint32 &scales, uint32 &zeros) {
    scales = words >> 1 & (BITS < 8 ? 0x7fe07fe0 : 0x7f807f80);
    zeros = words & (BITS < 8 ? 0x003f003f : 0x00ff00ff);
    if constexpr (NEGATIVE) {
      constexpr uint32 LARGEST = static_cast<uint32>(((1 << BITS) - 1) / ZERO_STEP) * 0x10001u;
      const half2 turned = __hsub2(*reinterpret_cast<const half2 *>(&LARGEST), *reinterpret_cast<half2 *>(&zeros));
      zeros = *reinterpret_cast<const uint32 *>(&turned);
    }
  }
};

// A tile of 16 tokens in shared memory: codes of keys, of values; packed scales of keys, of values.
template <int D, int K_BITS, int K_C, int V_BITS, int V_C>
struct TileOfPages {
  using Keys = Pages<D, K_BITS, K_C>;
  using Values = Pages<D, V_BITS, V_C>;
  static constexpr bool APART = K_BITS != V_BITS || K_C != V_C;
  static constexpr int VALUES = Keys::CODES, WORDS = VALUES + Values::CODES, VALUE_WORDS = WORDS + Keys::WORDS;
  static constexpr int BYTES = (VALUE_WORDS + Values::WORDS + 127) / 128 * 128;
};

// Where keys (0) or values (1) of token-head `index` of a page lie, in bytes of codes and in packed scales.
template <int D, int K_BITS, int K_C, int V_BITS, int V_C>
struct PagePlaces {
  static constexpr int K_ROW = Pages<D, K_BITS, K_C>::ROW, V_ROW = Pages<D, V_BITS, V_C>::ROW;
  static __device__ __forceinline__ size_t rounded(size_t bytes) {
    return K_BITS == V_BITS ? bytes : (bytes + 15) / 16 * 16;
  }
  static __device__ __forceinline__ size_t codes(int page, int kind, int tokens, int index) {
    const size_t values = rounded((size_t)tokens * K_ROW), all = rounded(values + (size_t)tokens * V_ROW);
    return page * all + (kind ? values + (size_t)index * V_ROW : (size_t)index * K_ROW);
  }
  static __device__ __forceinline__ size_t words(int page, int kind, int tokens, int index) {
    return (size_t)page * tokens * (K_C + V_C) +
           (kind ? (size_t)tokens * K_C + (size_t)index * V_C : (size_t)index * K_C);
  }
};

__device__ __forceinline__ float2 both(uint32 halves) { return __half22float2(*reinterpret_cast<half2 *>(&halves)); }

// One group's range becomes its word; `safe` and `shift` take a value to its code.
template <int BITS>
__device__ __forceinline__ int word_of(float low, float high, bool broken, float &safe, float &shift) {
  constexpr int ZERO_BITS = BITS == 8 ? 8 : 6, KEPT = ZERO_BITS - 1, STEPS = (1 << BITS) - 1;
  constexpr float FINE = 1 << (ZERO_BITS - BITS);
  if (BITS < 4) {  // the outermost values are clipped
    low = __fmul_rn(low, BITS == 2 ? 0.75f : 0.90625f), high = __fmul_rn(high, BITS == 2 ? 0.75f : 0.90625f);
  }
  int half_bits = __half_as_ushort(__float2half_rn(__fdiv_rn(__fsub_rn(high, low), STEPS)));
  half_bits = min((half_bits + (1 << KEPT) - 1) >> KEPT << KEPT, 0x7fff & -(1 << KEPT));
  if (broken) half_bits = 0x7e00;  // NaN
  const float scale = __half2float(__ushort_as_half(static_cast<unsigned short>(half_bits)));
  safe = scale > 0 ? scale : 1.f;
  const float zero = rintf(__fmul_rn(__fdiv_rn(-low, safe), FINE));
  const int z = broken ? 0 : static_cast<int>(fminf(fmaxf(zero, 0.f), (1 << ZERO_BITS) - 1));  // NaN: 0
  shift = z / FINE;
  return (half_bits < 0x7c00 ? half_bits : 0x7e00) << 1 | z;  // an infinite scale is stored as NaN
}

}  // namespace crelle
