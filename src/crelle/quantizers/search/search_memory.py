"""How measuring sensitivities uses a memory budget (crelle.quantizers.search.gradient_stats).

    layer     its weights in f32, and their rounded copies where products are in bf16
    sums      the Hessians that one backward pass of a layer collects: of each linear, tokens weighted by its gradients,
              and of each input as calibration has it. Where all of a layer do not fit, the layer goes backward several
              times, for some of its stages each; every time costs one forward and one backward pass of that layer
    batch     activations of a batch in one layer and their gradients
    fits      factorization of a Hessian, and some rows at many settings
    states    hidden states before every layer, of the layer that is at work and of the gradients. On a GPU in bf16, in
              pinned host memory where they do not fit; on a CPU only those before every k-th layer are kept where not
              all fit, and the others computed again: one more forward pass in all
Batch and fits are not needed at the same time. Embedding and output head in f32, and up to an eighth of the budget for
logits, are there while no layer is, and are not in the plan. As in calibration, batches depend on the budget alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch

from crelle.errors import CapacityError
from crelle.quantizers.calibration.layer_api import Block, CalibrationModel

_TOKENS = 2048  # of a batch
_FACTOR = 28  # bytes per entry of a Hessian at the peak of its factorization
_FITS = 1 << 28  # bytes of rows at several settings that are worked on at one time, on a CPU
_FITS_CUDA = 1 << 30
_LOGITS = 1 << 29
_SPARE = 0.9  # of a budget on a GPU: the rest is for what allocators lose between blocks


@dataclass(frozen=True, slots=True)
class SearchMemory:
    """Where things are, and the bytes that are expected."""

    batch: int = 4  # sequences
    states: torch.dtype = torch.float32
    states_on_device: bool = True
    stride: int = 1  # layers between those whose hidden states are kept
    sums: int | None = None  # bytes of the Hessians of one backward pass; None: those of a layer at once
    fits: int = _FITS  # bytes of rows at several settings
    logits: int = _LOGITS  # bytes of logits, their softmax and its sums
    device_bytes: int = 0  # expected peak
    host_bytes: int = 0  # of hidden states in pinned memory

    def passes(self, block: Block) -> list[list[tuple[str, ...]]]:
        """Split the stages of a layer into those whose Hessians are collected by one backward pass."""
        groups: list[list[tuple[str, ...]]] = []
        used = 0
        for stage in block.stages():
            need = _sum_bytes(block.linears()[stage[0]].weight.shape[1], len(stage))
            if not groups or (self.sums is not None and used + need > self.sums):
                groups.append([])
                used = 0
            groups[-1].append(stage)
            used += need
        return groups

    def tokens_of_logits(self, V: int) -> int:
        """Return how many tokens' logits over V may be in memory."""
        return max(1, min(1024, self.logits // (16 * V)))


def _sum_bytes(K: int, linears: int) -> int:
    return 4 * K * K * (linears + 1)


def search_memory(
    model: CalibrationModel,
    tokens: torch.Tensor,
    device: torch.device,
    *,
    half: bool = True,
    budget: int | None = None,
) -> SearchMemory:
    """Plan the memory of measuring on sequences [S, T]; `budget`: bytes, default: all of a GPU, no bound on a CPU."""
    S, T = tokens.shape
    batch = max(1, min(S, _TOKENS // T))
    if device.type == "cuda" and half:
        free, total = torch.cuda.mem_get_info(device)
        shapes, width = model.shapes()
        return plan_device(shapes, S, T, width, model.layers, budget=min(budget or total, total), free=free)
    if budget is None:
        return SearchMemory(batch)
    return plan_host(*model.shapes(), S, T, model.layers, budget)


class _Layer:
    """The bytes that one layer takes; linears of as many inputs are taken to share them, which is never too little."""

    def __init__(self, shapes: Sequence[tuple[int, int]], width: int, half: bool) -> None:
        self.weights = (6 if half else 4) * sum(N * K for N, K in shapes)
        self._token = (2 if half else 4) * 3 * sum(N + K for N, K in shapes) + 4 * 6 * width
        self.widest = max(K for _, K in shapes)
        inputs = [K for _, K in shapes]
        self.sums = sum(_sum_bytes(K, 1) for K in inputs)
        self.least_sums = max(_sum_bytes(K, min(3, inputs.count(K))) for K in set(inputs))

    def batch(self, sequences: int, T: int) -> int:
        return sequences * T * (self._token + 8 * self.widest)

    def fits(self, rows: int) -> int:
        return max(_FACTOR * self.widest**2, 16 * self.widest**2 + rows)


def plan_device(
    shapes: Sequence[tuple[int, int]], S: int, T: int, width: int, layers: int, *, budget: int, free: int
) -> SearchMemory:
    """Plan for a GPU and layers with linears of shapes (N, K); `free`: bytes of the budget that are there now."""
    layer, room = _Layer(shapes, width, half=True), int(_SPARE * budget)
    batch = max(1, min(S, _TOKENS // T))
    state = 2 * S * T * width
    while batch > 1 and layer.weights + layer.least_sums + layer.batch(batch, T) > room:
        batch //= 2
    work, least = max(layer.batch(batch, T), layer.fits(_FITS_CUDA)), layer.weights + layer.least_sums
    if least + work > room:
        raise CapacityError(_refusal(least + work, room, "GPU memory"))
    all_states = (layers + 3) * state
    left = min(room, int(_SPARE * free)) - work - layer.weights
    sums = min(layer.sums, max(layer.least_sums, room - work - layer.weights))
    on_device = all_states + sums <= left
    used = layer.weights + sums + work + all_states * on_device
    bound = None if sums == layer.sums else sums
    return SearchMemory(
        batch,
        torch.bfloat16,
        on_device,
        sums=bound,
        fits=_FITS_CUDA,
        logits=min(_LOGITS, budget // 8),
        device_bytes=used,
        host_bytes=0 if on_device else all_states,
    )


def plan_host(shapes: Sequence[tuple[int, int]], width: int, S: int, T: int, layers: int, budget: int) -> SearchMemory:
    """Plan for a CPU, where all is f32 in host memory."""
    layer, state = _Layer(shapes, width, half=False), 4 * S * T * width
    batch = max(1, min(S, _TOKENS // T))
    fits, logits = (min(most, max(1 << 16, budget // 8)) for most in (_FITS, _LOGITS))
    stride = min(range(1, layers + 1), key=lambda k: (_states_held(layers, k), k))  # the fewest states
    least = layer.weights + layer.least_sums + _states_held(layers, stride) * state
    while batch > 1 and least + layer.batch(batch, T) > budget:
        batch //= 2
    work = max(layer.batch(batch, T), layer.fits(fits))
    if least + work > budget:
        raise CapacityError(_refusal(least + work, budget, "memory"))
    room = budget - work - layer.weights
    sums = min(layer.sums, room - _states_held(layers, stride) * state)  # going backward again costs more than forward
    stride = next(k for k in range(1, stride + 1) if _states_held(layers, k) * state + sums <= room)
    used = work + layer.weights + sums + _states_held(layers, stride) * state
    bound = None if sums == layer.sums else sums
    return SearchMemory(batch, stride=stride, sums=bound, fits=fits, logits=logits, device_bytes=used)


def _states_held(layers: int, stride: int) -> int:
    """Return how many hidden states are in memory at most: kept, computed again, at work, and gradients."""
    return ceil(layers / stride) + (stride - 1) + 3


def _refusal(need: int, room: int, what: str) -> str:
    return (
        f"measuring the sensitivities of a layer needs about {need / 1e9:.3g} GB of {what}, but the limit is "
        f"{room / 1e9:.3g} GB; allow more with `memory`, or use fewer (`rows`) or "
        "shorter (`length`) sequences"
    )
