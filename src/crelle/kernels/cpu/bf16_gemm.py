"""Products with matrices that are packed once, as bf16 tiles (AMX): linear layers of calibration forward passes."""

import torch
from torch import Tensor

from crelle.kernels import cpu


class PackedWeight:
    """A matrix [N, K] as bf16 tiles, f32 rounded to nearest even. `emulate`: tiles in plain C++, for tests."""

    def __init__(self, weight: Tensor, *, emulate: bool = False) -> None:
        if weight.ndim != 2:
            raise ValueError(f"a weight must be [N, K], got {list(weight.shape)}")
        self._core = cpu.core().PackedBf16(weight.detach().contiguous(), emulate)
        self.shape = weight.shape

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return bf16(x Wᵀ + bias) [..., N] for x [..., K], bias [N]; both f32 or bf16.

        x is rounded to bf16. Sums are f32, the bias is added to them as it is, and what comes out is rounded once. A
        row's result has the same bits alone as among others, on any number of threads.
        """
        N, K = self.shape
        if x.shape[-1:] != (K,):
            raise ValueError(f"x must be [..., {K}], as the weight has {K} inputs; got {list(x.shape)}")
        if bias is not None and bias.shape != (N,):
            raise ValueError(f"the bias must be [{N}], as the weight has {N} outputs; got {list(bias.shape)}")
        rows = x.detach().reshape(-1, K).contiguous()
        y = torch.empty(len(rows), N, dtype=torch.bfloat16)
        self._core.product(rows, None if bias is None else bias.detach().contiguous(), y)
        return y.view(*x.shape[:-1], N)
