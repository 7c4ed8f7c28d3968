"""Rows split into groups: every solver works on a plain matrix of groups, whatever K and the group size are."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from crelle.errors import FormatError, SchemeError
from crelle.formats.bcq import groups_in

TINY = 2.0**-24  # the smallest positive f16: a group of zeros gets this scale, so that nothing divides by 0
_SLAB = 1 << 22  # weights that a solver works on at one time: bounds its memory, whatever the matrix
SLAB_CUDA = 1 << 26  # on a GPU, where few rows would leave most of it idle
_slab_cuda: ContextVar[int] = ContextVar("slab_cuda", default=SLAB_CUDA)


@contextmanager
def slabs_on_gpu(weights: int) -> Iterator[None]:
    """Let solvers on a GPU work on at most so many weights at one time while the block runs."""
    token = _slab_cuda.set(weights)
    try:
        yield
    finally:
        _slab_cuda.reset(token)


def row_slabs(N: int, K: int, device: torch.device, block: int = 1) -> Iterator[slice]:
    """Split N rows of K weights into slabs that bound a solver's memory, each of whole blocks but for the last."""
    step = max(1, (_slab_cuda.get() if device.type == "cuda" else _SLAB) // K // block) * block
    return (slice(n, min(n + step, N)) for n in range(0, N, step))


def to_groups(w: Tensor, group: int) -> tuple[Tensor, Tensor | None]:
    """Return w [N, K] as groups [N, C, G] and a mask of what is no padding (None: all; the last group may be short)."""
    N, K = w.shape
    C = groups_in(K, group)
    if C * group == K:
        return w.reshape(N, C, group), None
    padded = torch.nn.functional.pad(w, (0, C * group - K)).reshape(N, C, group)
    real = (torch.arange(C * group, device=w.device) < K).reshape(1, C, group)
    return padded, real


def from_groups(g: Tensor, K: int) -> Tensor:
    """Return groups [N, C, G] as rows [N, K]."""
    return g.flatten(1)[:, :K]


def require_finite(w: Tensor) -> Tensor:
    """Return w as f32; raises FormatError on NaN or infinity."""
    w = w.to(torch.float32)
    if not torch.isfinite(w).all():
        raise FormatError("the weight contains NaN or infinity")
    return w


def importances(cost: Tensor, group: int) -> Tensor:
    """Return the importance of each column of a group [C, G], 1 on average; positive, padding 0."""
    h, real = to_groups(cost[None].float(), group)  # [1, C, G]
    mask = torch.ones_like(h) if real is None else real.float()
    mean = (h * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    relative = torch.where(mean > 0, h / mean.clamp(min=1e-38), 1.0)
    return (relative.clamp(min=1e-6) * mask)[0]


def storable(t: Tensor) -> Tensor:
    """Return scales as f16; raises SchemeError on values beyond its range."""
    stored = t.to(torch.float16)
    if not torch.isfinite(stored).all():
        raise SchemeError(f"a scale of {t.abs().max().item():.3g} is outside the range of f16")
    return stored
