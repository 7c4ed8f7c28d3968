"""Plain 16-bit weights in a decoder's step: dense.cu for few rows, torch (cuBLAS) for more."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.kernels.cuda import dispatch
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.planes import batch_invariant as invariant
from crelle.kernels.cuda.planes.bmma_gemv import BitSerialX
from crelle.kernels.cuda.step.activations import Prologue
from crelle.kernels.cuda.step.fused_linear import FusedLinear, Norm, of_norm


class DenseLinear(FusedLinear):
    """Linears with plain 16-bit weights."""

    kernel = "dense"
    weights: list[Tensor]

    @staticmethod
    def join(weights: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]] | None:
        whole = torch.cat(list(weights))
        return whole, torch.split(whole, [w.shape[0] for w in weights])

    def _gemv_rows(self, rows: int) -> int:
        return dispatch.GEMV_ROWS if dispatch.dense_route(rows) == "gemv" else 0

    def _multiply(
        self,
        x: Tensor | BitSerialX,
        w: Tensor,
        op: Prologue,
        norm: Norm | None,
        bias: Tensor | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(x, Tensor), "digits are for planes"
        return dense.product(x, w, op, *of_norm(norm), bias, residual, dtype, out)

    def _linear(
        self, h: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, batch_invariant: bool
    ) -> Tensor:
        if batch_invariant:
            y = invariant.matmul(h, w, bias)
        elif residual is not None and bias is None:
            return torch.addmm(residual, h, w.T)
        else:
            y = F.linear(h, w, bias)
        return y if residual is None else y + residual
