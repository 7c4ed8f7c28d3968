// Mixed 2/4-bit weights as the tiles of gemm_sm90.cuh and gemm_sm80.cuh take them (plane_source.cuh says what that is).
//
// Blocks of 256 inputs are units of 2 bits as they lie in memory, then two units of 4 bits each (mixed_layout.py). Lane
// 4g + t has 16 inputs of every 64, of rows g and g + 8, under one scale (two in groups of 8). Codes lie in pairs in
// the halves of a word, and one AND-OR makes both of them floats: under the exponent of 2^e, bit e of a mantissa is a
// one, so q there is 2^e + q. That and the zero are subtracted, exactly, then the scale is multiplied in. (Looking the
// four values of a scale up by byte permutation takes as many instructions, twice as many of them at half speed.)
//
// Outliers come with the block (mixed_gemm_layout.py): a word of them is a value and where it lies among the operands
// of all lanes. The lanes write those of SPAN chunks of 64 inputs into the warp's scratch, which is zero otherwise, and
// every lane begins with what lies there for it: the product of code and scale is added to that by one instruction.
#pragma once
#include "ptx/copies.cuh"
#include "mixed/mixed_codes.cuh"
#include "ptx/pack2.cuh"
#include "ptx/shared_loads.cuh"

namespace crelle {

constexpr int MIXED_STAGED = 64;  // outliers of a block that come through the pipeline; others are read where they lie

// The bits that any lane has.
__device__ __forceinline__ uint32 any_bits(uint32 mine) { return __reduce_or_sync(~0u, mine); }

// Floats of type X under which codes lie: PLACE 0 ... 3 of a word of 2-bit codes, 0 and 1 of one of 4-bit codes, in
// both halves. A bfloat16 has room for half of them, so words are shifted more often.
template <typename X>
struct CodePlaces {
  static constexpr int PLACES2 = 4, PLACES4 = 2;
  static __device__ constexpr uint32 base2(int place) { return 0x5c005c00u - place * 0x08000800u; }  // 256, 64, 16, 4
  static __device__ constexpr float less2(int place) { return 256 >> 2 * place; }
  static __device__ constexpr uint32 base4(int place) { return place ? 0x54005400u : 0x64006400u; }  // 1024, 64
  static __device__ constexpr float less4(int place) { return place ? 64 : 1024; }
};
template <>
struct CodePlaces<bfloat16> {
  static constexpr int PLACES2 = 2, PLACES4 = 1;
  static __device__ constexpr uint32 base2(int place) { return place ? 0x41004100u : 0x42004200u; }  // 32, 8
  static __device__ constexpr float less2(int place) { return place ? 8 : 32; }
  static __device__ constexpr uint32 base4(int) { return 0x43004300u; }  // 128
  static __device__ constexpr float less4(int) { return 128; }
};

// A scale as pairs of X: bfloat16 has eight bits, so there it is a sum of two.
template <typename X>
struct PairScale {
  uint32 scale;
  __device__ __forceinline__ void set(float v) { scale = Pack2<X>::of(v); }
  __device__ __forceinline__ uint32 times(uint32 q, uint32 plus) const { return Pack2<X>::fma(q, scale, plus); }
};
template <>
struct PairScale<bfloat16> {
  uint32 scale, rest;
  __device__ __forceinline__ void set(float v) {
    scale = Pack2<bfloat16>::of(v), rest = Pack2<bfloat16>::of(v - Pack2<bfloat16>::values(scale).x);
  }
  __device__ __forceinline__ uint32 times(uint32 q, uint32 plus) const {
    return Pack2<bfloat16>::add(Pack2<bfloat16>::fma(q, scale, Pack2<bfloat16>::mul(q, rest)), plus);
  }
};

// tiles [tiles, tile bytes]; grid_rows [16 tiles]: scale and zero of 4-bit groups; outliers: for each block of each
// tile their count, then words of them, padded to 16 bytes, from starts [tiles, blocks] (of such pieces) up to the next
// start; or null. STAGED: they come through the pipeline.
template <int SUBS, int SPAN, bool STAGED, typename X>
struct MixedSource {
  static constexpr int UNIT2 = 1024 + 240 * SUBS, CODES = 2048, SCRATCH = SPAN * 2048;
  static constexpr int BYTES = CODES + (STAGED ? 16 + 4 * MIXED_STAGED : 0);
  static constexpr bool RESIDUAL = true;
  const char *tiles;
  const __half2 *grid_rows;
  const uint4 *outliers;
  const int *starts;
  int U2, U4, blocks;
  const char *at = nullptr;
  int index = 0, begin = 0, end = 0;  // of the next block's outliers

