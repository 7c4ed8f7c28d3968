// Hopper's warpgroup instruction for bytes: d [64, N] += a [64, 32] b [N, 32].T in int32; a in registers (a lane has
// those of m16n8k32 for the 16 rows of its warp), b in shared memory (rows of 128 bytes, swizzled), N = 8, 16 ... 256.
#pragma once
#include "ptx/wgmma.cuh"

namespace crelle {

// The low half of the descriptor of rows of 128 bytes, swizzled, in groups of eight: in units of 16 bytes.
__device__ __forceinline__ uint32 swizzled_rows(uint32 address) { return 1u << 16 | address >> 4; }

template <int N>
struct WgmmaS8;

// D, A0 ... A3, B, P: the operands' names (P: whether d is added to, or else overwritten); then the accumulators.
#define CRELLE_WGMMA_S8(N, D, A0, A1, A2, A3, B, P, ...)                                                             \
  template <>                                                                                                        \
  struct WgmmaS8<N> {                                                                                                \
    static __device__ __forceinline__ void multiply(uint32 (&d)[N / 2], const uint32 (&a)[4], uint32 b, int add) {   \
      asm volatile("{ .reg .pred p;\n .reg .b64 b;\n setp.ne.b32 p, %" #P ", 0;\n mov.b64 b, {%" #B                  \
                   ", 0x40000040};\n wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" D "}, {%" #A0 ", %" #A1 \
                   ", %" #A2 ", %" #A3 "}, b, p; }"                                                                  \
                   : __VA_ARGS__                                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add));                                  \
    }                                                                                                                \
  };
#define CRELLE_I4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define CRELLE_I(i) CRELLE_I4(i), CRELLE_I4(i + 4)
#define CRELLE_D8 "%0, %1, %2, %3"
#define CRELLE_D24 CRELLE_D16 ", %8, %9, %10, %11"
#define CRELLE_I8 CRELLE_I4(0)
#define CRELLE_I16 CRELLE_I(0)
#define CRELLE_I24 CRELLE_I16, CRELLE_I4(8)
#define CRELLE_I32 CRELLE_I16, CRELLE_I(8)
#define CRELLE_I48 CRELLE_I32, CRELLE_I(16)
#define CRELLE_I64 CRELLE_I48, CRELLE_I(24)
#define CRELLE_I80 CRELLE_I64, CRELLE_I(32)
#define CRELLE_I96 CRELLE_I80, CRELLE_I(40)
#define CRELLE_I112 CRELLE_I96, CRELLE_I(48)
#define CRELLE_I128 CRELLE_I112, CRELLE_I(56)
#define CRELLE_I144 CRELLE_I128, CRELLE_I(64)
#define CRELLE_I160 CRELLE_I144, CRELLE_I(72)
#define CRELLE_I176 CRELLE_I160, CRELLE_I(80)
#define CRELLE_I192 CRELLE_I176, CRELLE_I(88)
#define CRELLE_I208 CRELLE_I192, CRELLE_I(96)
#define CRELLE_I224 CRELLE_I208, CRELLE_I(104)
#define CRELLE_I240 CRELLE_I224, CRELLE_I(112)
#define CRELLE_I256 CRELLE_I240, CRELLE_I(120)

CRELLE_WGMMA_S8(8, CRELLE_D8, 4, 5, 6, 7, 8, 9, CRELLE_I8)
CRELLE_WGMMA_S8(16, CRELLE_D16, 8, 9, 10, 11, 12, 13, CRELLE_I16)
CRELLE_WGMMA_S8(24, CRELLE_D24, 12, 13, 14, 15, 16, 17, CRELLE_I24)
CRELLE_WGMMA_S8(32, CRELLE_D32, 16, 17, 18, 19, 20, 21, CRELLE_I32)
CRELLE_WGMMA_S8(48, CRELLE_D48, 24, 25, 26, 27, 28, 29, CRELLE_I48)
CRELLE_WGMMA_S8(64, CRELLE_D64, 32, 33, 34, 35, 36, 37, CRELLE_I64)
CRELLE_WGMMA_S8(80, CRELLE_D80, 40, 41, 42, 43, 44, 45, CRELLE_I80)
CRELLE_WGMMA_S8(96, CRELLE_D96, 48, 49, 50, 51, 52, 53, CRELLE_I96)
CRELLE_WGMMA_S8(112, CRELLE_D112, 56, 57, 58, 59, 60, 61, CRELLE_I112)
CRELLE_WGMMA_S8(128, CRELLE_D128, 64, 65, 66, 67, 68, 69, CRELLE_I128)
CRELLE_WGMMA_S8(144, CRELLE_D144, 72, 73, 74, 75, 76, 77, CRELLE_I144)
CRELLE_WGMMA_S8(160, CRELLE_D160, 80, 81, 82, 83, 84, 85, CRELLE_I160)
CRELLE_WGMMA_S8(176, CRELLE_D176, 88, 89, 90, 91, 92, 93, CRELLE_I176)
CRELLE_WGMMA_S8(192, CRELLE_D192, 96, 97, 98, 99, 100, 101, CRELLE_I192)
CRELLE_WGMMA_S8(208, CRELLE_D208, 104, 105, 106, 107, 108, 109, CRELLE_I208)
CRELLE_WGMMA_S8(224, CRELLE_D224, 112, 113, 114, 115, 116, 117, CRELLE_I224)
CRELLE_WGMMA_S8(240, CRELLE_D240, 120, 121, 122, 123, 124, 125, CRELLE_I240)
CRELLE_WGMMA_S8(256, CRELLE_D256, 128, 129, 130, 131, 132, 133, CRELLE_I256)

}  // namespace crelle
