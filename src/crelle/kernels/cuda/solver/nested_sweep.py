"""Launches nested_sweep.cu: passes over the columns of a weight with one code for several precisions.

As crelle.kernels.cuda.solver.sweep, but a row of the products is a precision of a row of the weight: [K, P N].
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from crelle.kernels.cuda.launch import load
from crelle.kernels.cuda.solver.sweep import BLOCK, ROWS, blocks, no_tf32, shared_bytes

MOST = 8  # precisions: a code has 8 bits


def sweep_variant(precisions: int, descent: bool) -> tuple[str, str]:
    return "solver/nested_sweep.cu", f"crelle::nested_sweep<{precisions}, {str(descent).lower()}>"


def nearest_variant(precisions: int) -> tuple[str, str]:
    return "solver/nested_sweep.cu", f"crelle::nested_nearest<{precisions}>"


def variants() -> Iterator[tuple[str, str]]:
    """Return what CI compiles."""
    for precisions in range(1, MOST + 1):
        yield nearest_variant(precisions)
        yield from (sweep_variant(precisions, descent) for descent in (False, True))


@no_tf32()
def sweep_nested(
    target: Tensor, error: Tensor | None, mix: Tensor, grids: Tensor, group: Tensor, weights: Tensor, coarse: int
) -> Tensor:
    """Return the common codes uint8 [K, N] for target [K, N].

    error [K, P N]: of all columns and precisions before the pass; None: none, and mix is upper triangular. grids f32
    [groups, P, 2, N]: scale and lowest level; group int32 [K]: of each column; weights f32 [P]: of the precisions;
    coarse: levels of the coarsest precision.
    """
    (K, N), P = target.shape, len(weights)
    target, mix, grids, roots = target.contiguous(), mix.contiguous(), grids.contiguous(), weights.sqrt()
    found = torch.empty(K, N, dtype=torch.uint8, device=target.device)
    left = target.new_empty(K, P * N)
    if error is not None:
        left.copy_(error)
    change = None if error is None else target.new_empty(min(BLOCK, K), P * N)
    kernel = load(*sweep_variant(P, error is not None))
    shared = shared_bytes(2 * P, P, 4 if P > 4 else 8) + 4 * BLOCK  # columns as in nested_sweep.cu
    for want, b in blocks(target, mix, left, change, P):
        inputs = want, target[b], mix[b, b], grids, group[b], roots
        outputs = left[b], change, found[b]
        kernel((-(-N // ROWS), 1, 1), 32, *inputs, *outputs, coarse, N, K, b.stop - b.start, shared=shared)
    return found


def nearest_nested(weight: Tensor, grids: Tensor, G: int, weights: Tensor, coarse: int) -> Tensor:
    """Return the best common codes uint8 [K, N] of a weight [K, N] without error propagation, groups of G columns."""
    (K, N), P = weight.shape, len(weights)
    weight, grids = weight.contiguous(), grids.contiguous()
    found = torch.empty(K, N, dtype=torch.uint8, device=weight.device)
    at = (-(-N // 32), -(-K // G), 1)
    load(*nearest_variant(P))(at, 32, weight, grids, weights.sqrt(), found, coarse, N, K, G)
    return found
