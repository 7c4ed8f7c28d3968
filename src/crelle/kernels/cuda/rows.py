"""Launches rows.cu: what stands between the products of many tokens, straight into the order of tiles.cu.

    xs, x = between(x, w, "RMS_NORM", norm=norm, eps=eps, more=y)      # x += y; norm; ready for tiles.product(xs, w)
    xs, _ = between(inner, down, "SILU_MUL")

What `dense.apply` and `tiles.arrange` do, and the sum before them, in one launch instead of three.
"""

from collections.abc import Iterator
from typing import get_args

import torch
from torch import Tensor

from crelle.kernels.cuda.decode import C_TYPES, Op
from crelle.kernels.cuda.launch import load
from crelle.kernels.cuda.layout import BLOCK, CudaWeight
from crelle.kernels.cuda.tiles import Arranged

_WARPS = {True: 16, False: 8}  # of a thread block that has a whole row, and of one that has 256 inputs for each of them
_TIMES = 8  # pieces of 8 inputs that a thread has, at most


def supports(w: CudaWeight, K: int) -> str | None:
    """Return None, or why x [M, K] cannot be made ready for a weight."""
    if K % 8:
        return f"takes rows of a multiple of 8 numbers, not of {K}"
    if (most := BLOCK * _WARPS[True] * _TIMES) < BLOCK * w.blocks:
        return f"takes rows of up to {most} numbers, not of {K}"
    return None


def variant(op: Op, dtype: torch.dtype, inputs: int, whole: bool) -> tuple[str, str]:
    """`whole`: a thread block has all inputs of a row."""
    warps = _WARPS[whole]
    times = -(-inputs // (BLOCK * warps)) if whole else 1
    return "rows.cu", f"crelle::between<crelle::{op}, {warps}, {times}, {C_TYPES[dtype]}>"


def variants() -> Iterator[tuple[str, str]]:
    """Return what CI compiles."""
    for dtype in (torch.float16, torch.bfloat16):
        for op in get_args(Op):
            yield variant(op, dtype, 4096, "NORM" in op)
            yield variant(op, dtype, 8192, True)


def between(
    x: Tensor,
    w: CudaWeight,
    op: Op = "PLAIN",
    norm: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
    more: Tensor | None = None,
) -> tuple[Arranged, Tensor]:
    """Return op(x + more) as w's matrix instructions take it, and x + more, for x [M, K] (SILU_MUL: [M, 2K])."""
    to = Arranged.empty(x.shape[0], w, x)
    return to, _launch(x, w, op, norm, shift, eps, more, to.xs, to.flags, 0)


def in_order(
    x: Tensor,
    w: CudaWeight,
    op: Op = "PLAIN",
    norm: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
    more: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the same as rows: [M, K], or where w has its inputs in another order [M, 256 blocks] in that order."""
    pitch = x.shape[1] // (2 if op == "SILU_MUL" else 1) if w.order is None else BLOCK * w.blocks
    rows = torch.empty(x.shape[0], pitch, dtype=x.dtype, device=x.device)
    return rows, _launch(x, w, op, norm, shift, eps, more, rows, None, pitch)


def _launch(
    x: Tensor,
    w: CudaWeight,
    op: Op,
    norm: Tensor | None,
    shift: Tensor | None,
    eps: float,
    more: Tensor | None,
    xs: Tensor,
    flags: Tensor | None,
    pitch: int,
) -> Tensor:
    """Fill xs; return x + more."""
    M, K = x.shape[0], x.shape[1] // (2 if op == "SILU_MUL" else 1)
    assert supports(w, K) is None
    assert x.is_contiguous()
    assert more is None or (more.is_contiguous() and op != "SILU_MUL")
    inputs, whole = BLOCK * w.blocks, w.order is not None or "NORM" in op
    part = inputs if whole else min(inputs, BLOCK * _WARPS[False])
    total = x if more is None else torch.empty_like(x)
    load(*variant(op, x.dtype, inputs, whole))(
        (-(-inputs // part), -(-M // 8) * 8, 1),
        32 * _WARPS[whole],
        *(x, more, norm, shift, w.order, None if more is None else total, xs, flags),
        *(0 if flags is None else flags.numel(), M, K, w.blocks, part, pitch, w.far, float(eps)),
        shared=2 * part,
        overlap=True,
    )
    return total
