"""Binary coding: choose planes b_p in {-1, +1} and scales alpha_p, z that minimise sum (w - z - sum_p alpha_p b_p)^2.

Greedy (rounds=0): z = mean(w); then plane by plane, b = sign(residual), alpha = mean |residual|.
Alternating: from a start, codes and scales in turn (crelle.quantizers.solvers.alternating_ls), which never raises the
error. Three initializations: greedy, the uniform grid, and the best solution of one plane fewer with a greedy plane
more. Each group keeps the best initial or final solution after its scales are rounded to f16, so the stored error is
never above greedy's and never rises with a plane.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.base import Spec
from crelle.formats.bcq import BCQTensor
from crelle.quantizers.base import Group, GroupedConfig
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.solvers.alternating_ls import SortedGroups, alternate_from, better, levels_of
from crelle.quantizers.solvers.group_solver import expanded, group_solver
from crelle.quantizers.solvers.grouping import from_groups, require_finite, row_slabs, storable, to_groups


@dataclass(frozen=True, slots=True)
class BCQ(GroupedConfig):
    """Binary-coding quantization of the weights alone, no data."""

    scheme: ClassVar[str] = "bcq"
    searchable: ClassVar[bool] = True
    bits: int = 3
    group: Group = 128
    rounds: int = 20  # 0 = greedy; each round solves alpha and z, then the codes
    bias: bool = True  # whether there is a z per group

    def __post_init__(self) -> None:
        GroupedConfig.__post_init__(self)
        if self.rounds < 0:
            raise SchemeError(f"rounds must be at least 0 (greedy), got {self.rounds}")

    def fit(self, weight: Tensor, stats: Stats | None = None) -> BCQTensor:
        """Return the weight [N, K] as P planes with their scales."""
        weight = require_finite(weight)
        N, K = weight.shape
        group = self.group_for(K)
        parts = [self._fit_rows(weight[rows], group) for rows in row_slabs(N, K, weight.device)]
        codes, alpha, z = (torch.cat(t) for t in zip(*parts, strict=True))  # [N, K], [N, C, P], [N, C]
        return BCQTensor.from_codes(codes, alpha.movedim(-1, 0), z if self.bias else None, group)

    def format_settings(self) -> Spec:
        return {"format": BCQTensor.format, "bias": self.bias}

    def _fit_rows(self, w: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
        g, real = to_groups(w, group)
        shape = g.shape  # [N, C, G]
        h = None if real is None else real[0].float()
        alpha, z = binary_scales(g.flatten(0, 1), h, self.bits, self.rounds, self.bias)
        stored_alpha, stored_z = storable(alpha), storable(z)
        codes = _nearest(g.flatten(0, 1), stored_alpha.float(), stored_z.float())
        codes = from_groups(codes.reshape(shape), w.shape[1])
        return codes, stored_alpha.reshape(*shape[:2], -1), stored_z.reshape(shape[:2])


def binary_scales(g: Tensor, h: Tensor | None, P: int, rounds: int, bias: bool) -> tuple[Tensor, Tensor]:
    """Return alpha [R, P] and z [R] for groups [R, G] whose weights have importance h (None: all 1; padding has 0).

    h is [C, G]: that of group r is row r modulo C. In canonical order: alphas positive and descending, so plane 0 is
    the most significant.
    """
    if solver := group_solver(g):
        alpha, z = solver.binary_scales(g, h, P, rounds, bias)
    else:
        alpha, z = _binary_scales(g, None if h is None else expanded(h, len(g)), P, rounds, bias)
    return alpha.abs().sort(-1, descending=True).values, z


def _binary_scales(g: Tensor, h: Tensor | None, P: int, rounds: int, bias: bool) -> tuple[Tensor, Tensor]:
    """The same in torch, with importances [R, G]; the alphas in any order."""
    alpha, z = _greedy(g, h, P, bias)
    return _best(SortedGroups.of(g, h), g, h, alpha, z, rounds, bias) if rounds else (alpha, z)


def _best(
    s: SortedGroups, g: Tensor, h: Tensor | None, alpha: Tensor, z: Tensor, rounds: int, bias: bool
) -> tuple[Tensor, Tensor]:
    """Return the best solution found with as many planes as the greedy one has."""
    P = alpha.shape[1]
    book = signs(P, g.device)
    starts = [(alpha, z), _uniform(s, P, bias)]
    if P > 1:  # the greedy planes are nested: without the last they are the greedy solution of one plane fewer
        starts.append(_grow(g, h, *_best(s, g, h, alpha[:, :-1], z, rounds, bias)))
    return better(s, starts + alternate_from(s, starts, book, rounds, bias), book)


def signs(P: int, device: torch.device) -> Tensor:
    """Return the code book -1/+1 [2^P, P]: row c holds the bits of c, top bit first."""
    c = torch.arange(2**P, device=device)[:, None]
    return ((c >> torch.arange(P - 1, -1, -1, device=device)) & 1) * 2.0 - 1.0


def _greedy(g: Tensor, h: Tensor | None, P: int, bias: bool) -> tuple[Tensor, Tensor]:
    """Plane by plane on the residual: alpha [R, P], z [R]."""
    h = torch.ones_like(g) if h is None else h
    mass = h.sum(-1)
    z = (g * h).sum(-1) / mass if bias else torch.zeros_like(mass)
    residual = g - z[:, None]
    alpha = []
    for _ in range(P):
        a = (residual.abs() * h).sum(-1) / mass
        alpha.append(a)
        residual = residual - torch.where(residual >= 0, a[:, None], -a[:, None])
    return torch.stack(alpha, dim=1), z


def _grow(g: Tensor, h: Tensor | None, alpha: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Add a plane to a solution, greedily on its residual."""
    levels, _ = levels_of(alpha, z, signs(alpha.shape[1], g.device))
    residual = (g - levels.gather(1, _ranks(g, levels))).abs()
    a = residual.mean(-1) if h is None else (residual * h).sum(-1) / h.sum(-1)
    return torch.cat([alpha, a[:, None]], dim=1), z


def _uniform(sums: SortedGroups, P: int, bias: bool) -> tuple[Tensor, Tensor]:
    """A uniform grid over the range of each group, around zero if there is no z."""
    low, high = sums.range()
    if not bias:
        high = torch.maximum(high.abs(), low.abs())
        low = -high
    place = 2.0 ** torch.arange(P - 2, -2, -1, device=low.device)
    step = (high - low) / (2**P - 1)
    return step[:, None] * place, (low + high) / 2


def _nearest(g: Tensor, alpha: Tensor, z: Tensor) -> Tensor:
    """Return the code of the level nearest to each weight, uint8 [R, G]."""
    if solver := group_solver(g):
        return solver.binary_codes(g, alpha, z)
    levels, order = levels_of(alpha, z, signs(alpha.shape[1], g.device))
    return order.gather(1, _ranks(g, levels)).to(torch.uint8)


def _ranks(g: Tensor, levels: Tensor) -> Tensor:
    """Return which of the ascending levels [R, L] is nearest to each weight, [R, G]."""
    borders = (levels[:, 1:] + levels[:, :-1]) / 2
    return torch.searchsorted(borders.contiguous(), g.contiguous())
