"""Launches kl_divergence.cu: the divergence of two models' next-token distributions, from their logits [M, V]."""

from collections.abc import Iterator

import torch
from torch import Tensor

from crelle.kernels import cuda
from crelle.kernels.cuda.launch import load
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES

_FILE = "training/kl_divergence.cu"
_THREADS = 256  # as in kl_divergence.cu


def variant(name: str, vector: int, dtype: torch.dtype) -> tuple[str, str]:
    return _FILE, f"crelle::{name}<{vector}, {C_TYPES[dtype]}>"


def variants() -> Iterator[tuple[str, str]]:
    """Return what CI compiles."""
    for name in ("kl_divergence", "kl_divergence_backward"):
        for dtype in C_TYPES:
            for vector in (1, _widest(dtype)):
                yield variant(name, vector, dtype)


def usable(mine: Tensor, theirs: Tensor) -> bool:
    """Whether the kernels of this module can work on these logits."""
    alike = mine.dtype == theirs.dtype and mine.shape == theirs.shape and mine.numel() > 0
    return mine.device.type == "cuda" and mine.dtype in C_TYPES and alike and cuda.available() is None


def divergences(mine: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return f32 [M]: the divergence of each row, and log Σ exp of its logits in `mine` and in `theirs`."""
    M, V = mine.shape
    found = tuple(torch.empty(M, device=mine.device) for _ in range(3))
    load(*variant("kl_divergence", _vector(V, mine, theirs), mine.dtype))((M, 1, 1), _THREADS, mine, theirs, *found, V)
    return found[0], found[1], found[2]


def gradient(mine: Tensor, theirs: Tensor, log_mine: Tensor, log_theirs: Tensor, by: Tensor) -> Tensor:
    """Return the gradient of the sum of all divergences for `mine`, times `by`, an f32 tensor of one element."""
    M, V = mine.shape
    found = torch.empty_like(mine)
    vector = _vector(V, mine, theirs)
    grid = M, -(-V // (_THREADS * vector)), 1
    kernel = load(*variant("kl_divergence_backward", vector, mine.dtype))
    kernel(grid, _THREADS, mine, theirs, log_mine, log_theirs, by, found, V)
    return found


def _widest(dtype: torch.dtype) -> int:
    """Return the logits of a 16-byte load."""
    return 16 // dtype.itemsize


def _vector(V: int, *logits: Tensor) -> int:
    widest = _widest(logits[0].dtype)
    return widest if V % widest == 0 and all(t.data_ptr() % 16 == 0 for t in logits) else 1
