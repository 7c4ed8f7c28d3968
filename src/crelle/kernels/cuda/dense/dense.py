"""Launches dense.cu: GEMV with plain 16-bit weights for up to GEMV_ROWS tokens, with a prologue and an epilogue.

y = product(x, weight, "RMS_NORM", norm=norm, eps=1e-5)                # norm and product in one launch
y = product(inner, down, "SILU_MUL", residual=y)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from crelle.kernels.cuda.dispatch import GEMV_ROWS
from crelle.kernels.cuda.launch import load
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES
from crelle.kernels.cuda.step.activations import Prologue, width

_STEP = 32  # inputs that a warp takes at a time
_ROWS = 16  # outputs of a thread block
_ROOM = 200 * 1024  # shared memory for x
_APPLY_WARPS = 8


@dataclass(frozen=True, slots=True)
class DenseTileConfig:
    """Tile config of dense.cu; its template parameters."""

    warps: int  # that share the inputs of 16 rows
    depth: int  # reads under way in a warp
    occupancy: int  # warps that a multiprocessor should hold


def choose(K: int) -> DenseTileConfig:
    """Return the tile config that was fastest on an H200."""
    return DenseTileConfig(8, 8, 16) if K % 8 == 0 else DenseTileConfig(8, 2, 16)


def product_variant(
    op: Prologue, tokens: int, K: int, dtype: torch.dtype, out_dtype: torch.dtype, config: DenseTileConfig | None = None
) -> tuple[str, str]:
    c = config or choose(K)
    arguments = f"crelle::{op}, {tokens}, {c.warps}, {c.depth}, {c.occupancy}, {_aligned(K)}"
    return "dense/dense.cu", f"crelle::dense_gemv<{arguments}, {C_TYPES[dtype]}, {C_TYPES[out_dtype]}>"


def product(
    x: Tensor,
    weight: Tensor,
    op: Prologue = "PLAIN",
    norm: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    config: DenseTileConfig | None = None,
) -> Tensor:
    """Return op(x) @ weight.T (+ bias) (+ residual) as [tokens, N], in `dtype` (that of x by default).

    x [tokens, K] (gated: [tokens, 2K], gate then up); weight [N, K]; norm and shift [K]: the norm's weight and bias.
    """
    tokens, (N, K) = x.shape[0], weight.shape
    y = torch.empty(tokens, N, dtype=dtype or x.dtype, device=x.device) if out is None else out
    if tokens == 0:
        return y
    c = config or choose(K)
    share = -(-K // _STEP // c.warps)
    share += share & 1  # steps of a warp; two are a line of 128 bytes
    row = c.warps * (share + 1) * _STEP * 2  # bytes of shared memory that a token needs
    together = min(tokens, GEMV_ROWS, _ROOM // row)  # where inputs are very long, not all tokens fit at once
    for first in range(0, tokens, together):
        some = slice(first, min(first + together, tokens))
        kernel = load(*product_variant(op, some.stop - first, K, x.dtype, y.dtype, c))
        kernel(
            (-(-N // _ROWS), 1, 1),
            32 * c.warps,
            x[some],
            weight,
            norm,
            shift,
            bias,
            None if residual is None else residual[some],
            y[some],
            N,
            K,
            share,
            float(eps),
            shared=(some.stop - first) * row,
            pdl=True,
        )
    return y


def apply_variant(op: Prologue, K: int, dtype: torch.dtype) -> tuple[str, str]:
    return "dense/dense.cu", f"crelle::apply<crelle::{op}, {_APPLY_WARPS}, {_aligned(K)}, {C_TYPES[dtype]}>"


def apply(
    x: Tensor,
    op: Prologue,
    norm: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return op(x) as [tokens, K]: what `product` does before it multiplies."""
    tokens, K = x.shape[0], x.shape[1] // width(op)
    y = torch.empty(tokens, K, dtype=x.dtype, device=x.device) if out is None else out
    if tokens == 0:
        return y
    kernel = load(*apply_variant(op, K, x.dtype))
    grid = (-(-K // (8 * 32 * _APPLY_WARPS)), tokens, 1)
    kernel(grid, 32 * _APPLY_WARPS, x, norm, shift, y, K, float(eps), pdl=True)
    return y


def _aligned(K: int) -> str:
    return "true" if K % 8 == 0 else "false"
