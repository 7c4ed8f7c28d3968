#include "decoder/ops.h"

#include <cstring>

namespace crelle::cpu {

const Ops &ops_of([[maybe_unused]] const Isa &isa) {
#if defined(__x86_64__)
  if (!std::strncmp(isa.name, "generic", 7)) return kOpsGeneric;
  const bool narrow = !std::strncmp(isa.name, "avx2", 4) || !std::strcmp(isa.name, "avx-vnni");
  return narrow ? kOpsAvx2 : kOpsAvx512;  // every other one begins with AVX-512
#else
  return kOpsGeneric;
#endif
}

}  // namespace crelle::cpu
