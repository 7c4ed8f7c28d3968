"""Weights that train: modules that give a linear layer its numbers, and in the end a tensor of our formats.

Rounded     an affine grid; weights, scales and lows train through the rounding (straight-through):
                v = (w - low) / scale     q = clamp(round(v), 0, 2^P - 1)     ŵ = low + scale q
                dŵ/dw = 1      dŵ/dscale = q - v     dŵ/dlow = 0     inside the grid
                dŵ/dw = 0      dŵ/dscale = q         dŵ/dlow = 1     outside
Frozen      codes stay as they are, only the numbers per group train (AlphaTuning): for every format with planes

All parameters are kept in units of the group's first step, so one learning rate fits every layer: it says what part of
a step a weight moves. Scales are rounded to f16 on the way, so what trains is what will be stored.
"""

from typing import Any

import torch
from torch import Tensor, nn

from crelle.errors import UnsupportedError
from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import BCQTensor, UniformTensor, spread
from crelle.formats.packing import unpack_signs
from crelle.quantizers.grouping import from_groups, to_groups

_TINY = 2.0**-24  # the smallest positive f16


class _OnGrid(torch.autograd.Function):
    """w [N, C, G] (in steps) on the grid of its group; the gradient is straight-through, recomputed, not remembered."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, step: Tensor, scale: Tensor, low: Tensor, top: int) -> Tensor:
        ctx.save_for_backward(w, step, scale, low)
        ctx.top = top
        q = (w * step).sub_(low).div_(scale).round_().clamp_(0, top)
        return q.mul_(scale).add_(low)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor, Tensor, None]:
        (g,) = gradients
        w, step, scale, low = ctx.saved_tensors
        v = (w * step).sub_(low).div_(scale)
        q = v.round().clamp_(0, ctx.top)
        through = g * ((v > -0.5) & (v < ctx.top + 0.5))
        d_scale = (g * q).sub_(through * v).sum(-1, keepdim=True)
        d_low = (g - through).sum(-1, keepdim=True)
        return through.mul_(step), None, d_scale, d_low, None


def _as_f16(x: Tensor) -> Tensor:
    """The value that f16 would keep, with the gradient of x itself."""
    return x + (x.half().float() - x).detach()


class Rounded(nn.Module):
    """An affine grid whose weights, scales and lows train."""

    step: Tensor  # f32 [N, C, 1]

    def __init__(self, start: AffineTensor, weight: Tensor | None = None) -> None:
        """Begin with the codes of `start`; `weight` [N, K] says where in its bin each weight begins."""
        super().__init__()
        self.bits, self.group, self.K = start.bits, start.group, start.K
        step = start.scale.float()[..., None]  # [N, C, 1]
        self.register_buffer("step", step)
        on_grid = start.dequantize(torch.float32)
        w, _ = to_groups(on_grid, self.group)
        if weight is not None:
            # The codes were chosen with care: a weight may lean towards its source, but not out of its bin.
            off = to_groups(weight.float() - on_grid, self.group)[0] / step
            w = w + off.clamp_(-0.45, 0.45) * step
        self.w = nn.Parameter((w / step).contiguous())
        self.scale = nn.Parameter(torch.ones_like(step))
        self.low = nn.Parameter(start.low.float()[..., None] / step)

    def _grid(self) -> tuple[Tensor, Tensor]:
        return _as_f16((self.scale * self.step).clamp(min=_TINY)), _as_f16(self.low * self.step)

    def forward(self) -> Tensor:
        scale, low = self._grid()
        w: Tensor = _OnGrid.apply(self.w, self.step, scale, low, 2**self.bits - 1)  # type: ignore[no-untyped-call]
        return from_groups(w, self.K)

    @torch.no_grad()
    def export(self) -> AffineTensor:
        scale, low = self._grid()
        q = ((self.w * self.step - low) / scale).round().clamp(0, 2**self.bits - 1)
        codes = from_groups(q.to(torch.uint8), self.K)
        return AffineTensor.from_codes(codes, self.bits, scale[..., 0].half(), low[..., 0].half(), self.group)


class Frozen(nn.Module):
    """Fixed codes; the numbers per group train. Its parameters are all that a task changes."""

    unit: Tensor  # f32 [N, C]

    def __init__(self, start: QuantTensor) -> None:
        super().__init__()
        if not isinstance(start, BCQTensor | UniformTensor | AffineTensor):
            raise UnsupportedError(f"the format '{start.format}' has no scales that could be trained")
        self.start = start
        numbers = {k: v.float() for k, v in start.tensors().items() if v.is_floating_point()}
        unit = numbers["alpha"].abs().mean(0) if "alpha" in numbers else numbers["scale"].abs()
        self.register_buffer("unit", unit.clamp(min=_TINY))
        self.numbers = nn.ParameterDict({k: nn.Parameter(v / self.unit) for k, v in numbers.items()})

    def _numbers(self) -> dict[str, Tensor]:
        return {k: _as_f16(v * self.unit) for k, v in self.numbers.items()}

    def forward(self) -> Tensor:
        s, n = self.start, self._numbers()
        if isinstance(s, BCQTensor):
            w = sum(spread(n["alpha"][p], s.group, s.K) * unpack_signs(s.planes[p], s.K) for p in range(s.bits))
            return w + spread(n["z"], s.group, s.K) if "z" in n else w  # type: ignore[return-value]
        codes = s.codes().float()
        if isinstance(s, UniformTensor):
            return (codes - spread(s.zeros().float(), s.group, s.K)) * spread(n["scale"], s.group, s.K)
        return codes * spread(n["scale"], s.group, s.K) + spread(n["low"], s.group, s.K)

    @torch.no_grad()
    def export(self) -> QuantTensor:
        numbers = {k: v.half() for k, v in self._numbers().items()}
        return type(self.start).from_parts(self.start.spec(), self.start.tensors() | numbers)


def trainable(start: QuantTensor, weight: Tensor | None, what: str) -> Rounded | Frozen:
    """Return the module that trains `what` of a tensor: "scales", or "all" (weights too, affine grids only)."""
    if what == "all" and isinstance(start, AffineTensor):
        return Rounded(start, weight)
    return Frozen(start)
