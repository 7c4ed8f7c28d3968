"""Codes and scales that minimise the layer's output error:  tr((T - Ŵ) H (T - Ŵ)ᵀ)  row by row.

T is the target weight [N, K], H the Hessian of the layer's inputs (crelle.quantizers.calibration.stats), E = T - Ŵ the
error. Three steps, for any format whose weights take one of L levels per group, the levels being linear in a few stored
scales:

    feedback  one pass over the columns; each error is compensated by the columns after it (GPTQ, arXiv 2210.17323)
    descend   coordinate descent, one pass: each code is set to its best level given all others
    solve     codes fixed, least squares for all scales of a row: a linear system with a few unknowns per group

Feedback and descent are the same loop (crelle.quantizers.solvers.sweep): the code of input i is the level nearest to
t_i + Σ_j e_j mix[j, i].
    feedback  H = M D Mᵀ, M upper triangular with unit diagonal; mix = M - I, so only columns already rounded count.
              The error is then exactly  Σ_i D_i (rounding error of column i)², which is why D is the importance of
              columns when scales are chosen. (The same codes as GPTQ's inverse Hessian gives, without inverting.)
    descent   mix[j, i] = H[j, i] / H[i, i]  for j ≠ i
Rows are independent, and every step keeps, row by row, the better of before and after.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.bcq import expand_groups
from crelle.kernels.cpu import solver
from crelle.quantizers.solvers.grouping import from_groups, to_groups
from crelle.quantizers.solvers.sweep import LevelTable, SortedLevels, sweep, sweep_levels

# Of the mean diagonal, added to the Hessian. With 0.01 error feedback fits the calibration text: SmolLM2 at 3 bits then
# has 5% more perplexity on a test text, and 8 to 25% more on text of other kinds.
DAMP = 0.2
_UNKNOWNS = 1 << 22  # entries of the row systems that are solved at one time: bounds the memory
_UNKNOWNS_CUDA = 1 << 25  # on a GPU: C steps of five launches each, which few rows would not fill
_SOLVED = 192  # inputs of a triangular matrix up to which solving is as fast as products of halves
_LANES = 256  # unknowns of a row up to which 16 rows are solved side by side in C++: 4 MB for each thread


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """The levels of every group: level l is  Σ_u (book[l, u] - shift_u) scales_u."""

    book: Tensor  # f32 [L, U]
    scales: Tensor  # f32 [N, C, U], values that f16 can represent
    group: int
    shift: Tensor | None = None  # f32 [N, C, U]
    count: Sequence[int] | None = None  # levels that each group uses of the book, from the first on; None: all

    def values(self) -> Tensor:
        """Return the levels [N, C, L]."""
        shifted = 0.0 if self.shift is None else (self.shift * self.scales).sum(-1, keepdim=True)
        return self.scales @ self.book.T - shifted

    def features(self, codes: Tensor) -> Tensor:
        """Return the factor of each scale in each weight [U, N, K]."""
        features = self.book.T[:, codes.long()]
        if self.shift is None:
            return features
        return features - expand_groups(self.shift.movedim(-1, 0), self.group, codes.shape[1])

    def factors(self) -> Tensor:
        """Return the factor of each scale in each level [U, N, C, L]."""
        N, C, U = self.scales.shape
        book = self.book.T[:, None, None].expand(U, N, C, len(self.book))
        return book if self.shift is None else book - self.shift.movedim(-1, 0)[..., None]

    def decode(self, codes: Tensor) -> Tensor:
        """Return the weights that codes [N, K] stand for."""
        if self.count is not None:  # a long book of which most groups use little
            return (self.features(codes) * expand_groups(self.scales.movedim(-1, 0), self.group, codes.shape[1])).sum(0)
        grouped, _ = to_groups(codes, self.group)
        return from_groups(self.values().gather(-1, grouped.long()), codes.shape[1])

    def where(self, rows: Tensor, other: "Levels") -> "Levels":
        """Return these levels in the rows [N] given, those of `other` elsewhere."""
        return replace(self, scales=torch.where(rows[:, None, None], self.scales, other.scales))


class Fit(NamedTuple):
    """A solution: the codes [N, K] and the levels that they name."""

    codes: Tensor
    levels: Levels

    def where(self, rows: Tensor, other: "Fit") -> "Fit":
        return Fit(torch.where(rows[:, None], self.codes, other.codes), self.levels.where(rows, other.levels))


class LDLFactor(NamedTuple):
    """LDL factorization of the damped Hessian, H = M D Mᵀ, columns in the order in which they are rounded."""

    order: Tensor  # int64 [K]
    mix: Tensor  # f32 [K, K], M - I, both axes in that order
    cost: Tensor  # f32 [K], D in the original order of inputs
    damped: Tensor  # f32 [K, K], H as it was decomposed, in the original order
    kept: dict[str, Tensor]  # what is made of this once for all weights of the input


def factor(hessian: Tensor, damp: float, *, act_order: bool, order: Tensor | None = None) -> LDLFactor:
    """Decompose the Hessian, adding `damp` times its mean diagonal, and more where that does not make it definite.

    `order`: in which columns are rounded, where neither their own order nor that of the activations is wanted.
    """
    if not torch.isfinite(hessian).all():
        raise SchemeError("the statistics of a layer's inputs contain NaN or infinity")
    K = len(hessian)
    diagonal = hessian.diagonal().double()
    mean = diagonal.mean() if (diagonal > 0).any() else torch.ones_like(diagonal[0])
    if order is None:
        order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(K, device=hessian.device)
    backwards = order.flip(0)  # the Cholesky factor of H with its inputs reversed is M √D reversed
    reversed_hessian = hessian[backwards][:, backwards]
    for ridge in (damp, *(r for r in (1e-6, 1e-4, 1e-2, 1e-1, 1.0) if r > damp)):
        damped = reversed_hessian.double()  # f64 matrices of 28,672 inputs have 6.6 GB each: two at a time, no more
        damped.diagonal().add_(ridge * mean)
        root, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if not failed and root.diagonal().amin() > 0:
            break
    else:
        raise SchemeError("the Hessian of a layer's inputs is not positive definite, even with the largest damping")
    root = root.flip(0, 1)
    scale = root.diagonal().clone()
    cost = torch.empty_like(scale).scatter_(0, order, scale.square())
    mix = root.div_(scale).float()  # the other triangle is 0
    mix.diagonal().zero_()
    wanted = hessian.float().clone()
    wanted.diagonal().copy_(diagonal + ridge * mean)
    return LDLFactor(order, mix, cost.float(), wanted, {})


def solve_damped(by: LDLFactor, b: Tensor) -> Tensor:
    """Return b H⁻¹ [N, K] for the damped Hessian."""
    x = torch.linalg.solve_triangular(by.mix, b.T.contiguous()[by.order], upper=True, unitriangular=True)
    x /= by.cost[by.order][:, None]
    x = torch.linalg.solve_triangular(by.mix.T, x, upper=False, unitriangular=True)
    return torch.empty_like(x).index_copy_(0, by.order, x).T


def inverse_diagonal(by: LDLFactor) -> Tensor:
    """Return the diagonal of H⁻¹ [K], in the original order of inputs."""
    if "inverse" in by.kept:
        return by.kept["inverse"]
    found = (_unit_inverse(by.mix).square() / by.cost[by.order][:, None]).sum(0)
    by.kept["inverse"] = torch.empty_like(found).scatter_(0, by.order, found)
    return by.kept["inverse"]


def _unit_inverse(upper: Tensor) -> Tensor:
    """Return (I + U)⁻¹ of a strictly upper triangular matrix, by halves: products of a third of what solving takes."""
    K = len(upper)
    inverse: Tensor = torch.eye(K, device=upper.device)
    if K <= _SOLVED:
        inverse = torch.linalg.solve_triangular(upper, inverse, upper=True, unitriangular=True)
    else:
        a, b = slice(0, K // 2), slice(K // 2, K)
        inverse[a, a], inverse[b, b] = _unit_inverse(upper[a, a]), _unit_inverse(upper[b, b])
        inverse[a, b] = (inverse[a, a] @ upper[a, b]).neg_() @ inverse[b, b]
    return inverse


def _level_table(levels: Levels) -> LevelTable:
    if levels.count is not None:  # levels ascend: one positive scale, and a book in order
        shift = torch.zeros_like(levels.scales) if levels.shift is None else levels.shift
        each = [(levels.book[:n] - shift[None, :, c, 0]) * levels.scales[:, c, 0] for c, n in enumerate(levels.count)]
        return LevelTable(torch.cat(each), None, [0, *accumulate(levels.count)][:-1], levels.count)
    values, codes = levels.values().permute(1, 2, 0).contiguous().sort(1)  # [C, L, N]
    C, L, _ = values.shape
    places = torch.arange(L, device=codes.device)[:, None]
    named = None if bool((codes == places).all()) else codes.to(torch.uint8).flatten(0, 1)
    return LevelTable(values.flatten(0, 1), named, range(0, C * L, L), [L] * C)


def feedback(target: Tensor, by: LDLFactor, levels: Levels) -> Fit:
    """Choose the codes with error feedback."""
    group_of = (by.order // levels.group).tolist()
    codes = torch.empty(target.shape[::-1], dtype=torch.uint8, device=target.device)
    codes[by.order], _ = sweep_levels(target.T.contiguous()[by.order], None, by.mix, _level_table(levels), group_of)
    return Fit(codes.T.contiguous(), levels)


def feedback_by_group(target: Tensor, by: LDLFactor, group: int, find: Callable[[Tensor, slice], Levels]) -> Fit:
    """Choose the codes with error feedback, and the levels of a group when the pass, in column order, reaches it.

    `find` gets the weights [N, G] of a group, as adjusted by the feedback, and its columns.
    """
    K = target.shape[1]
    parts: list[Levels] = []
    by_group: list[SortedLevels] = []

    def levels_at(i: int, want: Tensor) -> SortedLevels:
        if i % group == 0:
            place = slice(i, min(i + group, K))
            parts.append(find(want[place].T, place))
            by_group.extend(_level_table(parts[-1]).sorted_levels())
        return by_group[-1]

    codes = sweep(target.T.contiguous(), None, by.mix, levels_at, group)
    shifts = [p.shift for p in parts if p.shift is not None]
    shift = torch.cat(shifts, 1) if shifts else None
    return Fit(codes.T.contiguous(), Levels(parts[0].book, torch.cat([p.scales for p in parts], 1), group, shift))


def descend(target: Tensor, hessian: Tensor, fit: Fit) -> Fit:
    """Coordinate descent, one pass: set each code to its best level given all others."""
    error = errors(target, fit)
    group_of = [i // fit.levels.group for i in range(target.shape[1])]
    codes, _ = sweep_levels(target.T, error, mixing(hessian), _level_table(fit.levels), group_of)
    return Fit(codes.T.contiguous(), fit.levels)


def mixing(hessian: Tensor) -> Tensor:
    """Return the coupling of columns in coordinate descent, H[j, i] / H[i, i] with a zero diagonal."""
    diagonal = hessian.diagonal()
    mix = hessian / torch.where(diagonal > 0, diagonal, 1.0)  # a column whose input is always 0 takes the nearest level
    mix.diagonal().zero_()
    return mix


def errors(target: Tensor, fit: Fit) -> Tensor:
    """Return what the weights differ from the target by, [K, N]: as the loops over columns take it."""
    if _in_cpp(target, fit):
        return solver.level_values(fit.codes, fit.levels.values(), fit.levels.group, target)
    return (target - fit.levels.decode(fit.codes)).T


def _in_cpp(target: Tensor, fit: Fit) -> bool:
    return type(fit.levels) is Levels and fit.levels.count is None and solver.usable(target)


def row_errors(target: Tensor, hessian: Tensor, fit: Fit) -> Tensor:
    """Return the output error of each row [N]."""
    error = errors(target, fit)
    if solver.usable(error):
        return solver.row_errors(error, hessian)
    error = error.T
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
    if solver.usable(target) and C * U <= _LANES:
        if _in_cpp(target, fit):
            features = torch.stack([solver.level_values(codes, f, G) for f in levels.factors()])
        else:
            features = levels.features(codes).mT
        return levels.scales.double() + solver.solve_scales(errors(target, fit), hessian, features, G, ridge)
    H = torch.nn.functional.pad(hessian, (0, C * G - K, 0, C * G - K))
    most = _UNKNOWNS_CUDA if codes.device.type == "cuda" else _UNKNOWNS
    step = max(1, most // max(C * U * C * U, K * U))
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
    """Apply the steps (`solve`, `descend`) in order, keeping a row's result only where its error falls.

    The steps use the damped Hessian: with fewer tokens than inputs the undamped one is singular, and scales would grow
    without bound.
    """
    if not steps:
        return fit
    return improve_from(target, hessian, damped, fit, row_errors(target, hessian, fit), steps)[0]


def improve_from(
    target: Tensor, hessian: Tensor, damped: Tensor, fit: Fit, error: Tensor, steps: Sequence[Step]
) -> tuple[Fit, Tensor]:
    """Do the same with a known error of each row [N]; returns the error, too: each costs a product with the Hessian."""
    for step in steps:
        found = step(target, damped, fit)
        now = row_errors(target, hessian, found)
        positive = (found.levels.scales[..., 0] >= 0).all(1)  # a negative scale comes from a nearly singular system
        won = (now < error) & positive  # a scale beyond f16 makes the error inf or NaN, which is not less
        fit, error = found.where(won, fit), torch.where(won, now, error)
    return fit, error
