"""Launches encode.cu and bmma_gemv.cu: x becomes bit-serial once, then any number of weights multiply it.

    xb = encode(x, w)                                   # optional prologue: a norm or an activation
    y = product(xb, w, dtype, bias, residual)
    y = matmul(x, w)                                    # both, with less work for the host
    y, xb = product_encode(xb, w, dtype, "RMS_NORM", gain, eps)     # epilogue encodes y for the next GEMV

Up to GEMV_ROWS rows of x. All launch on the current stream, allocate only through torch and can be captured in a graph.
"""

import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import inf, log2
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor

from crelle.kernels.cuda.launch import ADDRESS, Launch, can_bind, is_recording, load, multiprocessors
from crelle.kernels.cuda.planes.weight_layout import BLOCK, ROWS, CudaWeight, ScaleKind
from crelle.kernels.cuda.runtime import measured_configs
from crelle.kernels.cuda.step.activations import Prologue, is_gated, width

C_TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}
_ENCODE_WARPS = 8
_MEASURED_ON = 132  # multiprocessors of the device in autotune.json
_PLANES = (ScaleKind.BCQ, ScaleKind.BCQ_SYMMETRIC)
_SHARED = 96 * 1024  # bytes of shared memory that every chip since Ampere gives a thread block's pipelines

# Weights of more bytes store y as values: there a separate encode launch costs less than a cluster epilogue.
_MOST_ENCODED = 70e6

_MOST_HALVES = 64  # half blocks of x (128 inputs each) that every thread block may encode for itself
_NO_X = (None, None, None, None)  # x is bit-serial

EpilogueOut = Literal[
    "STORE",
    "NORM_ENCODE",
    "SILU_MUL_ENCODE",
    "RELU_ENCODE",
    "GELU_ENCODE",
    "GELU_TANH_ENCODE",
    "GELU_MUL_ENCODE",
    "GELU_TANH_MUL_ENCODE",
]
EPILOGUES: tuple[EpilogueOut, ...] = get_args(EpilogueOut)
_ENCODING: dict[Prologue, EpilogueOut] = {
    "RMS_NORM": "NORM_ENCODE",
    "LAYER_NORM": "NORM_ENCODE",
    "SILU_MUL": "SILU_MUL_ENCODE",
    "RELU": "RELU_ENCODE",
    "GELU": "GELU_ENCODE",
    "GELU_TANH": "GELU_TANH_ENCODE",
    "GELU_MUL": "GELU_MUL_ENCODE",
    "GELU_TANH_MUL": "GELU_TANH_MUL_ENCODE",
}


@dataclass(frozen=True, slots=True, eq=False)
class BitSerialX:
    """Bit-serial activations: rows of x as binary digits; serves every weight with the same inputs (`same_inputs`)."""

    tokens: int
    bits: Tensor  # int32 [2 blocks, 32, M, 2] or, of the same size, as bitserial.cuh says
    scale: Tensor  # f32 [2 blocks, M, 1 + parts]
    moments: Tensor | None = (
        None  # f32 [2 blocks, M, 2]: sums and sums of squares, where the division by the norm is deferred
    )
    eps: float = 0.0  # of that norm

    @classmethod
    def empty(cls, tokens: int, halves: int, parts: int, device: torch.device) -> Self:
        """Room for tokens of so many half blocks."""
        M = columns(tokens)
        bits = torch.empty(halves, 32, M, 2, dtype=torch.int32, device=device)
        return cls(tokens, bits, torch.empty(halves, M, 1 + parts, dtype=torch.float32, device=device))


@dataclass(frozen=True, slots=True)
class GemvTileConfig:
    """Tile config of bmma_gemv.cu; its template parameters."""

    tiles: int  # of 16 rows that a thread block takes
    warps: int  # that share them
    run: int  # blocks of 256 inputs fetched at a time
    stages: int  # of the load pipeline
    halves: int = 1  # of a block of x fetched at a time
    occupancy: int = 32  # warps that a multiprocessor can hold, which bounds their registers
    blocks: int = 2  # thread blocks on a multiprocessor: the grid fits at once, and room is left for the next kernel's
    policy: int = 0  # how clusters of them are placed


def columns(tokens: int) -> int:
    """Return the M of the kernels for so many tokens."""
    return 1 if tokens == 1 else 2 if tokens == 2 else 4


