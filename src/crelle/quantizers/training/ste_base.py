"""What trainable quantized weights share: the rounding with a straight-through gradient, and the module's interface."""

from typing import Any

import torch
from torch import Tensor, nn

from crelle.formats.base import QuantTensor
from crelle.kernels.cuda.training import straight_through
from crelle.quantizers.solvers.grouping import TINY


class OnGrid(torch.autograd.Function):
    """w [N, C, G] (in steps) on the grid of its group, f32; straight-through gradient, recomputed in backward."""

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


class _OnGridFused(torch.autograd.Function):
    """The same by kernels; own: scale and low are in steps, and rounded to f16 on the way."""

    @staticmethod
    def forward(
        ctx: Any, w: Tensor, step: Tensor, scale: Tensor, low: Tensor, top: int, dtype: torch.dtype, own: bool
    ) -> Tensor:
        ctx.save_for_backward(w, step, scale, low)
        ctx.top, ctx.own = top, own
        return straight_through.on_grid(w, step, scale, low, top, dtype, own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        w, step, scale, low = ctx.saved_tensors
        d_w, d_scale, d_low = straight_through.gradients(w, step, scale, low, ctx.top, gradients[0], ctx.own)
        return d_w, None, d_scale, d_low, None, None, None


def on_grid(w: Tensor, step: Tensor, scale: Tensor, low: Tensor, top: int) -> Tensor:
    """Return w [N, C, G] (in steps) on the grids low + scale (0 … top), with a straight-through gradient.

    On a GPU in the dtype that a product would round it to: there this is the last that is done with it.
    """
    if straight_through.usable(w):
        return _fused(w, step, scale, low, top, own=False)
    found: Tensor = OnGrid.apply(w, step, scale, low, top)  # type: ignore[no-untyped-call]
    return found


def on_own_grid(w: Tensor, step: Tensor, scale: Tensor, low: Tensor, top: int) -> Tensor:
    """Do the same where scale and low train, in steps too, and are stored as f16."""
    if straight_through.usable(w):
        return _fused(w, step, scale, low, top, own=True)
    return on_grid(w, step, *stored_grid(step, scale, low), top)


def stored_grid(step: Tensor, scale: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and low as they are stored, from what they are in steps."""
    return as_f16((scale * step).clamp(min=TINY)), as_f16(low * step)


def _fused(w: Tensor, step: Tensor, scale: Tensor, low: Tensor, top: int, *, own: bool) -> Tensor:
    half = torch.is_autocast_enabled(w.device.type)
    dtype = torch.get_autocast_dtype(w.device.type) if half else torch.float32
    found: Tensor = _OnGridFused.apply(w, step, scale, low, top, dtype, own)  # type: ignore[no-untyped-call]
    return found


def as_f16(x: Tensor) -> Tensor:
    """Round to f16, with a straight-through gradient."""
    return x + (x.half().float() - x).detach()


class TrainableWeight(nn.Module):
    """Computes the weight [N, K] of a linear. A parameter named `w` holds weights, all others are scales."""

    def export(self) -> QuantTensor:
        """Return the tensor to store."""
        raise NotImplementedError
