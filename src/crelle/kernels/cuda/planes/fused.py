"""Bit-plane weights in a decoder's step: x is bit-serial for few rows, packed 16-bit values for more (dispatch.py).

gemv           norms and activations are fused into its prologue; its epilogue can encode for the next GEMV
skinny_gemm    one launch before it: residual add, norm or activation (residual_norm_pack.cu)
gemm           the same launch, which also packs x
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from crelle.kernels.cuda import dispatch
from crelle.kernels.cuda.launch import is_recording
from crelle.kernels.cuda.planes import batch_invariant as invariant
from crelle.kernels.cuda.planes import gemm, skinny_gemm, weight_layout
from crelle.kernels.cuda.planes.bmma_gemv import (
    BitSerialX,
    encode,
    encode_product,
    encodes_itself,
    epilogue_encodes,
    parts,
    product,
    product_encode,
)
from crelle.kernels.cuda.planes.gemm import PackedX
from crelle.kernels.cuda.planes.weight_layout import BLOCK, CudaWeight
from crelle.kernels.cuda.step import residual_norm_pack
from crelle.kernels.cuda.step.activations import Prologue, width
from crelle.kernels.cuda.step.fused_linear import Activated, FusedLinear, LinearLayer, Norm, of_norm, opened


class PlanesLinear(FusedLinear):
    """Linears with bit-plane weights (BCQ, uniform, affine)."""

    kernel = "cuda"
    keeps_copies = True
    weights: list[CudaWeight]

    def __init__(self, linears: Sequence[LinearLayer], dtype: torch.dtype) -> None:
        super().__init__(linears, dtype)
        self._folded: tuple[Norm, Tensor, Tensor] | None = None

    @staticmethod
    def join(weights: Sequence[CudaWeight]) -> tuple[CudaWeight, Sequence[CudaWeight]] | None:
        return weight_layout.join(list(weights))

    def _gemv_rows(self, rows: int) -> int:
        return dispatch.GEMV_ROWS if dispatch.route(rows) == "gemv" else 0

    def _dequantize(self, w: CudaWeight, unit: Tensor) -> Tensor:
        return gemm.matmul(unit, w, None).T

    # --- few rows -----------------------------------------------------------------------------------------------------

    @property
    def takes_bitserial(self) -> bool:
        w = self.weights[0]
        return len(self.weights) == 1 and w.perm is None and parts(w) == 1 and not self._small

    def _multiply(
        self,
        x: Tensor | BitSerialX,
        w: CudaWeight,
        op: Prologue,
        norm: Norm | None,
        bias: Tensor | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        if isinstance(x, Tensor) and encodes_itself(w):
            return encode_product(x, w, dtype, op, *of_norm(norm), bias, residual, out, in_graph=True)
        digits, bias, fold = self._digits(x, w, op, norm, bias)
        return product(digits, w, dtype, bias, residual, out, in_graph=True, fold=fold)

    def activated(
        self,
        x: Tensor | BitSerialX,
        then: Prologue,
        following: FusedLinear,
        op: Prologue = "PLAIN",
        norm: Norm | None = None,
    ) -> Tensor | BitSerialX | Activated:
        w = self._encoding_weight(then, following)
        if w is None:
            return self(x, op, norm)
        digits, bias, fold = self._digits(x, w, op, norm, self.bias)
        return product_encode(digits, w, self.dtype, then, bias=bias, fold=fold)[1]

    def normed(
        self,
        x: Tensor | BitSerialX | Activated,
        then: Norm,
        following: FusedLinear,
        op: Prologue = "PLAIN",
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | BitSerialX]:
        x, op = opened(x, op)
        kind: Prologue = "RMS_NORM" if then.bias is None else "LAYER_NORM"
        w = self._encoding_weight(kind, following)
        if w is None or then.weight is None:
            y = self(x, op, norm, residual)
            return y, y
        digits, bias, fold = self._digits(x, w, op, norm, self.bias)
        stored, made = product_encode(digits, w, self.dtype, kind, then.weight, then.eps, bias, residual, fold)
        assert stored is not None
        return stored, made

    def _encoding_weight(self, then: Prologue, following: FusedLinear) -> CudaWeight | None:
        """The weight, where its epilogue can encode then(y)."""
        w = self.weights[0]
        one = len(self.weights) == 1 and following.takes_bitserial and not self._small
        return w if one and epilogue_encodes(w, then, self.dtype) else None

    def _digits(
        self, x: Tensor | BitSerialX, w: CudaWeight, op: Prologue, norm: Norm | None, bias: Tensor | None
    ) -> tuple[BitSerialX, Tensor | None, Tensor | None]:
        """Return op(x) encoded, with the bias and the `fold` that the product is to take."""
        scale, shift, eps = of_norm(norm)
        if not isinstance(x, BitSerialX):
            return encode(x, w, op, scale, shift, eps), bias, None
        if x.moments is None or norm is None or scale is None or shift is None:
            return x, bias, None
        folded = self._folded
        if folded is None or folded[0] is not norm:  # a layer norm's part that is the same for all tokens
            gain, added = (product(encode(v[None], w), w, torch.float32)[0] for v in (scale, shift))
            folded = norm, (added if bias is None else added + bias).to(self.dtype), gain
            self._folded = None if is_recording() else folded
        return x, *folded[1:]

    # --- any number of rows -------------------------------------------------------------------------------------------

    def _linear(
        self, h: Tensor, w: CudaWeight, bias: Tensor | None, residual: Tensor | None, batch_invariant: bool
    ) -> Tensor:
        y = (invariant.matmul if batch_invariant else gemm.matmul)(h, w, bias)
        return y if residual is None else y + residual

    def takes_packed(self, rows: int, K: int, batch_invariant: bool) -> CudaWeight | None:
        w = self.weights[0]
        if len(self.weights) > 1 or w.perm is not None or w.blocks * BLOCK != K:
            return None
        if rows % 8 or (not batch_invariant and dispatch.route(rows) != "gemm"):
            return None
        return w if not batch_invariant or rows <= dispatch.INVARIANT_ROWS else None

    def _fused_rows(
        self,
        x: Tensor,
        addend: Tensor | None,
        op: Prologue,
        norm: Norm | None,
        batch_invariant: bool,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        if len(self.weights) > 1 or (not batch_invariant and self._gemv_rows(x.shape[0])):
            return None
        if residual_norm_pack.supports(self.weights[0], x.shape[1] // width(op)) is not None:
            return None
        return self._packed(x, addend, op, norm, batch_invariant)

    def _packed(
        self, x: Tensor, addend: Tensor | None, op: Prologue, norm: Norm | None, batch_invariant: bool
    ) -> tuple[Tensor, Tensor]:
        if batch_invariant and x.shape[0] > dispatch.INVARIANT_ROWS:
            return invariant.in_chunks(
                x, addend, lambda some, more: self._packed(some, more, op, norm, batch_invariant)
            )
        w = self.weights[0]
        if not batch_invariant and dispatch.gemm_route(x.shape[0]) == "skinny_gemm":
            plain = op == "PLAIN" and addend is None
            ready, total = (
                (skinny_gemm.permuted_rows(x, w), x)
                if plain
                else residual_norm_pack.add_norm_permute(x, w, op, norm, addend)
            )
            return skinny_gemm.product(ready, w, self.bias), total
        xs, total = residual_norm_pack.add_norm_pack(x, w, op, norm, addend)
        return self._from_packed(xs, batch_invariant), total

    def _from_packed(self, xs: PackedX, batch_invariant: bool) -> Tensor:
        return (invariant.product if batch_invariant else gemm.product)(xs, self.weights[0], self.bias)
