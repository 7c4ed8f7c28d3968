"""What trainable quantized weights share: the rounding with a straight-through gradient, and the module's interface."""

from typing import Any

import torch
from torch import Tensor, nn

from crelle.formats.base import QuantTensor


class OnGrid(torch.autograd.Function):
    """w [N, C, G] (in steps) on the grid of its group; straight-through gradient, recomputed in backward."""

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


def as_f16(x: Tensor) -> Tensor:
    """Round to f16, with a straight-through gradient."""
    return x + (x.half().float() - x).detach()


class TrainableWeight(nn.Module):
    """Computes the weight [N, K] of a linear. A parameter named `w` holds weights, all others are scales."""

    def export(self) -> QuantTensor:
        """Return the tensor to store."""
        raise NotImplementedError
