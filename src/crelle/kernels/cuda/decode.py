"""Launches decode.cu and bits.cu: x becomes digits once, then any number of matrices multiply by them.

    digits = encode(x, w)                 # or with a norm or an activation applied on the way
    y = product(digits, w, bias, residual)
    y, digits = product_digits(digits, w, dtype, "RMS_NORM", gain, eps)        # for the product behind, in one launch

Up to GEMV_ROWS rows of x. All launch on the current stream, allocate only through torch and can be captured in a graph.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import inf, log2
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.layout import BLOCK, ROWS, CudaWeight, Kind

C_TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}
_ENCODE_WARPS = 8
_MEASURED_ON = 132  # multiprocessors of the device in tuned.json
_PLANES = (Kind.BCQ, Kind.BCQ_SYMMETRIC)
_SHARED = 96 * 1024  # bytes of shared memory that every chip since Ampere gives the queues of a thread block

# Products with matrices of more bytes leave as numbers: there the launch that makes digits costs less than clusters.
_MOST_GIVEN = 70e6

Op = Literal["PLAIN", "RMS_NORM", "LAYER_NORM", "SILU_MUL", "RELU"]
Give = Literal["NUMBERS", "NORMED", "GATED", "POSITIVE"]
GIVES: tuple[Give, ...] = get_args(Give)
_GIVEN: dict[Op, Give] = {"RMS_NORM": "NORMED", "LAYER_NORM": "NORMED", "SILU_MUL": "GATED", "RELU": "POSITIVE"}


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """Some tokens as bits; serves every weight with as many blocks, parts and the same order of inputs."""

    tokens: int
    bits: Tensor  # int32 [2 blocks, 32, M, 2] or, of the same size, as digits.cuh says
    scale: Tensor  # f32 [2 blocks, M, 1 + parts]
    moments: Tensor | None = None  # f32 [2 blocks, M, 2]: sums and squares, where a norm is still to be divided by
    eps: float = 0.0  # of that norm

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
    policy: int = 0  # how clusters of them are placed


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


def decode_variant(
    w: CudaWeight, tokens: int, shape: Shape, dtype: torch.dtype, give: Give = "NUMBERS", divided: bool = False
) -> tuple[str, str]:
    s = shape
    numbers = f"{w.P}, crelle::{w.kind.name}, {w.groups}, {columns(tokens)}"
    pieces = f"{s.tiles}, {s.warps}, {s.run}, {s.stages}, {s.halves}, {s.resident}"
    types = f"{C_TYPES[w.scales.dtype]}, {C_TYPES[dtype]}"
    return "decode.cu", f"crelle::decode<{numbers}, {pieces}, crelle::{give}, {str(divided).lower()}, {types}>"


def gives(w: CudaWeight, op: Op, dtype: torch.dtype) -> bool:
    """Whether products with w should leave as digits of op(y); thread blocks meet then, and make whole blocks of it."""
    if op not in _GIVEN or dtype == torch.float32 or not w.words.is_cuda or w.nbytes > _MOST_GIVEN:
        return False
    rows = 2 * BLOCK if op == "SILU_MUL" else BLOCK
    return w.N % rows == 0 and torch.cuda.get_device_capability(w.words.device) >= (9, 0)


def product(
    x: Digits,
    w: CudaWeight,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    shape: Shape | None = None,
    chained: bool = False,
    fold: Tensor | None = None,
) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) as [tokens, N]; `chained`: kernels that overlap come before and after.

    `fold` f32 [N]: W times the gain of the layer norm that x still has to be divided by.
    """
    s = shape or choose(w, x.tokens, chained=chained)
    y = torch.empty(x.tokens, w.N, dtype=dtype, device=x.bits.device) if out is None else out
    _launch(x, w, dtype, s, "NUMBERS", (fold, bias, residual, y, None), None)
    return y


def product_digits(
    x: Digits,
    w: CudaWeight,
    dtype: torch.dtype,
    op: Op,
    gain: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    fold: Tensor | None = None,
    shape: Shape | None = None,
) -> tuple[Tensor | None, Digits]:
    """Return y as in `product`, and op(y) as digits; y is made only where op is a norm (of that gain and eps).

    What the norm divides by is left to the next product, as is a layer norm's bias.
    """
    give = _GIVEN[op]
    s = shape or choose(w, x.tokens, chained=True, give=give)
    device, y, halves = x.bits.device, None, w.N // 128 // (2 if give == "GATED" else 1)
    made = Digits.empty(x.tokens, halves, 1, device)
    if give == "NORMED":
        moments = torch.empty(halves, columns(x.tokens), 2, dtype=torch.float32, device=device)
        made = replace(made, moments=moments, eps=eps)
        y = torch.empty(x.tokens, w.N, dtype=dtype, device=device)
    _launch(x, w, dtype, s, give, (fold, bias, residual, y, gain), made)
    return y, made


