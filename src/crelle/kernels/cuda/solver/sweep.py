"""Launches sweep.cu: one pass over the columns of a weight, as crelle.quantizers.solvers.sweep describes it.

The kernel rounds 64 columns of all rows in one launch. Their errors reach the other columns by matrix products in two
levels: within 512 columns after each launch, and before each 512 columns one product gathers what all others
contribute: K/512 large products and less than K/64 small ones for K columns.

Products are f32: with TF32 a column's want would be off by about 5e-4 of what feedback contributes to it, and codes
would differ from the reference's not only at ties.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from crelle.kernels.cuda.launch import load

BLOCK, _OUTER = 64, 512  # columns; BLOCK as in sweep_block.cuh
ROWS = 32  # as in sweep_block.cuh
_LEVELS = (2, 4, 8, 16)  # in registers; with 16, columns with more are searched in memory


def variant(levels: int, descent: bool, outliers: bool) -> tuple[str, str]:
    """`levels`: the most that a column has."""
    flags = ", ".join(str(flag).lower() for flag in (descent, outliers))
    return "solver/sweep.cu", f"crelle::sweep_table<{_held(levels)}, {flags}>"


def _held(levels: int) -> int:
    return next((n for n in _LEVELS if levels <= n), _LEVELS[-1])


UNIFORM = "solver/sweep.cu", "crelle::sweep_uniform"


def variants() -> Iterator[tuple[str, str]]:
    """Return what CI compiles."""
    yield UNIFORM
    for levels in _LEVELS:
        for descent in (False, True):
            yield from (variant(levels, descent, outliers) for outliers in (False, True))


@contextmanager
def no_tf32() -> Iterator[None]:
    """Keep products in f32, whatever the process has set."""
    matmul = torch.backends.cuda.matmul
    setting: tuple[str, Any, Any] = "", None, None  # name, value when off, value before
    try:
        setting = "allow_tf32", False, matmul.allow_tf32
    except RuntimeError:  # the process has set fp32_precision, which torch 2.9 brought
        setting = "fp32_precision", "ieee", matmul.fp32_precision
    name, off, before = setting
    if before != off:
        setattr(matmul, name, off)
    try:
        yield
    finally:
        if before != off:
            setattr(matmul, name, before)


@no_tf32()
def sweep_table(
    target: Tensor,
    error: Tensor | None,
    mix: Tensor,
    values: Tensor,
    codes: Tensor | None,
    first: Tensor,
    count: Tensor,
    most: int,
    outliers: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return codes uint8 [K, N] and weights of outliers [K, N] for target [K, N].

    Column i takes one of count[i] rows of values [levels, N] from first[i] on (both int32 [K]), `most` at most; codes
    uint8 [levels, N]. error, mix, outliers: as crelle.quantizers.solvers.sweep.sweep_levels takes them.
    """
    K, N = target.shape
    target, mix, values = target.contiguous(), mix.contiguous(), values.contiguous()
    level_codes = None if codes is None else codes.contiguous()
    some = None if outliers is None else outliers.contiguous()
    kept = None if some is None else torch.empty_like(target)
    found = torch.empty(K, N, dtype=torch.uint8, device=target.device)
    left = torch.empty_like(target) if error is None else torch.empty_like(target).copy_(error)
    change = None if error is None else target.new_empty(min(BLOCK, K), N)
    kernel = load(*variant(most, error is not None, some is not None))
    shared = shared_bytes(_held(most)) + 8 * BLOCK
    assert values.numel() < 1 << 32  # indices are 32 bits
    for want, b in blocks(target, mix, left, change):
        place = None if some is None else some[b]
        outputs = left[b], change, found[b], None if kept is None else kept[b]
        inputs = want, target[b], mix[b, b], values, level_codes, first[b], count[b], place
        kernel((-(-N // ROWS), 1, 1), 32, *inputs, *outputs, N, K, b.stop - b.start, shared=shared)
    return found, kept


@no_tf32()
def sweep_uniform(target: Tensor, mix: Tensor, scale: Tensor, low: Tensor, top: Tensor) -> Tensor:
    """Return the errors [K, N] of error feedback on the levels low + scale q, q = 0 … top [N]; others are [K, N]."""
    K, N = target.shape
    target, mix, scale, low = (t.contiguous() for t in (target, mix, scale, low))
    left = torch.empty_like(target)
    kernel = load(*UNIFORM)
    for want, b in blocks(target, mix, left, None):
        inputs = want, target[b], mix[b, b], scale[b], low[b], top
        kernel((-(-N // ROWS), 1, 1), 32, *inputs, left[b], N, K, b.stop - b.start, shared=shared_bytes(2))
    return left


def shared_bytes(floats: int, precisions: int = 1, columns: int = 8) -> int:
    """Of a thread block with `columns` columns in registers, each with so many floats of levels for each row."""
    return 4 * (BLOCK * BLOCK + BLOCK * precisions * ROWS + 2 * columns * floats * ROWS)


def blocks(
    target: Tensor, mix: Tensor, left: Tensor, change: Tensor | None, precisions: int = 1
) -> Iterator[tuple[Tensor, slice]]:
    """Yield what each block's columns want [B, P N], and its columns.

    The caller rounds them into `left` (and `change`). target [K, N], left and change [.., P N]. change: of the errors,
    in coordinate descent; None: feedback, where columns not yet rounded have no error.
    """
    K = len(target)
    for begin in range(0, K, _OUTER):
        end = min(begin + _OUTER, K)
        known = begin if change is None else K
        here = target[begin:end] if precisions == 1 else target[begin:end].repeat(1, precisions)
        want = torch.addmm(here, mix[:known, begin:end].T, left[:known])
        for b in range(begin, end, BLOCK):
            e = min(b + BLOCK, end)
            yield want[b - begin : e - begin], slice(b, e)
            moved = left[b:e] if change is None else change[: e - b]
            want[e - begin :].addmm_(mix[b:e, e:end].T, moved)
