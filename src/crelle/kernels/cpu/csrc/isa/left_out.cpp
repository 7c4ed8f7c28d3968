// Empty tables for the instruction sets that a build leaves out (CRELLE_NATIVE in CMakeLists.txt), so that it links.
// isas() lists no set whose table is empty, whatever machine runs it.
#include "attention/bf16_attention.h"
#include "decoder/ops.h"
#include "dense/bf16_gemm.h"
#include "dense/i16_gemm.h"
#include "isa/isa.h"
#include "solver/stats.h"

namespace crelle::cpu {

#if defined(CRELLE_WITHOUT_AMX)
const Gemm kAmxGemm{}, kAmxInt8Gemm{}, kAmxBf16Gemm{};
const IntegerKernel kIntegerAmx{};
const StatsKernel kStatsAmx{};
const Bf16GemmKernel kBf16GemmAmx{};
const Bf16AttentionKernel kBf16AttentionAmx{};
bool request_amx() { return false; }
void matmul_digits(const Weight &, const Activations &, float *, size_t, int, int) {}
#endif

#if defined(CRELLE_WITHOUT_AVX_VNNI)
const Isa kAvxVnni{};
const I16Kernel kI16AvxVnni{};
#endif

#if defined(CRELLE_WITHOUT_AVX512)
const Isa kAvx512{}, kAvx512Vnni{}, kVbmi{};
const MixedKernel kMixedVnni{};
const IntegerKernel kIntegerVnni{};
const Ops kOpsAvx512{};
const Gemm kF32Avx512{};
const I16Kernel kI16Avx512{}, kI16Avx512Vnni{};
#endif

}  // namespace crelle::cpu
