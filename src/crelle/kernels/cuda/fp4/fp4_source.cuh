// Four-bit floats as the tiles of gemm_sm90.cuh and gemm_sm80.cuh take them (plane_source.cuh says what that is).
#pragma once
#include "fp4/fp4_codes.cuh"
#include "ptx/copies.cuh"
#include "ptx/shared_loads.cuh"

namespace crelle {

// weight [tiles, Fp4Block::tile_bytes]
template <Fp4Kind KIND, typename X>
struct Fp4Source {
  using Block = Fp4Block<KIND>;
  static constexpr int BYTES = Block::BYTES, SCRATCH = 0;
  static constexpr bool RESIDUAL = true;
  const char *weight;
  int blocks;
  const char *at = nullptr;

  __device__ __forceinline__ Fp4Source(const char *weight, int blocks) : weight(weight), blocks(blocks) {}

  __device__ __forceinline__ const char *block_of(int tile, int block) const {
    return weight + tile * Block::tile_bytes(blocks) + (size_t)block * BYTES;
  }
  __device__ __forceinline__ void seek(int tile, int block) { at = block_of(tile, block); }
  template <typename Queue>
  __device__ __forceinline__ void issue_load(Queue &queue, int stage, int, int zero) {
    queue.issue_load(stage, at + zero, BYTES, BYTES, at, 0);
    at += BYTES;
  }
  __device__ __forceinline__ void copy(char *to, int tile, int block, int lane) const {
    copy_run(to, block_of(tile, block), BYTES, lane);
  }
  // What the sums of rows g and g + 8 are multiplied by.
  __device__ __forceinline__ float2 row_scales(int tile, int lane) const {
    const char *const from = weight + tile * Block::tile_bytes(blocks);
    return make_float2(Block::row_scale(from, blocks, lane / 4), Block::row_scale(from, blocks, lane / 4 + 8));
  }

  struct W {
    Fp4Operands<X> operands;
    uint4 codes[2];
    uint32 scales, seen;

    __device__ __forceinline__ void begin_tile(const Fp4Source &, int, int) {}
    // Half h of a block in shared memory: chunks 2h and 2h + 1.
    __device__ __forceinline__ void load(const Fp4Source &, const char *piece, int, int, int h, int lane) {
      if (h == 0) seen = 0;
      const uint2 both = Block::scales(piece, lane);
      scales = h ? both.y : both.x, seen |= both.x | both.y;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        codes[i] = Block::codes(piece, 2 * h + i, lane);
        seen |= codes[i].x | codes[i].y | codes[i].z | codes[i].w;
      }
    }
    __device__ __forceinline__ int nothing(int positive) const { return crelle::nothing(seen, positive); }
    // Chunk 0 ... 3 of a block: four operands.
    __device__ __forceinline__ void unpack(uint32 (&to)[4][4], int chunk, char *, int) {
      operands.scale(Block::pair(scales, chunk));
      const uint4 c = codes[chunk % 2];
      operands.unpack(to[0], c.x), operands.unpack(to[1], c.y), operands.unpack(to[2], c.z),
          operands.unpack(to[3], c.w);
    }
  };
};

}  // namespace crelle
