"""The linears of a decode step on a GPU: those that read the same input as one launch, with what comes before fused in.

    y = FusedLinear([q, k, v])(x, "RMS_NORM", norm)      norm, encode and three matrices: two launches, or one

The matrices of a product are laid out behind one another and every layer gets its part of that memory back, so
the layers that run a prompt and the step that runs a token share one copy.

Matrices of at most SMALL bytes in 16 bits are also kept dequantized, for steps of few rows: reading them takes less
time than encoding x does, so that a small model is no slower quantized than not (`copy_bytes`: what that costs).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from crelle.kernels.base import Prepared
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.integer import integer_linear
from crelle.kernels.cuda.integer.integer_encode import EncodePlan
from crelle.kernels.cuda.integer.integer_linear import CudaIntegerWeight
from crelle.kernels.cuda.launch import is_recording
from crelle.kernels.cuda.mixed import mixed_decode, mixed_gemv, mixed_layout
from crelle.kernels.cuda.mixed.mixed_layout import MixedWeight
from crelle.kernels.cuda.planes import gemm
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
from crelle.kernels.cuda.planes.weight_layout import CudaWeight, join
from crelle.kernels.cuda.step.activations import Prologue

SMALL = 2 << 20  # bytes of a matrix in 16 bits
STEPPED = {"cuda", "cuda-mixed", "cuda-integer", "dense"}  # kernels whose weights a step can multiply by


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Scale and shift of a norm; a shift means a layer norm, none an RMS norm."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Activated:
    """What the product before has applied the activation to already."""

    values: Tensor


class LinearLayer(Protocol):
    """A layer y = x @ W.T + bias, as far as it is used here: the prepared weight may be replaced by a view."""

    prepared: Prepared
    bias: Tensor | None


class FusedLinear:
    """Some linear layers of the same input as one."""

    def __init__(self, linears: Sequence[LinearLayer], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.weights = _joined(linears)
        sizes = [linear.prepared.problem.N for linear in linears]
        self.bias = _cat_biases(linears, sizes, dtype)
        apart = len(self.weights) > 1 and self.bias is not None
        self._biases: Sequence[Tensor | None] = torch.split(self.bias, sizes) if apart else [None] * len(sizes)  # type: ignore[arg-type]
        self._folded: tuple[Norm, Tensor, Tensor] | None = None
        self._small, self._inputs = all(map(_is_small, linears)), linears[0].prepared.problem.K
        self._dense: Tensor | None = None  # of small matrices, made when it is first used
        self._perms = _orders(self.weights)
        integer = [w for w in self.weights if isinstance(w, CudaIntegerWeight)]
        self._integer = integer if len(integer) == len(self.weights) else []
        self._plan = EncodePlan([w.form for w in self._integer])

    @property
    def takes_bitserial(self) -> bool:
        """Whether all is one bit-plane weight, which can take x as another kernel's epilogue encoded it."""
        w, small = self.weights[0], self._small
        return len(self.weights) == 1 and isinstance(w, CudaWeight) and w.perm is None and parts(w) == 1 and not small

    @property
    def takes_integers(self) -> bool:
        """Whether all weights want quantized activations: `integer_product` is all there is to do."""
        return bool(self._integer)

    def integer_product(
        self,
        x: Tensor,
        op: Prologue = "PLAIN",
        norm: Norm | None = None,
        addend: Tensor | None = None,
        residual: Tensor | None = None,
        batch_invariant: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return op(x + addend) @ W.T + bias + residual, and x + addend, for any number of rows."""
        biases = [self.bias] if len(self._integer) == 1 else self._biases
        settings = op, norm, addend, biases, residual, batch_invariant
        return integer_linear.multiply(self._integer, self._plan, x, *settings)

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
        y = self._product(*_opened(x, op), norm, residual, dtype or self.dtype, out)
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
        if self.takes_integers and isinstance(x, Tensor):
            return self.integer_product(x, op, norm, residual=residual)[0].to(dtype)
        if self._small and isinstance(x, Tensor):
            return self._multiply(x, self._dequantized(x.device), op, norm, self.bias, residual, dtype, out)
        if (y := self._decode(x, op, norm, residual, dtype)) is not None:
            return y
        if len(self.weights) == 1:
            return self._multiply(x, self.weights[0], op, norm, self.bias, residual, dtype, out)
        assert residual is None, "only single matrices write back to the residual stream"
        if self._perms is not None:
            return self._multiply_each(x, op, norm, dtype)
        pairs = zip(self.weights, self._biases, strict=True)
        return torch.cat([self._multiply(x, w, op, norm, b, None, dtype) for w, b in pairs], dim=-1)

    def _decode(
        self,
        x: Tensor | BitSerialX,
        op: Prologue,
        norm: Norm | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        paired: bool = False,
    ) -> Tensor | None:
        """The product of one token with mixed weights, where one launch does all of it; paired: silu(gate) * up."""
        mixed = [w for w in self.weights if isinstance(w, MixedWeight)]
        if len(mixed) < len(self.weights) or not isinstance(x, Tensor):
            return None
        scale, shift, eps = (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)
        biases = self._biases if len(mixed) > 1 else [self.bias]
        if not mixed_decode.supports(x, mixed, op, scale, shift, residual, *biases):
            return None
        if paired and not mixed_decode.pairs(mixed):
            return None
        return mixed_decode.product(x, mixed, dtype, op, scale, shift, eps, biases, residual, paired=paired)

    def _multiply_each(self, x: Tensor | BitSerialX, op: Prologue, norm: Norm | None, dtype: torch.dtype) -> Tensor:
        """The product of mixed weights whose 4-bit groups differ: x is encoded for all of them in one launch."""
        first = self.weights[0]
        assert isinstance(first, MixedWeight)
        assert isinstance(x, Tensor)
        assert self._perms is not None
        scale, shift, eps = (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)
        encoded = mixed_gemv.encode_each(x, first, self._perms, op, scale, shift, eps)
        y = []
        for w, xs, bias in zip(self.weights, encoded, self._biases, strict=True):
            assert isinstance(w, MixedWeight)
            y.append(mixed_gemv.product(xs, w, dtype, bias))
        return torch.cat(y, dim=-1)

    def activated(
        self,
        x: Tensor | BitSerialX,
        then: Prologue,
        following: "FusedLinear",
        op: Prologue = "PLAIN",
        norm: Norm | None = None,
    ) -> Tensor | BitSerialX | Activated:
        """Return what `following` takes: then(y), encoded or not, where the epilogue can do that, y otherwise."""
        pairs = then == "SILU_MUL" and not self._small
        if pairs and (y := self._decode(x, op, norm, None, self.dtype, paired=True)) is not None:
            return Activated(y)
        w = self._encoding_weight(then, following)
        if w is None:
            return self(x, op, norm)
        digits, bias, fold = self._digits(x, w, op, norm, self.bias)
        return product_encode(digits, w, self.dtype, then, bias=bias, fold=fold)[1]

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
        x, op = _opened(x, op)
        kind: Prologue = "RMS_NORM" if then.bias is None else "LAYER_NORM"
        w = self._encoding_weight(kind, following)
        if w is None or then.weight is None:
            y = self(x, op, norm, residual)
            return y, y
        digits, bias, fold = self._digits(x, w, op, norm, self.bias)
        stored, made = product_encode(digits, w, self.dtype, kind, then.weight, then.eps, bias, residual, fold)
        assert stored is not None
        return stored, made

    def _encoding_weight(self, then: Prologue, following: "FusedLinear") -> CudaWeight | None:
        """The weight, where its epilogue can encode then(y)."""
        w = self.weights[0]
        one = len(self.weights) == 1 and following.takes_bitserial and not self._small
        return w if one and isinstance(w, CudaWeight) and epilogue_encodes(w, then, self.dtype) else None

    def _multiply(
        self,
        x: Tensor | BitSerialX,
        w: CudaWeight | MixedWeight | CudaIntegerWeight | Tensor,
        op: Prologue,
        norm: Norm | None,
        bias: Tensor | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        scale, shift, eps = (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)
        if isinstance(w, CudaWeight) and isinstance(x, Tensor) and encodes_itself(w):
            how = op, scale, shift, eps
            return encode_product(x, w, dtype, *how, bias, residual, out, in_graph=True)
        if isinstance(w, CudaWeight):
            digits, bias, fold = self._digits(x, w, op, norm, bias)
            return product(digits, w, dtype, bias, residual, out, in_graph=True, fold=fold)
        assert isinstance(x, Tensor), "digits are for planes"
        if isinstance(w, CudaIntegerWeight):
            plan = EncodePlan([w.form])
            return integer_linear.multiply([w], plan, x, op, norm, None, [bias], residual)[0].to(dtype)
        if isinstance(w, MixedWeight):
            encoded = mixed_gemv.encode(x, w, op, scale, shift, eps)
            return mixed_gemv.product(encoded, w, dtype, bias, residual)
        return dense.product(x, w, op, scale, shift, eps, bias, residual, dtype, out)

    def _digits(
        self, x: Tensor | BitSerialX, w: CudaWeight, op: Prologue, norm: Norm | None, bias: Tensor | None
    ) -> tuple[BitSerialX, Tensor | None, Tensor | None]:
        """Return op(x) encoded, with the bias and the `fold` that the product is to take."""
        scale, shift, eps = (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)
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

    def _dequantized(self, device: torch.device) -> Tensor:
        """All matrices as one in 16 bits: what they make of the unit vectors."""
        if self._dense is not None:
            return self._dense
        unit, parts = torch.eye(self._inputs, dtype=self.dtype, device=device), list[Tensor]()
        for w in self.weights:
            if isinstance(w, CudaWeight):
                parts.append(gemm.matmul(unit, w, None).T)
            else:
                assert isinstance(w, MixedWeight)
                parts.append(mixed_gemv.matmul(unit, w, None, False).T)
        dense = torch.cat(parts).contiguous()
        self._dense = None if is_recording() else dense
        return dense


def copy_bytes(linears: Iterable[LinearLayer], element_size: int) -> int:
    """Return the bytes of small matrices' dequantized copies."""
    sizes = (linear.prepared.problem for linear in linears if _is_small(linear))
    return sum(p.N * p.K * element_size for p in sizes)


def _is_small(linear: LinearLayer) -> bool:
    if not isinstance(linear.prepared.data, CudaWeight | MixedWeight):
        return False
    p = linear.prepared.problem
    return 2 * p.N * p.K <= SMALL


def _opened(x: Tensor | BitSerialX | Activated, op: Prologue) -> tuple[Tensor | BitSerialX, Prologue]:
    return (x.values, "PLAIN") if isinstance(x, Activated) else (x, op)


def _orders(weights: Sequence[Any]) -> Tensor | None:
    """Return the orders of inputs of several mixed weights with as many groups of each kind; None for others."""
    if len(weights) < 2 or not all(isinstance(w, MixedWeight) for w in weights):
        return None
    if len({(w.K, w.U2, w.U4, w.subs) for w in weights}) > 1:
        return None
    return torch.stack([w.perm for w in weights])


def _joined(linears: Sequence[LinearLayer]) -> list[CudaWeight | MixedWeight | CudaIntegerWeight | Tensor]:
    """Return the matrices as one where their layouts allow it, and let the linears point into it."""
    data = [linear.prepared.data for linear in linears]
    if len(data) == 1:
        return data
    joined = _whole(data)
    if joined is None:
        return data
    for linear, part in zip(linears, joined[1], strict=True):
        linear.prepared = replace(linear.prepared, data=part)
    return [joined[0]]


def _whole(data: list[Any]) -> tuple[Any, Sequence[Any]] | None:
    if all(isinstance(w, CudaWeight) for w in data):
        return join(data)
    if all(isinstance(w, MixedWeight) for w in data):
        return mixed_layout.join(data)
    if all(isinstance(w, CudaIntegerWeight) for w in data):
        return integer_linear.join(data)
    if all(isinstance(w, Tensor) for w in data):
        whole = torch.cat(data)
        return whole, torch.split(whole, [w.shape[0] for w in data])
    return None


def _cat_biases(linears: Sequence[LinearLayer], sizes: list[int], dtype: torch.dtype) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    some = next(linear.bias for linear in linears if linear.bias is not None)
    zeros = [torch.zeros(n, dtype=dtype, device=some.device) for n in sizes]
    return torch.cat([z if x.bias is None else x.bias for z, x in zip(zeros, linears, strict=True)])
