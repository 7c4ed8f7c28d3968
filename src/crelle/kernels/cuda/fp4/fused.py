"""Four-bit floats in a decoder's step: fp4_gemv.cu for few rows, fp4_gemm.cu for more.

Norms and activations are the prologue of the GEMV, a residual its epilogue. One launch before the GEMM makes x ready:
residual add, norm or activation, packing (residual_norm_pack.cu).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from crelle.kernels.cuda import dispatch
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.fp4 import fp4_gemm, fp4_gemv, fp4_layout
from crelle.kernels.cuda.fp4.fp4_layout import Fp4Weight
from crelle.kernels.cuda.planes.batch_invariant import in_chunks
from crelle.kernels.cuda.planes.bmma_gemv import BitSerialX
from crelle.kernels.cuda.step import residual_norm_pack
from crelle.kernels.cuda.step.activations import Prologue, width
from crelle.kernels.cuda.step.fused_linear import FusedLinear, Norm, of_norm


class Fp4Linear(FusedLinear):
    """Linears with weights of four-bit floats."""

    kernel = "cuda-fp4"
    keeps_copies = True
    weights: list[Fp4Weight]

    @staticmethod
    def join(weights: Sequence[Fp4Weight]) -> tuple[Fp4Weight, Sequence[Fp4Weight]] | None:
        return fp4_layout.join(weights)

    def _gemv_rows(self, rows: int) -> int:
        return rows if dispatch.fp4_route(rows) == "gemv" else 0

    def _dequantize(self, w: Fp4Weight, unit: Tensor) -> Tensor:
        return fp4_gemm.matmul(unit, w).T

    def _multiply(
        self,
        x: Tensor | BitSerialX,
        w: Fp4Weight,
        op: Prologue,
        norm: Norm | None,
        bias: Tensor | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(x, Tensor), "digits are for planes"
        if not fp4_gemv.fits(w):
            h = x if op == "PLAIN" else dense.apply(x, op, *of_norm(norm))
            return fp4_gemm.matmul(h, w, bias, residual).to(dtype)
        return fp4_gemv.product(x, w, op, *of_norm(norm), bias, residual, dtype, out)

    def _linear(
        self, h: Tensor, w: Fp4Weight, bias: Tensor | None, residual: Tensor | None, batch_invariant: bool
    ) -> Tensor:
        return fp4_gemm.matmul(h, w, bias, residual, batch_invariant)

    def _fused_rows(
        self,
        x: Tensor,
        addend: Tensor | None,
        op: Prologue,
        norm: Norm | None,
        batch_invariant: bool,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        if not batch_invariant and self._gemv_rows(x.shape[0]):
            return None
        if residual_norm_pack.supports(self.weights[0], x.shape[1] // width(op)) is not None:
            return None
        return self._packed(x, addend, op, norm, batch_invariant)

    def _packed(
        self, x: Tensor, addend: Tensor | None, op: Prologue, norm: Norm | None, batch_invariant: bool
    ) -> tuple[Tensor, Tensor]:
        if batch_invariant and x.shape[0] > dispatch.INVARIANT_ROWS:
            return in_chunks(x, addend, lambda some, more: self._packed(some, more, op, norm, batch_invariant))
        xs, total = residual_norm_pack.add_norm_pack(x, self.weights[0], op, norm, addend)
        multiply = fp4_gemm.invariant_product if batch_invariant else fp4_gemm.product
        parts = [multiply(xs, w, bias) for w, bias in zip(self.weights, self._biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1), total
