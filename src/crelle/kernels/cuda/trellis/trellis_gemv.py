"""Launches trellis_encode.cu, trellis_gemv.cu and trellis_dequant.cu: products with trellis weights.

    xs = encode(x, w)                     # serves every weight with the same rotation (trellis_layout.same_inputs)
    y = product(xs, w, bias, residual)    # a few rows: 4 at a time, the weight is read again for the next ones
    W = dequantize(w, x.dtype)            # plain [N, K], for many rows: torch multiplies, and x is rotated (`rotate`)
    y = matmul(x, w, bias)                # either, by the number of rows

x is 16 bits an input with one scale a token, sums are exact, so a row's bits depend neither on the number of rows nor
on the tile config; those of `matmul` for many rows may. All launch on the current stream, allocate only through torch,
and can be captured in a graph.
"""

from dataclasses import dataclass
from functools import cache
from math import sqrt

import torch
from torch import Tensor

from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES
from crelle.kernels.cuda.step.activations import Prologue, width
from crelle.kernels.cuda.trellis.trellis_layout import ROWS, TrellisWeight

GEMV_ROWS = 16  # beyond, dequantizing once for torch should cost less: an estimate
TOKENS = (1, 2, 4)  # of a launch's pass over the weight
SPLITS = (1, 2, 4, 8)  # thread blocks of a cluster: of 3 or 5, fewer fit on the GPU at once
_ENCODE_WARPS, _OTHER_WARPS = 16, 8
_SCRATCH = 96 << 20  # bytes of a dequantized slab of rows


@dataclass(frozen=True, slots=True)
class TrellisTileConfig:
    """Tile config of trellis_gemv.cu; its template parameters."""

    warps: int  # of a thread block
    stages: int  # of a warp's load pipeline
    run: int  # units that it loads at a time: 1, 2 or 4
    occupancy: int  # thread blocks that a multiprocessor holds
    split: int  # thread blocks that share the inputs: a cluster


@dataclass(frozen=True, slots=True, eq=False)
class TrellisX:
    """x as digits, and a scale and a sum for each token."""

    tokens: int
    size: int  # tokens of a pass
    dtype: torch.dtype
    digits: Tensor  # int32 [passes, units, size, 2, 4]
    scales: Tensor  # f32 [tokens]
    sums: Tensor  # int32 [tokens]


def encode_variant(op: Prologue, size: int, aligned: bool, dtype: torch.dtype) -> tuple[str, str]:
    parameters = f"crelle::{op}, {size}, {str(aligned).lower()}, {_ENCODE_WARPS}, {C_TYPES[dtype]}"
    return "trellis/trellis_encode.cu", f"crelle::trellis_encode<{parameters}>"


