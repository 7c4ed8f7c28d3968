"""Uniform grids chosen by the layer's output error: GPTQ (arXiv 2210.17323), then refinement.

    1. scales  per group the clipped range with the least error weighted by the columns' importance, which is their
               cost in step 2; a free grid also alternates between codes and least squares
    2. codes   one pass with error feedback
    3. refine  least squares for all scales of a row; then rounds of coordinate descent over the codes, and the scales
               again. A second round gains 1 %.
Scales are rounded to f16 before codes are chosen for them.
"""

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.affine import AffineTensor
from crelle.formats.base import Spec
from crelle.formats.bcq import UniformTensor
from crelle.quantizers.base import Group
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.schemes.hessian_base import HessianConfig
from crelle.quantizers.solvers.alternating_ls import SortedGroups, alternate, better, squared_error
from crelle.quantizers.solvers.gptq_solver import (
    DAMP,
    Fit,
    LDLFactor,
    Levels,
    descend,
    feedback,
    feedback_by_group,
    improve,
    solve,
)
from crelle.quantizers.solvers.group_solver import expanded, group_solver
from crelle.quantizers.solvers.grouping import TINY, importances, storable, to_groups

_SHRINK = [1.0 - 0.65 * i / 7 for i in range(8)]  # 1 … 0.35
_ROUNDS = 10  # of codes and least squares for a free grid


@dataclass(frozen=True, slots=True)
class GPTQ(HessianConfig):
    """Error feedback on a uniform grid, with an integer zero point or a free lowest level."""

    scheme: ClassVar[str] = "gptq"
    searchable: ClassVar[bool] = True
    bits: int = 3
    group: Group = 128
    free: bool = False  # affine grid: a group's lowest level is any value, not a multiple of its scale
    symmetric: bool = False
    act_order: bool = True
    static: bool = True  # scales fixed before the feedback; otherwise when it reaches their group
    damp: float = DAMP
    refine: int = 1
    target: bool = True
    guidance: float = 0.0

    def __post_init__(self) -> None:
        HessianConfig.__post_init__(self)
        if self.act_order and not self.static:
            raise SchemeError(
                "static=false needs act_order=false: with act_order=true the solver does not visit the inputs group by "
                "group"
            )
        if self.symmetric and self.free:
            raise SchemeError("a symmetric grid has no free lowest level; use symmetric=true or free=true, not both")
        if self.symmetric and self.bits == 1:
            raise SchemeError("a symmetric grid of 1 bit has no level above zero; use hbcq:bits=1,bias=false")

    def fit(self, weight: Tensor, stats: Stats | None = None) -> UniformTensor | AffineTensor:
        """Return the weight [N, K] on its grid."""
        codes, levels = self.solution(weight, stats)
        scales = storable(levels.scales)
        if levels.shift is None:
            return AffineTensor.from_codes(codes, self.bits, scales[..., 0], scales[..., 1], levels.group)
        zero = None if self.symmetric else levels.shift[..., 0].to(torch.uint8)
        return UniformTensor.from_codes(codes, self.bits, scales[..., 0], zero, levels.group)

    def format_settings(self) -> Spec:
        if self.free:
            return {"format": AffineTensor.format}
        return {"format": UniformTensor.format, "symmetric": self.symmetric}

    def fit_rows(self, target: Tensor, hessian: Tensor, by: LDLFactor) -> Fit:
        group = self.group_for(target.shape[1])
        if self.static:
            fit = feedback(target, by, self.levels(target, by.cost, group))
        else:
            fit = feedback_by_group(target, by, group, lambda w, k: self.levels(w, by.cost[k], group))
        return improve(target, hessian, by.damped, fit, [solve, descend] * self.refine + [solve] * (self.refine > 0))

    def levels(self, w: Tensor, cost: Tensor, group: int) -> Levels:
        """Return the grids with the least error on the weights [N, K], column k weighted by cost[k]."""
        g, _ = to_groups(w, group)
        N, C, _ = g.shape
        found = self.grids(g.flatten(0, 1), importances(cost, group))
        book = torch.arange(2.0**self.bits, device=w.device)[:, None]
        if self.free:
            scales = torch.stack(found, -1).reshape(N, C, 2)
            return Levels(torch.nn.functional.pad(book, (0, 1), value=1.0), scales, group)
        scale, zero = found
        return Levels(book, scale.reshape(N, C, 1), group, zero.reshape(N, C, 1))

    def grids(self, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and zero point (free: lowest level) [R] of groups [R, G] of rows with importances [C, G]."""
        if (solver := group_solver(g)) is None:
            s = SortedGroups.of(g, expanded(h, len(g)))
            return self._free(s) if self.free else self.grid(s)
        shrinks = self._shrinks()
        if self.free:
            scale, low = solver.affine_grids(g, h, self.bits, shrinks, _ROUNDS)
            return scale, storable(low).float()
        aside = max(self._aside())
        scale, zero = solver.uniform_grids(g, h, self.bits, shrinks, symmetric=self.symmetric, aside=aside)
        return storable(scale).float(), zero

    def grid(self, s: SortedGroups) -> tuple[Tensor, Tensor]:
        """Return scale and zero point [R] of the uniform grid with the least error, for each group."""
        book = torch.arange(2.0**self.bits, device=s.w.device)[:, None]
        low, high = s.range()
        low, high = low.clamp(max=0), high.clamp(min=0)
        if self.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        top = 2**self.bits - 1
        best = torch.full_like(s.squares, torch.inf)
        scale, zero = torch.full_like(low, TINY), torch.zeros_like(low)
        for shrink, step in product(self._shrinks(), self._aside()):
            a = storable(((high - low) * (shrink / top)).clamp(min=TINY)).float()
            middle = torch.full_like(a, 2.0 ** (self.bits - 1))
            o = middle if self.symmetric else ((-low * shrink / a).round() + step).clamp(0, top)
            error = squared_error(s, a[:, None], -a * o, book)
            won = error < best
            scale, zero, best = torch.where(won, a, scale), torch.where(won, o, zero), torch.where(won, error, best)
        return scale, zero

    def _shrinks(self) -> list[float]:
        """Return the clipping factors to try; with many levels strong clipping never pays."""
        return _SHRINK if self.bits <= 4 else _SHRINK[:3]

    def _aside(self) -> tuple[int, ...]:
        """Return how far off the zero point to try others: a shifted one clips one end more."""
        return (0,) if self.symmetric or self.bits > 4 else (0, -1, 1)

    def _free(self, s: SortedGroups) -> tuple[Tensor, Tensor]:
        book = torch.arange(2.0**self.bits, device=s.w.device)[:, None]
        low, high = s.range()
        top = 2**self.bits - 1
        middle, width = (low + high) / 2, ((high - low) / top).clamp(min=TINY)
        starts = [(width[:, None] * f, middle - width * f * (top / 2)) for f in self._shrinks()]
        start = better(s, starts, book)
        scales, low = alternate(s, *start, book, _ROUNDS, bias=True)
        low = torch.where(scales[:, 0] < 0, low + top * scales[:, 0], low)  # the same levels, the lowest first
        scales, low = better(s, [start, (scales.abs().clamp(min=TINY), low)], book)
        return scales[:, 0], storable(low).float()
