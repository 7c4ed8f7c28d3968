"""Launches decode.cu and bits.cu: x becomes digits once, then any number of matrices multiply by them.

    digits = encode(x, w)                 # or with a norm or an activation applied on the way
    y = product(digits, w, bias, residual)

Up to TOKENS rows of x. Both launch on the current stream, allocate only through torch, and can be captured in a graph.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.layout import ROWS, CudaWeight

TOKENS = 4
C_TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}
_ENCODE_WARPS = 8
_SHARED = 96 * 1024  # bytes of shared memory that every chip since Ampere gives a thread block

Op = Literal["PLAIN", "RMS_NORM", "LAYER_NORM", "SILU_MUL", "RELU"]


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """Some tokens as bits; serves every weight with as many blocks, parts and the same order of inputs."""

    tokens: int
    bits: Tensor  # int32 [2 blocks, 32, M, 2]
    scale: Tensor  # f32 [2 blocks, M, 1 + parts]


@dataclass(frozen=True, slots=True)
class Shape:
    """How decode.cu cuts a product into pieces; its template parameters."""

    tiles: int  # of 16 rows that a thread block takes
    warps: int  # that share them
    run: int  # blocks of 256 inputs fetched at a time
    stages: int  # fetches under way
    resident: int  # warps that a multiprocessor should hold


def columns(tokens: int) -> int:
    """Return the M of the kernels for so many tokens."""
    return 1 if tokens == 1 else 2 if tokens == 2 else 4


def parts(w: CudaWeight) -> int:
    """Sums of x that half a block needs."""
    return max(1, w.groups // 2)


def encode_variant(op: Op, w_parts: int, tokens: int, dtype: torch.dtype) -> tuple[str, str]:
    M = columns(tokens)
    return "bits.cu", f"crelle::encode<crelle::{op}, {w_parts}, {M}, {_ENCODE_WARPS}, {C_TYPES[dtype]}>"


def encode(
    x: Tensor,
    w: CudaWeight,
    op: Op = "PLAIN",
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 0.0,
) -> Digits:
    """Turn x [tokens, K] (SILU_MUL: [tokens, 2K], gate then up) into digits for w, applying `op` to it first."""
    tokens, M, halves = x.shape[0], columns(x.shape[0]), 2 * w.blocks
    bits = torch.empty(halves, 32, M, 2, dtype=torch.int32, device=x.device)
    scale = torch.empty(halves, M, 1 + parts(w), dtype=torch.float32, device=x.device)
    kernel = load(*encode_variant(op, parts(w), tokens, x.dtype))
    grid = (-(-halves // _ENCODE_WARPS), tokens, 1)
    kernel(grid, 32 * _ENCODE_WARPS, x, weight, bias, w.order, bits, scale, w.K, w.blocks, float(eps), overlap=True)
    return Digits(tokens, bits, scale)


def decode_variant(w: CudaWeight, tokens: int, shape: Shape, dtype: torch.dtype) -> tuple[str, str]:
    s = shape
    numbers = f"{w.P}, crelle::{w.kind.name}, {w.groups}, {columns(tokens)}"
    pieces = f"{s.tiles}, {s.warps}, {s.run}, {s.stages}, {s.resident}"
    return "decode.cu", f"crelle::decode<{numbers}, {pieces}, {C_TYPES[w.scales.dtype]}, {C_TYPES[dtype]}>"


def product(
    x: Digits,
    w: CudaWeight,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) as [tokens, N]."""
    s = shape or choose(w, x.tokens)
    y = torch.empty(x.tokens, w.N, dtype=dtype, device=x.bits.device) if out is None else out
    kernel = load(*decode_variant(w, x.tokens, s, dtype))
    grid = (-(-w.N // (ROWS * s.tiles)), 1, 1)
    kernel(
        grid,
        32 * s.warps,
        w.words,
        w.scales,
        x.bits,
        x.scale,
        bias,
        residual,
        y,
        w.N,
        x.tokens,
        w.blocks,
        w.words.shape[2],
        w.span,
        shared=s.warps * _ring(w, s),
        overlap=True,
    )
    return y


def _ring(w: CudaWeight, s: Shape) -> int:
    """Bytes of shared memory of one warp's queue; as in ring.cuh."""
    lane_words = w.scales[0, 0, 0].numel() * w.scales.element_size() // 4
    return s.stages * (s.run * (w.P * 512 + lane_words * 32) + 8) + (s.stages & 1) * 8


def choose(w: CudaWeight, tokens: int, processors: int | None = None) -> Shape:
    """Return the cut that was fastest on an H200 for problems like this one (docs/kernels/bcq.md has the table)."""
    tiles = -(-w.N // ROWS) / (processors or multiprocessors())  # tiles of a multiprocessor
    if tokens > 2:
        cut = Shape(1, 8, 1, 2 if w.P > 3 else 4, 16) if tiles < 12 else Shape(2, 4, 1, 4, 16)
    elif tiles < 3:
        cut = Shape(1, 16, 1, 2, 32) if w.P <= 2 and w.blocks >= 16 else Shape(1, 8, 1, 4, 16)
    elif w.P <= 3:
        cut = Shape(2, 8, 1, 4 if w.P == 2 else 2, 16)
    else:
        cut = Shape(1, 4, 1, 2, 32 if w.P <= 4 else 16) if tiles < 6 else Shape(2, 4, 1, 4, 16)
    while cut.warps * _ring(w, cut) > _SHARED and cut.stages > 1:
        cut = replace(cut, stages=cut.stages // 2)
    return cut
