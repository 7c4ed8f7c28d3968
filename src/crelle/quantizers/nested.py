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
from crelle.quantizers.gptq import GPTQ
from crelle.quantizers.gptq_solver import DAMP, Fit, LDLFactor, Levels, improve, mixing, row_errors, solve
from crelle.quantizers.grouping import from_groups, importances, require_finite, row_slabs, storable, to_groups
from crelle.quantizers.hessian_base import HessianConfig
from crelle.quantizers.stats import Stats
from crelle.quantizers.sweep import sweep

_ROUNDS = 2  # of nearest codes and least squares before the error feedback
_ROUNDS_ALONE = 8  # without calibration data
_COSTS = 1 << 16  # of levels for weights that are compared at one time: a small matrix takes one step, not one a column


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
        codes[by.order] = self._pass(nest, target[:, by.order], None, by.mix, by.order.tolist())
        nest = nest._replace(codes=codes.T.contiguous())
        for _ in range(self.refine):
            nest = _solved(nest, target, hessian, by)
            nest = self._descended(nest, target, hessian, by)
        return _solved(nest, target, hessian, by) if self.refine else nest

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
        grouped, _ = to_groups(w, nest.group)  # [N, C, G]
        N, C, G = grouped.shape
        values = nest.values().reshape(len(self.precisions), N * C, -1)
        choice = _Choice.of(values, self._weights(w)).of_columns()
        at_once = max(1, _COSTS // choice.bend.numel())
        want = grouped.reshape(N * C, G).T.contiguous().expand(len(values), G, N * C)
        codes = torch.cat([choice.code(want[:, g : g + at_once]) for g in range(0, G, at_once)])
        return nest._replace(codes=from_groups(codes.T.reshape(N, C, G), w.shape[1]))

    def _descended(self, nest: "_Nest", target: Tensor, hessian: Tensor, by: LDLFactor) -> "_Nest":
        """Coordinate descent over the common codes, kept in the rows where the error falls."""
        errors = torch.cat([target - f.levels.decode(f.codes) for f in nest.fits()]).T.contiguous()
        codes = self._pass(nest, target, errors, mixing(by.damped), list(range(target.shape[1]))).T
        found = nest._replace(codes=codes.contiguous())
        won = self._error(found, target, hessian) < self._error(nest, target, hessian)
        return nest._replace(codes=torch.where(won[:, None], found.codes, nest.codes))

    def _pass(self, nest: "_Nest", target: Tensor, errors: Tensor | None, mix: Tensor, inputs: list[int]) -> Tensor:
        """Sweep over the columns, the rows of all precisions side by side; returns the common codes [K, N]."""
        weights = self._weights(target)
        choices = [_Choice.of(v, weights) for v in nest.values().unbind(2)]
        rows = target.T.repeat(1, len(self.precisions))  # [K, P N]
        return sweep(rows, errors, mix, lambda i, _: choices[inputs[i] // nest.group])[:, : len(target)]

    def _error(self, nest: "_Nest", target: Tensor, hessian: Tensor) -> Tensor:
        errors = torch.stack([row_errors(target, hessian, f) for f in nest.fits()])  # [P, N]
        return (self._weights(target)[:, None] * errors).sum(0)

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

    def values(self) -> Tensor:
        """Return what each of the finest codes stands for at each precision [P, N, C, L]."""
        return torch.stack([lv.values().repeat_interleave(self._merged(i), -1) for i, lv in enumerate(self.levels)])

    def _merged(self, i: int) -> int:
        return len(self.levels[-1].book) // len(self.levels[i].book)


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


def _solved(nest: _Nest, target: Tensor, hessian: Tensor, by: LDLFactor) -> _Nest:
    """Return the same codes with the best scales of each precision."""
    return nest._replace(levels=tuple(improve(target, hessian, by.damped, f, [solve]).levels for f in nest.fits()))


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
