"""Trellis weights in a decoder's step: trellis_gemv.cu for few rows, which encodes what comes before; torch for more.

Batch-invariant products take trellis_gemv.cu for any number of rows: its sums are exact, so no order has to be fixed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from crelle.kernels.cuda.planes.bmma_gemv import BitSerialX
from crelle.kernels.cuda.step.activations import Prologue
from crelle.kernels.cuda.step.fused_linear import FusedLinear, Norm, of_norm
from crelle.kernels.cuda.trellis import trellis_gemv, trellis_layout
from crelle.kernels.cuda.trellis.trellis_layout import TrellisWeight, same_inputs


class TrellisLinear(FusedLinear):
    """Linears with trellis weights, rotated or not."""

    kernel = "cuda-trellis"
    keeps_copies = True
    weights: list[TrellisWeight]

    @staticmethod
    def join(weights: Sequence[TrellisWeight]) -> tuple[TrellisWeight, Sequence[TrellisWeight]] | None:
        return trellis_layout.join(weights)

    def _gemv_rows(self, rows: int) -> int:
        return rows if rows <= trellis_gemv.GEMV_ROWS else 0

    def _dequantize(self, w: TrellisWeight, unit: Tensor) -> Tensor:
        plain = trellis_gemv.dequantize(w, unit.dtype)
        return plain if w.signs is None else plain @ trellis_gemv.rotate(unit, w).T

    def _multiply(
        self,
        x: Tensor | BitSerialX,
        w: TrellisWeight,
        op: Prologue,
        norm: Norm | None,
        bias: Tensor | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(x, Tensor), "digits are for planes"
        return trellis_gemv.product(trellis_gemv.encode(x, w, op, *of_norm(norm)), w, bias, residual).to(dtype)

    def _multiply_each(self, x: Tensor | BitSerialX, op: Prologue, norm: Norm | None, dtype: torch.dtype) -> Tensor:
        first = self.weights[0]
        if not all(same_inputs(first, w) for w in self.weights):
            return super()._multiply_each(x, op, norm, dtype)
        assert isinstance(x, Tensor), "digits are for planes"
        encoded = trellis_gemv.encode(x, first, op, *of_norm(norm))
        y = torch.empty(x.shape[0], sum(w.N for w in self.weights), dtype=x.dtype, device=x.device)
        slices = y.split([w.N for w in self.weights], -1)  # type: ignore[no-untyped-call]
        for w, bias, out in zip(self.weights, self._biases, slices, strict=True):
            trellis_gemv.product(encoded, w, bias, out=out)
        return y.to(dtype)

    def _linear(
        self, h: Tensor, w: TrellisWeight, bias: Tensor | None, residual: Tensor | None, batch_invariant: bool
    ) -> Tensor:
        if batch_invariant:
            return trellis_gemv.product(trellis_gemv.encode(h, w), w, bias, residual)
        return trellis_gemv.matmul(h, w, bias, residual)
