"""Training of weights in integer groups with outlier columns, with a straight-through estimator.

Fixed: the order of columns, which are outliers, the activations (their rounding passes the gradient through:
crelle.formats.activations), and the integer scales and zeros of the two-level format. Trained: weights and float
scales, of outliers too; outliers that are floats stay as they are.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from crelle.formats.activations import least_and_top
from crelle.formats.grouped import GroupedTensor, in_input_order, unrotated
from crelle.formats.packing import pack_stream
from crelle.formats.two_level import TwoLevelTensor
from crelle.quantizers.schemes.atom_grids import Columns
from crelle.quantizers.solvers.grouping import TINY, to_groups
from crelle.quantizers.training.ste_base import OnGrid, TrainableWeight, as_f16

_BIN = 0.45  # how far from its level, in steps, a weight may begin


class _Grid(NamedTuple):
    """Levels of all groups: low + i scale, i from 0."""

    scale: Tensor  # f32 [N, C, 1]
    low: Tensor


class _STEIntegers(TrainableWeight):
    """Weights in units of the group's initial step, scales of themselves; columns in stored order, all groups whole.

    `tops`: the last level of each group; levels count from 0.
    """

    step: Tensor  # f32 [N, C, 1]
    top: Tensor  # f32 [C, 1]
    pace: Tensor  # f32 [C, 1]

    def __init__(self, columns: Columns, start: GroupedTensor | TwoLevelTensor, tops: list[int]) -> None:
        super().__init__()
        self.columns, self.perm, self.activation, self.tops = columns, start.perm, start.activation, tops

    def _begin(self, levels: Tensor, weight: Tensor | None) -> None:
        """Start from levels [N, C, G]; `weight` [N, K] gives the initial position of each weight in its bin."""
        top = torch.tensor(self.tops, dtype=torch.float32, device=levels.device)[:, None]
        self.register_buffer("top", top)
        with torch.no_grad():
            grid = self._grid()
            self.register_buffer("step", grid.scale.clone())
            w = levels + grid.low / grid.scale  # in steps
            if weight is not None:
                stored = weight.float() if self.perm is None else weight.float()[:, self.perm.long()]
                stored = unrotated(stored, self.activation)  # its own inverse
                off = self._groups(stored[:, : self.columns.K]) / grid.scale - w
                # Clipped weights stay beyond the grid: they hold a scale up against the rounding errors.
                beyond = (levels == top) & (off > 0) | (levels == 0) & (off < 0)
                w = w + torch.where(beyond, off, off.clamp(-_BIN, _BIN))
            self.w = nn.Parameter(w.contiguous())

    def _grid(self) -> _Grid:
        raise NotImplementedError

    def _groups(self, t: Tensor) -> Tensor:
        return to_groups(self.columns.pad(t), self.columns.group)[0]

    def _columns(self) -> Tensor:
        """Return the weights in stored order."""
        grid, parts, C = self._grid(), [], self.columns.groups[0]
        for at in (slice(0, C), slice(C, len(self.tops))):
            if tops := self.tops[at]:
                given = (self.w[:, at], self.step[:, at], grid.scale[:, at], grid.low[:, at], tops[0])
                parts.append(OnGrid.apply(*given))  # type: ignore[no-untyped-call]
        return torch.cat(self.columns.split(torch.cat(parts, 1).flatten(1)), 1)

    def _in_input_order(self, w: Tensor) -> Tensor:
        return in_input_order(unrotated(w, self.activation), self.perm)

    def _levels(self) -> tuple[Tensor, Tensor]:
        """Return the levels of normal columns and of outliers, int16."""
        grid = self._grid()
        found = ((self.w * self.step - grid.low) / grid.scale).round().clamp(min=0).minimum(self.top)
        return self.columns.split(found.flatten(1).short())


class STEGrouped(_STEIntegers):
    """One scale per group."""

    least: Tensor  # f32 [C, 1]

    def __init__(self, start: GroupedTensor, weight: Tensor | None = None) -> None:
        s, integers, device = start.sizes, start.integers(), start.device
        columns = Columns(integers.shape[1], s.group, s.outliers if s.outlier_bits == 8 else 0)
        C, n = columns.groups
        ends = [least_and_top(s.bits)] * C + [least_and_top(8)] * n
        super().__init__(columns, start, [top - least for least, top in ends])
        self.start = start
        self.scale = nn.Parameter(torch.ones_like(start.scale, dtype=torch.float32)[..., None])
        # A change of the scale moves the outermost of 127 levels by 18 times as many steps as that of 7.
        self.register_buffer("pace", torch.tensor([min(1.0, 7 / top) for _, top in ends], device=device)[:, None])
        self.register_buffer("least", torch.tensor([float(least) for least, _ in ends], device=device)[:, None])
        self._begin(self._groups(integers.float()) - self.least, weight)

    def _grid(self) -> _Grid:
        scale = (1 + (self.scale - 1) * self.pace) * self.start.scale.float()[..., None]
        stored = as_f16(scale.clamp(min=TINY))
        return _Grid(stored, stored * self.least)

    def forward(self) -> Tensor:
        w = self._columns()
        if self.start.outliers is not None and self.columns.K < self.start.sizes.K:  # outliers that are floats
            w = torch.cat([w, self.start.outliers.float()], 1)
        return self._in_input_order(w)

    @torch.no_grad()
    def export(self) -> GroupedTensor:
        (normal, outliers), start, s = self._levels(), self.start, self.start.sizes
        codes = (normal + least_and_top(s.bits)[0]).to(torch.int8).contiguous()
        kept = (outliers - 127).to(torch.int8).contiguous() if self.columns.outliers else start.outliers
        made = GroupedTensor.from_codes(codes, s.bits, self._grid().scale[..., 0].half(), s.group, kept)
        return replace(made, perm=start.perm, activation=start.activation)


class STETwoLevel(_STEIntegers):
    """Integer scales and zeros of groups stay, the scale of a row trains."""

    def __init__(self, start: TwoLevelTensor, weight: Tensor | None = None) -> None:
        s = start.sizes
        columns = Columns(s.K, s.group, s.outliers)
        C, n = columns.groups
        super().__init__(columns, start, [15] * C + [254] * n)
        self.start = start
        self.scale = nn.Parameter(torch.ones_like(start.scale, dtype=torch.float32))  # [N]
        one = start.group_scale.new_ones(s.N, n)
        # In units of the row's scale, [N, C + n, 1]: the step of a group, and its lowest level.
        self.register_buffer("units", torch.cat([start.group_scale, one], 1).float()[..., None])
        self.register_buffer("lows", torch.cat([start.group_zero, one * 127], 1).float().neg()[..., None])
        codes = start.codes().float()
        levels = codes if start.outliers is None else torch.cat([codes, start.outliers.float() + 127], 1)
        self._begin(self._groups(levels), weight)

    units: Tensor
    lows: Tensor

    def _scale(self) -> Tensor:
        # One scale for all of a row's 8-bit levels: slow, as those of outliers in STEGrouped.
        return as_f16(((1 + (self.scale - 1) * (7 / 127)) * self.start.scale.float()).clamp(min=TINY))

    def _grid(self) -> _Grid:
        scale = self._scale()[:, None, None]
        return _Grid(scale * self.units, scale * self.lows)

    def forward(self) -> Tensor:
        return self._in_input_order(self._columns())

    @torch.no_grad()
    def export(self) -> TwoLevelTensor:
        (normal, outliers), start = self._levels(), self.start
        packed = pack_stream(normal.to(torch.uint8), 4)
        kept = None if start.outliers is None else (outliers - 127).to(torch.int8).contiguous()
        return replace(start, packed=packed, scale=self._scale().half(), outliers=kept)
