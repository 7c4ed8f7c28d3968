"""Launches mixed_solver.cu: grids and second-order scales of mixed 2/4-bit matrices, as on a CPU in C++ (sweep.h).

The descent over scales goes through the 2-bit columns in blocks of 64, as passes over columns do (crelle.kernels.cuda.
sweep): a launch sets the scales of a block's groups, and products carry what it changed to the others.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from crelle.kernels.cuda.launch import load
from crelle.kernels.cuda.solver.sweep import BLOCK, ROWS, blocks, no_tf32

GROUPS = (8, 16, 32, 64)
DESCEND = "solver/mixed_solver.cu", "crelle::descend_scales"


def search_variant(group: int) -> tuple[str, str]:
    return "solver/mixed_solver.cu", f"crelle::search_grids<{group}>"


def variants() -> Iterator[tuple[str, str]]:
    """Return what CI compiles."""
    yield DESCEND
    yield from map(search_variant, GROUPS)


def search_grids(weight: Tensor, importance: Tensor, group: int, shrink: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return scale and zero [N, C] of the 2-bit grids with the least weighted error; shrink: factors to try."""
    (N, K), C = weight.shape, -(-weight.shape[1] // group)
    scale, zero = weight.new_empty(N, C), weight.new_empty(N, C)
    if N * C == 0:
        return scale, zero
    inputs = weight.contiguous(), importance.contiguous(), torch.tensor(shrink, device=weight.device)
    load(*search_variant(group))((-(-N * C // 128), 1, 1), 128, *inputs, scale, zero, len(shrink), N, K, C)
    return scale, zero


@no_tf32()
def descend_scales(
    error: Tensor,
    factor: Tensor,
    hessian: Tensor,
    columns: Tensor,
    group: int,
    scale: Tensor,
    zero: Tensor,
    top: Tensor,
    codes: Tensor,
) -> None:
    """Set the scales of 2-bit groups to the best values that can be stored, group by group.

    Changes error, scale and codes.
    error, factor [K, N]; columns bool [K]: those of 2-bit groups, `group` of them each; scale, zero [ceil(N / 16), C2]:
    second-order, of 16 rows each; top [C2]: the largest code; codes f32 [C2, N]. All are contiguous.
    """
    N, groups = error.shape[1], len(codes)
    two, others = columns.nonzero()[:, 0], (~columns).nonzero()[:, 0]
    left, f = error[two], factor[two].contiguous()
    start = hessian[two[:, None], others] @ error[others]  # what the errors of other columns, which stay, contribute
    H = hessian[two[:, None], two]
    change = error.new_empty(min(BLOCK, len(two)), N)
    kernel = load(*DESCEND)
    shared = 4 * (BLOCK * BLOCK + 2 * BLOCK * ROWS)
    for pull, b in blocks(start, H, left, change):
        g = b.start // group
        inputs = pull, f[b], H[b, b], zero[:, g:], top[g:]
        outputs = left[b], change, scale[:, g:], codes[g:]
        sizes = N, len(two), b.stop - b.start, group, groups
        kernel((-(-N // ROWS), 1, 1), 32, *inputs, *outputs, *sizes, shared=shared)
    error[two] = left
