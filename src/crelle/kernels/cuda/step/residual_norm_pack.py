"""Launches residual_norm_pack.cu: fused residual add, norm or activation, and packing for the next GEMM.

    xs, x = add_norm_pack(x, w, "RMS_NORM", norm, addend=y)      # x += y; norm; packed for gemm.product
    xs, _ = add_norm_pack(inner, down, "SILU_MUL")

What `dense.apply` and `gemm.pack` do, and the sum before them, in one launch instead of three.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from crelle.kernels.cuda.launch import load
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES
from crelle.kernels.cuda.planes.gemm import Ordered, PackedX
from crelle.kernels.cuda.planes.weight_layout import BLOCK, CudaWeight
from crelle.kernels.cuda.step.activations import Prologue, is_gated, width

if TYPE_CHECKING:
    from crelle.kernels.cuda.step.fused_linear import Norm

_WARPS = {True: 16, False: 8}  # of a thread block that has a whole row, and of one that has 256 inputs for each of them
_TIMES = 8  # pieces of 8 inputs that a thread has, at most


def supports(w: Ordered, K: int) -> str | None:
    """Return None, or why x [M, K] cannot be made ready for a weight."""
    if K % 8:
        return f"takes rows of a multiple of 8 values, not of {K}"
    if (most := BLOCK * _WARPS[True] * _TIMES) < BLOCK * w.blocks:
        return f"takes rows of up to {most} values, not of {K}"
    return None


def variant(op: Prologue, dtype: torch.dtype, inputs: int, whole: bool) -> tuple[str, str]:
    """`whole`: a thread block has all inputs of a row."""
    warps = _WARPS[whole]
    times = -(-inputs // (BLOCK * warps)) if whole else 1
    return "step/residual_norm_pack.cu", f"crelle::add_norm_pack<crelle::{op}, {warps}, {times}, {C_TYPES[dtype]}>"


def variants() -> Iterator[tuple[str, str]]:
    """Return what CI compiles."""
    for dtype in (torch.float16, torch.bfloat16):
        for op in get_args(Prologue):
            yield variant(op, dtype, 4096, "NORM" in op)
            yield variant(op, dtype, 8192, True)


def add_norm_pack(
    x: Tensor, w: Ordered, op: Prologue = "PLAIN", norm: "Norm | None" = None, addend: Tensor | None = None
) -> tuple[PackedX, Tensor]:
    """Return op(x + addend) packed for w, and x + addend, for x [M, K] (gated: [M, 2K])."""
    (to,), total = add_norm_pack_each(x, w, w.perm, op, norm, addend)
    return to, total


def add_norm_pack_each(
    x: Tensor,
    w: Ordered,
    perms: Tensor | None,
    op: Prologue = "PLAIN",
    norm: "Norm | None" = None,
    addend: Tensor | None = None,
) -> tuple[list[PackedX], Tensor]:
    """Return the same for weights like w that differ in the order of inputs, int32 [orders, places]: one launch."""
    to = PackedX.empty(x.shape[0], w, x, 1 if perms is None else perms.numel() // w.places)
    return to, _launch(x, w, perms, op, norm, addend, to[0].xs, to[0].semaphores, 0, len(to))


def add_norm_permute(
    x: Tensor, w: CudaWeight, op: Prologue = "PLAIN", norm: "Norm | None" = None, addend: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the same as rows for skinny_gemm: [M, K], or [M, 256 blocks] permuted where w's inputs are."""
    pitch = x.shape[1] // width(op) if w.perm is None else BLOCK * w.blocks
    rows = torch.empty(x.shape[0], pitch, dtype=x.dtype, device=x.device)
    return rows, _launch(x, w, w.perm, op, norm, addend, rows, None, pitch)


def _launch(
    x: Tensor,
    w: Ordered,
    perms: Tensor | None,
    op: Prologue,
    norm: "Norm | None",
    addend: Tensor | None,
    xs: Tensor,
    semaphores: Tensor | None,
    pitch: int,
    orders: int = 1,
) -> Tensor:
    """Fill xs; return x + addend."""
    M, K = x.shape[0], x.shape[1] // width(op)
    weight, shift, eps = (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)
    assert supports(w, K) is None
    assert x.is_contiguous()
    assert addend is None or (addend.is_contiguous() and not is_gated(op))
    inputs, whole = BLOCK * w.blocks, perms is not None or "NORM" in op
    part = inputs if whole else min(inputs, BLOCK * _WARPS[False])
    total = x if addend is None else torch.empty_like(x)
    load(*variant(op, x.dtype, inputs, whole))(
        (-(-inputs // part), -(-M // 8) * 8, orders),
        32 * _WARPS[whole],
        *(x, addend, weight, shift, perms, None if addend is None else total, xs, semaphores),
        *(0 if semaphores is None else semaphores.numel(), M, K, w.blocks, part, pitch),
        *(w.order, w.places, float(eps)),
        shared=2 * part,
        pdl=True,
    )
    return total
