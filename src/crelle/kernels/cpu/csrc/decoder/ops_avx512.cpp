// The small ops for AVX-512 F/BW/VL/DQ.
#include <immintrin.h>

#include <iterator>
#include <type_traits>

#include "base/half.h"
#include "decoder/ops.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace avx512 {

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

}  // namespace avx512
}  // namespace

const Ops kOpsAvx512{"avx512",
                     avx512::load_floats,
                     avx512::store_floats,
                     avx512::rms_norm,
                     avx512::layer_norm,
                     avx512::rope,
                     avx512::activate,
                     avx512::add,
                     avx512::add_scaled,
                     avx512::scale,
                     avx512::cap,
                     avx512::dense,
                     avx512::attend,
                     avx512::combine,
                     avx512::tile_of_rows,
                     avx512::rows_of_tile,
                     avx512::norm_tile,
                     avx512::layer_norm_tile,
                     avx512::rope_tile,
                     avx512::add_to_tile,
                     avx512::attend_block,
                     avx512::attend_block_scratch,
                     avx512::unpack,
                     avx512::kTiles,
                     avx512::sweep_tiles,
                     avx512::nested_sweep_tile,
                     avx512::affine_sweep_tile,
                     avx512::descend_scales_tile,
                     avx512::uniform_grids_tile,
                     avx512::search_grids_tile,
                     avx512::second_order_tile,
                     avx512::row_errors_tiles,
                     avx512::solve_scales_tiles,
                     avx512::viterbi_tables,
                     avx512::viterbi_ring};

}  // namespace crelle::cpu