  __device__ __forceinline__ MixedSource(const char *tiles, const __half2 *grid_rows, const uint4 *outliers,
                                         const int *starts, int U2, int U4)
      : tiles(tiles),
        grid_rows(grid_rows),
        outliers(outliers),
        starts(starts),
        U2(U2),
        U4(U4),
        blocks(U2 + (U4 + 1) / 2) {}

  __device__ __forceinline__ const char *codes(int tile, int block) const {
    const int behind = max(block - U2, 0);
    return tiles + (size_t)tile * (U2 * UNIT2 + U4 * 1024) + (block - behind) * UNIT2 + behind * CODES;
  }
  __device__ __forceinline__ int code_bytes(int block) const {
    return block < U2 ? UNIT2 : 2 * (block - U2) + 1 == U4 ? 1024 : CODES;
  }
  __device__ __forceinline__ void seek(int tile, int block) {
    at = codes(tile, block), index = tile * blocks + block;
    if (outliers) begin = __ldg(starts + index), end = __ldg(starts + index + 1);
  }
  template <typename Queue>
  __device__ __forceinline__ void issue_load(Queue &queue, int stage, int block, int zero) {
    const int bytes = code_bytes(block), more = min((end - begin) * 16, BYTES - CODES);
    queue.issue_load(stage, at + zero, bytes, CODES, outliers + begin, more);
    at += bytes, index++, begin = end;
    if (outliers && block + 1 < blocks) end = __ldg(starts + index + 1);
  }
  __device__ __forceinline__ void copy(char *to, int tile, int block, int lane) const {
    copy_run(to, codes(tile, block), code_bytes(block), lane);
  }

  // A lane's share of 16 rows and half a block.
  struct W {
    using Places = CodePlaces<X>;
    const uint32 mask2[4] = {kept(0x000c000cu), kept(0x00300030u), kept(0x00c000c0u), kept(0x03000300u)};
    const uint32 mask4[2] = {kept(0x000f000fu), kept(0x00f000f0u)};
    bool two;
    uint32 words[8], seen;
    Scales<SUBS> s;
    PairScale<X> row_scale[2];  // of 4-bit groups
    uint32 row_start[2][Places::PLACES4];
    int count = 0;
    uint32 chunks = 0;                    // a bit for each that has outliers
    uint32 some[MIXED_STAGED / 32] = {};  // outliers
    const uint32 *list;                   // all of them, in global memory

    __device__ __forceinline__ void begin_tile(const MixedSource &source, int tile, int lane) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float2 grid = __half22float2(source.grid_rows[tile * 16 + 8 * r + lane / 4]);
        row_scale[r].set(grid.x);
#pragma unroll
        for (int p = 0; p < Places::PLACES4; p++) row_start[r][p] = Pack2<X>::of(-Places::less4(p) - grid.y);
      }
    }
    __device__ __forceinline__ void load(const MixedSource &source, const char *piece, int tile, int block, int h,
                                         int lane) {
      two = block < source.U2;
      if (h == 0) seen = 0;
      if (two) {
        put(0, *reinterpret_cast<const uint4 *>(piece + h * 512 + lane * 16));
        s.decode(h, piece, lane, kept(0x3f800000u));
        seen |= words[0] | words[1] | words[2] | words[3];
#pragma unroll
        for (int k = 0; k < SUBS; k++) {
          s.zeros[k] >>= 4 * h;
          seen |= __float_as_uint(s.scale[k][0][0]) | s.zeros[k];
        }
      } else {
        put(0, *reinterpret_cast<const uint4 *>(piece + h * 1024 + lane * 16));
        put(4, *reinterpret_cast<const uint4 *>(piece + h * 1024 + 512 + lane * 16));
#pragma unroll
        for (int i = 0; i < 8; i++) seen |= words[i];
      }
      if (h == 0 && source.outliers) {
        const uint32 *staged = reinterpret_cast<const uint32 *>(piece + CODES);
        const int from = STAGED ? 0 : source.starts[tile * source.blocks + block];
        if constexpr (!STAGED) list = staged = reinterpret_cast<const uint32 *>(source.outliers + from);
        count = staged[0];
        chunks = 0;
#pragma unroll
        for (int i = 0; i < MIXED_STAGED / 32; i++) {
          some[i] = i * 32 + lane < count ? staged[1 + i * 32 + lane] : 0;
          if (some[i] >> 16) chunks |= 1u << (some[i] >> 11 & 3);
        }
        chunks = count > MIXED_STAGED ? 15 : any_bits(chunks);
        if (STAGED && count > MIXED_STAGED)
          list = reinterpret_cast<const uint32 *>(source.outliers + source.starts[tile * source.blocks + block]);
      }
    }
    __device__ __forceinline__ int nothing(int positive) const {
      return crelle::nothing(seen | count | some[0] | some[1], positive);
    }

