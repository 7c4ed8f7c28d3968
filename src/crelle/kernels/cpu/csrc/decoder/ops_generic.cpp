// The small ops for any machine: the compiler's own choice of vectors.
#if defined(__aarch64__)
#include <arm_neon.h>  // conversion of f16: part of the base instruction set
#endif

#include <iterator>
#include <type_traits>

#include "base/half.h"
#include "decoder/ops.h"

#define CRELLE_INLINE inline __attribute__((always_inline))

namespace crelle::cpu {
namespace {
namespace generic {

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

}  // namespace generic
}  // namespace

const Ops kOpsGeneric{"generic",
                      generic::load_floats,
                      generic::store_floats,
                      generic::rms_norm,
                      generic::layer_norm,
                      generic::rope,
                      generic::activate,
                      generic::add,
                      generic::add_scaled,
                      generic::scale,
                      generic::cap,
                      generic::dense,
                      generic::attend,
                      generic::combine,
                      generic::tile_of_rows,
                      generic::rows_of_tile,
                      generic::norm_tile,
                      generic::layer_norm_tile,
                      generic::rope_tile,
                      generic::add_to_tile,
                      generic::attend_block,
                      generic::attend_block_scratch,
                      generic::unpack,
                      generic::kTiles,
                      generic::sweep_tiles,
                      generic::nested_sweep_tile,
                      generic::affine_sweep_tile,
                      generic::descend_scales_tile,
                      generic::uniform_grids_tile,
                      generic::search_grids_tile,
                      generic::second_order_tile,
                      generic::row_errors_tiles,
                      generic::solve_scales_tiles,
                      generic::viterbi_tables,
                      generic::viterbi_ring};

}  // namespace crelle::cpu
