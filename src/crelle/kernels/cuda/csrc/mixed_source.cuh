// Mixed 2/4-bit weights as the tiles of gemm_sm90.cuh and gemm_sm80.cuh take them (plane_source.cuh says what that is).
//
// Blocks of 256 inputs are units of 2 bits as they lie in memory, then two units of 4 bits each (mixed_layout.py). Lane
// 4g + t has 16 inputs of every 64, of rows g and g + 8, under one scale (two in groups of 8). So the four values that
// codes of 2 bits stand for are a table of low bytes and one of high bytes: four codes of the same half of a word are
// looked up at once, and two byte permutations make two pairs of it. Codes of 4 bits become 1024 + q or 64 + q by one
// AND-OR.
//
// Outliers come with the block (mixed_gemm_layout.py): a word of them is a value and where it lies among the operands
// of all lanes. The lanes write those of a chunk into the warp's scratch, which is zero otherwise, and every lane adds
// what lies there for it.
#pragma once
#include "copies.cuh"
#include "mixed_codes.cuh"
#include "pack2.cuh"
#include "shared_loads.cuh"

namespace crelle {

constexpr int MIXED_STAGED = 64;  // outliers of a block that come through the pipeline; others are read where they lie

// Codes of 4 bits of a row: s (q - z).
template <typename X>
struct RowGrid {
  uint32 scale, start[2];
  __device__ __forceinline__ void set(float2 grid) {
    scale = Pack2<X>::of(grid.x), start[0] = Pack2<X>::of(-1024 - grid.y), start[1] = Pack2<X>::of(-64 - grid.y);
  }
  // Codes i and i + 4 of a word.
  template <int I>
  __device__ __forceinline__ uint32 pair(uint32 word) const {
    const uint32 v = I < 2 ? word : word >> 8;
    const uint32 q = I % 2 ? (v & 0x00f000f0u) | 0x54005400u : (v & 0x000f000fu) | 0x64006400u;
    return Pack2<X>::mul(Pack2<X>::add(q, start[I % 2]), scale);
  }
};
template <>
struct RowGrid<bfloat16> {  // the scale as a sum of two: bfloat16 has eight bits, it has eleven
  uint32 scale, rest, start;
  __device__ __forceinline__ void set(float2 grid) {
    scale = Pack2<bfloat16>::of(grid.x), start = Pack2<bfloat16>::of(-128 - grid.y);
    rest = Pack2<bfloat16>::of(grid.x - Pack2<bfloat16>::values(scale).x);
  }
  template <int I>
  __device__ __forceinline__ uint32 pair(uint32 word) const {
    const uint32 q = Pack2<bfloat16>::add((word >> 4 * I & 0x000f000fu) | 0x43004300u, start);
    return Pack2<bfloat16>::fma(q, scale, Pack2<bfloat16>::mul(q, rest));
  }
};

// tiles [tiles, tile bytes]; grid_rows [16 tiles]: scale and zero of 4-bit groups; outliers: for each block of each
// tile their count, then words of them, padded to 16 bytes, from starts [tiles, blocks] (of such pieces) up to the next
// start; or null. STAGED: they come through the pipeline.
template <int SUBS, bool STAGED, typename X>
struct MixedSource {
  static constexpr int UNIT2 = 1024 + 240 * SUBS, CODES = 2048, SCRATCH = 2048;
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
    bool two;
    uint32 words[8], seen;
    Scales<SUBS> s;
    RowGrid<X> grid[2];
    int count = 0;
    uint32 some[MIXED_STAGED / 32] = {};  // outliers
    const uint32 *list;                   // all of them, in global memory

    __device__ __forceinline__ void begin_tile(const MixedSource &source, int tile, int lane) {
      grid[0].set(__half22float2(source.grid_rows[tile * 16 + lane / 4]));
      grid[1].set(__half22float2(source.grid_rows[tile * 16 + 8 + lane / 4]));
    }
    __device__ __forceinline__ void load(const MixedSource &source, const char *piece, int tile, int block, int h,
                                         int lane) {
      two = block < source.U2;
      if (two) {
        put(0, *reinterpret_cast<const uint4 *>(piece + h * 512 + lane * 16));
        s.decode(h, piece, lane, kept(0x3f800000u));
        seen = words[0] | words[1] | words[2] | words[3];
#pragma unroll
        for (int k = 0; k < SUBS; k++) {
          s.zeros[k] >>= 4 * h;
          seen |= __float_as_uint(s.scale[k][0][0]) | s.zeros[k];
        }
      } else {
        put(0, *reinterpret_cast<const uint4 *>(piece + h * 1024 + lane * 16));
        put(4, *reinterpret_cast<const uint4 *>(piece + h * 1024 + 512 + lane * 16));
        seen = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) seen |= words[i];
      }
      if (h == 0 && source.outliers) {
        const uint32 *staged = reinterpret_cast<const uint32 *>(piece + CODES);
        const int from = STAGED ? 0 : source.starts[tile * source.blocks + block];
        if constexpr (!STAGED) list = staged = reinterpret_cast<const uint32 *>(source.outliers + from);
        count = staged[0];
#pragma unroll
        for (int i = 0; i < MIXED_STAGED / 32; i++) some[i] = i * 32 + lane < count ? staged[1 + i * 32 + lane] : 0;
        if (STAGED && count > MIXED_STAGED)
          list = reinterpret_cast<const uint32 *>(source.outliers + source.starts[tile * source.blocks + block]);
      }
    }
    __device__ __forceinline__ int nothing(int positive) const {
      return crelle::nothing(seen | count | some[0] | some[1], positive);
    }

