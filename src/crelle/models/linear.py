"""The linear layer and the embedding of all models: weights in any format, whatever kernel was chosen for them."""

import torch
from torch import Tensor, nn

from crelle.formats.base import QuantTensor
from crelle.kernels import ops
from crelle.kernels.base import Problem


class QuantEmbedding(nn.Module):
    """Rows of a matrix in any format, dequantized when they are looked up."""

    def __init__(self, w: QuantTensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.dtype = w, dtype

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.weight.rows(tokens.flatten()).dequantize(self.dtype)  # [tokens, width]
        return rows.reshape(*tokens.shape, -1)


class QuantLinear(nn.Module):
    """y = x @ W.T + bias."""

    def __init__(self, name: str, w: QuantTensor, bias: Tensor | None, dtype: torch.dtype, kernel: str | None) -> None:
        super().__init__()
        self.name, self.bias = name, None if bias is None else bias.to(dtype)
        self.prepared = ops.prepare(w, dtype, kernel)
        # A GPU's memory is not for two copies: only the kernel's layout stays, and of `weight` what it looks like.
        self.weight = w if w.device.type == "cpu" else w.to("meta")

    def forward(self, x: Tensor | ops.Encoded) -> Tensor:
        y = ops.matmul(x, self.prepared)
        return y if self.bias is None else y + self.bias

    @property
    def problem(self) -> Problem:
        return self.prepared.problem

    @property
    def kernel(self) -> str:
        return self.prepared.kernel.name
