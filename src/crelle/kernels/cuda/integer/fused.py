"""Weights with quantized activations in a decoder's step: one launch quantizes x for any number of rows, then GEMM."""

from collections.abc import Sequence

import torch
from torch import Tensor

from crelle.kernels.cuda.integer import integer_linear
from crelle.kernels.cuda.integer.integer_encode import EncodePlan
from crelle.kernels.cuda.integer.integer_linear import CudaIntegerWeight
from crelle.kernels.cuda.planes.bmma_gemv import BitSerialX
from crelle.kernels.cuda.step.activations import Prologue
from crelle.kernels.cuda.step.fused_linear import FusedLinear, LinearLayer, Norm


class IntegerLinear(FusedLinear):
    """Linears with integer weights and activations (grouped, two-level)."""

    kernel = "cuda-integer"
    takes_integers = True
    weights: list[CudaIntegerWeight]

    def __init__(self, linears: Sequence[LinearLayer], dtype: torch.dtype) -> None:
        super().__init__(linears, dtype)
        self._plan = EncodePlan([w.form for w in self.weights])

    @staticmethod
    def join(weights: Sequence[CudaIntegerWeight]) -> tuple[CudaIntegerWeight, Sequence[CudaIntegerWeight]] | None:
        return integer_linear.join(weights)

    def _all(
        self,
        x: Tensor,
        op: Prologue,
        norm: Norm | None,
        addend: Tensor | None = None,
        residual: Tensor | None = None,
        batch_invariant: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return op(x + addend) @ W.T + bias + residual, and x + addend, for any number of rows."""
        settings = op, norm, addend, self._biases, residual, batch_invariant
        return integer_linear.multiply(self.weights, self._plan, x, *settings)

    def _product(
        self,
        x: Tensor | BitSerialX,
        op: Prologue,
        norm: Norm | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> Tensor:
        assert isinstance(x, Tensor), "digits are for planes"
        return self._all(x, op, norm, residual=residual)[0].to(dtype)

    def linear(
        self,
        x: Tensor,
        op: Prologue = "PLAIN",
        norm: Norm | None = None,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
    ) -> Tensor:
        return self._all(x, op, norm, None, residual, batch_invariant)[0].to(dtype or self.dtype)

    def _fused_rows(
        self,
        x: Tensor,
        addend: Tensor | None,
        op: Prologue,
        norm: Norm | None,
        batch_invariant: bool,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        y, total = self._all(x, op, norm, addend, None, batch_invariant)
        return (y if norm is None else y.to(dtype or self.dtype)), total

    def _multiply(
        self,
        x: Tensor | BitSerialX,
        w: CudaIntegerWeight,
        op: Prologue,
        norm: Norm | None,
        bias: Tensor | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        raise AssertionError("all weights are multiplied together")

    def _linear(
        self, h: Tensor, w: CudaIntegerWeight, bias: Tensor | None, residual: Tensor | None, batch_invariant: bool
    ) -> Tensor:
        raise AssertionError("all weights are multiplied together")

    def _linear_each(self, h: Tensor, residual: Tensor | None, batch_invariant: bool) -> Tensor:
        return self._all(h, "PLAIN", None, None, residual, batch_invariant)[0]

    def _gemv_rows(self, rows: int) -> int:
        return 0
