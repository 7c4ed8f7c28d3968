"""Integer grids of weights in groups with outlier columns: their scales, and codes as formats store them.

Solvers work on columns that are padded so that every group is whole: [normal | zeros | outliers | zeros]. Codes count
from 0: level i of a group is  (i - shift) scale,  of `count` levels.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from crelle.formats.activations import ActivationSpec, least_and_top
from crelle.formats.grouped import GroupedTensor
from crelle.formats.two_level import LIMIT, TwoLevelTensor
from crelle.quantizers.solvers.gptq_solver import Fit, Levels
from crelle.quantizers.solvers.grouping import TINY, importances, storable, to_groups

_SHRINK = [1.0 - 0.05 * i for i in range(11)]  # 1 … 0.5


@dataclass(frozen=True, slots=True)
class Columns:
    """How K columns in stored order lie in groups, the last `outliers` in groups of their own."""

    K: int
    group: int
    outliers: int

    @property
    def normal(self) -> int:
        return self.K - self.outliers

    @property
    def groups(self) -> tuple[int, int]:
        """Return the number of groups of normal columns, and of outliers."""
        return -(-self.normal // self.group), -(-self.outliers // self.group)

    def pad(self, t: Tensor) -> Tensor:
        """Return [..., K] with zeros behind normal columns and outliers, so that all groups are whole."""
        pad = torch.nn.functional.pad
        C, n = self.groups
        normal, outliers = t[..., : self.normal], t[..., self.normal :]
        filled = [(normal, C * self.group - self.normal), (outliers, n * self.group - self.outliers)]
        return torch.cat([pad(part, (0, more)) for part, more in filled], -1)

    def split(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normal columns and the outliers of padded columns [..., K']."""
        begin = self.groups[0] * self.group
        return t[..., : self.normal], t[..., begin : begin + self.outliers]

    def pass_order(self, energy: Tensor) -> Tensor:
        """Return the order in which the feedback takes the padded columns: large activations first, outliers last."""
        begin = self.groups[0] * self.group
        parts = (energy[:begin], energy[begin:])
        order = [part.argsort(descending=True, stable=True) for part in parts]
        return torch.cat([order[0], begin + order[1]])


def one_level(w: Tensor, cost: Tensor, columns: Columns, bits: int, *, clip: bool) -> Levels:
    """Return symmetric grids for padded weights [N, K'], column k weighted by cost[k]."""
    g, _ = to_groups(w, columns.group)
    h = importances(cost, columns.group)
    C, n = columns.groups
    outliers = _grid(g[:, C:], h[C:], 8, clip=False)
    scale = torch.cat([_grid(g[:, :C], h[:C], bits, clip=clip and bits < 8), outliers], 1)  # [N, C + n]
    return _levels(scale, [-least_and_top(bits)[0]] * C + [127] * n, columns.group, bits, C, n)


def _levels(scale: Tensor, shifts: list[int], group: int, bits: int, C: int, n: int) -> Levels:
    book = torch.arange(256.0, device=scale.device)[:, None]
    shift = torch.tensor(shifts, dtype=torch.float32, device=scale.device).expand(scale.shape)
    least, top = least_and_top(bits)
    return Levels(book, scale[..., None], group, shift[..., None], [top - least + 1] * C + [255] * n)


def _grid(g: Tensor, h: Tensor, bits: int, *, clip: bool) -> Tensor:
    """Return the scale [N, C] with the least error of groups [N, C, G]."""
    least, top = least_and_top(bits)
    size = g.abs().amax(-1)
    best = torch.full_like(size, torch.inf)
    scale = torch.full_like(size, TINY)
    for shrink in _SHRINK if clip else _SHRINK[:1]:
        a = storable((size * (shrink / top)).clamp(min=TINY)).float()
        q = (g / a[..., None]).round_().clamp_(least, top)
        error = (q.mul_(a[..., None]).sub_(g).square_() * h).sum(-1)
        won = error < best
        scale, best = torch.where(won, a, scale), torch.where(won, error, best)
    return scale


@dataclass(frozen=True, slots=True, eq=False)
class TwoLevels(Levels):
    """Levels unit (a i - z), and unit of outliers, as they are stored."""

    unit: Tensor = field(kw_only=True)  # f32 [N]
    a: Tensor = field(kw_only=True)  # f32 [N, C]
    z: Tensor = field(kw_only=True)

    def where(self, rows: Tensor, other: Levels) -> "TwoLevels":
        assert isinstance(other, TwoLevels)
        return self.at(torch.where(rows, self.unit, other.unit))

    def at(self, unit: Tensor) -> "TwoLevels":
        """Return the same integers in other units [N]."""
        return replace(self, scales=self.scales * (unit / self.unit)[:, None, None], unit=unit)


