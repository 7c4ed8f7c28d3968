// Bit-plane weights as the tiles of gemm_sm90.cuh and gemm_sm80.cuh take them. What such a source of weights has:
//   BYTES, SCRATCH     of a pipeline stage (16 rows, a block of 256 inputs); of shared memory that a warp has besides
//   RESIDUAL           whether the epilogue may have a residual to add
//   seek, issue_load   go to a block of a tile; ask for it and go on to the next one
//   copy               the same where the threads of a warp copy (before Hopper)
//   W                  the registers of a lane: begin_tile, load (half a block), unpack (64 inputs)
//   row_scales         if it exists: what the sums of a tile's rows g and g + 8 are multiplied by
#pragma once
#include "ptx/copies.cuh"
#include "planes/dequant.cuh"
#include "ptx/pipeline.cuh"

namespace crelle {

// words [tiles, blocks, planes, 32, uint4]; scales [tiles, ceil(blocks / blocks_per_scale), SCALE_BYTES]
template <int P, ScaleKind KIND, int GROUPS, typename S, typename X>
struct PlaneSource {
  using Half = Weights<P, KIND, GROUPS, S, X, uses_stride16(KIND, P)>;
  static constexpr int BYTES = Half::BYTES, SCRATCH = 0;
  static constexpr bool RESIDUAL = false;
  const char *words, *scales;
  int blocks, planes, blocks_per_scale;
  const char *planes_at = nullptr, *scales_at = nullptr;

  __device__ __forceinline__ PlaneSource(const char *words, const char *scales, int blocks, int planes,
                                         int blocks_per_scale)
      : words(words), scales(scales), blocks(blocks), planes(planes), blocks_per_scale(blocks_per_scale) {}

  __device__ __forceinline__ int sets() const { return (blocks + blocks_per_scale - 1) / blocks_per_scale; }
  __device__ __forceinline__ void seek(int tile, int block) {
    planes_at = words + (size_t)(tile * blocks + block) * (planes * 512);
    scales_at = scales + (size_t)(GROUPS > 1 ? tile * blocks + block : tile * sets()) * Half::SCALE_BYTES;
  }
  template <typename Queue>
  __device__ __forceinline__ void issue_load(Queue &queue, int stage, int block, int zero) {
    const int set = GROUPS > 1 ? 0 : block / blocks_per_scale;
    queue.issue_load(stage, planes_at + zero, Half::PLANE_BYTES, scales_at + set * Half::SCALE_BYTES + zero,
                     Half::SCALE_BYTES);
    planes_at += planes * 512, scales_at += GROUPS > 1 ? Half::SCALE_BYTES : 0;
  }
  __device__ __forceinline__ void copy(char *to, int tile, int block, int lane) const {
    const int set = GROUPS > 1 ? tile * blocks + block : tile * sets() + block / blocks_per_scale;
    copy_run(to, words + (size_t)(tile * blocks + block) * (planes * 512), Half::PLANE_BYTES, lane);
    copy_run(to + Half::PLANE_BYTES, scales + (size_t)set * Half::SCALE_BYTES, Half::SCALE_BYTES, lane);
  }

  struct W : Half {
    __device__ __forceinline__ void begin_tile(const PlaneSource &, int, int) {}
    // Half h of a block in shared memory.
    __device__ __forceinline__ void load(const PlaneSource &, const char *piece, int, int, int h, int lane) {
      Half::load(piece, h, lane);
    }
    // Chunk 0 ... 3 of a block: 64 inputs, four operands.
    __device__ __forceinline__ void unpack(uint32 (&to)[4][4], int chunk, char *, int) {
      if (chunk % 2) this->next_half();
      this->template step<0>(to[0]), this->template step<1>(to[1]);
      this->template step<2>(to[2]), this->template step<3>(to[3]);
    }
  };
};

}  // namespace crelle
