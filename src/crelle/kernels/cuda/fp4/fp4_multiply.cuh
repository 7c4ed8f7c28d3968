// A block of four-bit floats in shared memory times its 256 inputs of up to 8 tokens: the loop of the GEMVs.
#pragma once
#include "fp4/fp4_codes.cuh"
#include "ptx/tensorcore.cuh"

namespace crelle {

// d [tile][even or odd steps] += TILES blocks at `piece`, one behind the other, times x: where the lane's inputs of the
// block begin, 32 t bytes into a token's row. refill(seen) is called when all of the piece has been read, with an OR of
// it.
template <Fp4Kind KIND, int TILES, typename T, typename Refill>
__device__ __forceinline__ void fp4_multiply(float (&d)[TILES][2][4], const char *piece, const char *x,
                                             Fp4Operands<T> &operands, int lane, Refill refill) {
  using Block = Fp4Block<KIND>;
  uint2 scales[TILES];
  uint32 seen = 0;
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    scales[j] = Block::scales(piece + j * Block::BYTES, lane);
    seen |= scales[j].x | scales[j].y;
  }
#pragma unroll
  for (int chunk = 0; chunk < 4; chunk++) {
    uint4 codes[TILES];
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      codes[j] = Block::codes(piece + j * Block::BYTES, chunk, lane);
      seen |= codes[j].x | codes[j].y | codes[j].z | codes[j].w;
    }
    if (chunk == 3) refill(seen);
    const uint4 low = *reinterpret_cast<const uint4 *>(x + chunk * 128);
    const uint4 high = *reinterpret_cast<const uint4 *>(x + chunk * 128 + 16);
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      operands.scale(Block::pair(chunk < 2 ? scales[j].x : scales[j].y, chunk));
      const auto step = [&](float (&to)[4], uint32 word, uint32 b0, uint32 b1) {
        uint32 a[4];
        operands.unpack(a, word);
        multiply<T>(to, a[0], a[1], a[2], a[3], b0, b1);
      };
      step(d[j][0], codes[j].x, low.x, low.y), step(d[j][1], codes[j].y, low.z, low.w);
      step(d[j][0], codes[j].z, high.x, high.y), step(d[j][1], codes[j].w, high.z, high.w);
    }
  }
}

}  // namespace crelle
