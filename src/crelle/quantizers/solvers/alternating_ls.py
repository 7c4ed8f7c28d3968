"""Alternating least squares for the levels of groups of weights, with an importance per weight.

The levels of a group are  v_l = z + sum_u book[l, u] alpha_u:  binary coding (a book of signs) and the uniform grid
(book[l] = l) alike. With importances h, minimise  sum_k h_k (w_k - v_code(k))^2:
    codes fixed:  alpha and z are a weighted least-squares problem of a few unknowns per group
    scales fixed: the best code of a weight is the nearest level
Neither step can raise the error (Xu et al. 2018, arXiv 1802.00150).

It is fast because the weights of a group are sorted once. The weights of one level are then an interval of the sorted
group, so a round needs only the borders between levels (binary search) and differences of prefix sums of h and h w,
never the weights. That also makes it cheap to compare many initializations.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_SMALL = 1 << 16  # weights


class SortedGroups(NamedTuple):
    """Groups with their weights in ascending order, and the running sums of h, h w, h w^2 (f64)."""

    w: Tensor  # f32 [R, G], padding sorted to the end as +inf
    real: Tensor  # int64 [R] weights that are not padding
    masses: Tensor  # f64 [R, G+1]
    sums: Tensor  # f64 [R, G+1]
    squares: Tensor  # f64 [R]

    @classmethod
    def of(cls, g: Tensor, importance: Tensor | None) -> "SortedGroups":
        """Sort groups [R, G]; importance [R, G] is 0 for padding, and all ones when absent."""
        if importance is None:
            importance = torch.ones_like(g)
        else:
            g = g.masked_fill(importance <= 0, torch.inf)
        w, order = g.sort(-1)
        h = importance.gather(1, order).double()
        finite = w.double().nan_to_num_(posinf=0.0)
        masses, sums = (torch.nn.functional.pad(t.cumsum(-1), (1, 0)) for t in (h, h * finite))
        return cls(w, (importance > 0).sum(-1), masses, sums, (h * finite.square()).sum(-1))

    def range(self) -> tuple[Tensor, Tensor]:
        return self.w[:, 0], self.w.gather(1, self.real[:, None] - 1)[:, 0]

    def take(self, index: Tensor) -> "SortedGroups":
        return SortedGroups(*(t[index] for t in self))

    def boundaries(self, levels: Tensor) -> Tensor:
        """Return where the weights nearest to each of the ascending levels [R, L] begin and end, [R, L+1]."""
        borders = (levels[:, 1:] + levels[:, :-1]) / 2
        end = self.real[:, None]
        inner = torch.minimum(torch.searchsorted(self.w, borders), end)
        return torch.cat([torch.zeros_like(end), inner, end], dim=1)

    def per_level(self, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of h and of h w between the boundaries, f64 [R, L]."""
        return self.masses.gather(1, bounds).diff(dim=1), self.sums.gather(1, bounds).diff(dim=1)


def levels_of(alpha: Tensor, z: Tensor, book: Tensor) -> tuple[Tensor, Tensor]:
    """Return the levels in ascending order [R, L] and the code of each."""
    levels = alpha @ book.T.to(alpha.dtype) + z[:, None]
    return levels.sort(-1)


def alternate_from(
    s: SortedGroups, starts: list[tuple[Tensor, Tensor]], book: Tensor, rounds: int, bias: bool
) -> list[tuple[Tensor, Tensor]]:
    """Alternate from several starts; all at once for few weights, where the number of steps is what costs time."""
    if s.w.numel() > _SMALL:
        return [alternate(s, *start, book, rounds, bias) for start in starts]
    R = len(s.w)
    alpha, z = (torch.cat(parts) for parts in zip(*starts, strict=True))
    alpha, z = alternate(s.take(torch.arange(R, device=z.device).repeat(len(starts))), alpha, z, book, rounds, bias)
    return list(zip(alpha.reshape(-1, R, alpha.shape[1]), z.reshape(-1, R), strict=True))


