"""Codes and scales of a mixed 2/4-bit matrix that minimise the layer's output error  tr((T - Ŵ) H (T - Ŵ)ᵀ).

As crelle.quantizers.gptq_solver, whose loop over columns this uses, but each group has its own number of levels, scales
take only the values that second-order quantization stores, and outliers take any value.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from crelle.formats.mixed import BLOCK
from crelle.quantizers.gptq_solver import Choice, LDLFactor, SortedLevels, mixing, sweep
from crelle.quantizers.grouping import TINY


class SecondOrder(NamedTuple):
    """Scales of 2-bit groups, quantized: scale[block] (codes + zero[block])."""

    scale: Tensor  # f32 [B, C2], values of f16
    zero: Tensor  # f32 [B, C2], 0 … 15
    codes: Tensor  # f32 [N, C2]
    top: Tensor  # f32 [C2], the largest code

    def scales(self) -> Tensor:
        """Return the first-order scales [N, C2]."""
        return _by_row(self.scale, self.codes) * (self.codes + _by_row(self.zero, self.codes))


@dataclass(frozen=True, slots=True, eq=False)
class MixedFit:
    """A solution for some rows."""

    four: Tensor  # bool [C]
    outliers: Tensor  # bool [N, K]
    group: int
    zero: Tensor  # f32 [N, C2], in steps: 0.5, 1, 1.5 or 2
    second: SecondOrder
    row_scale: Tensor  # f32 [N]
    row_zero: Tensor  # f32 [N]
    codes: Tensor  # uint8 [N, K]
    values: Tensor  # f32 [N, K], of outliers

    def grid(self) -> tuple[Tensor, Tensor]:
        """Return scale and zero of every weight [N, K]."""
        N, C = len(self.zero), len(self.four)
        scale, zero = self.row_scale[:, None].repeat(1, C), self.row_zero[:, None].repeat(1, C)
        scale[:, ~self.four], zero[:, ~self.four] = self.second.scales(), self.zero
        K = self.outliers.shape[1]
        return tuple(t[..., None].expand(N, C, self.group).flatten(1)[:, :K] for t in (scale, zero))  # type: ignore[return-value]

    def weight(self) -> Tensor:
        """Return the weights [N, K] that codes and outliers stand for."""
        return torch.where(self.outliers, self.values, self.dense())

    def dense(self) -> Tensor:
        """Return the weights [N, K] that codes alone stand for."""
        scale, zero = self.grid()
        return scale * (self.codes - zero)


class _Column(NamedTuple):
    """The levels of one column; outliers take the value that is wanted, as f16 stores it."""

    levels: SortedLevels
    outliers: Tensor  # bool [N]
    keep: Tensor  # f32 [N], where the values of outliers go

    def nearest(self, want: Tensor) -> tuple[Tensor, Tensor]:
        value, code = self.levels.nearest(want)
        exact = want.half().float()
        self.keep.copy_(torch.where(self.outliers, exact, 0.0))
        return torch.where(self.outliers, exact, value), code


def second_order(scale: Tensor, importance: Tensor, widths: Tensor) -> SecondOrder:
    """Quantize scales [N, C2] within blocks of rows, to the given bits; importance [N, C2] weights their errors."""
    N, C2 = scale.shape
    B = -(-N // BLOCK)
    pad = (0, 0, 0, B * BLOCK - N)
    wanted = torch.nn.functional.pad(scale, pad).reshape(B, BLOCK, C2)
    weight = torch.nn.functional.pad(importance, pad).reshape(B, BLOCK, C2)
    top = (2.0**widths - 1).to(scale)
    largest = wanted.amax(1)  # [B, C2]
    best = torch.full_like(largest, torch.inf)
    found_scale, found_zero = torch.full_like(largest, TINY), torch.zeros_like(largest)
    for zero in range(16):
        for shrink in (1.0, 0.93, 0.86):
            step = (largest * shrink / (top + zero)).half().float().clamp(min=TINY)
            code = (wanted / step[:, None] - zero).round().clamp(min=0).minimum(top)
            # A scale of zero would make a group of zeros: the smallest code stays above it.
            code = code.clamp(min=1) if zero == 0 else code
            error = (weight * (step[:, None] * (code + zero) - wanted).square()).sum(1)
            won = error < best
            best = torch.where(won, error, best)
            found_scale, found_zero = torch.where(won, step, found_scale), torch.where(won, float(zero), found_zero)
    s, z = _by_row(found_scale, scale), _by_row(found_zero, scale)
    codes = (scale / s - z).round().clamp(min=0).minimum(top)
    return SecondOrder(found_scale, found_zero, torch.where((z == 0) & (codes == 0), 1.0, codes), top)


def feedback(target: Tensor, by: LDLFactor, start: MixedFit) -> MixedFit:
    """Choose the codes in one pass over the columns with error feedback."""
    choice, values = _choices(start, by.order)
    codes = torch.empty(target.shape[::-1], dtype=torch.uint8, device=target.device)
    codes[by.order] = sweep(target[:, by.order].T.contiguous(), None, by.mix, choice)
    return replace(start, codes=codes.T.contiguous(), values=values.T.contiguous())


def descend(target: Tensor, hessian: Tensor, fit: MixedFit) -> MixedFit:
    """Coordinate descent, one pass: set each code and each outlier to its best value given all others."""
    order = torch.arange(target.shape[1], device=target.device)
    choice, values = _choices(fit, order)
    error = (target - fit.weight()).T.contiguous()
    codes = sweep(target.T.contiguous(), error, mixing(hessian), choice)
    return replace(fit, codes=codes.T.contiguous(), values=values.T.contiguous())


def _choices(fit: MixedFit, order: Tensor) -> tuple[Callable[[int, Tensor], Choice], Tensor]:
    """Return the levels of the i-th column of a pass, and where it leaves the outliers' values [K, N]."""
    device = fit.zero.device
    four_levels = _levels(fit.row_scale, fit.row_zero, 16)
    two = iter(zip(fit.second.scales().unbind(1), fit.zero.unbind(1), strict=True))
    by_group = [four_levels if is_four else _levels(*next(two), 4) for is_four in fit.four.tolist()]
    outliers = fit.outliers.T.contiguous()  # [K, N]
    columns, some = order.tolist(), outliers.any(1).tolist()
    values = torch.zeros(outliers.shape, device=device)

    def choice(i: int, _: Tensor) -> Choice:
        k = columns[i]
        levels = by_group[k // fit.group]
        return _Column(levels, outliers[k], values[k]) if some[k] else levels

    return choice, values


def _levels(scale: Tensor, zero: Tensor, count: int) -> SortedLevels:
    codes = torch.arange(count, device=scale.device).expand(len(scale), count)
    values = scale[:, None] * (codes - zero[:, None])
    return SortedLevels(values, codes, ((values[:, 1:] + values[:, :-1]) / 2).contiguous())


def tune_scales(target: Tensor, hessian: Tensor, fit: MixedFit) -> MixedFit:
    """With the codes fixed, set scale codes, second-order scales and row scales to their best values, one by one."""
    codes, K = fit.codes, target.shape[1]
    _, zero = fit.grid()
    factor = torch.where(fit.outliers, 0.0, codes - zero)  # of its scale, in each weight
    error = target - fit.weight()
    pull = error @ hessian
    second = fit.second
    scale2, scale_codes = second.scale.clone(), second.codes.clone()
    two = [c for c, is_four in enumerate(fit.four.tolist()) if not is_four]
    for j, c in enumerate(two):
        columns = slice(c * fit.group, min((c + 1) * fit.group, K))
        f = factor[:, columns]
        num = (f * pull[:, columns]).sum(1)
        den = ((f @ hessian[columns, columns]) * f).sum(1)
        z, top, old_code = second.zero[:, j], float(second.top[j]), scale_codes[:, j]
        old = _by_row(scale2[:, j], old_code) * (old_code + _by_row(z, old_code))
        multiple = old_code + _by_row(z, old_code)
        moved = scale2[:, j] + _per_block(multiple * num) / _per_block(multiple.square() * den).clamp(min=1e-30)
        moved = torch.where(moved > TINY, moved, scale2[:, j]).half().float()
        best = old + num / den.clamp(min=1e-30)
        found_code, found_scale, found_gain = old_code, scale2[:, j], torch.zeros_like(moved)
        for candidate in (scale2[:, j], moved):
            step, offset = _by_row(candidate, best), _by_row(z, best)
            least = (offset == 0).float()  # a scale stays above 0
            code = torch.maximum((best / step - offset).round().clamp(max=top), least)
            gain = _per_block(_gain(step * (code + offset) - old, num, den))
            won = gain > found_gain
            found_gain, found_scale = torch.where(won, gain, found_gain), torch.where(won, candidate, found_scale)
            found_code = torch.where(_by_row(won, code), code, found_code)
        scale2[:, j], scale_codes[:, j] = found_scale, found_code
        change = (_by_row(found_scale, best) * (found_code + _by_row(z, best)) - old)[:, None] * f
        pull -= change @ hessian[columns]
    row_scale = fit.row_scale
    if fit.four.any():
        column4 = fit.four.repeat_interleave(fit.group)[:K]
        f = factor[:, column4]
        num, den = (f * pull[:, column4]).sum(1), ((f @ hessian[column4][:, column4]) * f).sum(1)
        moved = (row_scale + num / den.clamp(min=1e-30)).half().float()
        better = (moved > TINY) & (_gain(moved - row_scale, num, den) > 0)
        row_scale = torch.where(better, moved, row_scale)
    return replace(fit, second=second._replace(scale=scale2, codes=scale_codes), row_scale=row_scale)


def _gain(change: Tensor, num: Tensor, den: Tensor) -> Tensor:
    """Return by how much the error falls when a scale changes."""
    return 2 * change * num - change.square() * den


def _by_row(blocks: Tensor, like: Tensor) -> Tensor:
    """Return values of blocks [B, …] for each of their rows [N, …]."""
    return blocks.repeat_interleave(BLOCK, 0)[: len(like)]


def _per_block(rows: Tensor) -> Tensor:
    """Return sums over the rows [N] of each block [B]."""
    padded = torch.nn.functional.pad(rows, (0, -len(rows) % BLOCK))
    return padded.reshape(-1, BLOCK).sum(1)
