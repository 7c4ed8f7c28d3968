// The copy of one word to shared memory without a register: for rows of any length. A file of its own, so that the
// kernels that copy 16 bytes at a time need not be compiled anew when this one changes.
#pragma once
#include "ptx/copies.cuh"

namespace crelle {

__device__ __forceinline__ void copy_4(uint32 to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

}  // namespace crelle
