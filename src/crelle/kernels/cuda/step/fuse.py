"""Which FusedLinear takes which prepared weights: the registry of kinds, and what several kinds of one input take."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from crelle.kernels.cuda.dense.fused import DenseLinear
from crelle.kernels.cuda.fp4.fp4_layout import Fp4Weight
from crelle.kernels.cuda.fp4.fused import Fp4Linear
from crelle.kernels.cuda.integer.fused import IntegerLinear
from crelle.kernels.cuda.integer.integer_linear import CudaIntegerWeight
from crelle.kernels.cuda.mixed.fused import MixedLinear
from crelle.kernels.cuda.mixed.mixed_layout import MixedWeight
from crelle.kernels.cuda.planes.bmma_gemv import BitSerialX
from crelle.kernels.cuda.planes.fused import PlanesLinear
from crelle.kernels.cuda.planes.weight_layout import CudaWeight
from crelle.kernels.cuda.step.activations import Prologue
from crelle.kernels.cuda.step.fused_linear import FusedLinear, LinearLayer, Norm, is_small
from crelle.kernels.cuda.trellis.fused import TrellisLinear
from crelle.kernels.cuda.trellis.trellis_layout import TrellisWeight

KINDS: dict[type, type[FusedLinear]] = {
    CudaWeight: PlanesLinear,
    MixedWeight: MixedLinear,
    CudaIntegerWeight: IntegerLinear,
    TrellisWeight: TrellisLinear,
    Fp4Weight: Fp4Linear,
    Tensor: DenseLinear,
}
STEPPED = {kind.kernel for kind in KINDS.values()}  # kernels whose weights a step can multiply by


def fuse(linears: Sequence[LinearLayer], dtype: torch.dtype) -> FusedLinear:
    """Return linear layers of the same input as one."""
    kinds = {_kind(linear) for linear in linears}
    kind = kinds.pop() if len(kinds) == 1 else SeparateLinear
    assert kind is not None, "supports_model has let a kernel through that is not part of the step"
    return kind(linears, dtype)


def copy_bytes(linears: Iterable[LinearLayer], element_size: int) -> int:
    """Return the bytes of small matrices' dequantized copies."""
    copied = [x for x in linears if (kind := _kind(x)) is not None and kind.keeps_copies and is_small(x)]
    return sum(x.prepared.problem.N * x.prepared.problem.K * element_size for x in copied)


def _kind(linear: LinearLayer) -> type[FusedLinear] | None:
    data = linear.prepared.data
    return next((kind for weight, kind in KINDS.items() if isinstance(data, weight)), None)


class SeparateLinear(FusedLinear):
    """Linears with weights of several kinds: each takes its own kernels, and x is normed once for all of them."""

    kernel = ""  # several
    weights: list[FusedLinear]

    def __init__(self, linears: Sequence[LinearLayer], dtype: torch.dtype) -> None:
        super().__init__(linears, dtype)
        self._small = all(part._small for part in self.weights)

    def _joined(self, linears: Sequence[LinearLayer]) -> list[Any]:
        return [fuse([linear], self.dtype) for linear in linears]

    @staticmethod
    def join(weights: Sequence[Any]) -> tuple[Any, Sequence[Any]] | None:
        return None

    def _gemv_rows(self, rows: int) -> int:
        """Return what all of them can take at a time."""
        return min(part._gemv_rows(rows) for part in self.weights)

    def _dequantize(self, w: FusedLinear, unit: Tensor) -> Tensor:
        return w._dequantize(w.weights[0], unit)

    def _multiply(
        self,
        x: Tensor | BitSerialX,
        w: FusedLinear,
        op: Prologue,
        norm: Norm | None,
        bias: Tensor | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        return w(x, op, norm, residual, dtype, out)  # which has a bias of its own

    def _linear(
        self, h: Tensor, w: FusedLinear, bias: Tensor | None, residual: Tensor | None, batch_invariant: bool
    ) -> Tensor:
        return w._linear_each(h, residual, batch_invariant)
