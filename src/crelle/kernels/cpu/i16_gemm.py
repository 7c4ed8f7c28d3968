"""Products of many rows by 16-bit integers (VNNI, vpmaddwd): calibration's forward passes on x86-64 without AMX.

Values that are summed over share scales in chunks of 320 at most and keep 12 bits: about the accuracy of bf16. Sums of
a chunk are exact, results are f32. A row's result has the same bits alone as among others, on any number of threads.
"""

import torch
from torch import Tensor

from crelle.kernels import cpu


def usable(device: torch.device) -> bool:
    """Whether the instruction set in use has such products, and tensors of the device can be read."""
    return device.type == "cpu" and cpu.available() is None and bool(cpu.core().has_i16())


class PackedI16Weight:
    """A matrix [N, K] as 16-bit integers with scales. `emulate`: in plain C++, for tests."""

    def __init__(self, weight: Tensor, *, emulate: bool = False) -> None:
        if weight.ndim != 2:
            raise ValueError(f"a weight must be [N, K], got {list(weight.shape)}")
        self._core = cpu.core().PackedI16(_plain(weight).numpy(), emulate)
        self.shape = weight.shape

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + bias [..., N] in f32 for x [..., K] and bias [N]."""
        N, K = self.shape
        if x.shape[-1:] != (K,):
            raise ValueError(f"x must be [..., {K}], as the weight has {K} inputs; got {list(x.shape)}")
        if bias is not None and bias.shape != (N,):
            raise ValueError(f"the bias must be [{N}], as the weight has {N} outputs; got {list(bias.shape)}")
        rows = _plain(x.reshape(-1, K))
        y = torch.empty(len(rows), N)
        self._core.product(rows.numpy(), None if bias is None else _plain(bias).numpy(), y.numpy())
        return y.view(*x.shape[:-1], N)


class StatsI16:
    """Adds up products of inputs: as crelle.kernels.cpu.stats.StatsTiles does, by 16-bit integers."""

    def __init__(self, *, emulate: bool = False) -> None:
        self._core = cpu.core().StatsI16(emulate)

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

        With a = weight x and d = weight (full - x): hessian += aᵀ a, cross [K, K] += dᵀ a, abssum += Σ |a|. weight [T];
        None: 1. Of the lower triangle of hessian some may be added to as well.
        """
        weight = torch.ones(len(x)) if weight is None else weight
        both = (full, cross) if full is not None and cross is not None else (None, None)
        sums = hessian.numpy(), None if both[1] is None else both[1].numpy(), abssum.numpy()
        self._core.add(
            _plain(x).numpy(), None if both[0] is None else _plain(both[0]).numpy(), _plain(weight).numpy(), *sums
        )


def _plain(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()
