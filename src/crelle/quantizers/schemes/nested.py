"""One set of codes for several precisions: the first p planes are the p-bit model (crelle.formats.affine.NestedTensor).

    w_p = low_p + scale_p (q >> (P - p))        p = lowest … P        minimise  Σ_p balance^p tr((T - Ŵ_p) H (T - Ŵ_p)ᵀ)

Fitting the coarsest planes first and freezing them would cost the finest precision: at 2 bits the error feedback moves
weights by whole 2-bit steps, which finer bits cannot undo (the 4-bit model then has four times the error of one fitted
alone). So every code is chosen for all precisions at once:

    1. scales  the finest grid as `gptq:free=true` starts, coarser ones in it; rounds of nearest codes and least squares
    2. codes   one pass with error feedback; each precision compensates its own errors, the code is common
    3. refine  rounds of least squares for the scales of each precision and coordinate descent over the common codes
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.affine import NestedTensor
from crelle.formats.base import Spec
from crelle.quantizers.base import Group
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.schemes.gptq import GPTQ
from crelle.quantizers.schemes.hessian_base import HessianConfig
from crelle.quantizers.solvers.gptq_solver import DAMP, Fit, LDLFactor, Levels, improve_from, mixing, row_errors, solve
from crelle.quantizers.solvers.grouping import importances, require_finite, row_slabs, storable, to_groups
from crelle.quantizers.solvers.nested_sweep import NestedGrids, nearest_nested, sweep_nested

_ROUNDS = 2  # of nearest codes and least squares before the error feedback
_ROUNDS_ALONE = 8  # without calibration data


@dataclass(frozen=True, slots=True)
class Nested(HessianConfig):
    """Bit-planes that serve several precisions."""

    scheme: ClassVar[str] = "bcq-nested"
    bits: int = 4
    group: Group = 128
    lowest: int = 2  # the coarsest precision on offer
    balance: float = 2.0  # how much more an error counts at one bit more: 1 favours the coarsest, 4 the finest
    data: bool = True  # by the layer's output error; otherwise by the weights alone
    act_order: bool = True
    damp: float = DAMP
    refine: int = 2
    target: bool = True
    guidance: float = 0.0

    def __post_init__(self) -> None:
        HessianConfig.__post_init__(self)
        if not 1 <= self.lowest <= self.bits:
            raise SchemeError(f"lowest must be 1 to bits = {self.bits}, got {self.lowest}")
        if not 0.01 <= self.balance <= 100:
            raise SchemeError(f"balance must be 0.01 to 100, got {self.balance}")

    @property
    def calibrated(self) -> bool:  # type: ignore[override]
        return self.data

    @property
    def precisions(self) -> tuple[int, ...]:
        return tuple(range(self.lowest, self.bits + 1))

    def fit(self, weight: Tensor, stats: Stats | None = None) -> NestedTensor:
        """Return the weight [N, K] as planes with a grid for each precision."""
        N, K = weight.shape
        slabs = row_slabs(N, K * len(self.precisions), weight.device)
        if self.data:
            target, hessian, by = self.wanted(weight, stats)
            nests = [self._by_output(target[rows], hessian, by) for rows in slabs]
        else:
            weight = require_finite(weight)
            nests = [self._start(weight[rows], torch.ones(K, device=weight.device), _ROUNDS_ALONE) for rows in slabs]
        scales = torch.stack([torch.cat(s) for s in zip(*(n.scales() for n in nests), strict=True)])  # [P, N, C, 2]
        codes, scales = torch.cat([n.codes for n in nests]), storable(scales)
        return NestedTensor.from_codes(codes, self.precisions, scales[..., 0], scales[..., 1], self.group_for(K))

    def format_settings(self) -> Spec:
        return {"format": NestedTensor.format, "precisions": list(self.precisions)}

    def _by_output(self, target: Tensor, hessian: Tensor, by: LDLFactor) -> "_Nest":
        nest = self._start(target, by.cost, _ROUNDS)
        codes = torch.empty(target.shape[::-1], dtype=torch.uint8, device=target.device)
        codes[by.order] = sweep_nested(target.T[by.order], None, by.mix, self._grids(nest), by.order.tolist())
        nest = nest._replace(codes=codes.T.contiguous())
        if not self.refine:
            return nest
        errors = _row_errors(nest, target, hessian)
        for _ in range(self.refine):
            nest, errors = _solved(nest, target, hessian, by, errors)
            nest, errors = self._descended(nest, target, hessian, by, errors)
        return _solved(nest, target, hessian, by, errors)[0]

    def _start(self, w: Tensor, cost: Tensor, rounds: int) -> "_Nest":
        """Return initial grids and codes for the weights [N, K], column k weighted by cost[k]."""
        group = self.group_for(w.shape[1])
        finest = GPTQ(bits=self.bits, group=group, free=True).levels(w, cost, group)
        scale, low = finest.scales.unbind(-1)
        grids = []
        for p in self.precisions:
            merged = 2 ** (self.bits - p)  # levels of the finest grid that become one: it lies in their middle
            scales = torch.stack([scale * merged, low + scale * ((merged - 1) / 2)], -1)
            grids.append(Levels(finest.book[: 2**p], scales.half().float(), group))
        h = importances(cost, group)
        nest = self._nearest(_Nest(torch.empty(0), tuple(grids)), w)
        for _ in range(rounds):
            levels = tuple(_least_squares(w, nest.at(i), h) for i in range(len(grids)))
            nest = self._nearest(_Nest(nest.codes, levels), w)
        return nest

    def _nearest(self, nest: "_Nest", w: Tensor) -> "_Nest":
        """Return the best common codes without error propagation."""
        return nest._replace(codes=nearest_nested(w, self._grids(nest)))

    def _descended(
        self, nest: "_Nest", target: Tensor, hessian: Tensor, by: LDLFactor, errors: Tensor
    ) -> tuple["_Nest", Tensor]:
        """Coordinate descent over the common codes, kept in the rows where the sum of their errors [P, N] falls."""
        before = torch.cat([target - f.levels.decode(f.codes) for f in nest.fits()]).T  # [K, P N]
        codes = sweep_nested(target.T, before, mixing(by.damped), self._grids(nest), range(target.shape[1]))
        found = nest._replace(codes=codes.T.contiguous())
        now, weights = _row_errors(found, target, hessian), self._weights(target)[:, None]
        won = (weights * now).sum(0) < (weights * errors).sum(0)
        kept = nest._replace(codes=torch.where(won[:, None], found.codes, nest.codes))
        return kept, torch.where(won, now, errors)

    def _grids(self, nest: "_Nest") -> NestedGrids:
        return NestedGrids(torch.stack(nest.scales()), nest.group, self.bits, self._weights(nest.scales()[0]))

    def _weights(self, like: Tensor) -> Tensor:
        return torch.tensor([self.balance ** (p - self.bits) for p in self.precisions], device=like.device)


class _Nest(NamedTuple):
    """The finest codes, and the levels of each precision, the coarsest first."""

    codes: Tensor  # uint8 [N, K]
    levels: tuple[Levels, ...]

    @property
    def group(self) -> int:
        return self.levels[0].group

    def at(self, i: int) -> Fit:
        return Fit(self.codes // self._merged(i), self.levels[i])

    def fits(self) -> list[Fit]:
        return [self.at(i) for i in range(len(self.levels))]

    def scales(self) -> list[Tensor]:
        return [levels.scales for levels in self.levels]

    def _merged(self, i: int) -> int:
        return len(self.levels[-1].book) // len(self.levels[i].book)


def _row_errors(nest: _Nest, target: Tensor, hessian: Tensor) -> Tensor:
    """Return the output error of each row at each precision [P, N]."""
    return torch.stack([row_errors(target, hessian, f) for f in nest.fits()])


def _solved(nest: _Nest, target: Tensor, hessian: Tensor, by: LDLFactor, errors: Tensor) -> tuple[_Nest, Tensor]:
    """Return the same codes with the best scales of each precision, and the rows' errors [P, N]."""
    found = [improve_from(target, hessian, by.damped, f, e, [solve]) for f, e in zip(nest.fits(), errors, strict=True)]
    return nest._replace(levels=tuple(fit.levels for fit, _ in found)), torch.stack([e for _, e in found])


def _least_squares(w: Tensor, fit: Fit, h: Tensor) -> Levels:
    """Return the grids by least squares with importances h [C, G]; unchanged where the codes do not determine them."""
    codes, levels = fit
    (t, _), (q, _) = to_groups(w, levels.group), to_groups(codes.float(), levels.group)
    mass = h.sum(-1)
    t_mean, q_mean = (h * t).sum(-1) / mass, (h * q).sum(-1) / mass
    q = q - q_mean[..., None]
    variance, both = (h * q * q).sum(-1), (h * q * (t - t_mean[..., None])).sum(-1)
    scale = both / variance.clamp(min=1e-12 * mass)
    scale = torch.where((variance > 1e-6 * mass) & (scale > 0), scale, levels.scales[..., 0])
    scales = torch.stack([scale, t_mean - scale * q_mean], -1).half().float()
    return replace(levels, scales=scales)
