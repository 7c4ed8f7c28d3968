#pragma once

namespace crelle::cpu {

// x [n], in blocks of `block` channels: times the Hadamard matrix over the root of its size. `block` a power of two.
void hadamard(float *x, int n, int block);

}  // namespace crelle::cpu
