"""Launches fp4_gemv.cu: products of up to 8 tokens with four-bit floats, with a prologue and an epilogue.

    y = product(x, w, "RMS_NORM", norm=norm, eps=1e-5)      # norm and product in one launch
    y = product(inner, down, "SILU_MUL", residual=y)

x is taken as it is, weights lose nothing, and sums are f32 in an order that follows from the weight alone: a row's bits
do not depend on the number of rows. Launches on the current stream, allocates only through torch, and can be captured
in a graph.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from crelle.kernels.cuda.fp4.fp4_layout import BLOCK, Fp4Weight
from crelle.kernels.cuda.launch import load, most_shared_memory, multiprocessors
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES
from crelle.kernels.cuda.step.activations import Prologue, width

TOKENS = (1, 2, 4, 8)  # of a launch
_RESERVED = 1024  # bytes of shared memory of a thread block outside its pipelines


@dataclass(frozen=True, slots=True)
class Fp4TileConfig:
    """Tile config of fp4_gemv.cu; its template parameters."""

    tiles: int  # of 16 rows that a thread block has
    warps: int  # that share their inputs
    stages: int  # of a warp's load pipeline
    occupancy: int  # thread blocks that a multiprocessor holds


def gemv_variant(
    w: Fp4Weight,
    op: Prologue,
    size: int,
    c: Fp4TileConfig,
    aligned: bool,
    dtype: torch.dtype,
    out: torch.dtype,
    hopper: bool,
) -> tuple[str, str]:
    """`size`: of TOKENS."""
    pieces = f"{size}, {c.tiles}, {c.warps}, {c.stages}, {c.occupancy}, {str(aligned).lower()}"
    arguments = f"{w.kind}, crelle::{op}, {pieces}, {C_TYPES[dtype]}, {C_TYPES[out]}"
    return "fp4/fp4_gemv.cu", f"crelle::fp4_gemv_sm{90 if hopper else 80}<{arguments}>"


def product(
    x: Tensor,
    w: Fp4Weight,
    op: Prologue = "PLAIN",
    norm: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    config: Fp4TileConfig | None = None,
) -> Tensor:
    """Return op(x) @ W.T (+ bias) (+ residual) as [tokens, N], in `dtype` (that of x by default).

    x [tokens, K] (gated: [tokens, 2K], gate then up); norm and shift [K]: the norm's weight and bias. More tokens than
    fit into a launch take several.
    """
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    tokens, type_out = x.shape[0], dtype or x.dtype
    assert x.shape[1] == w.K * width(op)
    fits = out is not None and out.is_contiguous() and out.dtype == type_out and out.shape == (tokens, w.N)
    y = out if out is not None and fits else torch.empty(tokens, w.N, dtype=type_out, device=x.device)
    if tokens == 0:
        return y
    hopper = torch.cuda.get_device_capability() == (9, 0)
    c, room = config or choose(w), most_shared_memory()
    aligned = w.K % 8 == 0 and all(t is None or t.data_ptr() % 16 == 0 for t in (x, norm, shift))
    at_once = tokens_at_once(w, c, room)
    for first in range(0, tokens, at_once):
        some = slice(first, min(first + at_once, tokens))
        count = some.stop - first
        size = next(m for m in TOKENS if m >= count)
        load(*gemv_variant(w, op, size, c, aligned, x.dtype, type_out, hopper))(
            (-(-w.tiles // c.tiles), 1, 1),
            32 * c.warps,
            *(w.data, x[some], norm, shift, bias, None if residual is None else residual[some], y[some]),
            *(w.N, w.K, count, w.blocks, float(eps)),
            shared=shared_bytes(w, size, c),
            pdl=True,
        )
    return y


def shared_bytes(w: Fp4Weight, size: int, c: Fp4TileConfig) -> int:
    """Dynamic shared memory, as Fp4Shared has it."""
    first = -(-c.warps * c.stages * 8 // 128) * 128
    share = -(-w.blocks // c.warps)
    x = size * (share * 2 * BLOCK + 16)
    return first + c.warps * (c.stages * c.tiles * w.block_bytes + x + size * 16 * c.tiles * 4)


def tokens_at_once(w: Fp4Weight, c: Fp4TileConfig, room: int) -> int:
    """Return how many tokens of this weight's inputs fit into shared memory; 0: not one."""
    return next((m for m in reversed(TOKENS) if shared_bytes(w, m, c) <= room - _RESERVED), 0)


def fits(w: Fp4Weight) -> bool:
    """Whether rows are short enough for shared memory: 80,000 inputs on Hopper, 30,000 before."""
    return tokens_at_once(w, choose(w), most_shared_memory()) > 0


def choose(w: Fp4Weight, processors: int | None = None, room: int | None = None) -> Fp4TileConfig:
    """Return a tile config, the same for any number of tokens: the order of sums follows from it."""
    return _choose(w.tiles, w.blocks, processors or multiprocessors(), room or most_shared_memory())


@cache
def _choose(tiles: int, blocks: int, processors: int, room: int) -> Fp4TileConfig:
    """Many rows: tiles share x; few: as many warps as have a block each. Measured on an H200 (h200-fp4.json)."""
    if room < 200 * 1024:
        return Fp4TileConfig(1, 8, 2, 1)
    if tiles <= processors and blocks >= 16:
        return Fp4TileConfig(1, 16, 2, 1)
    if blocks > 96:
        return Fp4TileConfig(1, 8, 3, 1)
    if tiles >= 8 * processors:
        return Fp4TileConfig(2, 8, 2, 2)
    return Fp4TileConfig(1, 8, 3 if tiles >= 4 * processors else 4, 2)
