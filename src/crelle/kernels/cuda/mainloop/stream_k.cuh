// The stream-K tile scheduler of gemm_sm90.cuh and integer_sm90.cuh.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

#if __CUDA_ARCH__ == 900
// The work of a thread block: blocks of 256 inputs of some tiles. Of `tiles`, the last `whole` (a multiple of the grid,
// or all) are data-parallel, the others stream-K.
struct TileScheduler {
  int tile, first, count;  // the current piece: `count` blocks from `first` on
  int at, end, next, tiles, blocks;

  __device__ __forceinline__ static int share(int index, int rest, int blocks) {
    return (long long)rest * blocks * index / gridDim.x;
  }
  __device__ __forceinline__ TileScheduler(int tiles, int whole, int blocks) : tiles(tiles), blocks(blocks) {
    const int rest = tiles - whole, index = blockIdx.x;
    at = share(index, rest, blocks), end = share(index + 1, rest, blocks), next = rest + index;
    advance();
  }
  // One of `shares` of a tile: neighbouring thread blocks have the same one.
  __device__ __forceinline__ TileScheduler(int split_k, int blocks) : tiles(0), blocks(blocks), next(0) {
    const int tile = blockIdx.x / split_k, share = blockIdx.x % split_k;
    at = tile * blocks + share * blocks / split_k, end = tile * blocks + (share + 1) * blocks / split_k;
    advance();
  }
  template <int SPLIT_K>
  __device__ __forceinline__ static TileScheduler of(int tiles, int whole, int blocks) {
    if constexpr (SPLIT_K > 1)
      return TileScheduler(SPLIT_K, blocks);
    else
      return TileScheduler(tiles, whole, blocks);
  }
  __device__ __forceinline__ void advance() {
    if (at < end) {
      tile = at / blocks, first = at % blocks, count = min(blocks - first, end - at);
      at += count;
    } else {
      tile = next, first = 0, count = next < tiles ? blocks : 0;
      next += gridDim.x;
    }
  }
};
#endif

}  // namespace crelle
