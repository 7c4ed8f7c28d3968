// Stands in for ptx/semaphore.cuh in tests on a CPU.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

inline int add_acq_rel(int *counter, int by) { return atomicAdd(counter, by); }

}  // namespace crelle
