// The small ops for AVX2 + FMA + F16C.
#include <immintrin.h>

#include <iterator>
#include <type_traits>

#include "base/half.h"
#include "decoder/ops.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace avx2 {

#include "base/simd.h"
#include "decoder/small_ops.h"
#include "dense/dense.h"
#include "attention/attention.h"
#include "decoder/transposed_ops.h"
#include "attention/prefill_attention.h"
#include "attention/kv_dequant.h"
#include "solver/sweep.h"
#include "solver/grid_search.h"
#include "solver/nested_sweep.h"
#include "solver/normal_equations.h"
#include "solver/viterbi.h"

}  // namespace avx2
}  // namespace

const Ops kOpsAvx2{"avx2",
                   avx2::load_floats,
                   avx2::store_floats,
                   avx2::rms_norm,
                   avx2::layer_norm,
                   avx2::rope,
                   avx2::activate,
                   avx2::add,
                   avx2::add_scaled,
                   avx2::scale,
                   avx2::cap,
                   avx2::dense,
                   avx2::attend,
                   avx2::combine,
                   avx2::tile_of_rows,
                   avx2::rows_of_tile,
                   avx2::norm_tile,
                   avx2::layer_norm_tile,
                   avx2::rope_tile,
                   avx2::add_to_tile,
                   avx2::attend_block,
                   avx2::attend_block_scratch,
                   avx2::unpack,
                   avx2::kTiles,
                   avx2::sweep_tiles,
                   avx2::nested_sweep_tile,
                   avx2::affine_sweep_tile,
                   avx2::descend_scales_tile,
                   avx2::uniform_grids_tile,
                   avx2::search_grids_tile,
                   avx2::second_order_tile,
                   avx2::row_errors_tiles,
                   avx2::solve_scales_tiles,
                   avx2::viterbi_tables,
                   avx2::viterbi_ring};

}  // namespace crelle::cpu
