"""The common codes of several precisions of a weight: nearest, and passes over its columns that propagate errors.

    value_p(q) = low_p + scale_p (q >> (bits - p))        the code q minimises  Σ_p weight_p (value_p(q) - want_p)²

As crelle.quantizers.solvers.sweep, but each precision of a row has errors of its own. On a CPU in C++ (nested_sweep.h),
on a GPU in CUDA (crelle.kernels.cuda.solver.nested_sweep), in torch as the reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from crelle.kernels import cuda
from crelle.kernels.cpu import solver
from crelle.kernels.cuda.solver import nested_sweep as kernels
from crelle.quantizers.solvers.grouping import from_groups, to_groups
from crelle.quantizers.solvers.sweep import sweep

_COSTS = 1 << 16  # of levels for weights that are compared at one time: a small matrix takes one step, not one a column


@dataclass(frozen=True, slots=True, eq=False)
class NestedGrids:
    """The levels of all groups at P precisions, the coarsest first."""

    scales: Tensor  # f32 [P, N, C, 2]: scale and low
    group: int
    bits: int  # of the finest precision
    weights: Tensor  # f32 [P], of the errors

    @property
    def coarse(self) -> int:
        """How many levels the coarsest precision has."""
        return int(2 ** (self.bits + 1 - len(self.scales)))

    def by_column(self) -> Tensor:
        """Return scale and low as kernels read them, [C, P, 2, N]."""
        return self.scales.permute(2, 0, 3, 1).contiguous()

    def values(self) -> Tensor:
        """Return what each of the finest codes stands for at each precision [P, N, C, L]."""
        codes = torch.arange(2**self.bits, device=self.scales.device)
        shifts = torch.arange(len(self.scales) - 1, -1, -1, device=self.scales.device)
        steps = (codes >> shifts[:, None]).float()[:, None, None]  # [P, 1, 1, L]
        scale, low = self.scales[..., None].unbind(3)  # [P, N, C, 1]
        return torch.addcmul(low, scale, steps)


def nearest_nested(w: Tensor, grids: NestedGrids) -> Tensor:
    """Return the best common codes uint8 [N, K] of weights [N, K] without error propagation."""
    if solver.usable(w):
        group = torch.arange(w.shape[1]) // grids.group
        return solver.nested_sweep(
            w.T, None, None, grids.by_column(), grids.weights, grids.coarse, group
        ).T.contiguous()
    if w.device.type == "cuda" and cuda.available() is None:
        found = kernels.nearest_nested(w.T, grids.by_column(), grids.group, grids.weights, grids.coarse)
        return found.T.contiguous()
    grouped, _ = to_groups(w, grids.group)  # [N, C, G]
    N, C, G = grouped.shape
    values = grids.values().reshape(len(grids.scales), N * C, -1)
    choice = _Choice.of(values, grids.weights).of_columns()
    at_once = max(1, _COSTS // choice.bend.numel())
    want = grouped.reshape(N * C, G).T.contiguous().expand(len(values), G, N * C)
    codes = torch.cat([choice.code(want[:, g : g + at_once]) for g in range(0, G, at_once)])
    return from_groups(codes.T.reshape(N, C, G), w.shape[1])


def sweep_nested(
    target: Tensor, errors: Tensor | None, mix: Tensor, grids: NestedGrids, inputs: Sequence[int]
) -> Tensor:
    """Round the columns of target [K, N] in order to common codes, uint8 [K, N]; the i-th column is input inputs[i].

    errors [K, P N]: of all columns and precisions before the pass; None: none, and mix is upper triangular.
    """
    group = torch.tensor(inputs, dtype=torch.int32) // grids.group
    if solver.usable(target):
        return solver.nested_sweep(target, errors, mix, grids.by_column(), grids.weights, grids.coarse, group)
    if target.device.type == "cuda" and cuda.available() is None:
        there = group.to(target.device)
        return kernels.sweep_nested(target, errors, mix, grids.by_column(), there, grids.weights, grids.coarse)
    choices = [_Choice.of(v, grids.weights) for v in grids.values().unbind(2)]
    of = group.tolist()
    rows = target.repeat(1, len(grids.scales))  # [K, P N]
    before = None if errors is None else errors.contiguous()
    return sweep(rows, before, mix, lambda i, _: choices[of[i]])[:, : target.shape[1]]


class _Choice(NamedTuple):
    """A group's levels at P precisions: the code is one for all of them."""

    values: Tensor  # f32 [P, N, L]
    middle: Tensor  # f32 [N], subtracted before squaring
    pull: Tensor  # f32 [P, L, N]  Σ_p weight_p (v_p - want_p)² = bend - Σ_p pull_p want_p + what no code changes
    bend: Tensor  # f32 [L, N]

    @classmethod
    def of(cls, values: Tensor, weights: Tensor) -> "_Choice":
        middle = values[-1].mean(-1)
        v, weight = (values - middle[:, None]).transpose(1, 2).contiguous(), weights[:, None, None]
        return cls(values, middle, 2 * weight * v, (weight * v * v).sum(0))

    def of_columns(self) -> "_Choice":
        """Return the same for several columns of the group at once: want is then [P, g, N], the code [g, N]."""
        return self._replace(pull=self.pull[:, :, None], bend=self.bend[:, None])

    def code(self, want: Tensor) -> Tensor:
        """Return the best code, uint8 [N], where want [P, N] is wanted."""
        pulls, wants = self.pull.unbind(), (want - self.middle).unbind()
        cost = torch.addcmul(self.bend, pulls[0], wants[0], value=-1)
        for pull, w in zip(pulls[1:], wants[1:], strict=True):
            cost.addcmul_(pull, w, value=-1)
        return _argmin(cost)

    def nearest(self, want: Tensor) -> tuple[Tensor, Tensor]:
        P, N, _ = self.values.shape
        code = self.code(want.reshape(P, N)).expand(P, N)
        return self.values.gather(2, code[..., None].long()).flatten(), code.reshape(-1)


def _argmin(cost: Tensor) -> Tensor:
    """Return where [L, ...] is least along L, a power of two: pairwise, many times faster than torch's argmin.

    The bits of the code are collected as "the lower half is the better one", so as L - 1 less the code.
    """
    levels = cost.shape[0]
    half = levels // 2
    below = torch.zeros(0)
    while half > 0:
        low, high = cost[:half], cost[half:]
        first = (low <= high).view(torch.uint8)
        if 2 * half == levels:
            below = first * half
        else:
            a, b = below[:half], below[half:]
            chosen = ((a ^ b) * first).bitwise_xor_(b)  # a where first, else b: torch.where is slow
            below = chosen.add_(first, alpha=half)
        cost = torch.minimum(low, high)
        half //= 2
    return (levels - 1) - below[0]