    // Chunk 0 ... 3 of a block; chunk % 2 a constant where it is called.
    __device__ __forceinline__ void unpack(uint32 (&to)[4][4], int chunk, char *scratch, int lane) {
      if (two)
        unpack2(to, chunk % 2);
      else
        unpack4(to, chunk % 2);
      if (count > 0) add_outliers(to, chunk, scratch, lane);
    }

  private:
    __device__ __forceinline__ void put(int i, uint4 v) {
      words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
    }
    __device__ __forceinline__ void unpack2(uint32 (&to)[4][4], int set) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        uint32 low[SUBS], high[SUBS];
#pragma unroll
        for (int k = 0; k < SUBS; k++) table(low[k], high[k], k, set, r);
        const uint32 word = words[2 * r + set], second = SUBS == 2 ? 0x44004400u : 0;  // the other table
        const uint32 even = (word & 0x33333333u) | second, odd = (word >> 2 & 0x33333333u) | second;
        const uint32 selectors[4] = {even, even >> 16, odd, odd >> 16};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint32 l = bytes_of(low[0], low[SUBS - 1], selectors[i]),
                       u = bytes_of(high[0], high[SUBS - 1], selectors[i]);
          to[i][r] = bytes_of(l, u, 0x5140), to[i][2 + r] = bytes_of(l, u, 0x7362);
        }
      }
    }
    // What the codes 0 ... 3 of a row stand for: s (q - (zero + 1) / 2).
    __device__ __forceinline__ void table(uint32 &low, uint32 &high, int k, int set, int r) const {
      const int bit = 2 * set + 8 * r;  // (zero + 1) << bit is exact behind the 2^23 that the bits stand behind
      const float scale = s.scale[k][set][r];
      const float zero = __uint_as_float((s.zeros[k] & 3u << bit) | 0x4b000000u) - (power(23) - power(bit));
      const float first = zero * (scale * (-0.5f * power(-bit)));
      const uint32 a = Pack2<X>::of(first, first + scale),
                   b = Pack2<X>::of(fmaf(2, scale, first), fmaf(3, scale, first));
      low = bytes_of(a, b, 0x6420), high = bytes_of(a, b, 0x7531);
    }
    __device__ __forceinline__ void unpack4(uint32 (&to)[4][4], int part) {
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const uint32 word = words[4 * r + 2 * part + i];
          to[2 * i][r] = grid[r].template pair<0>(word), to[2 * i][2 + r] = grid[r].template pair<1>(word);
          to[2 * i + 1][r] = grid[r].template pair<2>(word), to[2 * i + 1][2 + r] = grid[r].template pair<3>(word);
        }
    }

    // The outliers of a chunk, by all lanes, to where each lane finds its own; or zeros in their place.
    template <bool CLEAR>
    __device__ __forceinline__ void scatter(int chunk, char *scratch, int lane) const {
      const auto place = [&](uint32 word) {
        if (is_in(word, chunk))
          *reinterpret_cast<X *>(scratch + (word & 0x7ff)) =
              from_float<X>(CLEAR ? 0 : __half2float(__ushort_as_half(word >> 16)));
      };
#pragma unroll
      for (int i = 0; i < MIXED_STAGED / 32; i++) place(some[i]);
#pragma unroll 1
      for (int i = MIXED_STAGED + lane; i < count; i += 32) place(list[1 + i]);
    }
    static __device__ __forceinline__ bool is_in(uint32 word, int chunk) {
      return word >> 16 && (word >> 11 & 3) == (uint32)chunk;
    }
    __device__ __forceinline__ void add_outliers(uint32 (&to)[4][4], int chunk, char *scratch, int lane) const {
      bool any = count > MIXED_STAGED;
#pragma unroll
      for (int i = 0; i < MIXED_STAGED / 32; i++) any |= is_in(some[i], chunk);
      if (!__any_sync(~0u, any)) return;
      __syncwarp();
      scatter<false>(chunk, scratch, lane);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint4 v = reinterpret_cast<const uint4 *>(scratch)[i * 32 + lane];
        to[i][0] = Pack2<X>::add(to[i][0], v.x), to[i][1] = Pack2<X>::add(to[i][1], v.y);
        to[i][2] = Pack2<X>::add(to[i][2], v.z), to[i][3] = Pack2<X>::add(to[i][3], v.w);
      }
      __syncwarp();
      scatter<true>(chunk, scratch, lane);
    }
  };
};

}  // namespace crelle