def solve_unit(target: Tensor, hessian: Tensor, fit: Fit) -> Fit:
    """Return the same codes with the best unit of each row, as f16 stores it."""
    assert isinstance(fit.levels, TwoLevels)
    w = fit.levels.decode(fit.codes)
    seen = w @ hessian
    best = (target * seen).sum(1) / (w * seen).sum(1).clamp(min=1e-30)
    return Fit(fit.codes, fit.levels.at((fit.levels.unit * best).clamp(min=TINY).half().float()))


def two_levels(w: Tensor, cost: Tensor, columns: Columns, bits: int, *, clip: bool) -> Levels:
    """Return grids of 16 levels a q - z, in units of the row's scale: a and z integers, weights within ±119 units."""
    g, _ = to_groups(w, columns.group)
    h = importances(cost, columns.group)
    C, n = columns.groups
    unit = storable((w.abs().amax(-1) / LIMIT).clamp(min=TINY)).float()[:, None]  # [N, 1]
    v = g[:, :C] / unit[..., None]
    low, high = v.amin(-1).clamp(-LIMIT, 0), v.amax(-1).clamp(0, LIMIT)
    best = torch.full_like(low, torch.inf)
    a, z = torch.ones_like(low), torch.zeros_like(low)
    for shrink in _SHRINK if clip else _SHRINK[:1]:
        zero = (-low * shrink).round_()
        step = ((high - low) * (shrink / 15)).ceil_().clamp_(1, 16)
        step = torch.minimum(step, ((127 + zero) / 15).floor_().clamp_(min=1))  # the top level fits 8 bits
        q = ((v + zero[..., None]) / step[..., None]).round_().clamp_(0, 15)
        error = ((q * step[..., None] - zero[..., None] - v).square_() * h[:C]).sum(-1)
        won = error < best
        a, z, best = torch.where(won, step, a), torch.where(won, zero, z), torch.where(won, error, best)
    scale = torch.cat([a * unit, unit.expand(-1, n)], 1)
    found = _levels(scale, [0] * C + [127] * n, columns.group, 4, C, n)
    assert found.shift is not None
    shift = torch.cat([z / a, found.shift[:, C:, 0]], 1)
    return TwoLevels(found.book, found.scales, found.group, shift[..., None], found.count, unit=unit[:, 0], a=a, z=z)


def store_one_level(
    fits: list[Fit],
    columns: Columns,
    bits: int,
    perm: Tensor,
    activation: ActivationSpec | None,
    floats: Tensor | None = None,
) -> GroupedTensor:
    """Pack what was fitted; floats [N, n]: the outliers, where those are not quantized."""
    normal, outliers = columns.split(torch.cat([f.codes for f in fits]).short())
    scale = storable(torch.cat([f.levels.scales[..., 0] for f in fits]))
    codes = (normal + least_and_top(bits)[0]).to(torch.int8)
    kept: Tensor | None = (outliers - 127).to(torch.int8).contiguous() if columns.outliers else None
    if floats is not None and columns.outliers:
        kept, scale = storable(floats), scale[:, : columns.groups[0]]
    return GroupedTensor.from_codes(codes.contiguous(), bits, scale, columns.group, kept, perm, activation)


def store_two_levels(
    fits: list[Fit],
    columns: Columns,
    bits: int,
    perm: Tensor,
    activation: ActivationSpec | None,
    floats: Tensor | None = None,
) -> TwoLevelTensor:
    """Pack what was fitted."""
    normal, outliers = columns.split(torch.cat([f.codes for f in fits]))
    levels = [f.levels for f in fits if isinstance(f.levels, TwoLevels)]
    unit, a, z = (torch.cat([getattr(one, name) for one in levels]) for name in ("unit", "a", "z"))
    kept = (outliers.short() - 127).to(torch.int8).contiguous() if columns.outliers else None
    integers = a.to(torch.uint8), z.to(torch.uint8)
    return TwoLevelTensor.from_codes(
        normal.contiguous(), *integers, storable(unit), columns.group, kept, perm, activation
    )
