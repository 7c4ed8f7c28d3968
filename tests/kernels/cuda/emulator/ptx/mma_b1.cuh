// The matrix instruction for bits, for tests on a CPU. Stands in for ptx/mma_b1.cuh.
#pragma once
#include "ptx/pipeline.cuh"

namespace crelle {

// a [16, 256] and b [256, 8] of bits, c [16, 8] += counts; registers as of m16n8k32, 8 times as many values each.
inline void count(int (&c)[4], uint4 plane, uint32 b0, uint32 b1) {
  const int me = emulator.current;
  const uint32 mine[6] = {plane.x, plane.y, plane.z, plane.w, b0, b1};
  memcpy(emulator.in[me], mine, sizeof mine);
  memcpy(emulator.in[me] + 3, c, sizeof c);
  with_warp([](int first) {
    static uint32 words[32][6];
    for (int lane = 0; lane < 32; lane++) memcpy(words[lane], emulator.in[first + lane], sizeof words[lane]);
    for (int lane = 0; lane < 32; lane++) {
      int sums[4];
      memcpy(sums, emulator.in[first + lane] + 3, sizeof sums);
      for (int j = 0; j < 4; j++) {
        const int row = lane / 4, column = lane % 4 * 2 + j % 2;
        for (int t = 0; t < 4; t++)
          for (int half = 0; half < 2; half++)
            sums[j] += __popc(words[4 * row + t][2 * half + j / 2] & words[4 * column + t][4 + half]);
      }
      memcpy(emulator.out[first + lane], sums, sizeof sums);
    }
  });
  memcpy(c, emulator.out[me], sizeof c);
}
inline uint4 twice(const void *p) {
  uint4 v;
  memcpy(&v, p, 8), memcpy(&v.z, p, 8);
  return v;
}

}  // namespace crelle
