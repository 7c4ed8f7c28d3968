"""Binary coding: choose planes b_p in {-1, +1} and scales alpha_p, z that minimise sum (w - z - sum_p alpha_p b_p)^2.

Greedy (rounds=0): z = mean(w); then plane by plane, b = sign(residual), alpha = mean |residual|.
Alternating (Xu et al. 2018, arXiv 1802.00150): from a start, in turn
    codes fixed:  alpha and z are a least-squares problem of P+1 unknowns per group
    alphas fixed: the best code of a weight is the nearest of the 2^P levels
Neither step can raise the error. Three starts: greedy, the uniform grid, and the best of one plane fewer with a greedy
plane more. Each group keeps the start or end that is best once its scales are rounded to f16, so the stored error is
never above greedy's and never rises with a plane.

What makes it quick: the weights of a group are sorted once. The weights of one level are then an interval of the sorted
group, so a round needs only the 2^P - 1 borders (binary search) and differences of prefix sums, never the weights.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.bcq import BCQTensor
from crelle.quantizers.grouping import from_groups, require_finite, row_slabs, to_groups
from crelle.quantizers.scheme import Grid, Group


@dataclass(frozen=True, slots=True)
class BCQ(Grid):
    """Binary-coding quantization of the weights alone, no data."""

    scheme: ClassVar[str] = "bcq"
    bits: int = 3
    group: Group = 128
    rounds: int = 20  # 0 = greedy; each round solves alpha and z, then the codes
    bias: bool = True  # whether there is a z per group

    def __post_init__(self) -> None:
        Grid.__post_init__(self)
        if self.rounds < 0:
            raise SchemeError(f"rounds must be 0 (greedy) or more, got {self.rounds}")

    def fit(self, weight: Tensor) -> BCQTensor:
        """Return the weight [N, K] as P planes with their scales."""
        weight = require_finite(weight)
        N, K = weight.shape
        group = self.group_for(K)
        parts = [self._fit_rows(weight[rows], group) for rows in row_slabs(N, K)]
        codes, alpha, z = (torch.cat(t) for t in zip(*parts, strict=True))  # [N, K], [N, C, P], [N, C]
        return BCQTensor.from_codes(codes, alpha.movedim(-1, 0), z if self.bias else None, group)

    def _fit_rows(self, w: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
        g, real = to_groups(w, group)
        shape = g.shape  # [N, C, G]
        real = None if real is None else real.expand(shape).flatten(0, 1)
        alpha, z = _greedy(g.flatten(0, 1), real, self.bits, self.bias)  # [R, P], [R], R = N C groups
        if self.rounds:
            alpha, z = self._best(_SortedGroups.of(g.flatten(0, 1), real), g.flatten(0, 1), real, alpha, z)
        alpha, z = _canonical(alpha, z)
        stored_alpha, stored_z = _storable(alpha), _storable(z)
        codes = _nearest(g.flatten(0, 1), stored_alpha.float(), stored_z.float())
        codes = from_groups(codes.reshape(shape), w.shape[1])
        return codes, stored_alpha.reshape(*shape[:2], -1), stored_z.reshape(shape[:2])

    def _best(
        self, sums: "_SortedGroups", g: Tensor, real: Tensor | None, alpha: Tensor, z: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the best solution found with as many planes as the greedy one has."""
        P = alpha.shape[1]
        starts = [(alpha, z), _uniform(sums, P, self.bias)]
        if P > 1:  # the greedy planes are nested: without the last they are the greedy solution of one plane fewer
            starts.append(_grow(g, real, *self._best(sums, g, real, alpha[:, :-1], z)))
        return _better(sums, starts + [_alternate(sums, *start, self.rounds, self.bias) for start in starts])


