"""Launches expert_gemv.cu, expert_gemm.cu and routing.cu: products with the experts that tokens take.

    few tokens      inner = up(x, logits, e, ...)                   each token by itself; routes as it goes
                    y = down(inner, logits, e, residual)
    many tokens     chosen, weights = route(logits, e)
                    slots = sort(chosen, e, NT)                     slots by expert, and the passes over them
                    made = grouped_down(grouped_up(h, slots, e), slots, e)
                    y = combine(made, weights, residual)

All launch on the current stream, allocate only through torch, need nothing of the host and can be captured in a graph.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.planes.bmma_gemv import _ENCODE_WARPS, C_TYPES, encode_variant, parts
from crelle.kernels.cuda.planes.weight_layout import BLOCK, ROWS, CudaWeight
from crelle.kernels.cuda.step.activations import Prologue

Activation = Literal["SILU_GATE", "GELU_GATE", "GELU_TANH_GATE", "SWIGLUOAI_GATE"]
ACTIVATIONS: dict[str, Activation] = {
    "silu": "SILU_GATE",
    "gelu": "GELU_GATE",
    "gelu_tanh": "GELU_TANH_GATE",
    "swigluoai": "SWIGLUOAI_GATE",
}
MAX_EXPERTS = 512  # 16 logits a lane
MAX_TOP = 32  # a lane of a warp has one
PASSES = (8, 16, 32)  # slots of an expert at a time
_WARPS = 8
_ROOM = 226 * 1024  # bytes of shared memory of a multiprocessor
_OLD_ROOM = 99 * 1024  # the same before Hopper, of the smallest chip
_MOST_ENCODED = 64  # half blocks of `inner` that every thread block may encode for itself
_ROUTER_ROWS = 4  # tokens of a warp of router_logits
_PASS_WORDS = 10


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The experts of a layer, all of one layout, and where each has its bytes."""

    table: Tensor  # int64 [count, 9]: addresses of planes, scales and bias (0: none) of gate, up, down
    gate: CudaWeight  # that of one expert, for its form; `up` has the same
    down: CudaWeight
    count: int
    top: int
    normalize: bool
    activation: Activation

    @property
    def pitch(self) -> int:
        """Values of a row of `inner`: what `down` has blocks for."""
        return self.down.blocks * BLOCK


