// Hopper's warpgroup instruction for bytes, for tests on a CPU: each warp makes its 16 rows when it is issued. Stands
// in for ptx/wgmma_s8.cuh.
#pragma once
#include "ptx/tma.cuh"

namespace crelle {

inline uint32 swizzled_rows(uint32 address) { return address >> 4; }

template <int N>
struct WgmmaS8 {
  static void multiply(uint32 (&d)[N / 2], const uint32 (&a)[4], uint32 b, int add) {
    struct Operands {
      uint32 *d;
      const uint32 *a;
      uint32 b;
      bool add;
    } mine = {d, a, b << 4, add != 0};
    memcpy(emulator.in[emulator.current], &mine, sizeof mine);
    with_warp([](int first) {
      static int rows[16][32];
      Operands each[32];
      for (int lane = 0; lane < 32; lane++) {
        memcpy(&each[lane], emulator.in[first + lane], sizeof(Operands));
        const auto *bytes = reinterpret_cast<const signed char *>(each[lane].a);
        for (int i = 0; i < 16; i++) rows[lane / 4 + i / 4 % 2 * 8][lane % 4 * 4 + i / 8 * 16 + i % 4] = bytes[i];
      }
      for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < N / 2; i++) {
          const int row = lane / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + lane % 4 * 2 + i % 2;
          int sum = each[lane].add ? static_cast<int>(each[lane].d[i]) : 0;
          for (int k = 0; k < 32; k++) {
            const uint32 at = each[lane].b + n * 128 + k;
            sum += rows[row][k] * static_cast<signed char>(*at_shared(at ^ (at >> 7 & 7) << 4));
          }
          each[lane].d[i] = static_cast<uint32>(sum);
        }
    });
  }
};

}  // namespace crelle
