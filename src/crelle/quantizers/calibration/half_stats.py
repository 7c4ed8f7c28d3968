"""Stats by tensor cores: inputs rounded to bf16, products exact, sums in f32.

    hessian   X̂ᵀ X̂, one triangle in slabs of rows, the other is its mirror image
    cross     (X - X̂)ᵀ X̂ + hessian: rounding the difference keeps the digits that count

A rounded input is off by at most 2^-9 of itself, without bias, so an entry of H over T tokens is off by about 2^-9/√T
of the diagonal: less than what T tokens say of others, 1/√T, by a factor of 500. X is what a layer multiplies in any
case, in bf16; rounded besides is its product with a token's weight. On other devices the same is computed in f32 from
rounded inputs, to see on a CPU what a GPU gives.
"""

import torch
from torch import Tensor

from crelle.quantizers.calibration.stats import Stats, StatsCollector, mirror_, weighted, without_tokens

_SLAB = 2048  # rows of a sum that are updated at one time
_TOKENS = 2048  # whose rounding takes memory in f32 at one time
_SAMPLE = 128  # inputs of every batch that are kept as they are


class HalfStatsCollector(StatsCollector):
    """Collects the sums of StatsCollector, in both models, from inputs that are rounded to bf16."""

    def __init__(self, K: int, device: torch.device | str = "cpu") -> None:
        super().__init__(K, device, cross=True)

    def add(self, x: Tensor, full: Tensor | None = None, weight: Tensor | None = None) -> None:
        """Add inputs [..., K] times their tokens' weights; `full`: of the full-precision model, where they differ."""
        x = weighted(x.detach().flatten(0, -2), weight)
        full = x if full is None else weighted(full.detach().flatten(0, -2), weight)
        T, K = x.shape
        if not T:
            return
        here, difference = (torch.empty(T, K, dtype=torch.bfloat16, device=x.device) for _ in range(2))
        for begin in range(0, T, _TOKENS):
            some = slice(begin, begin + _TOKENS)
            wide = x[some].float()
            here[some] = wide
            difference[some] = full[some].float() - wide
            self._abssum += wide.abs().sum(0)
        assert self._cross is not None
        add_upper_half(self._hessian, here)
        for begin in range(0, K, _SLAB):
            end = min(begin + _SLAB, K)
            self._cross[begin:end] += _product(difference[:, begin:end].T, here)
        self._tokens += T
        some_inputs = x[:: max(1, T // _SAMPLE)]
        self._sample.append(some_inputs.to(torch.float32, copy=True))  # a view would keep the whole batch in memory

    def stats(self) -> Stats:
        """Return the stats; the sums become part of them, so that nothing can be added afterwards."""
        self._over_ranks()
        if not self._tokens:
            return without_tokens(self._abssum)
        T = self._tokens
        assert self._cross is not None
        hessian = mirror_(self._hessian.div_(T))
        cross = self._cross.div_(T).add_(hessian)
        sample = torch.cat(self._sample) if self._sample else None
        return Stats(hessian, self._abssum / T, self._tokens, cross, sample)


def add_upper_half(sums: Tensor, x: Tensor) -> None:
    """Add xᵀ x of bf16 inputs [T, K] to the upper triangle of f32 sums [K, K], and to little of the lower one."""
    for begin in range(0, len(sums), _SLAB):
        end = min(begin + _SLAB, len(sums))
        sums[begin:end, begin:] += _product(x[:, begin:end].T, x[:, begin:])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of bf16 matrices in f32."""
    if a.device.type == "cuda" and hasattr(torch.ops.aten.mm, "dtype"):  # torch 2.8 and later
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
