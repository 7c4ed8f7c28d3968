"""Choose codes and scales by what a layer's output shows: minimise  tr((T - Ŵ) H (T - Ŵ)ᵀ)  row by row.

T is the weight wanted [N, K], H the Hessian of the layer's inputs (crelle.quantizers.stats), E = T - Ŵ the error. Three
tools, for any format whose weights take one of L levels per group, the levels being linear in a few stored scales:

    feedback  one pass over the inputs; each error is made up for by the inputs still to come (GPTQ, arXiv 2210.17323)
    descend   one more pass; each code is set to its best level given all others
    solve     codes fixed, the scales of a whole row at once: a linear system with a few unknowns per group

Feedback and descent are the same loop, `sweep`: the code of input i is the level nearest to  t_i + Σ_j e_j mix[j, i].
    feedback  H = M D Mᵀ, M upper triangular with unit diagonal; mix = M - I, so only inputs already coded count.
              The error is then exactly  Σ_i D_i (what rounding input i left)², which is why D is the importance of
              inputs when scales are chosen. (The same codes as GPTQ's inverse Hessian gives, without inverting.)
    descent   mix[j, i] = H[j, i] / H[i, i]  for j ≠ i
Rows do not see each other, and every step keeps, row by row, the better of before and after.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.bcq import spread
from crelle.quantizers.grouping import from_groups, to_groups

_BLOCK = 64  # inputs that are coded before what they leave is handed on, by one matrix product
_UNKNOWNS = 1 << 22  # entries of the row systems that are solved at one time: bounds the memory


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """The levels of every group: level l is  Σ_u (book[l, u] - shift_u) scales_u."""

    book: Tensor  # f32 [L, U]
    scales: Tensor  # f32 [N, C, U], numbers that f16 can hold
    group: int
    shift: Tensor | None = None  # f32 [N, C, U]

    def values(self) -> Tensor:
        """Return the levels [N, C, L]."""
        shifted = 0.0 if self.shift is None else (self.shift * self.scales).sum(-1, keepdim=True)
        return self.scales @ self.book.T - shifted

    def features(self, codes: Tensor) -> Tensor:
        """Return what each scale is multiplied by in each weight [U, N, K]."""
        features = self.book.T[:, codes.long()]
        if self.shift is None:
            return features
        return features - spread(self.shift.movedim(-1, 0), self.group, codes.shape[1])

    def decode(self, codes: Tensor) -> Tensor:
        """Return the weights that codes [N, K] stand for."""
        grouped, _ = to_groups(codes, self.group)
        return from_groups(self.values().gather(-1, grouped.long()), codes.shape[1])

    def where(self, rows: Tensor, other: "Levels") -> "Levels":
        """Return these levels in the rows [N] given, the other ones elsewhere."""
        return replace(self, scales=torch.where(rows[:, None, None], self.scales, other.scales))


class Fit(NamedTuple):
    """A solution: the codes [N, K] and the levels that they name."""

    codes: Tensor
    levels: Levels

    def where(self, rows: Tensor, other: "Fit") -> "Fit":
        return Fit(torch.where(rows[:, None], self.codes, other.codes), self.levels.where(rows, other.levels))


class LDLFactor(NamedTuple):
    """H (damped) = M D Mᵀ for the inputs in the order in which they are coded."""

    order: Tensor  # int64 [K]
    mix: Tensor  # f32 [K, K], M - I, both axes in that order
    cost: Tensor  # f32 [K], D in the original order of inputs
    damped: Tensor  # f32 [K, K], H as it was decomposed, in the original order


def factor(hessian: Tensor, damp: float, *, act_order: bool) -> LDLFactor:
    """Decompose the Hessian, adding `damp` times its mean diagonal, and more where that does not make it definite."""
    if not torch.isfinite(hessian).all():
        raise SchemeError("the statistics of a layer's inputs hold NaN or infinity")
    K = len(hessian)
    H = hessian.double()
    diagonal = H.diagonal()
    mean = diagonal.mean() if (diagonal > 0).any() else torch.ones_like(diagonal[0])
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(K, device=H.device)
    backwards = order.flip(0)  # the Cholesky factor of H with its inputs reversed is M √D reversed
    reversed_hessian = H[backwards][:, backwards]
    eye = torch.eye(K, dtype=H.dtype, device=H.device)
    for ridge in (damp, *(r for r in (1e-6, 1e-4, 1e-2, 1e-1, 1.0) if r > damp)):
        root, failed = torch.linalg.cholesky_ex(reversed_hessian + ridge * mean * eye)
        if not failed and root.diagonal().amin() > 0:
            break
    else:
        raise SchemeError("the Hessian of a layer's inputs is not positive, however much it is damped")
    root = root.flip(0, 1)
    scale = root.diagonal()
    cost = torch.empty_like(scale).scatter_(0, order, scale.square())
    return LDLFactor(order, (root / scale).triu_(1).float(), cost.float(), (H + ridge * mean * eye).float())


class Choice(Protocol):
    """The levels that one input may take."""

    def nearest(self, want: Tensor) -> tuple[Tensor, Tensor]:
        """Return the levels to take where want [N] is wanted, and their codes."""
        ...


class SortedLevels(NamedTuple):
    """The levels of one group in ascending order: a binary search finds the nearest."""

    values: Tensor  # f32 [N, L]
    codes: Tensor  # int64 [N, L]
    borders: Tensor  # f32 [N, L-1]

    def nearest(self, want: Tensor) -> tuple[Tensor, Tensor]:
        """Return the levels nearest to want [N], and their codes."""
        rank = torch.searchsorted(self.borders, want[:, None])
        return self.values.gather(1, rank)[:, 0], self.codes.gather(1, rank)[:, 0]


def _ladders(levels: Levels) -> list[SortedLevels]:
    values, codes = levels.values().transpose(0, 1).contiguous().sort(-1)  # [C, N, L]
    borders = (values[..., 1:] + values[..., :-1]) / 2
    return [SortedLevels(*parts) for parts in zip(values, codes, borders, strict=True)]


def feedback(target: Tensor, by: LDLFactor, levels: Levels) -> Fit:
    """Choose the codes with error feedback."""
    ladders = _ladders(levels)
    group_of = (by.order // levels.group).tolist()
    codes = torch.empty(target.shape[::-1], dtype=torch.uint8, device=target.device)
    codes[by.order] = sweep(target[:, by.order].T.contiguous(), None, by.mix, lambda i, _: ladders[group_of[i]])
    return Fit(codes.T.contiguous(), levels)


def feedback_by_group(target: Tensor, by: LDLFactor, group: int, find: Callable[[Tensor, slice], Levels]) -> Fit:
    """Choose the codes with error feedback, and the levels of a group when the pass, in the inputs' order, reaches it.

    `find` gets the weights [N, G] of a group, as the feedback has made them, and its place.
    """
    K = target.shape[1]
    parts: list[Levels] = []
    ladders: list[SortedLevels] = []

    def ladder(i: int, want: Tensor) -> SortedLevels:
        if i % group == 0:
            place = slice(i, min(i + group, K))
            parts.append(find(want[place].T, place))
            ladders.extend(_ladders(parts[-1]))
        return ladders[-1]

    codes = sweep(target.T.contiguous(), None, by.mix, ladder, group)
    shifts = [p.shift for p in parts if p.shift is not None]
    shift = torch.cat(shifts, 1) if shifts else None
    return Fit(codes.T.contiguous(), Levels(parts[0].book, torch.cat([p.scales for p in parts], 1), group, shift))


def descend(target: Tensor, hessian: Tensor, fit: Fit) -> Fit:
    """Set each code to its best level given all others, once around."""
    ladders = _ladders(fit.levels)
    error = (target - fit.levels.decode(fit.codes)).T.contiguous()
    codes = sweep(target.T.contiguous(), error, mixing(hessian), lambda i, _: ladders[i // fit.levels.group])
    return Fit(codes.T.contiguous(), fit.levels)


def mixing(hessian: Tensor) -> Tensor:
    """Return how the errors of all other inputs move the level that descent wants for an input."""
    diagonal = hessian.diagonal()
    mix = hessian / torch.where(diagonal > 0, diagonal, 1.0)  # an input that is always 0 keeps the nearest level
    mix.diagonal().zero_()
    return mix


def sweep(
    target: Tensor,
    error: Tensor | None,
    mix: Tensor,
    ladder: Callable[[int, Tensor], Choice],
    group: int = _BLOCK,
) -> Tensor:
    """Code the inputs one after the other: target, error and the codes returned are [K, N], in the order of the pass.

    Within a block each input's change of error goes to the block's later inputs at once, to those behind the block
    together when it ends. A block never reaches over the end of a group, whose weights are then up to date when it
    begins. `ladder` gives the levels of the i-th input, from the weights wanted as they now are.
    """
    K = len(target)
    want = target.clone() if error is None else torch.addmm(target, mix.T, error)
    codes = torch.empty(target.shape, dtype=torch.uint8, device=target.device)
    for begin, end in _blocks(K, group):
        here = mix[begin:end, begin:end].contiguous()
        change = torch.empty_like(target[begin:end])
        for i in range(begin, end):
            value, codes[i] = ladder(i, want).nearest(want[i])
            now = torch.sub(target[i], value, out=change[i - begin])
            if error is not None:
                now -= error[i]
            want[i + 1 : end].addr_(here[i - begin, i + 1 - begin :], now)
        want[end:].addmm_(mix[begin:end, end:].T, change)
    return codes


def _blocks(K: int, group: int) -> list[tuple[int, int]]:
    """Cut K inputs into blocks that do not reach over the end of a group."""
    groups = [(g, min(g + group, K)) for g in range(0, K, group)]
    return [(b, min(b + _BLOCK, end)) for begin, end in groups for b in range(begin, end, _BLOCK)]


def row_errors(target: Tensor, hessian: Tensor, fit: Fit) -> Tensor:
    """Return each row's share of the output error [N]."""
    error = target - fit.levels.decode(fit.codes)
    return ((error @ hessian) * error).sum(1)


