#include "decoder/ops.h"

#include <cstring>

namespace crelle::cpu {

const Ops &ops_of([[maybe_unused]] const Isa &isa) {
#if defined(__x86_64__)
  if (!std::strcmp(isa.name, "generic")) return kOpsGeneric;
  const bool narrow = !std::strcmp(isa.name, "avx2") || !std::strcmp(isa.name, "avx-vnni");
  return narrow ? kOpsAvx2 : kOpsAvx512;  // every other one begins with AVX-512
#else
  return kOpsGeneric;
#endif
}

}  // namespace crelle::cpu
