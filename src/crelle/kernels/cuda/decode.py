"""Launches decode.cu and bits.cu: x becomes digits once, then any number of matrices multiply by them.

    digits = encode(x, w)                 # or with a norm or an activation applied on the way
    y = product(digits, w, bias, residual)

Up to TOKENS rows of x. Both launch on the current stream, allocate only through torch, and can be captured in a graph.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import log2
from typing import Literal, Self

import torch
from torch import Tensor

from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.layout import ROWS, CudaWeight, Kind

TOKENS = 4
C_TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}
_ENCODE_WARPS = 8
_MEASURED_ON = 132  # multiprocessors of the device in tuned.json
_PLANES = (Kind.BCQ, Kind.BCQ_SYMMETRIC)
_SHARED = 96 * 1024  # bytes of shared memory that every chip since Ampere gives a thread block

Op = Literal["PLAIN", "RMS_NORM", "LAYER_NORM", "SILU_MUL", "RELU"]


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """Some tokens as bits; serves every weight with as many blocks, parts and the same order of inputs."""

    tokens: int
    bits: Tensor  # int32 [2 blocks, 32, M, 2] or, of the same size, as digits.cuh says
    scale: Tensor  # f32 [2 blocks, M, 1 + parts]

    @classmethod
    def empty(cls, tokens: int, halves: int, parts: int, device: torch.device) -> Self:
        """Room for tokens of so many half blocks."""
        M = columns(tokens)
        bits = torch.empty(halves, 32, M, 2, dtype=torch.int32, device=device)
        return cls(tokens, bits, torch.empty(halves, M, 1 + parts, dtype=torch.float32, device=device))


@dataclass(frozen=True, slots=True)
class Shape:
    """How decode.cu cuts a product into pieces; its template parameters."""

    tiles: int  # of 16 rows that a thread block takes
    warps: int  # that share them
    run: int  # blocks of 256 inputs fetched at a time
    stages: int  # fetches under way
    halves: int = 1  # of a block of x fetched at a time
    resident: int = 32  # warps that a multiprocessor can hold, which bounds their registers
    blocks: int = 2  # thread blocks on a multiprocessor: the grid fits at once, and room is left for the next kernel's


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
    tokens, halves = x.shape[0], 2 * w.blocks
    made = Digits.empty(tokens, halves, parts(w), x.device)
    kernel = load(*encode_variant(op, parts(w), tokens, x.dtype))
    grid, norm = (-(-halves // _ENCODE_WARPS), tokens, 1), (weight, bias)
    kernel(grid, 32 * _ENCODE_WARPS, x, *norm, w.order, made.bits, made.scale, w.K, w.blocks, float(eps), overlap=True)
    return made


def decode_variant(w: CudaWeight, tokens: int, shape: Shape, dtype: torch.dtype) -> tuple[str, str]:
    s = shape
    numbers = f"{w.P}, crelle::{w.kind.name}, {w.groups}, {columns(tokens)}"
    pieces = f"{s.tiles}, {s.warps}, {s.run}, {s.stages}, {s.halves}, {s.resident}"
    return "decode.cu", f"crelle::decode<{numbers}, {pieces}, {C_TYPES[w.scales.dtype]}, {C_TYPES[dtype]}>"


def product(
    x: Digits,
    w: CudaWeight,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    shape: Shape | None = None,
    chained: bool = False,
) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) as [tokens, N]; `chained`: kernels that overlap come before and after."""
    s = shape or choose(w, x.tokens, chained=chained)
    y = torch.empty(x.tokens, w.N, dtype=dtype, device=x.bits.device) if out is None else out
    kernel = load(*decode_variant(w, x.tokens, s, dtype))
    kernel(
        (_grid(w, s), 1, 1),
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


def _grid(w: CudaWeight, s: Shape) -> int:
    """Return as many thread blocks as can run at once, or fewer where that shares the work out evenly."""
    sets = -(-w.N // (ROWS * s.tiles))
    rounds = -(-sets // (multiprocessors() * s.blocks))
    return -(-sets // rounds)


def choose(w: CudaWeight, tokens: int, processors: int | None = None, chained: bool = False) -> Shape:
    """Return the cut that was fastest for the measured problem most like this one (tuned.json, made on an H200)."""
    rows = w.N * _MEASURED_ON / (processors or multiprocessors())  # as many rows a multiprocessor as there

    def unlike(m: "_Measured") -> tuple[float, float]:
        size = abs(log2(m.N / rows)) + abs(log2(m.K / w.K))
        other_kind, other_place = m.codes != (w.kind not in _PLANES), m.chained != chained
        return abs(m.P - w.P) + 4 * (columns(tokens) != m.M) + 0.5 * other_kind + 0.75 * other_place, size

    cut = min(_measured(), key=unlike).cut
    if w.P > 4 or w.groups > 2 or w.scales.element_size() > 2 or tokens == 2:  # unlike all that was measured: more
        cut = Shape(1, 8, 1, cut.stages, 1, 16 if tokens == 1 else 8)  # registers rather than more warps
    if w.words.shape[2] != w.P or w.span > 1:
        cut = replace(cut, run=1)
    while cut.warps * _ring(w, cut) > _SHARED and (cut.stages > 1 or cut.run > 1):
        cut = replace(cut, stages=cut.stages // 2) if cut.stages > 1 else replace(cut, run=1)
    return cut


def measured_cuts() -> set[tuple[int, Kind, int, Shape]]:
    """Return (planes, kind, tokens, cut) of all that was measured."""
    return {(m.P, Kind.UNIFORM if m.codes else Kind.BCQ, m.M, m.cut) for m in _measured()}


@dataclass(frozen=True, slots=True)
class _Measured:
    codes: bool  # one scale for all planes
    P: int
    N: int
    K: int
    M: int
    chained: bool  # in the steps of a model
    cut: Shape


@cache
def _measured() -> list[_Measured]:
    text = (files("crelle.kernels.cuda") / "tuned.json").read_text()
    return [
        _Measured(m["codes"], m["P"], m["N"], m["K"], m["M"], m["chained"], Shape(*m["cut"]))
        for m in json.loads(text)["best"]
    ]