def solve(target: Tensor, hessian: Tensor, fit: Fit) -> Fit:
    """Return the same codes with the best scales, as f16 stores them."""
    scales = best_scales(target, hessian, fit)
    return Fit(fit.codes, replace(fit.levels, scales=scales.half().float()))


Step = Callable[[Tensor, Tensor, Fit], Fit]


def best_scales(target: Tensor, hessian: Tensor, fit: Fit, ridge: float = 1e-7) -> Tensor:
    """Return the scales f64 [N, C, U] that minimise the rows' errors with the codes fixed.

    Solved for the change from the present scales; what the codes leave undetermined stays as it is.
    """
    codes, levels = fit
    N, K = codes.shape
    _, C, U = levels.scales.shape
    G = levels.group
    H = torch.nn.functional.pad(hessian, (0, C * G - K, 0, C * G - K))
    step = max(1, _UNKNOWNS // max(C * U * C * U, K * U))
    parts = []
    for rows in (slice(n, n + step) for n in range(0, N, step)):
        here = Fit(codes[rows], _rows(levels, rows))
        F = torch.nn.functional.pad(here.levels.features(here.codes), (0, C * G - K))  # [U, n, C G]
        pull = (target[rows] - here.levels.decode(here.codes)) @ H[:K]  # [n, C G]
        n = pull.shape[0]
        b = (F * pull).reshape(U, n, C, G).sum(-1).permute(1, 2, 0).reshape(n, C * U, 1).double()
        A = torch.empty(n, C, U, C, U, dtype=torch.float64, device=H.device)
        for d in range(C):
            reach = slice(d * G, C * G)  # A is symmetric: group d with itself and the later ones
            Y = F[:, :, d * G : (d + 1) * G] @ H[d * G : (d + 1) * G, reach]  # [U, n, ..]
            for u in range(U):
                for v in range(U):
                    part = (F[u, :, reach] * Y[v]).reshape(n, C - d, G).sum(-1)
                    A[:, d:, u, d, v] = part
                    A[:, d, v, d:, u] = part
        A = A.reshape(n, C * U, C * U)
        unit = A.diagonal(dim1=1, dim2=2).sqrt().clamp(min=1e-30).unsqueeze(-1)
        A = A / unit / unit.mT
        A.diagonal(dim1=1, dim2=2).add_(ridge)
        root, _ = torch.linalg.cholesky_ex(A)
        change = torch.cholesky_solve(b / unit, root) / unit
        parts.append(here.levels.scales.double() + change.reshape(n, C, U))
    return torch.cat(parts)


def _rows(levels: Levels, rows: slice) -> Levels:
    shift = None if levels.shift is None else levels.shift[rows]
    return replace(levels, scales=levels.scales[rows], shift=shift)


def improve(target: Tensor, hessian: Tensor, damped: Tensor, fit: Fit, steps: Sequence[Step]) -> Fit:
    """Take the steps (`solve`, `descend`) one after the other, each row only where its error falls.

    The steps see the damped Hessian: with fewer tokens than inputs the bare one does not see some changes of the weight
    at all, and scales would grow without bound.
    """
    error = row_errors(target, hessian, fit)
    for step in steps:
        found = step(target, damped, fit)
        now = row_errors(target, hessian, found)
        upright = (found.levels.scales[..., 0] >= 0).all(1)  # a grid turned over comes of a system nearly singular
        won = (now < error) & upright  # a scale beyond f16 makes the error inf or NaN, which is not less
        fit, error = found.where(won, fit), torch.where(won, now, error)
    return fit