def per_lane(count: int) -> int:
    """Return how many logits a lane holds: a power of two."""
    return 1 << max(0, (-(-count // 32) - 1).bit_length())


# --- few tokens -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpertGemvConfig:
    """Tile config of expert_gemv.cu; its template parameters."""

    warps: int  # that share K
    stages: int  # of a warp's load pipeline
    occupancy: int  # thread blocks that a multiprocessor holds


def up_variant(e: ExpertWeights, s: ExpertGemvConfig, op: Prologue, dtype: torch.dtype) -> tuple[str, str]:
    arguments = f"{_form(e.gate)}, {per_lane(e.count)}, crelle::{op}, crelle::{e.activation}"
    types = f"{C_TYPES[e.gate.scales.dtype]}, {C_TYPES[dtype]}"
    return "experts/expert_gemv.cu", f"crelle::expert_up<{arguments}, {s.warps}, {s.stages}, {s.occupancy}, {types}>"


def down_variant(e: ExpertWeights, s: ExpertGemvConfig, encodes: bool, dtype: torch.dtype) -> tuple[str, str]:
    arguments = f"{_form(e.down)}, {per_lane(e.count)}, {s.warps}, {s.stages}, {s.occupancy}, {str(encodes).lower()}"
    types = f"{C_TYPES[e.down.scales.dtype]}, {C_TYPES[dtype]}"
    return "experts/expert_gemv.cu", f"crelle::expert_down<{arguments}, {types}>"


def up(
    x: Tensor,
    logits: Tensor,
    e: ExpertWeights,
    op: Prologue = "PLAIN",
    norm: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Return inner [M, top, pitch] = act(gate x) * (up x) of the experts that logits [M, count …] choose.

    `op`: a norm of x [M, K] before it is multiplied, or PLAIN.
    """
    w, M = e.gate, x.shape[0]
    inner = torch.empty(M, e.top, e.pitch, dtype=x.dtype, device=x.device)
    s = gemv_config(w, w.blocks, 2)
    sets = e.top * -(-w.N // ROWS)
    load(*up_variant(e, s, op, x.dtype))(
        (_grid(sets, s, M), M, 1),
        32 * s.warps,
        *(e.table, logits, x, norm, shift, inner, w.N, w.K, w.blocks, w.words.shape[2], w.blocks_per_scale),
        *(e.count, logits.shape[1], e.top, int(e.normalize), e.pitch, float(eps)),
        shared=_gemv_shared(w, s, w.blocks),
        pdl=True,
    )
    return inner


def down(
    inner: Tensor, logits: Tensor, e: ExpertWeights, residual: Tensor | None = None, shared: Tensor | None = None
) -> Tensor:
    """Return residual + the weighted sum of what the chosen experts make of inner (+ the shared expert's, gated)."""
    w, M = e.down, inner.shape[0]
    units = e.top * w.blocks
    encodes = 2 * units <= _MOST_ENCODED
    s = gemv_config(w, units, 1, units if encodes else 0)
    bits = scale = None
    if not encodes:  # as one long row: a block of 256 inputs has no neighbours
        halves, sums = 2 * units * M, parts(w)
        bits = torch.empty(halves * 64, dtype=torch.int32, device=inner.device)
        scale = torch.empty(halves, 1 + sums, dtype=torch.float32, device=inner.device)
        load(*encode_variant("PLAIN", sums, 1, inner.dtype))(
            (-(-halves // _ENCODE_WARPS), 1, 1),
            32 * _ENCODE_WARPS,
            *(inner, None, None, None, bits, scale, halves * 128, halves // 2, 0.0),
            pdl=True,
        )
    y = torch.empty(M, w.N, dtype=inner.dtype, device=inner.device)
    load(*down_variant(e, s, encodes, inner.dtype))(
        (_grid(-(-w.N // ROWS), s, M), M, 1),
        32 * s.warps,
        *(e.table, logits, inner if encodes else None, bits, scale, residual, shared, y),
        *(w.N, w.blocks, w.words.shape[2], w.blocks_per_scale, e.count, logits.shape[1], e.top, int(e.normalize)),
        shared=_gemv_shared(w, s, units if encodes else 0),
        pdl=True,
    )
    return y


def gemv_config(
    w: CudaWeight, units: int, tiles: int, encoded: int | None = None, hopper: bool | None = None
) -> ExpertGemvConfig:
    """Return the tile config for products of this number of blocks of 256 inputs and tiles of rows at a time.

    `encoded`: blocks of x that a thread block has bit-serial.
    """
    encoded = units if encoded is None else encoded
    room = _room(hopper)
    most = 3 if w.P <= 4 and w.groups <= 2 else 2  # registers
    deep = min(4, max(2, tiles * -(-units // _WARPS)))
    for occupancy in range(most, 0, -1):
        for stages in range(deep, tiles - 1, -1):
            s = ExpertGemvConfig(_WARPS, stages, occupancy)
            static = 2 * _WARPS * tiles * 64 + 1024 + 256
            if (_gemv_shared(w, s, encoded) + static) * occupancy <= room:
                return s
            if occupancy > 2 and stages <= 3:
                break  # two thread blocks with more under way are better than three with less
    return ExpertGemvConfig(_WARPS // 2, tiles, 1)


def _grid(sets: int, s: ExpertGemvConfig, rows: int) -> int:
    """Return thread blocks for a token: as many as run at once, or fewer where that shares the work out evenly."""
    fit = max(1, multiprocessors() * s.occupancy // rows)
    return -(-sets // -(-sets // fit))


def _gemv_shared(w: CudaWeight, s: ExpertGemvConfig, encoded: int) -> int:
    queue = s.stages * (_block_bytes(w) + 8) + (s.stages & 1) * 8
    return s.warps * queue + 2 * encoded * (64 + 1 + parts(w)) * 4


# --- many tokens ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """A batch's slots (a token at one of its experts) sorted by expert."""

    count: int
    at_a_time: int  # slots of a pass
    order: Tensor  # int32 [count]: the slot at each place
    passes: Tensor  # int64 [most, 10]
    pass_count: Tensor  # int32 [1]


@dataclass(frozen=True, slots=True)
class ExpertGemmConfig:
    """Tile config of expert_gemm.cu; its template parameters."""

    tokens: int  # of a pass
    warps_n: int  # warps along N
    warps_k: int  # warps that split K
    stages: int  # times 256 inputs and two tiles
    occupancy: int


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return logits f32 [M, count] = x @ weight.T (+ bias), each row with one order of sums."""
    (M, K), count = x.shape, weight.shape[0]
    logits = torch.empty(M, count, dtype=torch.float32, device=x.device)
    load(*logits_variant(x.dtype))(
        (-(-count // 8), -(-M // _ROUTER_ROWS), 1), 256, x, weight, bias, logits, count, K, M, pdl=True
    )
    return logits


def logits_variant(dtype: torch.dtype) -> tuple[str, str]:
    return "experts/routing.cu", f"crelle::router_logits<{_ROUTER_ROWS}, {C_TYPES[dtype]}>"


def route_variant(count: int) -> tuple[str, str]:
    return "experts/routing.cu", f"crelle::route<{per_lane(count)}>"


def sort_variant(at_a_time: int) -> tuple[str, str]:
    return "experts/routing.cu", f"crelle::sort_slots<{at_a_time}>"


def combine_variant(dtype: torch.dtype) -> tuple[str, str]:
    return "experts/routing.cu", f"crelle::combine<{C_TYPES[dtype]}>"


def route(logits: Tensor, e: ExpertWeights) -> tuple[Tensor, Tensor]:
    """Return the experts int32 [M, top] that logits f32 [M, count …] choose, and their weights f32 [M, top]."""
    M = logits.shape[0]
    chosen = torch.empty(M, e.top, dtype=torch.int32, device=logits.device)
    weights = torch.empty(M, e.top, dtype=torch.float32, device=logits.device)
    sizes = (M, e.count, logits.shape[1], e.top, int(e.normalize))
    load(*route_variant(e.count))((-(-M // 8), 1, 1), 256, logits, chosen, weights, *sizes, pdl=True)
    return chosen, weights


def at_a_time(rows: int, e: ExpertWeights) -> int:
    """Return how many slots a pass should take: what most experts have."""
    mean = rows * e.top / e.count
    return next((n for n in PASSES if 1.5 * mean <= n), PASSES[-1])


def sort(chosen: Tensor, e: ExpertWeights, tokens: int) -> Slots:
    """Return the slots of chosen [M, top] sorted by expert, in passes of up to `tokens`."""
    count, device = chosen.numel(), chosen.device
    most = min(count, e.count + count // tokens)
    order = torch.empty(count, dtype=torch.int32, device=device)
    passes = torch.empty(most, _PASS_WORDS, dtype=torch.int64, device=device)
    pass_count = torch.empty(1, dtype=torch.int32, device=device)
    load(*sort_variant(tokens))(
        (1, 1, 1),
        1024,
        *(chosen, e.table, order, passes, pass_count, count, e.count),
        shared=32 * e.count * 4,
        pdl=True,
    )
    return Slots(count, tokens, order, passes, pass_count)


def gemm_variant(e: ExpertWeights, gated: bool, s: ExpertGemmConfig, dtype: torch.dtype) -> tuple[str, str]:
    w = e.gate if gated else e.down
    arguments = f"{str(gated).lower()}, {_form(w)}, {s.tokens}, crelle::{e.activation}"
    pieces = f"{s.warps_n}, {s.warps_k}, {s.stages}, {s.occupancy}"
    types = f"{C_TYPES[w.scales.dtype]}, {C_TYPES[dtype]}"
    return "experts/expert_gemm.cu", f"crelle::expert_gemm<{arguments}, {pieces}, {types}>"


def grouped_up(h: Tensor, slots: Slots, e: ExpertWeights) -> Tensor:
    """Return inner [slots, pitch] = act(gate x) * (up x) in sorted order, for h [M, K]."""
    inner = torch.empty(slots.count, e.pitch, dtype=h.dtype, device=h.device)
    _grouped(h, inner, slots, e, True)
    return inner


def grouped_down(inner: Tensor, slots: Slots, e: ExpertWeights) -> Tensor:
    """Return [slots, N], what experts make of `inner`, in the order of tokens and their experts."""
    made = torch.empty(slots.count, e.down.N, dtype=inner.dtype, device=inner.device)
    _grouped(inner, made, slots, e, False)
    return made


def _grouped(x: Tensor, y: Tensor, slots: Slots, e: ExpertWeights, gated: bool) -> None:
    w = e.gate if gated else e.down
    s = gemm_config(w, slots.at_a_time)
    outputs = ROWS * s.warps_n * (1 if gated else 2)
    most = slots.passes.shape[0] * -(-w.N // outputs)
    load(*gemm_variant(e, gated, s, x.dtype))(
        (min(most, multiprocessors() * s.occupancy), 1, 1),
        32 * s.warps_n * s.warps_k,
        *(slots.passes, slots.pass_count, slots.order, x, y, w.N, x.shape[1], w.blocks),
        *(w.words.shape[2], w.blocks_per_scale, x.shape[1], y.shape[1], e.top),
        shared=_gemm_shared(w, s),
        pdl=True,
    )


def gemm_config(w: CudaWeight, tokens: int, hopper: bool | None = None) -> ExpertGemmConfig:
    """Return the tile config for passes of this number of slots; K is split the same for all, for a slot's bits."""
    warps_k = next(n for n in (8, 4, 2, 1) if w.blocks / (-(-w.blocks // n) * n) >= 0.85)
    room, most = _room(hopper), 1 if tokens > 16 or w.P > 4 else 2
    for occupancy in range(most, 0, -1):
        for stages in (4, 3, 2) if occupancy == 1 else (3, 2):
            s = ExpertGemmConfig(tokens, _WARPS // warps_k, warps_k, stages, occupancy)
            if (_gemm_shared(w, s) + 1024) * occupancy <= room:
                return s
    return ExpertGemmConfig(tokens, max(1, 4 // warps_k), min(4, warps_k), 1, 1)


def _gemm_shared(w: CudaWeight, s: ExpertGemmConfig) -> int:
    stages = 2 * s.stages
    queue = stages * (_block_bytes(w) + 8)
    return s.warps_n * s.warps_k * queue + 2 * s.warps_k * s.tokens * (32 * s.warps_n + 4) * 4


def combine(
    made: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    shared: Tensor | None = None,
    logits: Tensor | None = None,
    count: int = 0,
) -> Tensor:
    """Return residual + weighted sums of made [slots, N], + shared [M, N] by the sigmoid of logits [:, count]."""
    M, top = weights.shape
    N = made.shape[1]
    y = torch.empty(M, N, dtype=made.dtype, device=made.device)
    load(*combine_variant(made.dtype))(
        (-(-N // 256), M, 1),
        256,
        *(made, weights, residual, shared, logits, y, N, top, count, 0 if logits is None else logits.shape[1]),
        pdl=True,
    )
    return y


def _room(hopper: bool | None) -> int:
    """Return the bytes of shared memory of a multiprocessor; hopper: or newer, asked of the device unless given."""
    return _ROOM if (torch.cuda.get_device_capability() >= (9, 0) if hopper is None else hopper) else _OLD_ROOM


def _form(w: CudaWeight) -> str:
    return f"{w.P}, crelle::{w.kind.name}, {w.groups}"


def _block_bytes(w: CudaWeight) -> int:
    """Of 16 rows and 256 inputs: planes that count, and scales."""
    return w.P * 512 + w.scales[0, 0].numel() * w.scales.element_size()


def variants(i: int, gate: CudaWeight, down_w: CudaWeight, hopper: bool) -> Iterator[tuple[str, str]]:
    """Return what CI compiles for the i-th of some weights: each value of each parameter comes in turn."""
    dtype, activation = (torch.float16, torch.bfloat16)[i % 2], get_args(Activation)[i % 4]
    e = ExpertWeights(torch.empty(0), gate, down_w, (8, 64, 128, 512)[i % 4], 2, True, activation)
    op: Prologue = ("PLAIN", "RMS_NORM", "LAYER_NORM")[i % 3]
    yield up_variant(e, gemv_config(gate, gate.blocks, 2, hopper=hopper), op, dtype)
    yield down_variant(e, gemv_config(down_w, 8, 1, 8 * (i % 2), hopper=hopper), i % 2 == 1, dtype)
    tokens = PASSES[i % 3]
    for gated in (True, False):
        yield gemm_variant(e, gated, gemm_config(gate if gated else down_w, tokens, hopper), dtype)
    yield from (route_variant(e.count), sort_variant(tokens), logits_variant(dtype), combine_variant(dtype))
