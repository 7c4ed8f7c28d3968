"""Any kernel, for a matrix whose columns are stored in another order: it gets its inputs in that order."""

from typing import Any

import torch
from torch import Tensor

from crelle.formats.base import QuantTensor
from crelle.formats.composite import PermutedTensor
from crelle.kernels.select import Kernel, Problem


class Permuting:
    """The kernel of the tensor inside, under its own name."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    @property
    def name(self) -> str:
        return self.kernel.name

    def supports(self, problem: Problem) -> str | None:
        return self.kernel.supports(problem)

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> tuple[Tensor, Any]:
        assert isinstance(w, PermutedTensor), w.format
        return w.order.long(), self.kernel.prepare(w.inner, dtype)

    def run(self, x: Tensor, prepared: tuple[Tensor, Any]) -> Tensor:
        order, inner = prepared
        return self.kernel.run(x[:, order], inner)
