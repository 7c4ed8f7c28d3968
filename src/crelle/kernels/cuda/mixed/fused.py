"""Mixed 2/4-bit weights in a decoder's step: mixed_decode.cu for one token, mixed_gemv.cu for a few, mixed_gemm.cu.

Several weights of one input whose 4-bit groups differ cannot be joined; x is then encoded, or packed, for all of them
in one launch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from crelle.kernels.cuda import dispatch
from crelle.kernels.cuda.mixed import mixed_decode, mixed_gemm, mixed_gemv, mixed_layout
from crelle.kernels.cuda.mixed.mixed_layout import MixedWeight
from crelle.kernels.cuda.planes.batch_invariant import in_chunks
from crelle.kernels.cuda.planes.bmma_gemv import BitSerialX
from crelle.kernels.cuda.step import residual_norm_pack
from crelle.kernels.cuda.step.activations import Prologue, width
from crelle.kernels.cuda.step.fused_linear import Activated, FusedLinear, LinearLayer, Norm, of_norm


class MixedLinear(FusedLinear):
    """Linears with mixed 2/4-bit weights."""

    kernel = "cuda-mixed"
    keeps_copies = True
    weights: list[MixedWeight]

    def __init__(self, linears: Sequence[LinearLayer], dtype: torch.dtype) -> None:
        super().__init__(linears, dtype)
        self._perms = _orders(self.weights)

    @staticmethod
    def join(weights: Sequence[MixedWeight]) -> tuple[MixedWeight, Sequence[MixedWeight]] | None:
        return mixed_layout.join(list(weights))

    def _gemv_rows(self, rows: int) -> int:
        return rows if dispatch.mixed_route(rows) == "gemv" else 0

    def _dequantize(self, w: MixedWeight, unit: Tensor) -> Tensor:
        return mixed_gemv.matmul(unit, w, None, False).T

    # --- few rows -----------------------------------------------------------------------------------------------------

    def _product(
        self,
        x: Tensor | BitSerialX,
        op: Prologue,
        norm: Norm | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> Tensor:
        if not self._small and (y := self._decode(x, op, norm, residual, dtype)) is not None:
            return y
        return super()._product(x, op, norm, residual, dtype, out)

    def _multiply(
        self,
        x: Tensor | BitSerialX,
        w: MixedWeight,
        op: Prologue,
        norm: Norm | None,
        bias: Tensor | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(x, Tensor), "digits are for planes"
        return mixed_gemv.product(mixed_gemv.encode(x, w, op, *of_norm(norm)), w, dtype, bias, residual)

    def _multiply_each(self, x: Tensor | BitSerialX, op: Prologue, norm: Norm | None, dtype: torch.dtype) -> Tensor:
        if self._perms is None:
            return super()._multiply_each(x, op, norm, dtype)
        assert isinstance(x, Tensor), "digits are for planes"
        encoded = mixed_gemv.encode_each(x, self.weights[0], self._perms, op, *of_norm(norm))
        each = zip(encoded, self.weights, self._biases, strict=True)
        return torch.cat([mixed_gemv.product(xs, w, dtype, bias) for xs, w, bias in each], dim=-1)

    def activated(
        self,
        x: Tensor | BitSerialX,
        then: Prologue,
        following: FusedLinear,
        op: Prologue = "PLAIN",
        norm: Norm | None = None,
    ) -> Tensor | BitSerialX | Activated:
        pairs = then == "SILU_MUL" and not self._small
        if pairs and (y := self._decode(x, op, norm, None, self.dtype, paired=True)) is not None:
            return Activated(y)
        return self(x, op, norm)

    def _decode(
        self,
        x: Tensor | BitSerialX,
        op: Prologue,
        norm: Norm | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        paired: bool = False,
    ) -> Tensor | None:
        """The product of one token, where one launch does all of it; paired: silu(gate) * up."""
        if not isinstance(x, Tensor):
            return None
        scale, shift, eps = of_norm(norm)
        if not mixed_decode.supports(x, self.weights, op, scale, shift, residual, *self._biases):
            return None
        if paired and not mixed_decode.pairs(self.weights):
            return None
        biases = self._biases
        return mixed_decode.product(x, self.weights, dtype, op, scale, shift, eps, biases, residual, paired=paired)

    # --- any number of rows -------------------------------------------------------------------------------------------

    def _linear(
        self, h: Tensor, w: MixedWeight, bias: Tensor | None, residual: Tensor | None, batch_invariant: bool
    ) -> Tensor:
        y = mixed_gemv.matmul(h, w, bias, batch_invariant)
        return y if residual is None else y + residual

    def _fused_rows(
        self,
        x: Tensor,
        addend: Tensor | None,
        op: Prologue,
        norm: Norm | None,
        batch_invariant: bool,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        if not batch_invariant and dispatch.mixed_route(x.shape[0]) != "gemm":
            return None
        if len(self.weights) > 1 and self._perms is None:
            return None
        if residual_norm_pack.supports(self.weights[0], x.shape[1] // width(op)) is not None:
            return None
        return self._packed(x, addend, op, norm, batch_invariant)

    def _packed(
        self, x: Tensor, addend: Tensor | None, op: Prologue, norm: Norm | None, batch_invariant: bool
    ) -> tuple[Tensor, Tensor]:
        if batch_invariant and x.shape[0] > dispatch.INVARIANT_ROWS:
            return in_chunks(x, addend, lambda some, more: self._packed(some, more, op, norm, batch_invariant))
        w = self.weights[0]
        perms = w.perm if len(self.weights) == 1 else self._perms
        each, total = residual_norm_pack.add_norm_pack_each(x, w, perms, op, norm, addend)
        return mixed_gemm.products(each, self.weights, self._biases, batch_invariant), total


def _orders(weights: Sequence[MixedWeight]) -> Tensor | None:
    """Return the orders of inputs of several weights with as many groups of each kind; None for others."""
    if len(weights) < 2 or len({(w.K, w.U2, w.U4, w.subs) for w in weights}) > 1:
        return None
    return torch.stack([w.perm for w in weights])
