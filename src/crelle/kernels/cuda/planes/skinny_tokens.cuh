// x for a few dozen tokens as it lies in memory, in the registers of a warp, and its product with dequantized planes.
#pragma once
#include "planes/dequant.cuh"
#include "ptx/global_loads.cuh"
#include "ptx/tensorcore.cuh"

namespace crelle {

// Inputs 32t ... 32t+31 of NT / 8 tokens: first as they lie in memory, then as pairs for the instruction.
template <int NT>
struct Tokens {
  static constexpr int COUNT = NT / 8;
  uint32 words[COUNT][2][8];  // [tokens][half of the 32][...]

  // Inputs 16 PART ... of the 32; zeros from the `left`th on (`all`: there is none in the warp's half block).
  template <int PART, typename X>
  __device__ __forceinline__ void load(const X *const (&rows)[COUNT], bool all, int left) {
    if (all) {
#pragma unroll
      for (int i = 0; i < 2 * COUNT; i++) put(words[i / 2][PART] + i % 2 * 4, read_now(at<PART>(rows[i / 2]) + i % 2));
    } else {
#pragma unroll
      for (int i = 0; i < 2 * COUNT; i++)
        put(words[i / 2][PART] + i % 2 * 4,
            PART * 16 + i % 2 * 8 < left ? read_now(at<PART>(rows[i / 2]) + i % 2) : make_uint4(0, 0, 0, 0));
    }
  }
  template <int PART, typename X>
  static __device__ __forceinline__ const uint4 *at(const X *row) {
    return reinterpret_cast<const uint4 *>(row + PART * 16);
  }
  static __device__ __forceinline__ void put(uint32 *to, uint4 v) {
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
  // Step s = 0 ... 3 takes inputs s, s + 4 and s + 8, s + 12: pairs (0, 1) (4, 5) become (0, 4) (1, 5).
  template <int PART>
  __device__ __forceinline__ void pair() {
#pragma unroll
    for (int i = 0; i < 4 * COUNT; i++) {
      uint32 *const w = words[i / 4][PART] + i / 2 % 2 * 4 + i % 2;
      const uint32 low = __byte_perm(w[0], w[2], 0x5410), high = __byte_perm(w[0], w[2], 0x7632);
      w[0] = low, w[2] = high;
    }
  }
  // Inputs s, s + 4 (q = 0) or s + 8, s + 12 of step s.
  __device__ __forceinline__ uint32 of(int c, int step, int q) const {
    return words[c][step / 4][q * 4 + (step % 4) / 2 + step % 2 * 2];
  }
};

template <int STEP, int NT, typename X, typename W>
__device__ __forceinline__ void skinny_gemm_step(float (&d)[NT / 8][4], const W &w, const Tokens<NT> &x) {
  uint32 a[4];
  w.template step<STEP % 4>(a);
#pragma unroll
  for (int c = 0; c < NT / 8; c++) multiply<X>(d[c], a[0], a[1], a[2], a[3], x.of(c, STEP, 0), x.of(c, STEP, 1));
}

}  // namespace crelle
