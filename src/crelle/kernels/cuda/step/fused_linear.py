"""Linear layers of a decoder that read the same input, as one, with what comes before and after them fused in.

    fused = fuse([q, k, v], dtype)                           # fuse.py: the class follows from the kind of the weights
    y = fused(x, "RMS_NORM", norm)                           # up to GEMV_ROWS rows: norm, encode and three matrices
    y, x = fused.norm_linear(x, addend, "RMS_NORM", norm)    # any rows: norm(x + addend) @ W.T, and x + addend
    x, addend = o.linear_residual(a, x)                      # a @ W.T; the next norm_linear adds it to x

A kind of weights is a subclass in the folder of its kernels (planes/fused.py, mixed/fused.py, …). What it must answer:
`join`, `_multiply` (few rows), `_linear` (many rows) and `_gemv_rows`; what it may: `_fused_rows` (one launch that
prepares x for the GEMM), `normed` and `activated` (epilogues that encode for the next product), `takes_packed`.

The matrices of a product are laid out one after the other and every layer gets its part of that memory back, so the
layers that run a prompt and the step that runs a token share one copy. Matrices of at most SMALL bytes in 16 bits are
also kept dequantized (`keeps_copies`), for steps of few rows: reading them takes less time than encoding x does, so
that a small model is no slower quantized than not.

With `batch_invariant` a row's bits do not depend on the number of rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from crelle.kernels.base import Prepared
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.launch import is_recording
from crelle.kernels.cuda.planes.bmma_gemv import BitSerialX
from crelle.kernels.cuda.step.activations import Prologue

if TYPE_CHECKING:
    from crelle.kernels.cuda.planes.gemm import PackedX
    from crelle.kernels.cuda.planes.weight_layout import CudaWeight

SMALL = 2 << 20  # bytes of a matrix in 16 bits


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Scale and shift of a norm; a shift means a layer norm, none an RMS norm."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float

    @property
    def op(self) -> Prologue:
        """How it is fused into a product."""
        return "RMS_NORM" if self.bias is None else "LAYER_NORM"

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [N, K] normed, in a launch of its own."""
        return dense.apply(x, self.op, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class Activated:
    """What the product before has applied the activation to already."""

    values: Tensor


class LinearLayer(Protocol):
    """A layer y = x @ W.T + bias, as far as it is used here: the prepared weight may be replaced by a view."""

    prepared: Prepared
    bias: Tensor | None


class FusedLinear(ABC):
    """Linear layers of the same input, all of one kind of weights."""

    kernel: ClassVar[str]  # the Kernel whose weights these are
    keeps_copies: ClassVar[bool] = False  # of small matrices
    takes_integers: ClassVar[bool] = False  # x is quantized for the product: no other form of it will do

    def __init__(self, linears: Sequence[LinearLayer], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.weights = self._joined(linears)
        sizes = [linear.prepared.problem.N for linear in linears]
        self.bias = _cat_biases(linears, sizes, dtype)
        apart = len(self.weights) > 1 and self.bias is not None
        self._biases: Sequence[Tensor | None] = (
            torch.split(self.bias, sizes) if apart else [None] * len(sizes)  # type: ignore[arg-type]
        )
        if len(self.weights) == 1:
            self._biases = [self.bias]
        self._small = self.keeps_copies and all(map(is_small, linears))
        self._inputs = linears[0].prepared.problem.K
        self._dense: Tensor | None = None  # of small matrices, made when it is first used

    # --- what a kind of weights answers -------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def join(weights: Sequence[Any]) -> tuple[Any, Sequence[Any]] | None:
        """Return weights as one, and parts that point into it; None where their layouts do not fit."""

    @abstractmethod
    def _multiply(
        self,
        x: Tensor | BitSerialX,
        w: Any,
        op: Prologue,
        norm: Norm | None,
        bias: Tensor | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return op(x) @ W.T + bias + residual of one weight for few rows; `out` is where the result may go."""

    @abstractmethod
    def _linear(self, h: Tensor, w: Any, bias: Tensor | None, residual: Tensor | None, batch_invariant: bool) -> Tensor:
        """Return h @ W.T + bias + residual of one weight for any number of rows."""

    @abstractmethod
    def _gemv_rows(self, rows: int) -> int:
        """Return how many of so many rows one GEMV takes; 0: another kernel takes them all."""

    def _dequantize(self, w: Any, unit: Tensor) -> Tensor:
        """Return W [N, K] in 16 bits: what it makes of the unit vectors."""
        raise NotImplementedError  # of kinds that keep no copies

    def _fused_rows(
        self,
        x: Tensor,
        addend: Tensor | None,
        op: Prologue,
        norm: Norm | None,
        batch_invariant: bool,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Return op(x + addend) @ W.T + bias, and x + addend, where one launch prepares x for the GEMM."""
        return None

    def _from_packed(self, xs: "PackedX", batch_invariant: bool) -> Tensor:
        raise NotImplementedError  # of kinds for which `takes_packed` is None

    @property
    def takes_bitserial(self) -> bool:
        """Whether x can come as another kernel's epilogue encoded it."""
        return False

    def takes_packed(self, rows: int, K: int, batch_invariant: bool) -> "CudaWeight | None":
        """Return the weight for which `linear_residual` takes [rows, K] packed by the kernel before it, or None."""
        return None

    # --- few rows -----------------------------------------------------------------------------------------------------

    def __call__(
        self,
        x: Tensor | BitSerialX | Activated,
        op: Prologue = "PLAIN",
        norm: Norm | None = None,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return op(x) @ W.T + bias + residual as [tokens, N of all]; all but tensors have been through op already."""
        y = self._product(*opened(x, op), norm, residual, dtype or self.dtype, out)
        return y if out is None or y is out else out.copy_(y)

    def _product(
        self,
        x: Tensor | BitSerialX,
        op: Prologue,
        norm: Norm | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> Tensor:
        """The same; `out` is where the result may go."""
        if self._small and isinstance(x, Tensor):
            weight, bias = self._dequantized(x.device), self.bias
            return dense.product(x, weight, op, *of_norm(norm), bias, residual, dtype, out)
        if len(self.weights) == 1:
            return self._multiply(x, self.weights[0], op, norm, self.bias, residual, dtype, out)
        assert residual is None, "only single matrices write back to the residual stream"
        return self._multiply_each(x, op, norm, dtype)

    def _multiply_each(self, x: Tensor | BitSerialX, op: Prologue, norm: Norm | None, dtype: torch.dtype) -> Tensor:
        pairs = zip(self.weights, self._biases, strict=True)
        return torch.cat([self._multiply(x, w, op, norm, b, None, dtype) for w, b in pairs], dim=-1)

    def activated(
        self,
        x: Tensor | BitSerialX,
        then: Prologue,
        following: "FusedLinear",
        op: Prologue = "PLAIN",
        norm: Norm | None = None,
    ) -> Tensor | BitSerialX | Activated:
        """Return what `following` takes: then(y), encoded or not, where the epilogue can do that, y otherwise."""
        return self(x, op, norm)

    def normed(
        self,
        x: Tensor | BitSerialX | Activated,
        then: Norm,
        following: "FusedLinear",
        op: Prologue = "PLAIN",
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | BitSerialX]:
        """Return y, and what `following` takes: then(y) encoded where the epilogue can do that, y again otherwise."""
        y = self(x, op, norm, residual)
        return y, y

    # --- any number of rows -------------------------------------------------------------------------------------------

    def norm_linear(
        self,
        x: Tensor,
        addend: Tensor | None,
        op: Prologue,
        norm: Norm | None,
        batch_invariant: bool = False,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return op(x + addend) @ W.T + bias, and x + addend; op is a norm, or PLAIN."""
        if (both := self._fused_rows(x, addend, op, norm, batch_invariant, dtype)) is not None:
            return both
        x = x if addend is None else x + addend
        return self.linear(x, op, norm, batch_invariant=batch_invariant, dtype=dtype), x

    def linear_residual(
        self, h: "Tensor | PackedX", x: Tensor, op: Prologue = "PLAIN", batch_invariant: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return x and what is to be added to it: op(h) @ W.T + bias, or x with it added and None."""
        if (y := self._apart(h, op, batch_invariant)) is not None:
            return x, y
        assert isinstance(h, Tensor)
        return self.linear(h, op, residual=x, batch_invariant=batch_invariant), None

    def linear_norm(
        self, h: "Tensor | PackedX", norm: Norm, op: Prologue = "PLAIN", batch_invariant: bool = False
    ) -> Tensor:
        """Return norm(op(h) @ W.T + bias): what a norm behind a layer leaves to be added to x."""
        return norm(self.linear_apart(h, op, batch_invariant))

    def linear_apart(self, h: "Tensor | PackedX", op: Prologue = "PLAIN", batch_invariant: bool = False) -> Tensor:
        """Return op(h) @ W.T + bias, with nothing added."""
        if (y := self._apart(h, op, batch_invariant)) is not None:
            return y
        assert isinstance(h, Tensor)
        return self.linear(h, op, batch_invariant=batch_invariant)

    def linear(
        self,
        x: Tensor,
        op: Prologue = "PLAIN",
        norm: Norm | None = None,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
    ) -> Tensor:
        """Return op(x) @ W.T + bias + residual for any number of rows."""
        rows = x.shape[0]
        if not batch_invariant and (size := self._gemv_rows(rows)):
            chunks = [slice(at, at + size) for at in range(0, rows, size)]
            each = [self(x[s], op, norm, None if residual is None else residual[s], dtype) for s in chunks]
            return each[0] if len(each) == 1 else torch.cat(each)
        h = x if op == "PLAIN" else dense.apply(x, op, *of_norm(norm))
        return self._linear_each(h, residual, batch_invariant).to(dtype or self.dtype)

    def _linear_each(self, h: Tensor, residual: Tensor | None, batch_invariant: bool) -> Tensor:
        pairs = zip(self.weights, self._biases, strict=True)
        parts = [self._linear(h, w, bias, residual, batch_invariant) for w, bias in pairs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _apart(self, h: "Tensor | PackedX", op: Prologue, batch_invariant: bool) -> Tensor | None:
        """Return op(h) @ W.T + bias where the kernels for it add no residual."""
        if not isinstance(h, Tensor):
            return self._from_packed(h, batch_invariant)
        both = self._fused_rows(h, None, op, None, batch_invariant)
        return None if both is None else both[0]

    @property
    def has_copy(self) -> bool:
        """Whether the matrices are small and kept dequantized."""
        return self._small

    def plain_copy(self, device: torch.device) -> Tensor:
        """Return small matrices as one in 16 bits."""
        return self._dequantized(device)

    # --- matrices as one ----------------------------------------------------------------------------------------------

    def _dequantized(self, device: torch.device) -> Tensor:
        """All matrices as one in 16 bits."""
        if self._dense is not None:
            return self._dense
        unit = torch.eye(self._inputs, dtype=self.dtype, device=device)
        whole = torch.cat([self._dequantize(w, unit) for w in self.weights]).contiguous()
        self._dense = None if is_recording() else whole
        return whole

    def _joined(self, linears: Sequence[LinearLayer]) -> list[Any]:
        """Return the matrices as one where their layouts allow it, and let the linears point into it."""
        data = [linear.prepared.data for linear in linears]
        if len(data) == 1 or (joined := self.join(data)) is None:
            return data
        for linear, part in zip(linears, joined[1], strict=True):
            linear.prepared = replace(linear.prepared, data=part)
        return [joined[0]]


def is_small(linear: LinearLayer) -> bool:
    """Whether a matrix is small enough to be kept dequantized as well."""
    p = linear.prepared.problem
    return 2 * p.N * p.K <= SMALL


def of_norm(norm: Norm | None) -> tuple[Tensor | None, Tensor | None, float]:
    """Return scale, shift and epsilon."""
    return (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)


def opened(x: Tensor | BitSerialX | Activated, op: Prologue) -> tuple[Tensor | BitSerialX, Prologue]:
    """Return x as a product takes it, and what it still has to apply to it."""
    return (x.values, "PLAIN") if isinstance(x, Activated) else (x, op)


def _cat_biases(linears: Sequence[LinearLayer], sizes: list[int], dtype: torch.dtype) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    some = next(linear.bias for linear in linears if linear.bias is not None)
    zeros = [torch.zeros(n, dtype=dtype, device=some.device) for n in sizes]
    return torch.cat([z if x.bias is None else x.bias for z, x in zip(zeros, linears, strict=True)])
