// Stands in for csrc/dsmem.cuh in tests on a CPU.
#pragma once
#include "types.cuh"

namespace crelle {
using Mbarrier = unsigned long long;
}
