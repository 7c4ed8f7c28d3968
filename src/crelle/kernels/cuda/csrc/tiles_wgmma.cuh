// The matrix instructions of a Hopper warpgroup: d [64, N] += a [64, 16] b [N, 16].T, a in registers, b in shared
// memory (rows of 128 bytes, swizzled), for the N that tiles_hopper.cuh is built from.
#pragma once
#include "numbers.cuh"

namespace crelle {

template <int N, typename X>
struct Wgmma;

#define CRELLE_WGMMA(N, X, NAME, D, ...)                                                                           \
  template <>                                                                                                      \
  struct Wgmma<N, X> {                                                                                             \
    static __device__ __forceinline__ void multiply(float *d, const uint32 (&a)[4], unsigned long long b) {        \
      asm volatile("{ .reg .pred p;\n setp.eq.u32 p, 0, 0;\n wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME \
                   " {" D ", p, 1, 1, 0; }"                                                                        \
                   : __VA_ARGS__                                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                          \
    }                                                                                                              \
  };
#define CRELLE_WGMMAS(N, D, ...)                   \
  CRELLE_WGMMA(N, half, "f16.f16", D, __VA_ARGS__) \
  CRELLE_WGMMA(N, bfloat16, "bf16.bf16", D, __VA_ARGS__)
#define CRELLE_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CRELLE_16(i) CRELLE_4(i), CRELLE_4(i + 4), CRELLE_4(i + 8), CRELLE_4(i + 12)

CRELLE_WGMMAS(8,
              "%0, %1, %2, %3"
              "}, {%4, %5, %6, %7}, %8",
              CRELLE_4(0))
CRELLE_WGMMAS(16,
              "%0, %1, %2, %3, %4, %5, %6, %7"
              "}, {%8, %9, %10, %11}, %12",
              CRELLE_4(0), CRELLE_4(4))
CRELLE_WGMMAS(32,
              "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
              "}, {%16, %17, %18, %19}, %20",
              CRELLE_16(0))
CRELLE_WGMMAS(64,
              "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
              "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
              "}, {%32, %33, %34, %35}, %36",
              CRELLE_16(0), CRELLE_16(16))
CRELLE_WGMMAS(
    88,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43"
    "}, {%44, %45, %46, %47}, %48",
    CRELLE_16(0), CRELLE_16(16), CRELLE_4(32), CRELLE_4(36), CRELLE_4(40))
CRELLE_WGMMAS(96,
              "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
              "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
              "%42, %43, %44, %45, %46, %47"
              "}, {%48, %49, %50, %51}, %52",
              CRELLE_16(0), CRELLE_16(16), CRELLE_16(32))
CRELLE_WGMMAS(
    128,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "
    "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
    "}, {%64, %65, %66, %67}, %68",
    CRELLE_16(0), CRELLE_16(16), CRELLE_16(32), CRELLE_16(48))
#undef CRELLE_WGMMA
#undef CRELLE_WGMMAS
#undef CRELLE_4
#undef CRELLE_16

}  // namespace crelle