class _SortedGroups(NamedTuple):
    """Groups with their weights in ascending order, and the running sums of 1, w, w^2 (f64)."""

    w: Tensor  # f32 [R, G], padding sorted to the end as +inf
    real: Tensor  # int64 [R] how many weights are real
    sums: Tensor  # f64 [R, G+1]
    squares: Tensor  # f64 [R]

    @classmethod
    def of(cls, g: Tensor, real: Tensor | None) -> "_SortedGroups":
        if real is None:
            count = torch.full(g.shape[:1], g.shape[1], device=g.device)
        else:
            count = real.sum(-1)
            g = g.masked_fill(~real, torch.inf)
        w = g.sort(-1).values
        finite = w.double().nan_to_num_(posinf=0.0)
        sums = torch.nn.functional.pad(finite.cumsum(-1), (1, 0))
        return cls(w, count, sums, finite.square().sum(-1))

    def range(self) -> tuple[Tensor, Tensor]:
        return self.w[:, 0], self.w.gather(1, self.real[:, None] - 1)[:, 0]

    def take(self, index: Tensor) -> "_SortedGroups":
        return _SortedGroups(*(t[index] for t in self))

    def cut(self, levels: Tensor) -> Tensor:
        """Return where the weights nearest to each of the ascending levels [R, L] begin and end, [R, L+1]."""
        borders = (levels[:, 1:] + levels[:, :-1]) / 2
        end = self.real[:, None]
        inner = torch.minimum(torch.searchsorted(self.w, borders), end)
        return torch.cat([torch.zeros_like(end), inner, end], dim=1)

    def per_level(self, cuts: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many weights lie between the cuts, and their sum, f64 [R, L]."""
        return cuts.diff(dim=1).double(), self.sums.gather(1, cuts).diff(dim=1)


def _signs(P: int, device: torch.device) -> Tensor:
    """Return the code book -1/+1 [2^P, P]: row c holds the bits of c, top bit first."""
    c = torch.arange(2**P, device=device)[:, None]
    return ((c >> torch.arange(P - 1, -1, -1, device=device)) & 1) * 2.0 - 1.0


def _levels(alpha: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 2^P levels in ascending order [R, L] and the code of each."""
    levels = alpha @ _signs(alpha.shape[1], alpha.device).T.to(alpha.dtype) + z[:, None]
    return levels.sort(-1)


def _greedy(g: Tensor, real: Tensor | None, P: int, bias: bool) -> tuple[Tensor, Tensor]:
    """Plane by plane on the residual: alpha [R, P], z [R]."""
    mask = torch.ones_like(g) if real is None else real.float()
    n = mask.sum(-1)
    z = (g * mask).sum(-1) / n if bias else torch.zeros_like(n)
    residual = (g - z[:, None]) * mask
    alpha = []
    for _ in range(P):
        a = residual.abs().sum(-1) / n
        alpha.append(a)
        residual = (residual - torch.where(residual >= 0, a[:, None], -a[:, None])) * mask
    return torch.stack(alpha, dim=1), z


def _grow(g: Tensor, real: Tensor | None, alpha: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Add a plane to a solution, greedily on its residual."""
    levels, _ = _levels(alpha, z)
    residual = (g - levels.gather(1, _ranks(g, levels))).abs()
    a = residual.mean(-1) if real is None else (residual * real).sum(-1) / real.sum(-1)
    return torch.cat([alpha, a[:, None]], dim=1), z


def _uniform(sums: _SortedGroups, P: int, bias: bool) -> tuple[Tensor, Tensor]:
    """A uniform grid over the range of each group, around zero if there is no z."""
    low, high = sums.range()
    if not bias:
        high = torch.maximum(high.abs(), low.abs())
        low = -high
    place = 2.0 ** torch.arange(P - 2, -2, -1, device=low.device)
    step = (high - low) / (2**P - 1)
    return step[:, None] * place, (low + high) / 2


def _alternate(s: _SortedGroups, alpha: Tensor, z: Tensor, rounds: int, bias: bool) -> tuple[Tensor, Tensor]:
    """Alternate between codes and scales; a group whose codes no longer change is at its end and leaves the loop."""
    P, U = alpha.shape[1], alpha.shape[1] + bias
    book = _signs(P, alpha.device).double()
    if bias:
        book = torch.nn.functional.pad(book, (0, 1), value=1.0)  # the unknown z has b = 1 in every code
    outer = torch.einsum("li,lj->lij", book, book).flatten(1)  # [L, U^2], U unknowns
    result = torch.cat([alpha, z[:, None]], dim=1)
    active = torch.arange(len(alpha), device=alpha.device)
    before = torch.zeros(0)
    for i in range(rounds):
        levels, order = _levels(result[active, :P], result[active, P])
        cuts = s.cut(levels)
        state = torch.cat([cuts, order], dim=1)
        if i:
            moved = (state != before).any(1)
            active, s, cuts, order, state = active[moved], s.take(moved), cuts[moved], order[moved], state[moved]
            if not len(active):
                break
        before = state
        count, total = s.per_level(cuts)
        count = torch.zeros_like(count).scatter_(1, order, count)  # from ascending levels to codes
        total = torch.zeros_like(total).scatter_(1, order, total)
        solved = _solve((count @ outer).reshape(-1, U, U), total @ book, s.real)
        result[active, :U] = solved.to(result.dtype)
    return result[:, :P], result[:, P]


def _solve(A: Tensor, b: Tensor, n: Tensor) -> Tensor:
    """Solve many tiny systems A x = b [R, U, U], [R, U] by Cholesky, unknown by unknown over all R at once.

    Where two planes coincide A is singular; a whisper of a ridge then splits the scale evenly between them.
    """
    U = b.shape[1]
    ridge = 1e-9 * n.double()
    L = [[torch.empty(0)] * U for _ in range(U)]
    y: list[Tensor] = []
    for i in range(U):
        for j in range(i + 1):
            rest = A[:, i, j] - sum((L[i][k] * L[j][k] for k in range(j)), start=torch.zeros_like(ridge))
            L[i][j] = (rest + ridge).clamp(min=1e-12).sqrt() if i == j else rest / L[j][j]
        y.append((b[:, i] - sum((L[i][k] * y[k] for k in range(i)), start=torch.zeros_like(ridge))) / L[i][i])
    x = list(y)
    for i in reversed(range(U)):
        x[i] = (y[i] - sum((L[k][i] * x[k] for k in range(i + 1, U)), start=torch.zeros_like(ridge))) / L[i][i]
    return torch.stack(x, dim=1)


def _squared_error(s: _SortedGroups, alpha: Tensor, z: Tensor) -> Tensor:
    levels, _ = _levels(alpha, z)
    count, total = s.per_level(s.cut(levels))
    v = levels.double()
    return s.squares - 2 * (v * total).sum(-1) + (v * v * count).sum(-1)


def _better(s: _SortedGroups, found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Take for each group the solution with the least error, all as f16 would store them."""
    found = [(alpha.half().float(), z.half().float()) for alpha, z in found]
    errors = torch.stack([_squared_error(s, *f) for f in found])
    best = errors.nan_to_num(nan=torch.inf).argmin(0)  # [R]
    alpha, z = found[0]
    for i, (other_alpha, other_z) in enumerate(found[1:], start=1):
        alpha = torch.where((best == i)[:, None], other_alpha, alpha)
        z = torch.where(best == i, other_z, z)
    return alpha, z


def _canonical(alpha: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Same levels, written one way: alphas positive and descending, so that plane 0 matters most."""
    return alpha.abs().sort(-1, descending=True).values, z


def _nearest(g: Tensor, alpha: Tensor, z: Tensor) -> Tensor:
    """Return the code of the level nearest to each weight, uint8 [R, G]."""
    levels, order = _levels(alpha, z)
    return order.gather(1, _ranks(g, levels)).to(torch.uint8)


def _ranks(g: Tensor, levels: Tensor) -> Tensor:
    """Return which of the ascending levels [R, L] is nearest to each weight, [R, G]."""
    borders = (levels[:, 1:] + levels[:, :-1]) / 2
    return torch.searchsorted(borders.contiguous(), g.contiguous())


def _storable(t: Tensor) -> Tensor:
    stored = t.to(torch.float16)
    if not torch.isfinite(stored).all():
        raise SchemeError(f"a scale of {t.abs().max().item():.3g} is beyond the range of f16")
    return stored
