"""Codes and scales of a mixed 2/4-bit matrix that minimise the layer's output error  tr((T - Ŵ) H (T - Ŵ)ᵀ).

As crelle.quantizers.solvers.gptq_solver, whose loop over columns this uses, but each group has its own number of
levels, scales take only the values that second-order quantization stores, and outliers take any value.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from crelle.formats.mixed import BLOCK
from crelle.kernels import cpu, cuda
from crelle.kernels.cuda.solver import mixed_solver as kernels
from crelle.quantizers.solvers.gptq_solver import LDLFactor, mixing
from crelle.quantizers.solvers.grouping import TINY, to_groups
from crelle.quantizers.solvers.sweep import LevelTable, sweep_levels

_SHRINK = [1.0 - 0.06 * i for i in range(10)]  # clipping factors to try
_SECOND_SHRINK = (1.0, 0.93, 0.86)  # the same for second-order scales


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


def _in_cpp(t: Tensor) -> bool:
    return t.device.type == "cpu" and cpu.available() is None


def _in_cuda(t: Tensor) -> bool:
    return t.device.type == "cuda" and cuda.available() is None


def search_grids(weight: Tensor, importance: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return scale and zero [N, C] of the 2-bit grids with the least weighted error; zeros are 0.5, 1, 1.5 or 2."""
    N, C = len(weight), -(-weight.shape[1] // group)
    if _in_cpp(weight):
        found = torch.empty(2, C, N)
        inputs = [t.T.contiguous().numpy() for t in (weight, importance)]
        cpu.core().search_grids(*inputs, group, torch.tensor(_SHRINK).numpy(), *found.numpy())
        return found[0].T.contiguous(), found[1].T.contiguous()
    if _in_cuda(weight):
        return kernels.search_grids(weight, importance, group, _SHRINK)
    w, h = to_groups(weight, group)[0], to_groups(importance, group)[0]  # [N, C, G]
    low = torch.where(h > 0, w, torch.inf).amin(-1, keepdim=True)
    high = torch.where(h > 0, w, -torch.inf).amax(-1, keepdim=True)
    best = torch.full_like(low, torch.inf)
    scale, zero = torch.full_like(low, TINY), torch.full_like(low, 1.5)
    for z in (0.5, 1.0, 1.5, 2.0):
        reach = torch.maximum(high / (3 - z), -low / z).clamp(min=TINY)
        for shrink in _SHRINK:
            a = (reach * shrink).clamp(min=TINY)
            off = w - a * ((w / a + z).clamp_(0, 3).round_() - z)
            error = (h * off.square_()).sum(-1, keepdim=True)
            won = error < best
            scale, best = torch.where(won, a, scale), torch.where(won, error, best)
            zero = torch.where(won, z, zero)
    return scale[..., 0], zero[..., 0]


def second_order(scale: Tensor, importance: Tensor, widths: Tensor) -> SecondOrder:
    """Quantize scales [N, C2] within blocks of rows, to the given bits; importance [N, C2] weights their errors."""
    top = (2.0**widths - 1).to(scale)
    found_scale, found_zero = _second_grids(scale, importance, top)
    s, z = _by_row(found_scale, scale), _by_row(found_zero, scale)
    codes = (scale / s - z).round().clamp(min=0).minimum(top)
    return SecondOrder(found_scale, found_zero, torch.where((z == 0) & (codes == 0), 1.0, codes), top)


def _second_grids(scale: Tensor, importance: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and zero [B, C2] of the second-order grids with the least weighted error."""
    N, C2 = scale.shape
    B = -(-N // BLOCK)
    if _in_cpp(scale):
        found = torch.empty(2, B, C2)
        inputs = [t.T.contiguous().numpy() for t in (scale, importance)]
        cpu.core().second_order(*inputs, top.numpy(), torch.tensor(_SECOND_SHRINK).numpy(), *found.numpy())
        return found[0], found[1]
    pad = (0, 0, 0, B * BLOCK - N)
    wanted = torch.nn.functional.pad(scale, pad).reshape(B, BLOCK, C2)
    weight = torch.nn.functional.pad(importance, pad).reshape(B, BLOCK, C2)
    largest = wanted.amax(1)  # [B, C2]
    best = torch.full_like(largest, torch.inf)
    found_scale, found_zero = torch.full_like(largest, TINY), torch.zeros_like(largest)
    for zero in range(16):
        for shrink in _SECOND_SHRINK:
            step = (largest * shrink / (top + zero)).half().float().clamp(min=TINY)
            code = (wanted / step[:, None] - zero).round().clamp(min=0).minimum(top)
            # A scale of zero would make a group of zeros: the smallest code stays above it.
            code = code.clamp(min=1) if zero == 0 else code
            error = (weight * (step[:, None] * (code + zero) - wanted).square()).sum(1)
            won = error < best
            best = torch.where(won, error, best)
            found_scale, found_zero = torch.where(won, step, found_scale), torch.where(won, float(zero), found_zero)
    return found_scale, found_zero


def feedback(target: Tensor, by: LDLFactor, start: MixedFit) -> MixedFit:
    """Choose the codes in one pass over the columns with error feedback."""
    return _pass(target, None, by.mix, start, by.order)


def descend(target: Tensor, hessian: Tensor, fit: MixedFit) -> MixedFit:
    """Coordinate descent, one pass: set each code and each outlier to its best value given all others."""
    order = torch.arange(target.shape[1], device=target.device)
    return _pass(target, target - fit.weight(), mixing(hessian), fit, order)


def _pass(target: Tensor, error: Tensor | None, mix: Tensor, fit: MixedFit, order: Tensor) -> MixedFit:
    """Choose codes and the weights of outliers, column by column in the given order."""
    steps = torch.cat(
        [_levels(s, z, 4) for s, z in zip(fit.second.scales().unbind(1), fit.zero.unbind(1), strict=True)]
        + [_levels(fit.row_scale, fit.row_zero, 16)]
    )
    is_four = fit.four.tolist()
    two = iter(range(len(is_four)))
    place = [fit.zero.shape[1] if four else next(two) for four in is_four]  # of each group's levels in the table
    C2 = fit.zero.shape[1]
    table = LevelTable(steps, None, [4 * g for g in range(C2 + 1)], [4] * C2 + [16])
    group_of = [place[k // fit.group] for k in order.tolist()]
    outliers = fit.outliers[:, order].T if fit.outliers.any() else None
    before = None if error is None else error[:, order].T
    found, kept = sweep_levels(target[:, order].T, before, mix, table, group_of, outliers)
    codes, values = torch.empty_like(fit.codes), torch.zeros_like(target)
    codes[:, order] = found.T
    if kept is not None:
        values[:, order] = kept.T
    return replace(fit, codes=codes, values=values)


def _levels(scale: Tensor, zero: Tensor, count: int) -> Tensor:
    """Return the levels [count, N]."""
    return scale * (torch.arange(count, device=scale.device)[:, None] - zero)


def tune_scales(target: Tensor, hessian: Tensor, fit: MixedFit) -> MixedFit:
    """With the codes fixed, set scale codes, second-order scales and row scales to their best values, one by one."""
    _, zero = fit.grid()
    factor = torch.where(fit.outliers, 0.0, fit.codes - zero)  # of its scale, in each weight
    error = target - fit.weight()
    second, error = _descend_scales(error, factor, hessian, fit)
    row_scale = fit.row_scale
    if fit.four.any():
        column4 = fit.four.repeat_interleave(fit.group)[: target.shape[1]]
        f = factor[:, column4]
        num, den = (f * (error @ hessian[:, column4])).sum(1), ((f @ hessian[column4][:, column4]) * f).sum(1)
        moved = (row_scale + num / den.clamp(min=1e-30)).half().float()
        better = (moved > TINY) & (_gain(moved - row_scale, num, den) > 0)
        row_scale = torch.where(better, moved, row_scale)
    return replace(fit, second=second, row_scale=row_scale)


def _descend_scales(error: Tensor, factor: Tensor, hessian: Tensor, fit: MixedFit) -> tuple[SecondOrder, Tensor]:
    """Return better scales of 2-bit groups, and the error that is left: in C++ (sweep.h), CUDA or torch."""
    if not _in_cpp(error) and not _in_cuda(error):
        return _descend_scales_torch(error, factor, hessian, fit)
    second, left = fit.second, error.T.clone(memory_format=torch.contiguous_format)
    scale, codes = second.scale.clone(), second.codes.T.clone(memory_format=torch.contiguous_format)
    f, zero, top = (t.contiguous() for t in (factor.T, second.zero, second.top))
    if _in_cpp(error):
        columns = (~fit.four).nonzero()[:, 0].to(torch.int32) * fit.group
        first, then = ([t.contiguous().numpy() for t in some] for some in ((hessian, columns), (f, zero, top)))
        cpu.core().descend_scales(*first, fit.group, *then, *(t.numpy() for t in (left, scale, codes)))
    else:
        two = (~fit.four).repeat_interleave(fit.group)[: len(left)]
        kernels.descend_scales(left, f, hessian, two, fit.group, scale, zero, top, codes)
    return second._replace(scale=scale, codes=codes.T.contiguous()), left.T


def _descend_scales_torch(error: Tensor, factor: Tensor, hessian: Tensor, fit: MixedFit) -> tuple[SecondOrder, Tensor]:
    """Do the same in torch."""
    K, second = error.shape[1], fit.second
    left, pull = error.clone(), error @ hessian
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
        left[:, columns] -= change
        pull -= change @ hessian[columns]
    return second._replace(scale=scale2, codes=scale_codes), left


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