def alternate(
    s: SortedGroups, alpha: Tensor, z: Tensor, book: Tensor, rounds: int, bias: bool
) -> tuple[Tensor, Tensor]:
    """Alternate between codes and scales; a group whose codes no longer change has converged and leaves the loop."""
    P, U = alpha.shape[1], alpha.shape[1] + bias
    book = book.double()
    wide = torch.nn.functional.pad(book, (0, 1), value=1.0) if bias else book  # the unknown z counts once in every code
    outer = torch.einsum("li,lj->lij", wide, wide).flatten(1)  # [L, U^2], U unknowns
    result = torch.cat([alpha, z[:, None]], dim=1)
    active = torch.arange(len(alpha), device=alpha.device)
    before = torch.zeros(0)
    for i in range(rounds):
        levels, order = levels_of(result[active, :P], result[active, P], book)
        bounds = s.boundaries(levels)
        state = torch.cat([bounds, order], dim=1)
        if i:
            moved = (state != before).any(1).nonzero()[:, 0]
            if not len(moved):
                break
            if len(moved) < len(active):
                active, s = active[moved], s.take(moved)
                bounds, order, state = bounds[moved], order[moved], state[moved]
        before = state
        mass, total = s.per_level(bounds)
        mass = torch.zeros_like(mass).scatter_(1, order, mass)  # from ascending levels to codes
        total = torch.zeros_like(total).scatter_(1, order, total)
        solved = _solve((mass @ outer).reshape(-1, U, U), total @ wide, s.masses[:, -1])
        result[active, :U] = solved.to(result.dtype)
    return result[:, :P], result[:, P]


def _solve(A: Tensor, b: Tensor, mass: Tensor) -> Tensor:
    """Solve many tiny systems A x = b [R, U, U], [R, U] by Cholesky, column by column over all R at once.

    Where two planes coincide A is singular; a tiny ridge then splits the scale evenly between them.
    """
    U = b.shape[1]
    ridge = 1e-9 * mass
    rows = torch.cat([A.flatten(1), b], dim=1).T.contiguous().reshape(U + 1, U, -1)  # A is symmetric; b is a last row
    columns: list[Tensor] = []  # of the factor L [U+1 - j, R], from the diagonal down; the last row becomes y = L^-1 b
    for j in range(U):
        rest = rows[j:, j]
        if j:
            rest = rest - _total([c[j - k :] * c[j - k] for k, c in enumerate(columns)])
        pivot = (rest[0] + ridge).clamp(min=1e-12).sqrt()
        column = rest / pivot
        column[0] = pivot
        columns.append(column)
    x: list[Tensor] = []
    for column in reversed(columns):
        known = [c * solved for c, solved in zip(column[1:-1], x, strict=True)]
        rest = column[-1] - _total(known) if known else column[-1]
        x.insert(0, rest / column[0])
    return torch.stack(x, dim=1)


def _total(terms: list[Tensor]) -> Tensor:
    """Return the sum, in order."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def squared_error(s: SortedGroups, alpha: Tensor, z: Tensor, book: Tensor) -> Tensor:
    """Return the weighted squared error of every group, f64 [R]."""
    levels, _ = levels_of(alpha, z, book)
    mass, total = s.per_level(s.boundaries(levels))
    v = levels.double()
    return s.squares - 2 * (v * total).sum(-1) + (v * v * mass).sum(-1)


def better(s: SortedGroups, found: list[tuple[Tensor, Tensor]], book: Tensor) -> tuple[Tensor, Tensor]:
    """Take for each group the solution with the least error, all as f16 would store them."""
    found = [(alpha.half().float(), z.half().float()) for alpha, z in found]
    errors = torch.stack([squared_error(s, *f, book) for f in found])
    best = errors.nan_to_num(nan=torch.inf).argmin(0)  # [R]
    alpha, z = found[0]
    for i, (other_alpha, other_z) in enumerate(found[1:], start=1):
        alpha = torch.where((best == i)[:, None], other_alpha, alpha)
        z = torch.where(best == i, other_z, z)
    return alpha, z
