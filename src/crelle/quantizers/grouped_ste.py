"""Training of weights in integer groups with outlier columns, with a straight-through estimator.

Fixed: the order of columns, which are outliers, the activations (their rounding passes the gradient through:
crelle.formats.activations). Trained: weights and scales, of outliers too; outliers that are floats stay as they are.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from crelle.formats.activations import least_and_top
from crelle.formats.grouped import GroupedTensor, in_input_order
from crelle.quantizers.atom_grids import Columns
from crelle.quantizers.grouping import TINY, to_groups
from crelle.quantizers.ste_base import OnGrid, TrainableWeight, as_f16

_BIN = 0.45  # how far from its level, in steps, a weight may begin


class STEGrouped(TrainableWeight):
    """Parameters in units of the group's initial step; columns in stored order, all groups whole."""

    step: Tensor  # f32 [N, C, 1]

    def __init__(self, start: GroupedTensor, weight: Tensor | None = None) -> None:
        """Start from the codes of `start`; `weight` [N, K] gives the initial position of each weight in its bin."""
        super().__init__()
        self.start, s = start, start.sizes
        integers = start.integers()
        self.columns = Columns(integers.shape[1], s.group, s.outliers if s.outlier_bits == 8 else 0)
        step = start.scale.float().clamp(min=TINY)[..., None]
        self.register_buffer("step", step)
        w = self._groups(integers.float())  # in steps
        if weight is not None:
            stored = weight.float() if start.perm is None else weight.float()[:, start.perm.long()]
            off = self._groups(stored[:, : self.columns.K]) / step - w
            # Clipped weights stay beyond the grid: they are what holds a scale up against the rounding errors.
            ends = torch.tensor([least_and_top(b) for g, b in self._kinds() for _ in range(g.stop - g.start)])
            least, top = ends.to(w)[:, 0, None], ends.to(w)[:, 1, None]  # [C, 1]
            w = w + torch.where((w == top) & (off > 0) | (w == least) & (off < 0), off, off.clamp(-_BIN, _BIN))
        self.w = nn.Parameter(w.contiguous())
        self.scale = nn.Parameter(torch.ones_like(step))
        # A change of the scale moves the outermost of 127 levels by 18 times as many steps as that of 7.
        pace = [min(1.0, 7 / least_and_top(bits)[1]) for g, bits in self._kinds() for _ in range(g.stop - g.start)]
        self.register_buffer("pace", torch.tensor(pace, device=step.device)[:, None])

    pace: Tensor  # f32 [C, 1]

    def _groups(self, t: Tensor) -> Tensor:
        return to_groups(self.columns.pad(t), self.columns.group)[0]

    def _scale(self) -> Tensor:
        return as_f16(((1 + (self.scale - 1) * self.pace) * self.step).clamp(min=TINY))

    def _kinds(self) -> list[tuple[slice, int]]:
        """Return which groups have how many bits."""
        C, n = self.columns.groups
        return [(slice(0, C), self.start.sizes.bits), (slice(C, C + n), 8)]

    def forward(self) -> Tensor:
        scale, parts = self._scale(), []
        for groups, bits in self._kinds():
            (least, top), s = least_and_top(bits), scale[:, groups]
            parts.append(OnGrid.apply(self.w[:, groups], self.step[:, groups], s, s * least, top - least))  # type: ignore[no-untyped-call]
        columns = torch.cat(self.columns.split(torch.cat(parts, 1).flatten(1)), 1)
        if self.start.outliers is not None and self.columns.K < self.start.sizes.K:
            columns = torch.cat([columns, self.start.outliers.float()], 1)
        return in_input_order(columns, self.start.perm)

    @torch.no_grad()
    def export(self) -> GroupedTensor:
        scale, start = self._scale(), self.start
        parts = [
            (self.w[:, g] * self.step[:, g] / scale[:, g]).round().clamp(*least_and_top(bits)).to(torch.int8)
            for g, bits in self._kinds()
        ]
        codes, outliers = self.columns.split(torch.cat(parts, 1).flatten(1))
        kept = outliers.contiguous() if self.columns.outliers else start.outliers
        stored = scale[..., 0].half()
        made = GroupedTensor.from_codes(codes.contiguous(), start.sizes.bits, stored, start.sizes.group, kept)
        return replace(made, perm=start.perm, activation=start.activation)
