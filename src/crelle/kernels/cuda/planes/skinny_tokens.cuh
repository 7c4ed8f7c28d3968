// x for a few dozen tokens as it lies in memory, in the registers of a warp, and its product with dequantized planes.
#pragma once
#include "planes/dequant.cuh"
#include "ptx/global_loads.cuh"
#include "ptx/tensorcore.cuh"

namespace crelle {

// Inputs 32t ... 32t+31 of NT / 8 tokens: first as they lie in memory, then as pairs for the instruction, of inputs 4
// or (STRIDE16) 16 apart, as in dequant.cuh.
template <int NT, bool STRIDE16 = false>
struct Tokens {
  static constexpr int COUNT = NT / 8;
  static constexpr int NEAR = STRIDE16 ? 8 : 16, FAR = STRIDE16 ? 16 : 8;  // from part to part, from run to run of 8
  uint32 words[COUNT][2][8];                                               // [tokens][part of the 32][...]

  // Two runs of 8 inputs; zeros from the `left`th of the 32 on (`all`: there is none in the warp's half block).
  template <int PART, typename X>
  __device__ __forceinline__ void load(const X *const (&rows)[COUNT], bool all, int left) {
#pragma unroll
    for (int i = 0; i < 2 * COUNT; i++) {
      const int from = PART * NEAR + i % 2 * FAR;
      const uint4 *const at = reinterpret_cast<const uint4 *>(rows[i / 2] + from);
      put(words[i / 2][PART] + i % 2 * 4, all || from < left ? read_now(at) : make_uint4(0, 0, 0, 0));
    }
  }
  static __device__ __forceinline__ void put(uint32 *to, uint4 v) {
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
  // Step s = 0 ... 3 of a part takes its inputs s, s + 4 and s + 8, s + 12; STRIDE16: s, s + 16 and s + 4, s + 20.
  // Pairs (0, 1) (4, 5) or (0, 1) (16, 17) of neighbours become (0, 4) (1, 5) or (0, 16) (1, 17).
  template <int PART>
  __device__ __forceinline__ void pair() {
    constexpr int OTHER = STRIDE16 ? 4 : 2;
#pragma unroll
    for (int i = 0; i < 4 * COUNT; i++) {
      uint32 *const w = words[i / 4][PART] + (STRIDE16 ? i % 4 : i / 2 % 2 * 4 + i % 2);
      const uint32 low = __byte_perm(w[0], w[OTHER], 0x5410), high = __byte_perm(w[0], w[OTHER], 0x7632);
      w[0] = low, w[OTHER] = high;
    }
  }
  // The first (q = 0) or second pair of a step.
  __device__ __forceinline__ uint32 of(int c, int step, int q) const {
    const int s = step % 4;
    return words[c][step / 4][STRIDE16 ? s % 2 * 4 + q * 2 + s / 2 : q * 4 + s / 2 + s % 2 * 2];
  }
};

template <int STEP, int NT, typename X, typename W, bool STRIDE16>
__device__ __forceinline__ void skinny_gemm_step(float (&d)[NT / 8][4], const W &w, const Tokens<NT, STRIDE16> &x) {
  uint32 a[4];
  w.template step<STEP % 4>(a);
#pragma unroll
  for (int c = 0; c < NT / 8; c++) multiply<X>(d[c], a[0], a[1], a[2], a[3], x.of(c, STEP, 0), x.of(c, STEP, 1));
}

}  // namespace crelle
