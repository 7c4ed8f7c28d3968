"""Trainable quantized weights: modules that compute a linear layer's weight, and in the end export a QuantTensor.

STEWeight   an affine grid; weights, scales and lows train with a straight-through estimator (STE):
                v = (w - low) / scale     q = clamp(round(v), 0, 2^P - 1)     ŵ = low + scale q
                dŵ/dw = 1      dŵ/dscale = q - v     dŵ/dlow = 0     inside the grid
                dŵ/dw = 0      dŵ/dscale = q         dŵ/dlow = 1     outside
STEMixed    the same for 2- and 4-bit groups with second-order scales (crelle.quantizers.training.mixed_ste)
IncrementalTrellis  trellis codes, rotated or not: found a share at a time (crelle.quantizers.training.incremental)
RowScales   the same with fixed codes: one scale a row trains
STEGrouped, STETwoLevel  the same for integers with outlier columns (crelle.quantizers.training.grouped_ste)
ScaleTuner  codes are fixed, only the scales train (AlphaTuning): for every format whose `scales` are not empty

All parameters are stored in units of the group's initial step size, so one learning rate fits every layer. Scales are
rounded to f16 in the forward pass, so what trains is what will be stored.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from crelle.errors import UnsupportedError
from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor
from crelle.formats.grouped import GroupedTensor
from crelle.formats.mixed import MixedTensor
from crelle.formats.trellis import TrellisTensor
from crelle.formats.two_level import TwoLevelTensor
from crelle.formats.wrappers.rotated import RotatedTensor
from crelle.quantizers.solvers.grouping import TINY, from_groups, to_groups
from crelle.quantizers.training.grouped_ste import STEGrouped, STETwoLevel
from crelle.quantizers.training.incremental import IncrementalTrellis
from crelle.quantizers.training.mixed_ste import STEMixed
from crelle.quantizers.training.ste_base import TrainableWeight, as_f16, on_own_grid, stored_grid


class STEWeight(TrainableWeight):
    """An affine grid whose weights, scales and lows train."""

    step: Tensor  # f32 [N, C, 1]

    def __init__(self, start: AffineTensor, weight: Tensor | None = None) -> None:
        """Start from the codes of `start`; `weight` [N, K] gives the initial position of each weight in its bin."""
        super().__init__()
        self.bits, self.group, self.K = start.bits, start.group, start.K
        step = start.scale.float()[..., None]  # [N, C, 1]
        self.register_buffer("step", step)
        on_grid = start.dequantize(torch.float32)
        w, _ = to_groups(on_grid, self.group)
        if weight is not None:
            # Keep the codes of `start`: a weight moves towards its full-precision value, but not out of its bin.
            off = to_groups(weight.float() - on_grid, self.group)[0] / step
            w = w + off.clamp_(-0.45, 0.45) * step
        self.w = nn.Parameter((w / step).contiguous())
        self.scale = nn.Parameter(torch.ones_like(step))
        self.low = nn.Parameter(start.low.float()[..., None] / step)

    def forward(self) -> Tensor:
        return from_groups(on_own_grid(self.w, self.step, self.scale, self.low, 2**self.bits - 1), self.K)

    @torch.no_grad()
    def export(self) -> AffineTensor:
        scale, low = stored_grid(self.step, self.scale, self.low)
        q = ((self.w * self.step - low) / scale).round().clamp(0, 2**self.bits - 1)
        codes = from_groups(q.to(torch.uint8), self.K)
        return AffineTensor.from_codes(codes, self.bits, scale[..., 0].half(), low[..., 0].half(), self.group)


class ScaleTuner(TrainableWeight):
    """Fixed codes, trainable scales: its parameters are all that a task changes."""

    def __init__(self, start: QuantTensor) -> None:
        super().__init__()
        if not (scales := start.scales()):
            raise UnsupportedError(f"the format '{start.format}' has no trainable scales")
        self.start = start
        self.units = _units({name: t.float() for name, t in scales.items()})
        self.scales = nn.ParameterDict({name: nn.Parameter(t.float() / self.units[name]) for name, t in scales.items()})

    def _scales(self) -> dict[str, Tensor]:
        return {name: as_f16(t * self.units[name]) for name, t in self.scales.items()}

    def forward(self) -> Tensor:
        return self.start.with_scales(self._scales()).dequantize(torch.float32)

    @torch.no_grad()
    def export(self) -> QuantTensor:
        return self.start.with_scales({name: t.half() for name, t in self._scales().items()})


class RowScales(TrainableWeight):
    """Fixed codes whose only scale is one a row: they are decoded once, not in every step."""

    values: Tensor  # f32 [N, K], with scales of 1
    unit: Tensor  # f32 [N, 1]

    def __init__(self, start: QuantTensor) -> None:
        super().__init__()
        scale = start.scales()["scale"].float()
        self.start = start
        self.register_buffer("unit", scale.clamp(min=TINY).unsqueeze(1), persistent=False)
        whole = start.with_scales({"scale": torch.ones_like(scale)}).dequantize(torch.float32)
        self.register_buffer("values", whole, persistent=False)
        self.scale = nn.Parameter(torch.ones_like(self.unit))

    def forward(self) -> Tensor:
        return as_f16(self.scale * self.unit) * self.values

    @torch.no_grad()
    def export(self) -> QuantTensor:
        return self.start.with_scales({"scale": (self.scale * self.unit).squeeze(1).half()})


def _units(scales: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the unit of each scale tensor: the step size of its group, or its own mean magnitude."""
    first = next(iter(scales.values())).abs()
    step = first.flatten(0, -3).mean(0) if first.dim() > 2 else first
    step = step.clamp(min=TINY)
    return {
        name: step if t.shape[-step.dim() :] == step.shape else t.abs().mean().clamp(min=TINY)
        for name, t in scales.items()
    }


# Modules that train the weights of a format through the rounding; a format that has one adds it here.
STE_WEIGHTS: dict[str, Callable[[Any, Tensor | None], TrainableWeight]] = {
    AffineTensor.format: STEWeight,
    MixedTensor.format: STEMixed,
    GroupedTensor.format: STEGrouped,
    TwoLevelTensor.format: STETwoLevel,
}


def row_scaled(start: QuantTensor) -> bool:
    """Tell whether a tensor is of trellis codes, whose scales belong to rows: not where outputs are rotated."""
    if isinstance(start, RotatedTensor):
        return start.outputs is None and isinstance(start.inner, TrellisTensor)
    return isinstance(start, TrellisTensor)


def trainable_weight(start: QuantTensor, weight: Tensor | None) -> TrainableWeight | None:
    """Return the module that trains a tensor's weights through the rounding; None where only its scales can train."""
    if row_scaled(start):
        return IncrementalTrellis(start)  # type: ignore[arg-type]
    make = STE_WEIGHTS.get(start.format)
    return None if make is None else make(start, weight)


def trainable(start: QuantTensor, weight: Tensor | None, what: str) -> TrainableWeight:
    """Return the module that trains `what` of a tensor: "scales", or "all" (weights too, where the format can)."""
    if what == "all" and (module := trainable_weight(start, weight)) is not None:
        return module
    return RowScales(start) if row_scaled(start) else ScaleTuner(start)
