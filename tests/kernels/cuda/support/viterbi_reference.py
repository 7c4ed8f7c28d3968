"""The search of viterbi.h in torch, with its integers: for machines without the C++ core, too."""

import torch
from torch import Tensor

from crelle.formats.trellis import STATES


def rings(values: Tensor, roots: Tensor, x: Tensor, shift: int) -> Tensor:
    """Return the states [S, n] of the rings that C++ finds for x int16 [S, 128]; see kernels/cpu/solver.py."""
    V, count = values.shape[1], len(roots)
    n = 128 // V
    tables = [(values @ r).round().clamp(-32767, 32767).int() for r in roots]
    steps = x.int().view(len(x), n, V)
    half = n // 2
    around = _path(tables, steps.roll(half, 1), shift, half % count, None)
    return _path(tables, steps, shift, 0, around[:, half] % (STATES >> shift))


def _path(tables: list[Tensor], steps: Tensor, shift: int, first: int, ends: Tensor | None) -> Tensor:
    S, n, V = steps.shape
    J, low = 1 << shift, STATES >> shift
    cost = torch.zeros(S, low, dtype=torch.int32, device=steps.device)
    if ends is not None:
        cost.fill_(65535).scatter_(1, ends[:, None], 0)
    before = []
    for t in range(n):
        table, far = tables[(t + first) % len(tables)], torch.zeros(S, STATES, dtype=torch.int32, device=steps.device)
        for v in range(V):
            d = (steps[:, t, v, None] - table[:, v]) * (2 if shift >= 3 * V else 1)
            d = d.clamp(-32767, 32767)
            far += (d * d + 0x4000) >> 15
        far = far.clamp(max=32767)
        far.view(S, J, low).add_(cost.unsqueeze(1))
        far = far.clamp(max=65535).view(S, low, J)
        cost = far.min(-1).values
        before.append(_first_minimum(far))
        cost -= cost.min(1, keepdim=True).values
    group = _first_minimum(cost) if ends is None else ends
    states = torch.empty(S, n, dtype=torch.int64, device=steps.device)
    for t in reversed(range(n)):
        states[:, t] = (group << shift) | before[t].gather(1, group[:, None])[:, 0]
        group = states[:, t] & (low - 1)
    return states


def _first_minimum(of: Tensor) -> Tensor:
    """Return the place of the least, of several the first, along the last axis."""
    size = of.shape[-1]
    place = torch.arange(size, device=of.device)
    return torch.where(of == of.min(-1, keepdim=True).values, place, size).min(-1).values
