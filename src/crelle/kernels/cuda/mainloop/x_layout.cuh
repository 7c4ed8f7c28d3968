// Where an input of x stands for gemm.cu. Half a block, 128 inputs of a token, is 16 units of 16 bytes: a unit is 8 of
// the 16 places of k that an instruction has (u % 2: which), instruction u / 2 of eight. Places 2t and 2t + 1 belong to
// lane t of four, which has the bits of inputs 32t ... 32t + 31 (dequant.cuh). The two are 4 inputs apart, as
// byte permutations look them up, or 16 (`stride16`), as codes of four and more bits lie in the halves of a register.
//
// Mixed weights have an order of their own (mixed_layout.py), in which a lane has 16 of 64 2-bit inputs or 32 of 128
// 4-bit ones, neighbours in the halves of a register. `order`: 0, or 1 for stride16, or 2 + their blocks of 2 bits.
#pragma once

namespace crelle {

__device__ __forceinline__ int input_at(int u, int place, bool stride16) {
  const int pair = stride16 ? u / 8 * 8 + u % 2 * 4 : u / 8 * 16 + u % 2 * 8;
  return place / 2 * 32 + u / 2 % 4 + pair + place % 2 * (stride16 ? 16 : 4);
}
__device__ __forceinline__ int input_at(int u, int place, int order, int half_block) {
  if (order < 2) return input_at(u, place, order == 1);
  const int chunk = u / 8, step = u / 2 % 4, t = place / 2;
  const int at = step * 4 + u % 2 * 2 + place % 2;
  return half_block < 2 * (order - 2) ? chunk * 64 + t * 16 + at : t * 32 + chunk * 16 + at;
}

}  // namespace crelle
