"""Launches trellis_encode.cu, trellis_gemv.cu and trellis_dequant.cu: products with trellis weights.

    xs = encode(x, w)                     # serves every weight with the same rotation (trellis_layout.same_inputs)
    y = product(xs, w, bias, residual)    # a few rows: 4 at a time, the weight is read again for the next ones
    y = encode_product(x, w, "RMS_NORM", norm)  # both in one launch, on Hopper (`encodes_itself`); the same bits
    W = dequantize(w, x.dtype)            # plain [N, K], for many rows: torch multiplies, and x is rotated (`rotate`)
    y = matmul(x, w, bias)                # either, by the number of rows

x is 16 bits an input with one scale for each segment of its inputs, of which K has `segments`; sums of a segment are
exact. So a row's bits depend neither on the number of rows nor on the tile config; those of `matmul` for many rows may,
and those of a norm on whether it is fused. All launch on the current stream, allocate only through torch, and can be
captured in a graph.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import sqrt

import torch
from torch import Tensor

from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES
from crelle.kernels.cuda.step.activations import Prologue, width
from crelle.kernels.cuda.trellis import trellis_gemm
from crelle.kernels.cuda.trellis.trellis_layout import ROWS, TrellisWeight

GEMV_ROWS = 16  # beyond, dequantizing once for torch should cost less: an estimate
TOKENS = (1, 2, 4)  # of a launch's pass over the weight
PASSES = (1, 2, 4)  # over 256 inputs a warp, in which a thread block encodes its segment
_SMALLEST_SHARED = 99 << 10  # bytes that a thread block may have of chips before Hopper
_MOST_SEGMENTS = 8  # thread blocks of a cluster that every GPU of Hopper's kind can hold
_ENCODE_WARPS, _OTHER_WARPS = 16, 8
_SCRATCH = 96 << 20  # bytes of a dequantized slab of rows


@dataclass(frozen=True, slots=True)
class TrellisTileConfig:
    """Tile config of trellis_gemv.cu; but for `clusters` its template parameters."""

    warps: int  # of a thread block
    stages: int  # of a warp's load pipeline
    run: int  # units that it loads at a time: 1, 2 or 4
    occupancy: int  # thread blocks that a multiprocessor holds
    clusters: int  # that take the tiles in turns; 0: before Hopper, a thread block takes one tile


@dataclass(frozen=True, slots=True, eq=False)
class TrellisX:
    """x as digits, and a scale and a sum for each segment of a token."""

    tokens: int
    size: int  # tokens of a pass
    dtype: torch.dtype
    digits: Tensor  # int32 [passes, units, size, 2, 4]
    scales: Tensor  # f32 [tokens, segments]
    sums: Tensor  # int32 [tokens, segments]


def segments(units: int, hopper: bool | None = None) -> int:
    """Return how many segments x of these units of 16 inputs has: a thread block of the cluster takes each."""
    if hopper is None:
        hopper = torch.cuda.get_device_capability() == (9, 0)
    return max(s for s in (1, 2, 4, _MOST_SEGMENTS) if s == 1 or (hopper and units >= 8 * s))


def pass_size(tokens: int) -> int:
    """Return how many tokens a pass over the weight takes."""
    return next((m for m in TOKENS if m >= tokens), TOKENS[-1])


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
    size = pass_size(tokens)
    passes = -(-tokens // size)
    digits = torch.empty(passes, units, size, 2, 4, dtype=torch.int32, device=x.device)
    parts = segments(units)
    scales = torch.empty(tokens, parts, dtype=torch.float32, device=x.device)
    sums = torch.empty(tokens, parts, dtype=torch.int32, device=x.device)
    aligned = w.K % 8 == 0 and all(t is None or t.data_ptr() % 16 == 0 for t in (x, norm, shift))
    assert x.shape[1] == w.K * width(op)
    if tokens:
        load(*encode_variant(op, size, aligned, x.dtype))(
            (passes * size, 1, 1),
            32 * _ENCODE_WARPS,
            *(x, norm, shift, w.signs, digits, scales, sums),
            *(tokens, w.K, units, parts, w.block, 1 / sqrt(w.block), float(eps)),
            pdl=True,
        )
    return TrellisX(tokens, size, x.dtype, digits, scales, sums)


def product_variant(
    w: TrellisWeight, size: int, c: TrellisTileConfig, dtype: torch.dtype, op: Prologue | None = None
) -> tuple[str, str]:
    """Return the kernel of `product`, or, with `op`, of `encode_product`."""
    pieces = f"{size}, {c.warps}, {c.stages}, {c.run}, {c.occupancy}"
    if not c.clusters:
        return (
            "trellis/trellis_gemv.cu",
            f"crelle::trellis_gemv_sm80<{w.code.weights}, {w.shift}, {pieces}, {C_TYPES[dtype]}>",
        )
    first = "crelle::ENCODED, 1" if op is None else f"crelle::{op}, {encode_passes(w, c.warps)}"
    split = segments(w.units.shape[1], True)
    name = f"crelle::trellis_gemv_sm90<{w.code.weights}, {w.shift}, {first}, {pieces}, {split}, {C_TYPES[dtype]}>"
    return "trellis/trellis_gemv.cu", name


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
    if config is None and not c.clusters and shared_bytes(w, x.size, c) > _SMALLEST_SHARED:
        c = replace(c, warps=c.warps // 2)
    tiles, units = w.units.shape[:2]
    parts = x.scales.shape[1]
    load(*product_variant(w, x.size, c, x.dtype))(
        (parts * min(tiles, c.clusters) if c.clusters else tiles, x.digits.shape[0], 1),
        32 * c.warps,
        *(w.units, w.scale, x.digits, x.scales, x.sums),
        *((None, None, None, None) if c.clusters else ()),
        *(bias, residual, y),
        *(w.N, x.tokens, units, tiles, y.stride(0), 0 if residual is None else residual.stride(0)),
        *((w.K, w.block, 0.0, 0.0) if c.clusters else ()),
        shared=shared_bytes(w, x.size, c),
        pdl=True,
    )
    return y


def encodes_itself(w: TrellisWeight, config: TrellisTileConfig | None = None) -> bool:
    """Whether `encode_product` takes x for this weight: on Hopper, if a thread block can hold its segment."""
    c = config or choose(w)
    fits = c.clusters and w.K % 8 == 0 and w.block <= 1024 and 256 * c.warps % w.block == 0
    return bool(fits) and encode_passes(w, c.warps) in PASSES


def encode_product(
    x: Tensor,
    w: TrellisWeight,
    op: Prologue = "PLAIN",
    norm: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    config: TrellisTileConfig | None = None,
) -> Tensor:
    """Return op(x) @ W.T (+ bias) (+ residual) for x [tokens, K] (gated: [tokens, 2K]) in one launch."""
    x = x.contiguous()
    tokens = x.shape[0]
    y = torch.empty(tokens, w.N, dtype=x.dtype, device=x.device) if out is None else out
    if not tokens:
        return y
    c = config or choose(w)
    tiles, units = w.units.shape[:2]
    size = pass_size(tokens)
    assert x.shape[1] == w.K * width(op)
    load(*product_variant(w, size, c, x.dtype, op))(
        (segments(units, True) * min(tiles, c.clusters), -(-tokens // size), 1),
        32 * c.warps,
        *(w.units, w.scale, None, None, None, x, norm, shift, w.signs, bias, residual, y),
        *(w.N, tokens, units, tiles, y.stride(0), 0 if residual is None else residual.stride(0)),
        *(w.K, w.block, 1 / sqrt(w.block), float(eps)),
        shared=shared_bytes(w, size, c, op),
        pdl=True,
    )
    return y


def _segment_begin(units: int, rank: int, parts: int) -> int:
    """Return the first unit of a segment; as in trellis_prologue.cuh."""
    return units // 4 * rank // parts * 4


def encode_passes(w: TrellisWeight, warps: int) -> int:
    """Return how many times 256 inputs a warp hold the widest segment with the blocks of the rotation it touches."""
    units, step = w.units.shape[1], max(256, w.block)
    parts = segments(units, True)
    bounds = [16 * _segment_begin(units, r, parts) for r in range(parts + 1)]
    chunks = max(-(-(end - begin // step * step) // step) * step // 256 for begin, end in pairwise(bounds))
    needed = -(-chunks // warps)
    return next((p for p in PASSES if p >= needed), needed)


def shared_bytes(w: TrellisWeight, size: int, c: TrellisTileConfig, op: Prologue | None = None) -> int:
    """Dynamic shared memory, as TrellisShared and ShareEncoder have it."""
    units = w.units.shape[1]
    parts = segments(units, True) if c.clusters else 1
    sums = 32 * (64 * size + (8 if size == 4 else 4))
    first = -(-(c.warps * c.stages + 3) * 8 // 128) * 128
    found = first + c.warps * (c.stages * c.run * int(512 * w.bits) + sums) + (2048 * size if parts > 1 else 0)
    if op is None:
        return found
    widest = max(_segment_begin(units, r + 1, parts) - _segment_begin(units, r, parts) for r in range(parts))
    small = 16 * c.warps * size
    exchange = encode_passes(w, c.warps) * c.warps * 1024 if w.block > 256 else 0
    return found + small + exchange + widest * size * 32


def choose(w: TrellisWeight, processors: int | None = None, hopper: bool | None = None) -> TrellisTileConfig:
    """Return a tile config for any number of tokens."""
    if hopper is None:
        hopper = torch.cuda.get_device_capability() == (9, 0)
    return _choose(*w.units.shape[:2], processors or multiprocessors(), hopper)


@cache
def _choose(tiles: int, units: int, processors: int, hopper: bool) -> TrellisTileConfig:
    """As measured on an H200: two thread blocks a multiprocessor, equal rounds of tiles.

    A longer pipeline, or one thread block a multiprocessor, is slower for every rate.
    """
    if not hopper:
        return TrellisTileConfig(8, 2, 2, 1, 0)
    clusters = max(1, 2 * (processors // 16 * 16) // segments(units, True))  # those of 8 leave some of a GPC free
    return TrellisTileConfig(8, 2, 2, 2, -(-tiles // -(-tiles // clusters)))


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
        if encodes_itself(w) and x.data_ptr() % 16 == 0:
            return encode_product(x, w, bias=bias, residual=residual)
        return product(encode(x, w), w, bias, residual)
    return dense_product(rotate(x, w), w, bias, residual)


def dense_product(x: Tensor, w: TrellisWeight, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Return the same for x that has been rotated: decoded in the kernel, or for many more rows torch's product."""
    if trellis_gemm.supports(x, w) is None:
        return trellis_gemm.product(x, w, bias, residual)
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
