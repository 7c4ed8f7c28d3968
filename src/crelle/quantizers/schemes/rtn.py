"""Round to nearest on a uniform grid.

Asymmetric: the grid spans [min(w, 0), max(w, 0)] of the group, zero is a grid point.
    scale = (max - min) / (2^P - 1)      zero = round(-min / scale)      q = clamp(round(w / scale) + zero)
Symmetric: zero = 2^(P-1), scale = 2 max|w| / (2^P - 1).
The scale is rounded to its stored type first, and the codes are chosen for the rounded scale.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.base import Spec
from crelle.formats.bcq import UniformTensor, expand_groups
from crelle.quantizers.base import Group, GroupedConfig
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.solvers.grouping import TINY, from_groups, require_finite, row_slabs, storable, to_groups


@dataclass(frozen=True, slots=True)
class RTN(GroupedConfig):
    """Round to nearest: seconds for a model, no data; fine at 4 bits and more."""

    scheme: ClassVar[str] = "rtn"
    searchable: ClassVar[bool] = True
    bits: int = 4
    group: Group = 128
    symmetric: bool = False

    def __post_init__(self) -> None:
        GroupedConfig.__post_init__(self)
        if self.symmetric and self.bits == 1:
            raise SchemeError("a symmetric grid of 1 bit has no level above zero; use bcq:bits=1,bias=false")

    def fit(self, weight: Tensor, stats: Stats | None = None) -> UniformTensor:
        """Return the weight [N, K] on its grid."""
        weight = require_finite(weight)
        N, K = weight.shape
        group = self.group_for(K)
        parts = [self._fit_rows(weight[rows], group) for rows in row_slabs(N, K, weight.device)]
        codes, scale, zero = (torch.cat(t) for t in zip(*parts, strict=True))
        return UniformTensor.from_codes(codes, self.bits, scale, None if self.symmetric else zero, group)

    def format_settings(self) -> Spec:
        return {"format": UniformTensor.format, "symmetric": self.symmetric}

    def rounded(self, weight: Tensor) -> Tensor:
        """Return what `fit` would make of a weight f32 [N, K], without storing it."""
        K = weight.shape[1]
        group = self.group_for(K)
        codes, scale, zero = self._fit_rows(weight, group)
        return (codes - expand_groups(zero.float(), group, K)).mul_(expand_groups(scale.float(), group, K))

    def _fit_rows(self, w: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
        top = 2**self.bits - 1
        g, _ = to_groups(w, group)  # [N, C, G]; the padding is 0, which every grid contains
        if self.symmetric:
            scale = 2 * g.abs().amax(-1) / top
            zero = torch.full_like(scale, 2.0 ** (self.bits - 1))
        else:
            low, high = g.amin(-1).clamp(max=0), g.amax(-1).clamp(min=0)
            scale = (high - low) / top
            zero = (-low / scale.clamp(min=TINY)).round().clamp(0, top)
        stored = storable(scale.clamp(min=TINY))
        codes = (g / stored.float().unsqueeze(-1)).round_().add_(zero.unsqueeze(-1)).clamp_(0, top)
        return from_groups(codes.to(torch.uint8), w.shape[1]), stored, zero.to(torch.uint8)