def encode(
    x: Tensor,
    w: TrellisWeight,
    op: Prologue = "PLAIN",
    norm: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
) -> TrellisX:
    """Return op(x) for x [tokens, K] (gated: [tokens, 2K]) as `product` takes it."""
    x = x.contiguous()
    tokens, units = x.shape[0], w.units.shape[1]
    size = next((m for m in TOKENS if m >= tokens), TOKENS[-1])
    passes = -(-tokens // size)
    digits = torch.empty(passes, units, size, 2, 4, dtype=torch.int32, device=x.device)
    scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    sums = torch.empty(tokens, dtype=torch.int32, device=x.device)
    aligned = w.K % 8 == 0 and all(t is None or t.data_ptr() % 16 == 0 for t in (x, norm, shift))
    assert x.shape[1] == w.K * width(op)
    if tokens:
        load(*encode_variant(op, size, aligned, x.dtype))(
            (passes * size, 1, 1),
            32 * _ENCODE_WARPS,
            *(x, norm, shift, w.signs, digits, scales, sums),
            *(tokens, w.K, units, w.block, 1 / sqrt(w.block), float(eps)),
            pdl=True,
        )
    return TrellisX(tokens, size, x.dtype, digits, scales, sums)


def product_variant(w: TrellisWeight, size: int, c: TrellisTileConfig, dtype: torch.dtype) -> tuple[str, str]:
    pieces = f"{w.code.weights}, {w.shift}, {size}, {c.warps}, {c.stages}, {c.run}, {c.occupancy}"
    name = f"sm90<{pieces}, {c.split}" if c.split else f"sm80<{pieces}"
    return "trellis/trellis_gemv.cu", f"crelle::trellis_gemv_{name}, {C_TYPES[dtype]}>"


def product(
    x: TrellisX,
    w: TrellisWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    config: TrellisTileConfig | None = None,
) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) as [tokens, N] in x's dtype, which theirs is, too.

    out and residual may be slices of columns, and the same.
    """
    y = torch.empty(x.tokens, w.N, dtype=x.dtype, device=x.digits.device) if out is None else out
    if not x.tokens:
        return y
    c = config or choose(w)
    tiles, units = w.units.shape[:2]
    load(*product_variant(w, x.size, c, x.dtype))(
        (tiles * max(1, c.split), x.digits.shape[0], 1),
        32 * c.warps,
        *(w.units, w.scale, x.digits, x.scales, x.sums, bias, residual, y),
        *(w.N, x.tokens, units, y.stride(0), 0 if residual is None else residual.stride(0)),
        shared=shared_bytes(w, x.size, c),
        pdl=True,
    )
    return y


def shared_bytes(w: TrellisWeight, size: int, c: TrellisTileConfig) -> int:
    """Dynamic shared memory, as TrellisShared has it."""
    sums = 32 * (64 * size + (8 if size == 4 else 4))
    warp = max(c.stages * c.run * int(512 * w.bits), sums)
    first = -(-(c.warps * c.stages + 1) * 8 // 128) * 128
    received = c.split * -(-128 // c.split) * size * 16 if c.split > 1 else 0
    return first + c.warps * warp + received


def choose(w: TrellisWeight, processors: int | None = None, hopper: bool | None = None) -> TrellisTileConfig:
    """Return a tile config for any number of tokens."""
    if hopper is None:
        hopper = torch.cuda.get_device_capability() == (9, 0)
    return _choose(*w.units.shape[:2], processors or multiprocessors(), hopper)


@cache
def _choose(tiles: int, units: int, processors: int, hopper: bool) -> TrellisTileConfig:
    """As measured on an H200, within a tenth of the best (bench/gpu/trellis_cuda.py): one round of thread blocks."""
    if not hopper:
        return TrellisTileConfig(8, 2, 2, 1, 0)
    fitting = [s for s in SPLITS if units >= 8 * s and tiles * s <= 2 * processors]
    # More tiles than processors: several rounds anyway, which smaller shares fill better.
    split = 2 if tiles > processors and units >= 16 else max(fitting, default=1)
    return TrellisTileConfig(8, 2, 2, 2, split)


def dequant_variant(w: TrellisWeight, dtype: torch.dtype) -> tuple[str, str]:
    aligned = str(w.K % 4 == 0).lower()
    parameters = f"{w.code.weights}, {w.shift}, {aligned}, {_OTHER_WARPS}, {C_TYPES[dtype]}"
    return "trellis/trellis_dequant.cu", f"crelle::trellis_dequant<{parameters}>"


def dequantize(w: TrellisWeight, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
    """Return the plain matrix [N, K], still rotated, or some rows of it from a multiple of 256 on."""
    first, last, _ = rows.indices(w.N)
    tiles = slice(first // ROWS, -(-last // ROWS))
    out = torch.empty(last - first, w.K, dtype=dtype, device=w.units.device)
    load(*dequant_variant(w, dtype))(
        (-(-w.units.shape[1] // _OTHER_WARPS), tiles.stop - tiles.start, 1),
        32 * _OTHER_WARPS,
        *(w.units[tiles], w.scale[first:], out, last - first, w.K, w.units.shape[1]),
        pdl=True,
    )
    return out


def rotate_variant(aligned: bool, dtype: torch.dtype) -> tuple[str, str]:
    parameters = f"{str(aligned).lower()}, {_OTHER_WARPS}, {C_TYPES[dtype]}"
    return "trellis/trellis_encode.cu", f"crelle::trellis_rotate<{parameters}>"


def rotate(x: Tensor, w: TrellisWeight) -> Tensor:
    """Return x [tokens, K] as the dequantized weight takes it, rounded to its dtype."""
    if w.signs is None or not x.shape[0]:
        return x
    x = x.contiguous()
    y = torch.empty_like(x)
    load(*rotate_variant(w.K % 8 == 0 and x.data_ptr() % 16 == 0, x.dtype))(
        (-(-w.K // (1024 * _OTHER_WARPS)), x.shape[0], 1),
        32 * _OTHER_WARPS,
        *(x, w.signs, y, w.K, w.block, 1 / sqrt(w.block)),
        pdl=True,
    )
    return y


def matmul(x: Tensor, w: TrellisWeight, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) for x [tokens, K]."""
    if x.shape[0] <= GEMV_ROWS:
        return product(encode(x, w), w, bias, residual)
    return dense_product(rotate(x, w), w, bias, residual)


def dense_product(x: Tensor, w: TrellisWeight, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Return the same for x that has been rotated, by torch: slabs of W are dequantized."""
    step = max(ROWS, _SCRATCH // (2 * w.K) // ROWS * ROWS)
    y = torch.empty(x.shape[0], w.N, dtype=x.dtype, device=x.device)
    for n in range(0, w.N, step):
        rows = slice(n, min(n + step, w.N))
        plain = dequantize(w, x.dtype, rows)
        if bias is None:
            torch.mm(x, plain.T, out=y[:, rows])
        else:
            torch.addmm(bias[rows], x, plain.T, out=y[:, rows])
    return y if residual is None else y + residual