    // Chunk 0 ... 3 of a block, a constant where it is called.
    __device__ __forceinline__ void unpack(uint32 (&to)[4][4], int chunk, char *scratch, int lane) {
      if (count > 0 && chunk % SPAN == 0) {
        scatter<false>(chunk / SPAN, scratch, lane);
        __syncwarp();
      }
      if (chunks >> chunk & 1) {
        const uint4 *const from = reinterpret_cast<const uint4 *>(scratch + chunk % SPAN * 2048) + lane;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint4 v = from[i * 32];
          to[i][0] = v.x, to[i][1] = v.y, to[i][2] = v.z, to[i][3] = v.w;
        }
      } else {
#pragma unroll
        for (int i = 0; i < 16; i++) to[i / 4][i % 4] = 0;
      }
      if (two)
        unpack2(to, chunk % 2);
      else
        unpack4(to, chunk % 2);
      if (count > 0 && chunk % SPAN == SPAN - 1) {
        __syncwarp();
        scatter<true>(chunk / SPAN, scratch, lane);
        __syncwarp();
      }
    }

  private:
    __device__ __forceinline__ void put(int i, uint4 v) {
      words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
    }
    // Pair i of a row's word stands in steps 2i and 2i + 1 of the places (x_layout.cuh).
    __device__ __forceinline__ void unpack2(uint32 (&to)[4][4], int set) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const uint32 word = words[2 * r + set];
#pragma unroll
        for (int k = 0; k < SUBS; k++) {
          PairScale<X> scale;
          scale.set(s.scale[k][set][r]);
          uint32 start[Places::PLACES2];
          starts2(start, s.zeros[k] >> 8 * r, set);
#pragma unroll
          for (int i = 8 / SUBS * k; i < 8 / SUBS * (k + 1); i++) {
            const int p = i % Places::PLACES2, shift = 2 * (i - p) - 2;
            const uint32 v = shift < 0 ? word << 2 : word >> shift;
            const uint32 q = Pack2<X>::add((v & mask2[p]) | Places::base2(p), start[p]);
            to[i / 2][i % 2 * 2 + r] = scale.times(q, to[i / 2][i % 2 * 2 + r]);
          }
        }
      }
    }
    // -(zero + 1) / 2 less what the codes stand above; `zeros`: in both halves, at bit 2 set.
    __device__ __forceinline__ void starts2(uint32 (&start)[Places::PLACES2], uint32 zeros, int set) {
      const uint32 v = (set ? zeros : zeros << 2) & mask2[0];  // 2^e + the zero's code, as of the first place
      const uint32 zero = v | Places::base2(0);
#pragma unroll
      for (int p = 0; p < Places::PLACES2; p++)
        start[p] =
            Pack2<X>::fma(zero, Pack2<X>::of(-0.5f), Pack2<X>::of(0.5f * Places::less2(0) - 0.5f - Places::less2(p)));
    }
    __device__ __forceinline__ void unpack4(uint32 (&to)[4][4], int part) {
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const int p = i % Places::PLACES4, shift = 4 * (i % 4 - p);
          const uint32 v = words[4 * r + 2 * part + i / 4] >> shift;
          const uint32 q = Pack2<X>::add((v & mask4[p]) | Places::base4(p), row_start[r][p]);
          to[i / 2][i % 2 * 2 + r] = row_scale[r].times(q, to[i / 2][i % 2 * 2 + r]);
        }
    }

    // The outliers of a span, by all lanes, to where each lane finds its own; or zeros in their place.
    template <bool CLEAR>
    __device__ __forceinline__ void scatter(int span, char *scratch, int lane) const {
      const auto place = [&](uint32 word) {
        if (word >> 16 && (SPAN == 4 || (word >> 11 & 3) / SPAN == (uint32)span))
          *reinterpret_cast<X *>(scratch + (word & (SCRATCH - 1))) =
              CLEAR ? from_float<X>(0) : Pack2<X>::of_half(word >> 16);
      };
      place(some[0]);
      if (count > 32) {
#pragma unroll
        for (int i = 1; i < MIXED_STAGED / 32; i++) place(some[i]);
#pragma unroll 1
        for (int i = MIXED_STAGED + lane; i < count; i += 32) place(list[1 + i]);
      }
    }
  };
};

}  // namespace crelle