def parts(w: CudaWeight) -> int:
    """Sums of x that half a block needs."""
    return max(1, w.groups // 2)


def encode_variant(op: Prologue, w_parts: int, tokens: int, dtype: torch.dtype) -> tuple[str, str]:
    M = columns(tokens)
    return "planes/encode.cu", f"crelle::encode<crelle::{op}, {w_parts}, {M}, {_ENCODE_WARPS}, {C_TYPES[dtype]}>"


def encode(
    x: Tensor,
    w: CudaWeight,
    op: Prologue = "PLAIN",
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 0.0,
) -> BitSerialX:
    """Encode x [tokens, K] (gated ops: [tokens, 2K], gate then up) for w; `op` is applied as the prologue."""
    tokens, dtype = x.shape[0], x.dtype
    plan = w.plans.get((op, tokens, dtype))
    if plan is None:
        halves = 2 * w.blocks
        grid = (-(-halves // _ENCODE_WARPS), tokens, 1)
        plan = halves, parts(w), encode_variant(op, parts(w), tokens, dtype), grid, (w.K, w.blocks)
        w.plans[op, tokens, dtype] = plan
    halves, sums, variant, grid, sizes = plan
    made = BitSerialX.empty(tokens, halves, sums, x.device)
    vectors = (weight, bias, w.perm, made.bits, made.scale)
    load(*variant)(grid, 32 * _ENCODE_WARPS, x, *vectors, *sizes, float(eps), pdl=True)
    return made


def gemv_variant(
    w: CudaWeight,
    tokens: int,
    config: GemvTileConfig,
    dtype: torch.dtype,
    epilogue: EpilogueOut = "STORE",
    divided: bool = False,
    prologue: Prologue | None = None,
    x_dtype: torch.dtype | None = None,
) -> tuple[str, str]:
    """`prologue`: what the kernel applies to x of `x_dtype` before it encodes it; None: x is bit-serial."""
    s = config
    arguments = f"{w.P}, crelle::{w.kind.name}, {w.groups}, {columns(tokens)}"
    pieces = f"{s.tiles}, {s.warps}, {s.run}, {s.stages}, {s.halves}, {s.occupancy}"
    encodes = "crelle::ENCODED" if prologue is None else f"crelle::{prologue}"
    types = f"{C_TYPES[w.scales.dtype]}, {C_TYPES[x_dtype or torch.float16]}, {C_TYPES[dtype]}"
    options = f"crelle::{epilogue}, {str(divided).lower()}, {encodes}"
    return "planes/bmma_gemv.cu", f"crelle::bmma_gemv<{arguments}, {pieces}, {options}, {types}>"


def epilogue_encodes(w: CudaWeight, op: Prologue, dtype: torch.dtype) -> bool:
    """Whether the epilogue can apply `op` and encode y for the next GEMV, by a cluster of thread blocks."""
    if op not in _ENCODING or dtype == torch.float32 or not w.words.is_cuda or w.nbytes > _MOST_ENCODED:
        return False
    rows = width(op) * BLOCK
    return w.N % rows == 0 and torch.cuda.get_device_capability(w.words.device) >= (9, 0)


def product(
    x: BitSerialX,
    w: CudaWeight,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    config: GemvTileConfig | None = None,
    in_graph: bool = False,
    fold: Tensor | None = None,
) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) as [tokens, N]; `in_graph`: inside a captured step, with PDL.

    `fold` f32 [N]: W times the gain of the layer norm whose division is deferred to this product.
    """
    y = torch.empty(x.tokens, w.N, dtype=dtype, device=x.bits.device) if out is None else out
    _launch(x, w, _plan(w, x, dtype, config, "STORE", in_graph), (fold, bias, residual, y, None), None)
    return y


def product_encode(
    x: BitSerialX,
    w: CudaWeight,
    dtype: torch.dtype,
    op: Prologue,
    gain: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    fold: Tensor | None = None,
    config: GemvTileConfig | None = None,
) -> tuple[Tensor | None, BitSerialX]:
    """Return y as in `product`, and op(y) encoded; y is stored only where op is a norm (of that gain and eps).

    The norm's division is deferred to the next product, as is a layer norm's bias.
    """
    epilogue = _ENCODING[op]
    device, y, halves = x.bits.device, None, w.N // 128 // width(op)
    made = BitSerialX.empty(x.tokens, halves, 1, device)
    if epilogue == "NORM_ENCODE":
        moments = torch.empty(halves, columns(x.tokens), 2, dtype=torch.float32, device=device)
        made = replace(made, moments=moments, eps=eps)
        y = torch.empty(x.tokens, w.N, dtype=dtype, device=device)
    _launch(x, w, _plan(w, x, dtype, config, epilogue, True), (fold, bias, residual, y, gain), made)
    return y, made


class _Bound(NamedTuple):
    """Both launches of `matmul`, and how its scratch memory is shared out."""

    bytes: int
    scale_at: int
    encode: Launch
    product: Launch


def matmul(x: Tensor, w: CudaWeight) -> Tensor:
    """Return x @ W.T for x [tokens, K], contiguous, in x.dtype; nothing but addresses changes from call to call."""
    tokens, dtype, device = x.shape[0], x.dtype, x.device
    bound: _Bound | None = w.plans.get((tokens, dtype))
    if bound is None or is_recording():
        xb = encode(x, w)
        y = product(xb, w, dtype)
        bound = _bind(x, xb, w)
        if bound is not None:
            w.plans[tokens, dtype] = bound
        return y
    scratch = torch.empty(bound.bytes, dtype=torch.uint8, device=device)
    y = torch.empty(tokens, w.N, dtype=dtype, device=device)
    bits = scratch.data_ptr()
    scale = bits + bound.scale_at
    bound.encode(x.data_ptr(), bits, scale)
    bound.product(bits, scale, y.data_ptr())
    return y


def _bind(x: Tensor, xb: BitSerialX, w: CudaWeight) -> _Bound | None:
    """Return the launches of `encode` and `product` for inputs like x; None where kernels are recorded or emulated."""
    _, _, variant, grid, sizes = w.plans["PLAIN", xb.tokens, x.dtype]
    plan = _plan(w, xb, x.dtype, None, "STORE", False)
    encoding, multiplying = load(*variant), load(*plan.variant)
    if not (can_bind(encoding) and can_bind(multiplying)):
        return None
    vectors = (None, None, w.perm, ADDRESS, ADDRESS)
    encodes = encoding.bind(grid, 32 * _ENCODE_WARPS, ADDRESS, *vectors, *sizes, 0.0, pdl=True)
    outputs = (None, None, None, ADDRESS, None, None, None, None)  # fold, bias, residual, y, gain, encoded
    inputs = (w.words, w.scales, ADDRESS, ADDRESS, None)
    multiplies = multiplying.bind(plan.grid, plan.threads, *inputs, *outputs, *_NO_X, *plan.sizes, 0.0, **plan.options)
    scale_at = -(-xb.bits.numel() * 4 // 512) * 512
    return _Bound(scale_at + 4 * xb.scale.numel(), scale_at, encodes, multiplies)


class _GemvPlan(NamedTuple):
    """A launch of bmma_gemv.cu but for its tensors."""

    variant: tuple[str, str]
    grid: tuple[int, int, int]
    threads: int
    sizes: tuple[int, ...]
    options: dict[str, Any]


def _plan(
    w: CudaWeight,
    x: BitSerialX,
    dtype: torch.dtype,
    config: GemvTileConfig | None,
    epilogue: EpilogueOut,
    in_graph: bool,
) -> _GemvPlan:
    """Return the launch for inputs like x; made once for a weight, since `choose` compares many problems."""
    divided = x.moments is not None
    key = (x.tokens, dtype, config, epilogue, in_graph, divided)
    found: _GemvPlan | None = w.plans.get(key)
    if found is None:
        s = config or choose(w, x.tokens, in_graph=in_graph, epilogue=epilogue)
        shared = s.warps * _pipeline_bytes(w, s) + _cluster_bytes(w, s, x.tokens, epilogue)
        found = w.plans[key] = _GemvPlan(
            gemv_variant(w, x.tokens, s, dtype, epilogue, divided),
            (_grid(w, s, epilogue), 1, 1),
            32 * s.warps,
            (w.N, x.tokens, w.K, w.blocks, w.words.shape[2], w.blocks_per_scale),
            {"shared": shared, "pdl": True, "cluster": _cluster(s, epilogue), "policy": s.policy},
        )
    return found


def _launch(
    x: BitSerialX, w: CudaWeight, plan: _GemvPlan, vectors: tuple[Tensor | None, ...], made: BitSerialX | None
) -> None:
    given = (made.bits, made.scale, made.moments) if made else (None, None, None)
    inputs = (w.words, w.scales, x.bits, x.scale, x.moments)
    load(*plan.variant)(
        *(plan.grid, plan.threads, *inputs, *vectors, *given, *_NO_X, *plan.sizes, float(x.eps)), **plan.options
    )


def encodes_itself(w: CudaWeight) -> bool:
    """Whether `encode_product` should cost less than an encode launch and `product`: x is short."""
    return 2 * w.blocks <= _MOST_HALVES


def encode_product(
    x: Tensor,
    w: CudaWeight,
    dtype: torch.dtype,
    op: Prologue = "PLAIN",
    weight: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    config: GemvTileConfig | None = None,
    in_graph: bool = False,
) -> Tensor:
    """Return product(encode(x, w, op, weight, shift, eps), w, …) in one launch; `shift` is the norm's bias."""
    tokens = x.shape[0]
    s = config or choose(w, tokens, in_graph=in_graph)
    y = torch.empty(tokens, w.N, dtype=dtype, device=x.device) if out is None else out
    sizes = (w.N, tokens, w.K, w.blocks, w.words.shape[2], w.blocks_per_scale, float(eps))
    digits = 2 * w.blocks * columns(tokens) * 4 * (64 + 1 + parts(w))
    vectors = (None, bias, residual, y, None, None, None, None)
    load(*gemv_variant(w, tokens, s, dtype, prologue=op, x_dtype=x.dtype))(
        (_grid(w, s, "STORE"), 1, 1),
        32 * s.warps,
        *(w.words, w.scales, None, None, None, *vectors, x, weight, shift, w.perm, *sizes),
        shared=s.warps * _pipeline_bytes(w, s) + digits,
        pdl=True,
    )
    return y


def _cluster(s: GemvTileConfig, epilogue: EpilogueOut) -> int:
    """Thread blocks of a cluster, which encode 128 outputs together; as in bmma_gemv.cu."""
    return 1 if epilogue == "STORE" else 16 // s.tiles if is_gated(epilogue) else 8 // s.tiles


def _pipeline_bytes(w: CudaWeight, s: GemvTileConfig) -> int:
    """Bytes of shared memory of one warp's pipeline; as in pipeline.cuh."""
    lane_words = w.scales[0, 0, 0].numel() * w.scales.element_size() // 4
    return s.stages * (s.run * (w.P * 512 + lane_words * 32) + 8) + (s.stages & 1) * 8


def _cluster_bytes(w: CudaWeight, s: GemvTileConfig, tokens: int, epilogue: EpilogueOut) -> int:
    """Bytes of shared memory for the outputs that a cluster's first thread block receives; as in bmma_gemv.cu."""
    if epilogue == "STORE":
        return 0
    sets = -(-w.N // (ROWS * s.tiles))
    return -(-sets // _grid(w, s, epilogue)) * (columns(tokens) * 128 * 8 + 8)


def _grid(w: CudaWeight, s: GemvTileConfig, epilogue: EpilogueOut) -> int:
    """Return as many thread blocks as can run at once, or fewer where that shares the work out evenly."""
    size = _cluster(s, epilogue)
    sets = -(-w.N // (ROWS * s.tiles * size))
    fit = multiprocessors() * s.blocks // size
    rounds = -(-sets // fit)
    return -(-sets // rounds) * size


def choose(
    w: CudaWeight, tokens: int, processors: int | None = None, in_graph: bool = False, epilogue: EpilogueOut = "STORE"
) -> GemvTileConfig:
    """Return the tile config that was measured here, else that of the most similar problem in autotune.json."""
    if in_graph and processors is None and (found := measured_configs.lookup(w, columns(tokens), epilogue)):
        return GemvTileConfig(*found)
    return fitted(_nearest(w, tokens, processors, in_graph, epilogue), w, epilogue, processors)


def _nearest(
    w: CudaWeight, tokens: int, processors: int | None, in_graph: bool, epilogue: EpilogueOut
) -> GemvTileConfig:
    """Return the tile config of the most similar autotuned problem, all of which were measured on an H200."""
    like = epilogue  # gelu was not autotuned: take what has as much work
    if "GELU" in epilogue:
        like = "SILU_MUL_ENCODE" if is_gated(epilogue) else "RELU_ENCODE"
    rows = w.N * _MEASURED_ON / (processors or multiprocessors())  # as many rows a multiprocessor as there

    def unlike(m: "_Autotuned") -> float:
        size = abs(log2(m.N / rows)) + abs(log2(m.K / w.K))
        other_kind, other_place = m.codes != (w.kind not in _PLANES), (m.in_graph, m.epilogue) != (in_graph, like)
        other = 4 * (columns(tokens) != m.M) + 0.5 * other_kind + 0.75 * other_place
        other += 2 * (is_gated(m.epilogue) != is_gated(epilogue))  # two rows an output: other registers
        found = abs(m.P - w.P) + other + 0.75 * size
        if m.alone:
            return inf if found else -1
        return found + 0.25 * (m.groups != w.groups)

    nearest = min(_autotuned(), key=unlike)
    measured = w.groups <= 2 or (w.groups == nearest.groups and unlike(nearest) < 1)
    if w.P > 4 or not measured or w.scales.element_size() > 2:  # unlike all that was measured: registers, not warps
        return GemvTileConfig(1, 8, 1, nearest.config.stages, 1, 16 if tokens == 1 else 8)
    return nearest.config


def fitted(
    config: GemvTileConfig, w: CudaWeight, epilogue: EpilogueOut, processors: int | None = None
) -> GemvTileConfig:
    """Return a tile config as this weight can take it: whole rows in pairs, pipelines that fit a multiprocessor."""
    if w.words.shape[2] != w.P or w.blocks_per_scale > 1:
        config = replace(config, run=1)
    if is_gated(epilogue) and config.tiles % 2:
        config = replace(config, tiles=2, stages=max(2, config.stages))
    room = _SHARED if processors else _pipeline_room(torch.cuda.current_device())
    while config.warps * _pipeline_bytes(w, config) > room:
        if config.stages > config.tiles:  # which are taken at a time
            config = replace(config, stages=max(config.tiles, config.stages // 2))
        elif config.run > 1:
            config = replace(config, run=1)
        else:
            config = replace(config, warps=config.warps // 2)
    return config


@cache
def _pipeline_room(device: int) -> int:
    """Bytes of shared memory that this device gives the pipelines of a thread block, beside what else lies there."""
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return max(_SHARED, int(room) - 32 * 1024)


def decode_configs() -> list[GemvTileConfig]:
    """Return the tile configs that won inside a decode step, the most frequent first: what is worth trying there."""
    return [config for config, _ in Counter(m.config for m in _autotuned() if m.in_graph and m.M == 1).most_common()]


def autotuned(w: CudaWeight, M: int, epilogue: str, device: str) -> bool:
    """Whether autotune.json has this very problem inside a decode step, measured on such a device."""
    kind, key = w.kind not in _PLANES, (w.P, w.N, w.K, M, w.groups, epilogue)
    same = any(
        m.in_graph and m.codes == kind and (m.P, m.N, m.K, m.M, m.groups, m.epilogue) == key for m in _autotuned()
    )
    return same and device == _table()["device"]


def autotuned_configs() -> set[tuple[int, ScaleKind, int, int, GemvTileConfig, EpilogueOut]]:
    """Return (planes, kind, groups in 256 inputs, tokens, tile config, epilogue) of all autotuned problems."""
    kinds = {True: ScaleKind.UNIFORM, False: ScaleKind.BCQ}
    return {(m.P, kinds[m.codes], m.groups, m.M, m.config, m.epilogue) for m in _autotuned()}


@dataclass(frozen=True, slots=True)
class _Autotuned:
    codes: bool  # one scale for all planes
    P: int
    N: int
    K: int
    M: int
    in_graph: bool  # inside the decode step of a model
    epilogue: EpilogueOut
    config: GemvTileConfig
    alone: bool  # for this problem only: others like it were faster with their own
    groups: int  # of scales in a block


@cache
def _autotuned() -> list[_Autotuned]:
    return [
        _Autotuned(**{"epilogue": "STORE", "alone": False, "groups": 2, **m, "config": GemvTileConfig(*m["config"])})
        for m in _table()["best"]
    ]


@cache
def _table() -> Any:
    return json.loads((files("crelle.kernels.cuda.runtime") / "autotune.json").read_text())
