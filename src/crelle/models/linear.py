"""The one linear layer of all models: a weight in any format, multiplied by whatever kernel was chosen for it."""

import torch
from torch import Tensor, nn

from crelle.formats.base import QuantTensor
from crelle.kernels import ops
from crelle.kernels.select import Problem


class QuantLinear(nn.Module):
    """y = x @ W.T + bias."""

    def __init__(self, name: str, w: QuantTensor, bias: Tensor | None, dtype: torch.dtype, kernel: str | None) -> None:
        super().__init__()
        self.name, self.weight, self.bias = name, w, None if bias is None else bias.to(dtype)
        self.prepared = ops.prepare(w, dtype, kernel)

    def forward(self, x: Tensor) -> Tensor:
        y = ops.matmul(x, self.prepared)
        return y if self.bias is None else y + self.bias

    @property
    def problem(self) -> Problem:
        return self.prepared.problem

    @property
    def kernel(self) -> str:
        return self.prepared.kernel.name
