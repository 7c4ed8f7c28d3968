"""Sums over calibration tokens as bf16 tiles (AMX); the reference in torch is crelle.quantizers.calibration.stats."""

import torch
from torch import Tensor

from crelle.kernels import cpu
from crelle.kernels.cpu.tiles import usable

__all__ = ["StatsTiles", "usable"]


class StatsTiles:
    """Adds up products of inputs; keeps its room for packed tokens. `emulate`: tiles in plain C++, for tests."""

    def __init__(self, *, emulate: bool = False) -> None:
        self._core = cpu.core().StatsTiles(emulate)

    def add(
        self,
        x: Tensor,
        full: Tensor | None,
        weight: Tensor | None,
        hessian: Tensor,
        cross: Tensor | None,
        abssum: Tensor,
    ) -> None:
        """Add the sums of inputs x [T, K]: to the upper triangle of hessian [K, K], to abssum [K].

        a = bf16(weight x), d = bf16(weight (full - x)): hessian += aᵀ a, cross [K, K] += dᵀ a, abssum += Σ |weight x|,
        in f32. weight [T]; None: 1. Of the lower triangle of hessian some may be added to as well.
        """
        weight = torch.ones(len(x)) if weight is None else weight.detach().float().contiguous()
        both = (full, cross) if full is not None and cross is not None else (None, None)
        sums = hessian.numpy(), None if both[1] is None else both[1].numpy(), abssum.numpy()
        self._core.add(_plain(x), None if both[0] is None else _plain(both[0]), weight.numpy(), *sums)


def _plain(x: Tensor) -> Tensor:
    """Return inputs as the core reads them; a tensor, since numpy has no bf16."""
    x = x.detach()
    return (x if x.dtype in (torch.float32, torch.bfloat16) else x.float()).contiguous()
