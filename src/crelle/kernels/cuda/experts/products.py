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
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from crelle.kernels.cuda.dispatch import GEMV_ROWS
from crelle.kernels.cuda.launch import load, multiprocessors
from crelle.kernels.cuda.planes.bmma_gemv import _ENCODE_WARPS, C_TYPES, encode_variant, parts
from crelle.kernels.cuda.planes.weight_layout import BLOCK, ROWS, CudaWeight, ScaleKind
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
_WARPS = 8  # of expert_gemm.cu
_MOST_WARPS, _MOST_STAGES = 16, 4  # of expert_gemv.cu
_CLUSTER = 1  # of expert_down; 4 compiles, but has not been measured
_KEEPS_X = False  # whether expert_gemm may keep x of a pass in registers; not measured, either
_ROOM = 228 * 1024  # bytes of shared memory of a multiprocessor, 1024 of them each thread block's
_OLD_ROOM = 100 * 1024  # the same before Hopper, of the smallest chip
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


class Mixture(Protocol):
    """What routing and sorting read of a layer's experts, of whatever format."""

    @property
    def table(self) -> Tensor: ...
    @property
    def count(self) -> int: ...
    @property
    def top(self) -> int: ...
    @property
    def normalize(self) -> bool: ...


def per_lane(count: int) -> int:
    """Return how many logits a lane holds: a power of two."""
    return 1 << max(0, (-(-count // 32) - 1).bit_length())


# --- few tokens -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpertGemvConfig:
    """Tile config of expert_gemv.cu; its template parameters."""

    warps: int  # that share K; in expert_up those of gate and those of up
    stages: int  # of a warp's load pipeline
    occupancy: int  # thread blocks that a multiprocessor holds
    cluster: int = 1  # thread blocks that share K, in expert_down


def up_variant(e: ExpertWeights, s: ExpertGemvConfig, op: Prologue, dtype: torch.dtype) -> tuple[str, str]:
    arguments = f"{_form(e.gate)}, {per_lane(e.count)}, crelle::{op}, crelle::{e.activation}"
    types = f"{C_TYPES[e.gate.scales.dtype]}, {C_TYPES[dtype]}"
    pieces = f"{s.warps // 2}, {s.stages}, {s.occupancy}"
    return "experts/expert_gemv.cu", f"crelle::expert_up<{arguments}, {pieces}, {types}>"


def down_variant(e: ExpertWeights, s: ExpertGemvConfig, encodes: bool, dtype: torch.dtype) -> tuple[str, str]:
    arguments = f"{_form(e.down)}, {per_lane(e.count)}, {s.cluster}, {s.warps}, {s.stages}, {s.occupancy}"
    types = f"{C_TYPES[e.down.scales.dtype]}, {C_TYPES[dtype]}"
    return "experts/expert_gemv.cu", f"crelle::expert_down<{arguments}, {str(encodes).lower()}, {types}>"


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
    s = gemv_config(w, w.blocks, 2, staged=e.count)
    load(*up_variant(e, s, op, x.dtype))(
        (_grid(e.top * -(-w.N // ROWS), 2 * w.blocks, s, M), M, 1),
        32 * s.warps,
        *(e.table, logits, x, norm, shift, inner, w.N, w.K, w.blocks, w.words.shape[2], w.blocks_per_scale),
        *(e.count, logits.shape[1], e.top, int(e.normalize), e.pitch, float(eps)),
        shared=_gemv_shared(w, s, w.blocks, e.count),
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
    s = gemv_config(w, units, 1, units if encodes else 0, cluster=_cluster(units, encodes))
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
        (grid := _grid(-(-w.N // ROWS), units, s, M), M, 1),
        32 * s.warps,
        *(e.table, logits, inner if encodes else None, bits, scale, residual, shared, y),
        *(w.N, w.blocks, w.words.shape[2], w.blocks_per_scale, e.count, logits.shape[1], e.top, int(e.normalize)),
        shared=_gemv_shared(w, s, units if encodes else 0) + _page_bytes(-(-w.N // ROWS), grid, s),
        pdl=True,
        **({"cluster": s.cluster} if s.cluster > 1 else {}),
    )
    return y


def gemv_config(
    w: CudaWeight,
    blocks: int,
    matrices: int = 1,
    encoded: int | None = None,
    staged: int = 0,
    cluster: int = 1,
    hopper: bool | None = None,
) -> ExpertGemvConfig:
    """Return the tile config for rows of this number of blocks of 256 inputs, of one or two matrices at a time.

    Warps share the blocks as evenly as they can. `encoded`: blocks of x that a thread block has bit-serial;
    `staged`: experts of which it has the addresses. `cluster`: thread blocks that share the blocks first.
    """
    encoded = blocks if encoded is None else encoded
    blocks = -(-blocks // cluster)
    choices = range(1, min(_MOST_WARPS // matrices, blocks) + 1)
    each = max(choices, key=lambda n: (blocks / (-(-blocks // n) * n), n))
    warps = each * matrices
    most = max(1, (2 if w.P <= 4 and w.groups <= 2 else 1) * _MOST_WARPS // warps)  # registers: 64 a thread, or 128
    for occupancy in range(most, 0, -1):
        for stages in range(_MOST_STAGES, 1 if occupancy > 1 else 0, -1):
            s = ExpertGemvConfig(warps, stages, occupancy, cluster)
            static = 128 * warps + 384 + 1024
            if (_gemv_shared(w, s, encoded, staged) + static) * occupancy <= _room(hopper):
                return s
    return ExpertGemvConfig(warps, 1, 1, cluster)


def _cluster(units: int, encodes: bool) -> int:
    """Return how many thread blocks share the inputs of `down`: encoding all of them takes longer than sending sums."""
    return _CLUSTER if encodes and units >= 2 * _CLUSTER and torch.cuda.get_device_capability() >= (9, 0) else 1


def _page_bytes(sets: int, grid: int, s: ExpertGemvConfig) -> int:
    return 0 if s.cluster == 1 else -(-sets // (grid // s.cluster)) * (16 * 4 + 8)


def _grid(sets: int, blocks: int, s: ExpertGemvConfig, rows: int) -> int:
    """Return thread blocks for a token: the longest share of a multiprocessor is as short as it can be.

    Of equal shares those are better in which a thread block asks for all its weights at once, by some 12 warps of a
    multiprocessor; where none does, those with the most warps.
    """
    processors, mine = multiprocessors(), -(-blocks // (s.cluster * s.warps))

    def cost(each: int) -> tuple[int, bool, int]:  # sets of a multiprocessor, if a cluster takes `each`
        count = rows * s.cluster * -(-sets // each)
        resident = min(s.occupancy, -(-count // processors))
        waves = -(-count // (resident * processors))
        waits = each * mine > s.stages
        warps = resident * s.warps
        return resident * waves * each + 2 * (waves - 1), waits, -warps if waits else abs(warps - 12)

    best = min(range(1, sets + 1), key=cost)
    return s.cluster * -(-sets // best)


def _gemv_shared(w: CudaWeight, s: ExpertGemvConfig, encoded: int, staged: int = 0) -> int:
    queue = s.stages * (_block_bytes(w) + 8) + (s.stages & 1) * 8
    return s.warps * queue + 2 * -(-encoded // s.cluster) * (64 + 1 + parts(w)) * 4 + 32 * staged


def takes_few(rows: int, e: ExpertWeights) -> bool:
    """Whether this number of tokens is multiplied each by itself."""
    return rows * e.top <= max(e.count, GEMV_ROWS * e.top)


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
    keeps: bool  # x in registers: a warp has one block of 256 inputs
    tiles: int  # of 16 rows that a warp has; gate's and up's in turn
    warps_n: int  # warps along N
    warps_k: int  # warps that split K
    stages: int  # times 256 inputs of all tiles
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


def route(logits: Tensor, e: Mixture) -> tuple[Tensor, Tensor]:
    """Return the experts int32 [M, top] that logits f32 [M, count …] choose, and their weights f32 [M, top]."""
    M = logits.shape[0]
    chosen = torch.empty(M, e.top, dtype=torch.int32, device=logits.device)
    weights = torch.empty(M, e.top, dtype=torch.float32, device=logits.device)
    sizes = (M, e.count, logits.shape[1], e.top, int(e.normalize))
    load(*route_variant(e.count))((-(-M // 8), 1, 1), 256, logits, chosen, weights, *sizes, pdl=True)
    return chosen, weights


def at_a_time(rows: int, e: Mixture) -> int:
    """Return how many slots a pass should take: what most experts have."""
    mean = rows * e.top / e.count
    return next((n for n in PASSES if 1.5 * mean <= n), PASSES[-1])


def sort(chosen: Tensor, e: Mixture, tokens: int) -> Slots:
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
    pieces = f"{str(s.keeps).lower()}, {s.tiles}, {s.warps_n}, {s.warps_k}, {s.stages}, {s.occupancy}"
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
    outputs = ROWS * s.warps_n * s.tiles // (2 if gated else 1)
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
    choices = range(w.blocks, 0, -1) if _KEEPS_X and w.blocks <= _WARPS else (4, 2, 1)
    warps_k = next(n for n in choices if w.blocks / (-(-w.blocks // n) * n) >= 0.85)
    warps_n = _WARPS // warps_k
    keeps = _KEEPS_X and warps_k == w.blocks and tokens <= 8
    room, most = _room(hopper), 1 if tokens > 16 or w.P > 4 else 16 // (warps_n * warps_k)
    tiles = 4 if _has_offset_codes(w) and tokens <= 8 and 64 * warps_n <= w.N else 2
    for occupancy in range(most, 0, -1):
        for stages in range(8 // tiles, 0 if tiles == 4 else 1, -1):
            s = ExpertGemmConfig(tokens, keeps, tiles, warps_n, warps_k, stages, occupancy)
            if (_gemm_shared(w, s) + 1024) * occupancy <= room:
                return s
    return ExpertGemmConfig(tokens, keeps, 2, max(1, 4 // warps_k), warps_k, 1, 1)


def _has_offset_codes(w: CudaWeight) -> bool:
    """As HAS_OFFSET_CODES of offset_codes.cuh."""
    return w.P <= 4 and w.groups <= 2 and w.kind not in (ScaleKind.BCQ, ScaleKind.BCQ_SYMMETRIC)


def _gemm_shared(w: CudaWeight, s: ExpertGemmConfig) -> int:
    stages = s.tiles * s.stages
    queue = stages * (_block_bytes(w) + 8)
    return s.warps_n * s.warps_k * queue + 2 * s.warps_k * s.tokens * (16 * s.tiles * s.warps_n + 4) * 4


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
    yield up_variant(e, gemv_config(gate, gate.blocks, 2, staged=e.count, hopper=hopper), op, dtype)
    yield down_variant(
        e,
        gemv_config(down_w, 8, 1, 8 * (i % 2), cluster=4 if hopper and i % 2 else 1, hopper=hopper),
        i % 2 == 1,
        dtype,
    )
    tokens = PASSES[i % 3]
    for gated in (True, False):
        config = gemm_config(gate if gated else down_w, tokens, hopper)
        yield gemm_variant(e, gated, replace(config, keeps=tokens == 8), dtype)
    yield from (route_variant(e.count), sort_variant(tokens), logits_variant(dtype), combine_variant(dtype))
