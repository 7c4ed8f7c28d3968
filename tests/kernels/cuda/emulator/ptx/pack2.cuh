// Pairs of 16-bit floats, for tests on a CPU. Stands in for ptx/pack2.cuh.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

template <typename X>
struct Pack2 {
  static X of_half(uint32 bits) { return X((float)__ushort_as_half(bits)); }
  static uint32 of(float v) { return of(v, v); }
  static uint32 of(float a, float b) {
    const X v[2] = {X(a), X(b)};
    uint32 bits;
    memcpy(&bits, v, 4);
    return bits;
  }
  static float2 values(uint32 v) {
    X x[2];
    memcpy(x, &v, 4);
    return {x[0], x[1]};
  }
  static uint32 add(uint32 a, uint32 b) { return of(values(a).x + values(b).x, values(a).y + values(b).y); }
  static uint32 mul(uint32 a, uint32 b) { return of(values(a).x * values(b).x, values(a).y * values(b).y); }
  static uint32 fma(uint32 a, uint32 b, uint32 c) {
    return of(fmaf(values(a).x, values(b).x, values(c).x), fmaf(values(a).y, values(b).y, values(c).y));
  }
  static uint32 low_twice(uint32 v) { return __byte_perm(v, 0, 0x1010); }
  static uint32 high_twice(uint32 v) { return __byte_perm(v, 0, 0x3232); }
};
inline uint32 bytes_of(uint32 a, uint32 b, uint32 selector) { return __byte_perm(a, b, selector); }
inline uint32 mixed(uint32 mask, uint32 a, uint32 b) { return (mask & a) | (~mask & b); }

}  // namespace crelle
