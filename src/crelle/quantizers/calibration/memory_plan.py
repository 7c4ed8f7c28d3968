"""How calibration uses a memory budget: sequences of a batch, and where the hidden states are.

    layer     its weights in f32, as they were and as they are quantized
    solver    Hessian and cross term, and what the solver holds besides: by the f64 Cholesky factorization of K inputs,
              and by a slab of rows with the levels that are tried for them (bytes as measured on an H200)
    batch     activations of a batch in one layer, and its part of the sums
    states    hidden states of all sequences, three times: of both models, and behind the layer
    kept      what the linears of a layer read and give, and its norms, so that nothing is computed twice
Solver and batch are not needed at the same time. What fits is put on the device in the order of this list; states that
do not fit go to pinned host memory, products that are not kept are computed again. That changes no result. The sizes of
batches and slabs do change the last digits, so they depend on the budget alone and not on what is free at the moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from crelle.errors import CapacityError
from crelle.quantizers.solvers.grouping import SLAB_CUDA

BATCH = 8  # sequences
_FACTOR = 28  # bytes per entry of H at the peak of its factorization
_LEVELS = 60  # bytes for each weight of a slab
_LEAST_SLAB = 1 << 22
_SPARE = 0.9  # of a budget: the rest is for what allocators lose between blocks


@dataclass(frozen=True, slots=True)
class CalibrationMemory:
    """Where things are, and the bytes that are expected."""

    batch: int = BATCH
    states: torch.dtype = torch.float32
    states_on_device: bool = True
    keep: bool = True  # what linears read and give, and norms
    slab: int = SLAB_CUDA  # weights that a solver works on at one time
    device_bytes: int = 0  # expected peak
    host_bytes: int = 0  # of hidden states in pinned memory


def plan_host_memory(shapes: Sequence[tuple[int, int]], S: int, T: int, width: int, budget: int) -> CalibrationMemory:
    """Plan for a CPU, where all is f32 in host memory: products are kept where they fit."""
    inputs, outputs = sum(K for _, K in shapes), sum(N for N, _ in shapes)
    widest = max(K for _, K in shapes)
    token = 4 * (outputs + 3 * widest + 6 * width)
    layer = 12 * sum(N * K for N, K in shapes)  # twice, in f32 and, with AMX, as bf16 tiles
    work = layer + max((8 + _FACTOR) * widest**2, BATCH * T * token)
    need = work + 3 * 4 * S * T * width
    kept = 4 * S * T * (inputs + outputs + widest + 2 * width)  # widest: of what the feed-forward's last linear reads
    if need > budget:
        raise CapacityError(
            f"calibration on {S} sequences of {T} tokens needs about {need / 1e9:.3g} GB, but the limit is "
            f"{budget / 1e9:.3g} GB; allow more with `memory`, or use fewer sequences (`rows`)"
        )
    keep = need + kept <= budget
    return CalibrationMemory(keep=keep, device_bytes=need + kept * keep)


def plan_memory(
    shapes: Sequence[tuple[int, int]], S: int, T: int, width: int, *, budget: int, free: int
) -> CalibrationMemory:
    """Plan for a layer with linears of shapes (N, K) on a GPU, with S sequences of T tokens.

    `budget`: bytes that may be used; `free`: of them, bytes that are there now.
    """
    inputs, outputs = sum(K for _, K in shapes), sum(N for N, _ in shapes)
    layer = 8 * sum(N * K for N, K in shapes)
    widest = max(K for _, K in shapes)
    token = 4 * outputs + 12 * widest + 24 * width  # bytes: products in bf16 and what is made of them, sums' inputs
    room = int(_SPARE * budget)
    batch = min(BATCH, S)
    while batch > 1 and layer + 10 * widest**2 + batch * T * token > room:
        batch //= 2
    slab = SLAB_CUDA
    while slab > _LEAST_SLAB and layer + _solver_bytes(shapes, slab) > room:
        slab //= 2
    work = layer + max(_solver_bytes(shapes, slab), 10 * widest**2 + batch * T * token)
    if work > room:
        raise CapacityError(
            f"quantizing a layer of this model needs about {work / 1e9:.3g} GB of GPU memory, but the limit is "
            f"{room / 1e9:.3g} GB; allow more with `memory`, or use shorter sequences (`length`)"
        )
    left = min(room, int(_SPARE * free)) - work
    states = 3 * S * T * width * 2
    on_device = states <= left
    kept = S * T * (2 * outputs + 4 * inputs + 8 * width)
    keep = on_device and states + kept <= left
    used = work + states * on_device + kept * keep
    return CalibrationMemory(batch, torch.bfloat16, on_device, keep, slab, used, 0 if on_device else states)


def _solver_bytes(shapes: Sequence[tuple[int, int]], slab: int) -> int:
    """Return the peak of a solver: its factorization, or the factors and a slab of rows."""
    return max(8 * K * K + max(_FACTOR * K * K, 8 * K * K + _LEVELS * min(N * K, slab)) for N, K in shapes)
