// The matrix instructions of a Hopper warpgroup: d [64, N] += a [64, 16] b [N, 16].T, a in registers, b in shared
// memory (rows of 128 bytes, swizzled), for N = 16, 32 ... 256.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

template <int N, typename X>
struct Wgmma;

// D: the accumulators' names, A0 ... A3 and B those of the other operands; then the accumulators themselves.
#define CRELLE_WGMMA(N, X, NAME, D, A0, A1, A2, A3, B, ...)                                                        \
  template <>                                                                                                      \
  struct Wgmma<N, X> {                                                                                             \
    static __device__ __forceinline__ void multiply(float *d, const uint32 (&a)[4], unsigned long long b) {        \
      asm volatile("{ .reg .pred p;\n setp.eq.u32 p, 0, 0;\n wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME \
                   " {" D "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, 0; }"                    \
                   : __VA_ARGS__                                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                          \
    }                                                                                                              \
  };
#define CRELLE_WGMMAS(N, ...)                   \
  CRELLE_WGMMA(N, half, "f16.f16", __VA_ARGS__) \
  CRELLE_WGMMA(N, bfloat16, "bf16.bf16", __VA_ARGS__)
#define CRELLE_R(i)                                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

#define CRELLE_D16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CRELLE_D32 CRELLE_D16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CRELLE_D48 CRELLE_D32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CRELLE_D64 CRELLE_D48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CRELLE_D80 CRELLE_D64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CRELLE_D96 CRELLE_D80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CRELLE_D112 CRELLE_D96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CRELLE_D128 CRELLE_D112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CRELLE_D144 CRELLE_D128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define CRELLE_D160 CRELLE_D144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define CRELLE_D176 CRELLE_D160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define CRELLE_D192 CRELLE_D176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define CRELLE_D208 CRELLE_D192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define CRELLE_D224 CRELLE_D208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define CRELLE_D240 CRELLE_D224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define CRELLE_D256 CRELLE_D240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define CRELLE_R16 CRELLE_R(0)
#define CRELLE_R32 CRELLE_R16, CRELLE_R(8)
#define CRELLE_R48 CRELLE_R32, CRELLE_R(16)
#define CRELLE_R64 CRELLE_R48, CRELLE_R(24)
#define CRELLE_R80 CRELLE_R64, CRELLE_R(32)
#define CRELLE_R96 CRELLE_R80, CRELLE_R(40)
#define CRELLE_R112 CRELLE_R96, CRELLE_R(48)
#define CRELLE_R128 CRELLE_R112, CRELLE_R(56)
#define CRELLE_R144 CRELLE_R128, CRELLE_R(64)
#define CRELLE_R160 CRELLE_R144, CRELLE_R(72)
#define CRELLE_R176 CRELLE_R160, CRELLE_R(80)
#define CRELLE_R192 CRELLE_R176, CRELLE_R(88)
#define CRELLE_R208 CRELLE_R192, CRELLE_R(96)
#define CRELLE_R224 CRELLE_R208, CRELLE_R(104)
#define CRELLE_R240 CRELLE_R224, CRELLE_R(112)
#define CRELLE_R256 CRELLE_R240, CRELLE_R(120)

CRELLE_WGMMAS(16, CRELLE_D16, 8, 9, 10, 11, 12, CRELLE_R16)
CRELLE_WGMMAS(32, CRELLE_D32, 16, 17, 18, 19, 20, CRELLE_R32)
CRELLE_WGMMAS(48, CRELLE_D48, 24, 25, 26, 27, 28, CRELLE_R48)
CRELLE_WGMMAS(64, CRELLE_D64, 32, 33, 34, 35, 36, CRELLE_R64)
CRELLE_WGMMAS(80, CRELLE_D80, 40, 41, 42, 43, 44, CRELLE_R80)
CRELLE_WGMMAS(96, CRELLE_D96, 48, 49, 50, 51, 52, CRELLE_R96)
CRELLE_WGMMAS(112, CRELLE_D112, 56, 57, 58, 59, 60, CRELLE_R112)
CRELLE_WGMMAS(128, CRELLE_D128, 64, 65, 66, 67, 68, CRELLE_R128)
CRELLE_WGMMAS(144, CRELLE_D144, 72, 73, 74, 75, 76, CRELLE_R144)
CRELLE_WGMMAS(160, CRELLE_D160, 80, 81, 82, 83, 84, CRELLE_R160)
CRELLE_WGMMAS(176, CRELLE_D176, 88, 89, 90, 91, 92, CRELLE_R176)
CRELLE_WGMMAS(192, CRELLE_D192, 96, 97, 98, 99, 100, CRELLE_R192)
CRELLE_WGMMAS(208, CRELLE_D208, 104, 105, 106, 107, 108, CRELLE_R208)
CRELLE_WGMMAS(224, CRELLE_D224, 112, 113, 114, 115, 116, CRELLE_R224)
CRELLE_WGMMAS(240, CRELLE_D240, 120, 121, 122, 123, 124, CRELLE_R240)
CRELLE_WGMMAS(256, CRELLE_D256, 128, 129, 130, 131, 132, CRELLE_R256)

}  // namespace crelle
