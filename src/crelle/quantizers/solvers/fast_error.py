"""A fast estimate of the error of some rows at many settings at once; nothing is encoded.

Grids by a search of the range and two regressions, codes by one pass of error feedback
(crelle.quantizers.solvers.gptq_solver) in which the settings are additional rows. The error comes within a fifth of
GPTQ's on a free grid without refinement.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from crelle.formats.base import Spec
from crelle.kernels import cuda
from crelle.kernels.cpu import solver
from crelle.kernels.cuda.solver.sweep import sweep_uniform
from crelle.quantizers.base import BitConfig, Group
from crelle.quantizers.solvers.gptq_solver import LDLFactor
from crelle.quantizers.solvers.group_solver import group_solver
from crelle.quantizers.solvers.grouping import TINY, importances, to_groups

_SHRINK = [1.0 - 0.1 * i for i in range(7)]  # 1 … 0.4
_REGRESSIONS = 2
_BLOCK = 128  # columns per block: errors reach later blocks by one matrix product


class Candidate(Protocol):
    """A config that a search may choose for a matrix as it is, beside bits and groups of its recipe."""

    @property
    def bits(self) -> float: ...

    @property
    def group(self) -> Group: ...

    def storage(self, shape: tuple[int, int]) -> Spec: ...

    def row_errors(self, weight: Tensor, rows: Tensor, by: LDLFactor) -> Tensor:
        """Return a fast estimate of the error W - Ŵ [R, K] of some rows [R] of a matrix [N, K]."""
        ...


Setting = BitConfig | Candidate


@torch.no_grad()
def fast_errors(target: Tensor, by: LDLFactor, settings: Sequence[BitConfig]) -> Tensor:
    """Return the error W - Ŵ [settings, R, K] of rows [R, K]: error feedback on affine grids, without refinement."""
    R, K = target.shape
    kinds = [(s.bits, s.group_for(K)) for s in settings]  # in a short row several settings are one
    made = {kind: _grid(target, by.cost, *kind) for kind in dict.fromkeys(kinds)}
    grids = [made[kind] for kind in kinds]
    scale, low = (torch.cat([pair[j] for pair in grids])[:, by.order].T.contiguous() for j in (0, 1))  # [K, S R]
    top = torch.tensor([2.0**s.bits - 1 for s in settings], device=target.device).repeat_interleave(R)
    rows = target[:, by.order].T.repeat(1, len(settings))
    run = sweep_uniform if target.device.type == "cuda" and cuda.available() is None else _feedback
    left = run(rows, by.mix, scale, low, top)
    change = torch.empty_like(left)
    change[by.order] = left
    return change.T.reshape(len(settings), R, K)


def _feedback(target: Tensor, mix: Tensor, scale: Tensor, low: Tensor, top: Tensor) -> Tensor:
    """Round columns in order with error feedback (GPTQ); return the errors [K, rows]. In CUDA: sweep.cu."""
    if solver.usable(target):
        return solver.affine_sweep(target, mix, scale, low, top)
    want, left = target.clone(), torch.empty_like(target)
    for begin in range(0, len(target), _BLOCK):
        end = min(begin + _BLOCK, len(target))
        for i in range(begin, end):
            code = ((want[i] - low[i]) / scale[i]).round_().clamp_(min=0)
            code = torch.minimum(code, top, out=code)
            torch.sub(target[i], torch.addcmul(low[i], scale[i], code), out=left[i])
            want[i + 1 : end].addr_(mix[i, i + 1 : end], left[i])
        want[end:].addmm_(mix[begin:end, end:].T, left[begin:end])
    return left


def _grid(w: Tensor, cost: Tensor, bits: int, G: int) -> tuple[Tensor, Tensor]:
    """Return scale and lowest level of each weight's group, both [R, K]: clip the range, then regress."""
    K, top = w.shape[1], 2.0**bits - 1
    g, real = to_groups(w, G)  # [R, C, G]
    h = importances(cost, G)
    group_of = torch.arange(K, device=w.device) // G
    if groups := group_solver(g):
        found = groups.affine_grids(g.flatten(0, 1), h, bits, _SHRINK, _REGRESSIONS)
        scale, low = (t.reshape(g.shape[:2])[:, group_of] for t in found)
        return scale, low
    padded = torch.zeros_like(g, dtype=torch.bool) if real is None else ~real
    lowest, highest = g.masked_fill(padded, torch.inf).amin(-1), g.masked_fill(padded, -torch.inf).amax(-1)
    middle, width = (lowest + highest) / 2, ((highest - lowest) / top).clamp(min=TINY)
    best = torch.full_like(middle, torch.inf)
    scale, low = width, lowest

    def keep_better(a: Tensor, b: Tensor) -> None:
        nonlocal best, scale, low
        error = (_codes(g, a, b, top).mul_(a[..., None]).add_(b[..., None]).sub_(g).square_() * h).sum(-1)
        won = error < best
        best, scale, low = torch.where(won, error, best), torch.where(won, a, scale), torch.where(won, b, low)

    for f in _SHRINK:
        keep_better(width * f, middle - width * f * (top / 2))
    mass = h.sum(-1)
    for _ in range(_REGRESSIONS):
        q = _codes(g, scale, low, top)
        mean_q, mean_w = (q * h).sum(-1) / mass, (g * h).sum(-1) / mass
        spread_q = q - mean_q[..., None]
        slope = (spread_q * g * h).sum(-1) / (spread_q.square() * h).sum(-1).clamp(min=1e-12)
        a = torch.where(slope > 0, slope, scale)
        keep_better(a, mean_w - a * mean_q)
    return scale[:, group_of], low[:, group_of]


def _codes(g: Tensor, scale: Tensor, low: Tensor, top: float) -> Tensor:
    return g.sub(low[..., None]).div_(scale[..., None]).round_().clamp_(0, top)
