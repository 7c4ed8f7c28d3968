"""Any kernel, for a matrix whose columns are permuted: it gets x with its inputs in the stored order."""

from typing import Any

import torch
from torch import Tensor

from crelle.formats.base import QuantTensor
from crelle.formats.wrappers.composite import PermutedTensor
from crelle.kernels.base import Encoded, WrappedKernel


class PermutedKernel(WrappedKernel):
    """The kernel of the tensor inside, under its own name."""

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> tuple[Tensor, Any]:
        assert isinstance(w, PermutedTensor), w.format
        return w.order.long(), self.kernel.prepare(w.inner, dtype)

    def encode(self, x: Tensor, prepared: tuple[Tensor, Any]) -> Encoded:
        perm, inner = prepared
        return Encoded(self.kernel.encode(x[:, perm], inner))

    def shares(self, a: tuple[Tensor, Any], b: tuple[Tensor, Any]) -> bool:
        return (a[0] is b[0] or torch.equal(a[0], b[0])) and self.kernel.shares(a[1], b[1])

    def run(self, x: Tensor | Encoded, prepared: tuple[Tensor, Any]) -> Tensor:
        perm, inner = prepared
        return self.kernel.run(x[:, perm] if isinstance(x, Tensor) else x.data, inner)
