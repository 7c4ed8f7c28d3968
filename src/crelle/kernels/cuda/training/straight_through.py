"""Launches straight_through.cu: weights of training on the grids of their groups, in one kernel each way.

Weights are f32 [N, C, G], in steps; step, scale and low f32 [N, C, 1]. A row of any of them may be part of a longer
one. `own`: scale and low are in steps too, and rounded to f16 by the kernel.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from crelle.kernels import cuda
from crelle.kernels.cuda.launch import load
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES

_FILE = "training/straight_through.cu"
_THREADS = 128


def variant(name: str, vector: int, own: bool, dtype: torch.dtype) -> tuple[str, str]:
    return _FILE, f"crelle::{name}<{vector}, {str(own).lower()}, {C_TYPES[dtype]}>"


def variants() -> Iterator[tuple[str, str]]:
    """Return what CI compiles."""
    for name in ("straight_through", "straight_through_backward"):
        for vector in (1, 4):
            for own in (False, True):
                for dtype in C_TYPES:
                    yield variant(name, vector, own, dtype)


def usable(w: Tensor) -> bool:
    """Whether the kernels of this module can work on a tensor."""
    return w.device.type == "cuda" and w.dtype == torch.float32 and cuda.available() is None


def on_grid(w: Tensor, step: Tensor, scale: Tensor, low: Tensor, top: int, dtype: torch.dtype, own: bool) -> Tensor:
    """Return the values of the weights' grids [N, C, G] of a dtype."""
    out = torch.empty(w.shape, dtype=dtype, device=w.device)
    _launch("straight_through", (w, step, scale, low), (out,), dtype, own, top)
    return out


def gradients(
    w: Tensor, step: Tensor, scale: Tensor, low: Tensor, top: int, gradient: Tensor, own: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of w, scale and low for that of the values."""
    found = w.new_empty(w.shape), w.new_empty(scale.shape), w.new_empty(low.shape)
    outputs = gradient.contiguous(), *found
    _launch("straight_through_backward", (w, step, scale, low), outputs, gradient.dtype, own, top)
    return found


def _launch(
    name: str, inputs: tuple[Tensor, ...], others: tuple[Tensor, ...], dtype: torch.dtype, own: bool, top: int
) -> None:
    w, *grids = inputs
    N, C, G = w.shape
    if not w.numel():
        return
    w = w if w.stride(2) == 1 and w.stride(1) == G else w.contiguous()
    pitches = {g.stride(0) for g in grids}
    if len(pitches) > 1 or any(g.stride(1) != 1 for g in grids):
        grids = [g.contiguous() for g in grids]
    vector = 4 if G % 4 == 0 and w.stride(0) % 4 == 0 and w.data_ptr() % 16 == 0 else 1
    lanes = 1
    while lanes < 32 and lanes * vector < G:
        lanes *= 2
    grid = -(-N * C * lanes // _THREADS), 1, 1
    sizes = lanes, C, G, N * C, w.stride(0), grids[0].stride(0)
    load(*variant(name, vector, own, dtype))(grid, _THREADS, w, *grids, *others, *sizes, float(top))
