"""Activation-aware scales (AWQ, arXiv 2306.00978), clipping, then round to nearest.

    W x = (W diag(s)) (x / s)

1. scale  Rounding the weights of a large input is costly: with s > 1 they get finer steps relative to their size.
          s = absmean^a; per fold the exponent a of 0, 1/steps … 1 with the least output error
          Σ_readers tr(D H Dᵀ),  D = W - Q(W s) / s.  The division by s is folded into what computes x, the weight of a
          norm or the rows of a linear, so it costs nothing at inference.
2. clip   Per group, in turn, the range [f min, f max], f = 1 … 1/2, whose rounding gives the least output error given
          all other groups.
3. round  as crelle.quantizers.schemes.rtn does; the result is a UniformTensor.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.base import QuantTensor, Spec
from crelle.formats.bcq import UniformTensor
from crelle.quantizers.base import Group, GroupedConfig, check_guidance
from crelle.quantizers.calibration.calibrate import LayerCalibration
from crelle.quantizers.calibration.scale_folds import fold_scales
from crelle.quantizers.calibration.stats import Stats, require_stats
from crelle.quantizers.schemes.rtn import RTN
from crelle.quantizers.solvers.grouping import require_finite, row_slabs

_LEAST = 1e-4  # of the mean magnitude: bounds the scale of inputs that are almost always 0
_CLIPS = [1.0 - 0.05 * i for i in range(11)]  # 1 … 0.5


@dataclass(frozen=True, slots=True)
class AWQ(GroupedConfig):
    """Round to nearest after scaling inputs by their magnitude."""

    scheme: ClassVar[str] = "awq"
    calibrated: ClassVar[bool] = True
    bits: int = 4
    group: Group = 128
    symmetric: bool = False
    clip: bool = True
    steps: int = 20  # of the exponent; 0: no scaling
    guidance: float = 0.0

    def __post_init__(self) -> None:
        GroupedConfig.__post_init__(self)
        self._rounding()
        check_guidance(self.guidance)
        if not 0 <= self.steps <= 1000:
            raise SchemeError(f"steps must be 0 to 1000, got {self.steps}")

    def _rounding(self) -> RTN:
        return RTN(self.bits, self.group, self.symmetric)

    def before_layer(self, layer: LayerCalibration) -> dict[str, Tensor]:
        """Fold scales into the layer, which computes the same as before. Returns the changed norms and biases."""
        changed: dict[str, Tensor] = {}
        for fold in layer.full.folds():
            weights = [layer.full.linears()[name].weight for name in fold.readers]
            s = self.scales(weights, layer.stats(fold.readers[0]))
            if (s == 1).all():
                continue
            changed |= fold_scales(layer, fold, s)
        return changed

    def after_layer(self, layer: LayerCalibration, fitted: dict[str, QuantTensor]) -> dict[str, QuantTensor]:
        return fitted

    def scales(self, weights: list[Tensor], stats: Stats) -> Tensor:
        """Return the scales [K] with the least output error for the weights [N, K] that share an input."""
        size = stats.absmean / stats.absmean.mean().clamp(min=1e-30)
        size = size.clamp(min=_LEAST)
        best, least = torch.ones_like(size), float("inf")
        for i in range(self.steps + 1):
            s = size ** (i / max(1, self.steps))
            s = s / (s.amax() * s.amin()).sqrt()
            error = sum(stats.output_error(w - self._rounding().rounded(w * s) / s) for w in weights)
            if error < least:
                best, least = s, error
        return best

    def fit(self, weight: Tensor, stats: Stats | None = None) -> UniformTensor:
        """Return the weight [N, K], scaled already, on its grid."""
        N, K = weight.shape
        stats = require_stats(stats, self.scheme, K)
        weight = require_finite(weight)
        if self.clip:
            weight = torch.cat([self._clipped(weight[rows], stats.hessian) for rows in row_slabs(N, K, weight.device)])
        return self._rounding().fit(weight)

    def format_settings(self) -> Spec:
        return self._rounding().format_settings()

    def _clipped(self, w: Tensor, hessian: Tensor) -> Tensor:
        """Return the weights [N, K] clipped to the ranges with the least output error."""
        K, group, rounding = w.shape[1], self.group_for(w.shape[1]), self._rounding()
        clipped, error = w.clone(), w - rounding.rounded(w)
        for begin in range(0, K, group):
            place = slice(begin, min(begin + group, K))
            here, H = w[:, place], hessian[place, place]
            others = (
                error @ hessian[:, place] - error[:, place] @ H
            )  # [N, G], coupling with the errors of the other groups
            least = torch.full_like(here[:, :1], torch.inf)
            low, high = here.amin(1, keepdim=True).clamp(max=0), here.amax(1, keepdim=True).clamp(min=0)
            if self.symmetric:
                high = torch.maximum(-low, high)
                low = -high
            for f in _CLIPS:
                trial = here.clamp(f * low, f * high)
                left = here - rounding.rounded(trial)
                cost = ((left @ H + 2 * others) * left).sum(1, keepdim=True)
                won = cost < least
                least = torch.where(won, cost, least)
                clipped[:, place] = torch.where(won, trial, clipped[:, place])
                error[:, place] = torch.where(won, left, error[:, place])
        return clipped
