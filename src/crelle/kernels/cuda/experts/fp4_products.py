"""Launches fp4_expert_gemv.cu and fp4_expert_gemm.cu: products with chosen experts whose weights are four-bit floats.

    few tokens      inner = up(x, logits, e, ...);  y = down(inner, logits, e, residual)
    many tokens     made = grouped_down(grouped_up(h, slots, e), slots, e)

Arguments and results are those of products.py, which routes, sorts and combines for both. In the table of addresses an
expert's matrix has one piece of memory (fp4_layout.py), which stands where bit-planes do; nothing stands for scales.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from crelle.kernels.cuda.dispatch import GEMV_ROWS
from crelle.kernels.cuda.experts.products import Activation, Slots, per_lane
from crelle.kernels.cuda.fp4.fp4_layout import BLOCK, ROWS, Fp4Weight
from crelle.kernels.cuda.launch import load, most_shared_memory, multiprocessors
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES
from crelle.kernels.cuda.step.activations import Prologue

_HALVES = True  # f16 operands in a bf16 model, where no value can be too large (fp4_expert_gemv.cu)
_HOPPER_ROOM = 227 * 1024  # bytes of shared memory that a thread block can have
_OLD_ROOM = 99 * 1024  # the same before Hopper, of the smallest chip
_STATIC = 2048  # at most, of a thread block


@dataclass(frozen=True, slots=True, eq=False)
class Fp4Experts:
    """The experts of a layer, all of one shape and format, and where each has its bytes."""

    table: Tensor  # int64 [count, 9]: address of weights, 0, address of the bias (0: none) of gate, up, down
    gate: Fp4Weight  # that of one expert, for its form; `up` has the same
    down: Fp4Weight
    count: int
    top: int
    normalize: bool
    activation: Activation
    dtype: torch.dtype  # of the model

    @property
    def operands(self) -> torch.dtype:
        """What the products take x and `inner` as: f16 where it is faster and holds all values (fp4_expert_gemv.cu)."""
        return torch.float16 if _HALVES and self.activation == "SWIGLUOAI_GATE" else self.dtype

    @property
    def pitch(self) -> int:
        """Values of a row of `inner`: what `down` has blocks for."""
        return self.down.places


# --- few tokens -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fp4ExpertGemvConfig:
    """Tile config of fp4_expert_gemv.cu; its template parameters."""

    warps: int  # that share K
    stages: int  # of a warp's load pipeline
    occupancy: int  # thread blocks that a multiprocessor holds


_UP = [Fp4ExpertGemvConfig(*c) for c in ((4, 4, 2), (4, 2, 2), (4, 2, 1))]
_DOWN = [Fp4ExpertGemvConfig(*c) for c in ((12, 2, 2), (8, 2, 2), (8, 2, 1), (4, 2, 1))]
_LEAST = Fp4ExpertGemvConfig(4, 2, 1)


def _types(e: Fp4Experts) -> str:
    return f"{C_TYPES[e.dtype]}, {C_TYPES[e.operands]}"


def up_variant(e: Fp4Experts, s: Fp4ExpertGemvConfig, op: Prologue) -> tuple[str, str]:
    arguments = f"{e.gate.kind}, {per_lane(e.count)}, crelle::{op}, crelle::{e.activation}"
    pieces = f"{s.warps}, {s.stages}, {s.occupancy}"
    return "experts/fp4_expert_gemv.cu", f"crelle::fp4_expert_up<{arguments}, {pieces}, {_types(e)}>"


def down_variant(e: Fp4Experts, s: Fp4ExpertGemvConfig) -> tuple[str, str]:
    arguments = f"{e.down.kind}, {per_lane(e.count)}, {s.warps}, {s.stages}, {s.occupancy}"
    return "experts/fp4_expert_gemv.cu", f"crelle::fp4_expert_down<{arguments}, {_types(e)}>"


def up(
    x: Tensor,
    logits: Tensor,
    e: Fp4Experts,
    op: Prologue = "PLAIN",
    norm: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
    config: Fp4ExpertGemvConfig | None = None,
) -> Tensor:
    """Return inner [M, top, pitch] = act(gate x) * (up x) of the experts that logits [M, count …] choose."""
    w, M = e.gate, x.shape[0]
    inner = torch.empty(M, e.top, e.pitch, dtype=e.operands, device=x.device)
    s = config or up_config(e)
    load(*up_variant(e, s, op))(
        (_grid(e.top * w.tiles, s, M), M, 1),
        32 * s.warps,
        *(e.table, logits, _aligned(x), _aligned(norm), _aligned(shift), inner, w.N, w.K, w.blocks),
        *(e.count, logits.shape[1], e.top, int(e.normalize), e.pitch, float(eps)),
        shared=up_shared(w, s),
        pdl=True,
    )
    return inner


def down(
    inner: Tensor,
    logits: Tensor,
    e: Fp4Experts,
    residual: Tensor | None = None,
    shared: Tensor | None = None,
    config: Fp4ExpertGemvConfig | None = None,
) -> Tensor:
    """Return residual + the weighted sum of what the chosen experts make of inner (+ the shared expert's, gated)."""
    w, M = e.down, inner.shape[0]
    s = config or down_config(e)
    y = torch.empty(M, w.N, dtype=e.dtype, device=inner.device)
    load(*down_variant(e, s))(
        (_grid(w.tiles, s, M), M, 1),
        32 * s.warps,
        *(e.table, logits, inner, residual, shared, y),
        *(w.N, w.blocks, e.count, logits.shape[1], e.top, int(e.normalize)),
        shared=down_shared(w, e.top, s),
        pdl=True,
    )
    return y


def up_config(e: Fp4Experts, room: int | None = None) -> Fp4ExpertGemvConfig:
    """Return the tile config of `up`: measured on an H200 for gpt-oss, its order of preference."""
    room = room or most_shared_memory()
    return _first_that_fits(_UP, lambda s: up_shared(e.gate, s), room, per_lane(e.count))


def down_config(e: Fp4Experts, room: int | None = None) -> Fp4ExpertGemvConfig:
    """Return that of `down`, which takes the blocks of all slots of a token."""
    room = room or most_shared_memory()
    return _first_that_fits(_DOWN, lambda s: down_shared(e.down, e.top, s), room, per_lane(e.count))


def _first_that_fits(
    configs: Sequence[Fp4ExpertGemvConfig], shared: Callable[[Fp4ExpertGemvConfig], int], room: int, logits: int
) -> Fp4ExpertGemvConfig:
    """Return the first config whose thread blocks fit; each lane holds a number of logits in registers."""
    few = [s for s in configs if s.occupancy * s.warps <= (24 if logits <= 4 else 16)]
    return next((s for s in few if (shared(s) + _STATIC) * s.occupancy <= room), _LEAST)


def takes_few(rows: int, e: Fp4Experts, room: int | None = None) -> bool:
    """Whether this number of tokens is multiplied each by itself.

    Each reads its experts anew, and sorting costs three launches: on an H200 both are as fast at 4 tokens of 32 experts
    and at 8 of 128. And x of a token must fit into shared memory: 16 experts of 6,000 inputs do.
    """
    room = room or most_shared_memory()
    fits = max(up_shared(e.gate, _LEAST), down_shared(e.down, e.top, _LEAST)) + _STATIC <= room
    return fits and rows * e.top <= max(e.count // 4, GEMV_ROWS * e.top)


def _grid(sets: int, s: Fp4ExpertGemvConfig, rows: int) -> int:
    """Return thread blocks for a token: as many as run at once, or fewer where that shares the work out evenly."""
    fit = max(1, multiprocessors() * s.occupancy // rows)
    return -(-sets // -(-sets // fit))


def _queue(stages: int, piece: int) -> int:
    return stages * (piece + 8) + (stages & 1) * 8


def up_shared(w: Fp4Weight, s: Fp4ExpertGemvConfig) -> int:
    """Dynamic shared memory of fp4_expert_up."""
    return s.warps * _queue(s.stages, 2 * w.block_bytes) + w.blocks * 2 * BLOCK


def down_shared(w: Fp4Weight, top: int, s: Fp4ExpertGemvConfig) -> int:
    """The same of fp4_expert_down."""
    sums = 4 * ROWS * (2 * (s.warps + top) + 2 * top)
    return s.warps * _queue(s.stages, w.block_bytes) + top * w.blocks * 2 * BLOCK + sums


def _aligned(t: Tensor | None) -> Tensor | None:
    """Return a tensor that can be read 16 bytes at a time."""
    if t is None:
        return None
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


# --- many tokens ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fp4ExpertGemmConfig:
    """Tile config of fp4_expert_gemm.cu; its template parameters."""

    tokens: int  # of a pass
    warps_n: int  # warps along N
    warps_k: int  # warps that split K
    stages: int  # times 256 inputs and two tiles
    occupancy: int


def gemm_variant(e: Fp4Experts, gated: bool, s: Fp4ExpertGemmConfig) -> tuple[str, str]:
    arguments = f"{str(gated).lower()}, {e.gate.kind}, {s.tokens}, crelle::{e.activation}"
    pieces = f"{s.warps_n}, {s.warps_k}, {s.stages}, {s.occupancy}"
    return "experts/fp4_expert_gemm.cu", f"crelle::fp4_expert_gemm<{arguments}, {pieces}, {_types(e)}>"


def grouped_up(h: Tensor, slots: Slots, e: Fp4Experts, config: Fp4ExpertGemmConfig | None = None) -> Tensor:
    """Return inner [slots, pitch] = act(gate x) * (up x) in sorted order, for h [M, K]."""
    inner = torch.empty(slots.count, e.pitch, dtype=e.operands, device=h.device)
    h = h.to(e.operands).contiguous()
    _grouped(h if h.data_ptr() % 16 == 0 else h.clone(), inner, slots, e, True, config)
    return inner


def grouped_down(inner: Tensor, slots: Slots, e: Fp4Experts, config: Fp4ExpertGemmConfig | None = None) -> Tensor:
    """Return [slots, N], what experts make of `inner`, in the order of tokens and their experts."""
    made = torch.empty(slots.count, e.down.N, dtype=e.dtype, device=inner.device)
    _grouped(inner, made, slots, e, False, config)
    return made


def _grouped(
    x: Tensor, y: Tensor, slots: Slots, e: Fp4Experts, gated: bool, config: Fp4ExpertGemmConfig | None
) -> None:
    w = e.gate if gated else e.down
    s = config or gemm_config(w, slots.at_a_time)
    outputs = ROWS * s.warps_n * (1 if gated else 2)
    most = slots.passes.shape[0] * -(-w.N // outputs)
    load(*gemm_variant(e, gated, s))(
        (min(most, multiprocessors() * s.occupancy), 1, 1),
        32 * s.warps_n * s.warps_k,
        *(slots.passes, slots.pass_count, slots.order, x, y),
        *(w.N, x.shape[1], w.blocks, x.shape[1], y.shape[1], e.top),
        shared=gemm_shared(w, s),
        pdl=True,
    )


def gemm_config(w: Fp4Weight, tokens: int, room: int | None = None) -> Fp4ExpertGemmConfig:
    """Return the tile config for passes of this number of slots; K is split the same for all, for a slot's bits."""
    room, twice = room or most_shared_memory(), tokens <= 16  # two thread blocks a multiprocessor
    pieces = [(4, n, 2) for n in (3, 2) if twice] + [(4, n, 1) for n in (4, 3, 2)] + [(2, 2, 1), (2, 1, 1)]
    configs = [Fp4ExpertGemmConfig(tokens, warps_n, 2, *more) for warps_n, *more in pieces]
    return next((s for s in configs if (gemm_shared(w, s) + _STATIC) * s.occupancy <= room), configs[-1])


def gemm_shared(w: Fp4Weight, s: Fp4ExpertGemmConfig) -> int:
    """Dynamic shared memory of fp4_expert_gemm."""
    queue = _queue(s.stages, 2 * w.block_bytes)
    return s.warps_n * s.warps_k * queue + 2 * s.warps_k * s.tokens * (32 * s.warps_n + 4) * 4


def variants(i: int, gate: Fp4Weight, down_w: Fp4Weight, hopper: bool) -> Iterator[tuple[str, str]]:
    """Return what CI compiles for the i-th of some weights: each value of each parameter comes in turn."""
    room = _HOPPER_ROOM if hopper else _OLD_ROOM
    dtype, activation = (torch.float16, torch.bfloat16)[i // 2 % 2], get_args(Activation)[(3, 0, 1, 2)[i % 4]]
    e = Fp4Experts(torch.empty(0), gate, down_w, (32, 128, 8, 512)[i % 4], 4, True, activation, dtype)
    op: Prologue = ("RMS_NORM", "PLAIN", "LAYER_NORM")[i % 3]
    yield up_variant(e, up_config(e, room), op)
    yield down_variant(e, down_config(e, room))
    for gated, tokens in ((True, (8, 16, 32)[i % 3]), (False, (16, 32, 8)[i % 3])):
        yield gemm_variant(e, gated, gemm_config(gate if gated else down_w, tokens, room))
