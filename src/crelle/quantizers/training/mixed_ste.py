"""Quantization-aware training of mixed 2/4-bit matrices, with a straight-through estimator.

Fixed: which groups have 4 bits, the zeros, the codes of first-order scales, the places of outliers. Trained: weights,
second-order scales, row scales, the values of outliers.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from crelle.formats.mixed import MixedTensor, zero_of
from crelle.formats.packing.mixed import pack
from crelle.quantizers.solvers.grouping import TINY, from_groups, to_groups
from crelle.quantizers.training.ste_base import TrainableWeight, as_f16, on_grid

_BIN = 0.45  # how far from its level, in steps, a weight may begin


class STEMixed(TrainableWeight):
    """Parameters in units of what they begin with: weights of their step, scales of themselves.

    Groups lie in another order than in the matrix, those of 2 bits first. A forward pass asks nothing of the CPU, so
    that a step of training can be a CUDA graph.
    """

    def __init__(self, start: MixedTensor, weight: Tensor | None = None) -> None:
        """Start from the codes of `start`; `weight` [N, K] gives the initial position of each weight in its bin."""
        super().__init__()
        self.start, self.codes = start, start.codes()
        self.order = start.four.long().argsort(stable=True)  # groups of the matrix, those of 2 bits first
        self.back = self.order.argsort()
        self.C2 = len(self.order) - int(start.four.sum())
        self.second_scale = nn.Parameter(torch.ones_like(start.second_scale, dtype=torch.float32))
        self.row_scale = None if start.row_scale is None else nn.Parameter(torch.ones(start.N, device=start.device))
        self.outliers = self.places = None
        if start.outlier_values is not None:
            self.places = start.outlier_places()
            values = start.dequantize(torch.float32)[self.places]  # the weights, not what is added to codes
            self.unit = values.abs().mean().clamp(min=TINY)
            self.outliers = nn.Parameter(values / self.unit)
        with torch.no_grad():
            scale, zero = self._grid()
            step = scale.clamp(min=TINY)
            codes = torch.cat([self.codes.codes2, self.codes.codes4], 1).float()
            w = (codes - zero) * step  # [N, C, G]
            if weight is not None:
                off = (to_groups(weight.float(), start.G)[0][:, self.order] - w) / step
                w = w + off.clamp_(-_BIN, _BIN) * step
            self.register_buffer("step", step)
            self.w = nn.Parameter((w / step).contiguous())

    step: Tensor  # f32 [N, C, 1]

    def _stored(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return second-order scales and row scales as they will be stored, and the weights of outliers."""
        start = self.start
        second = as_f16((self.second_scale * start.second_scale.float()).clamp(min=TINY))
        row = outliers = None
        if self.row_scale is not None and start.row_scale is not None:
            row = as_f16((self.row_scale * start.row_scale.float()).clamp(min=TINY))
        if self.outliers is not None:
            outliers = self.outliers * self.unit
        return second, row, outliers

    def _grid(self) -> tuple[Tensor, Tensor]:
        """Return scale and zero of each group [N, C, 1]."""
        start, (second, row, _) = self.start, self._stored()
        multiple = self.codes.scale_codes + self._of_rows(self.codes.second_zeros)
        scale, zero = self._of_rows(second) * multiple, zero_of(self.codes.zeros)
        if row is not None and start.row_zero is not None:
            each = (start.N, len(self.order) - self.C2)
            scale = torch.cat([scale, row[:, None].expand(each)], 1)
            zero = torch.cat([zero, start.row_zero.float()[:, None].expand(each)], 1)
        return scale[..., None], zero[..., None]

    def _of_rows(self, blocks: Tensor) -> Tensor:
        return self.start.of_rows(blocks)

    def forward(self) -> Tensor:
        start = self.start
        scale, zero = self._grid()
        low = -zero * (scale := scale.clamp(min=TINY))
        parts = []
        for groups, top in ((slice(0, self.C2), 3), (slice(self.C2, None), 15)):
            w, step, s = self.w[:, groups], self.step[:, groups], scale[:, groups]
            if w.shape[1]:
                parts.append(on_grid(w, step, s, low[:, groups], top))
        weight = from_groups(torch.cat(parts, 1)[:, self.back], start.K)
        outliers = self._stored()[2]
        if outliers is None or self.places is None:
            return weight
        return weight.index_put(self.places, outliers.to(weight.dtype))

    @torch.no_grad()
    def export(self) -> MixedTensor:
        start, (second, row, outliers) = self.start, self._stored()
        scale, zero = self._grid()
        q = (self.w * self.step / scale.clamp(min=TINY) + zero).round()
        two, four = q[:, : self.C2].clamp(0, 3).to(torch.uint8), q[:, self.C2 :].clamp(0, 15).to(torch.uint8)
        packed = pack(start.packing, self.codes._replace(codes2=two, codes4=four))
        half_row = None if row is None else row.half()
        found = replace(start, packed=packed, second_scale=second.half(), row_scale=half_row)
        if outliers is None or self.places is None:
            return found
        dense = replace(found, outlier_values=None).dequantize(torch.float32)
        return replace(found, outlier_values=(outliers - dense[self.places]).half())