def _launch(
    x: Digits,
    w: CudaWeight,
    dtype: torch.dtype,
    s: Shape,
    give: Give,
    numbers: tuple[Tensor | None, ...],
    made: Digits | None,
) -> None:
    given = (made.bits, made.scale, made.moments) if made else (None, None, None)
    sizes = (w.N, x.tokens, w.K, w.blocks, w.words.shape[2], w.span, float(x.eps))
    load(*decode_variant(w, x.tokens, s, dtype, give, x.moments is not None))(
        (_grid(w, s, give), 1, 1),
        32 * s.warps,
        *(w.words, w.scales, x.bits, x.scale, x.moments, *numbers, *given, *sizes),
        shared=s.warps * _ring(w, s) + _pages(w, s, x.tokens, give),
        overlap=True,
        cluster=_cluster(s, give),
        policy=s.policy,
    )


def _cluster(s: Shape, give: Give) -> int:
    """Thread blocks that make 128 numbers of what a product gives; as in decode.cu."""
    return 1 if give == "NUMBERS" else 16 // s.tiles if give == "GATED" else 8 // s.tiles


def _ring(w: CudaWeight, s: Shape) -> int:
    """Bytes of shared memory of one warp's queue; as in ring.cuh."""
    lane_words = w.scales[0, 0, 0].numel() * w.scales.element_size() // 4
    return s.stages * (s.run * (w.P * 512 + lane_words * 32) + 8) + (s.stages & 1) * 8


def _pages(w: CudaWeight, s: Shape, tokens: int, give: Give) -> int:
    """Bytes of shared memory for what a cluster's first thread block gets; as in decode.cu."""
    if give == "NUMBERS":
        return 0
    sets = -(-w.N // (ROWS * s.tiles))
    return -(-sets // _grid(w, s, give)) * (columns(tokens) * 128 * 8 + 8)


def _grid(w: CudaWeight, s: Shape, give: Give) -> int:
    """Return as many thread blocks as can run at once, or fewer where that shares the work out evenly."""
    size = _cluster(s, give)
    sets = -(-w.N // (ROWS * s.tiles * size))
    fit = multiprocessors() * s.blocks // size
    rounds = -(-sets // fit)
    return -(-sets // rounds) * size


def choose(
    w: CudaWeight, tokens: int, processors: int | None = None, chained: bool = False, give: Give = "NUMBERS"
) -> Shape:
    """Return the cut that was fastest for the measured problem most like this one (tuned.json, made on an H200)."""
    rows = w.N * _MEASURED_ON / (processors or multiprocessors())  # as many rows a multiprocessor as there

    def unlike(m: "_Measured") -> float:
        size = abs(log2(m.N / rows)) + abs(log2(m.K / w.K))
        other_kind, other_place = m.codes != (w.kind not in _PLANES), (m.chained, m.give) != (chained, give)
        other = 4 * (columns(tokens) != m.M) + 0.5 * other_kind + 0.75 * other_place
        found = abs(m.P - w.P) + other + 0.75 * size
        return found if not m.alone else inf if found else -1

    cut = min(_measured(), key=unlike).cut
    if w.P > 4 or w.groups > 2 or w.scales.element_size() > 2:  # unlike all that was measured: registers, not warps
        cut = Shape(1, 8, 1, cut.stages, 1, 16 if tokens == 1 else 8)
    if w.words.shape[2] != w.P or w.span > 1:
        cut = replace(cut, run=1)
    if give == "GATED" and cut.tiles % 2:
        cut = replace(cut, tiles=2, stages=max(2, cut.stages))
    room = _SHARED if processors else _queue_room(torch.cuda.current_device())
    while cut.warps * _ring(w, cut) > room:
        if cut.stages > cut.tiles:  # which are taken at a time
            cut = replace(cut, stages=max(cut.tiles, cut.stages // 2))
        elif cut.run > 1:
            cut = replace(cut, run=1)
        else:
            cut = replace(cut, warps=cut.warps // 2)
    return cut


@cache
def _queue_room(device: int) -> int:
    """Bytes of shared memory that this device gives the queues of a thread block, beside what else lies there."""
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return max(_SHARED, int(room) - 32 * 1024)


def measured_cuts() -> set[tuple[int, Kind, int, Shape, Give]]:
    """Return (planes, kind, tokens, cut, what it gives) of all that was measured."""
    return {(m.P, Kind.UNIFORM if m.codes else Kind.BCQ, m.M, m.cut, m.give) for m in _measured()}


@dataclass(frozen=True, slots=True)
class _Measured:
    codes: bool  # one scale for all planes
    P: int
    N: int
    K: int
    M: int
    chained: bool  # in the steps of a model
    give: Give
    cut: Shape
    alone: bool  # for this problem only: others like it were faster with their own


@cache
def _measured() -> list[_Measured]:
    text = (files("crelle.kernels.cuda") / "tuned.json").read_text()
    return [
        _Measured(**{"give": "NUMBERS", "alone": False, **m, "cut": Shape(*m["cut"])}) for m in json.loads(text)["best"]
    ]
