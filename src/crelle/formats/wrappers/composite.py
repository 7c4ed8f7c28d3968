"""Formats that wrap another one; PermutedTensor: a matrix whose input channels were sorted before it was encoded.

    W[:, order] = inner        y = W x = inner x[order]

GPTQ with act-order (`desc_act`) puts inputs of like importance into one group, wherever in the row they stand. Our
formats share scales among neighbours, so the columns are stored in the order of their groups, with the way back:
    order  int32 [K]     input `order[j]` of the matrix is column j of `inner`; a permutation of 0 ... K-1
Bits per weight: those of inner + 32 / N.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor, Spec, expect, register_format, shape_of, take
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.formats.parallel import SCATTERED, stacked
from crelle.formats.storage.io import shown

INNER: dict[str, type[QuantTensor]] = {c.format: c for c in (UniformTensor, AffineTensor, BCQTensor)}


@dataclass(frozen=True, slots=True, eq=False)
class WrappedTensor:
    """What the formats that wrap another one have in common: they do something to the inputs of a matrix."""

    quantized: ClassVar[bool] = True
    inner: QuantTensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.inner.shape

    @property
    def bits(self) -> float:
        return self.inner.bits

    @property
    def group(self) -> int | None:
        return self.inner.group

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def scales(self) -> dict[str, Tensor]:
        return self.inner.scales()


@register_format
@dataclass(frozen=True, slots=True, eq=False)
class PermutedTensor(WrappedTensor):
    """An encoded matrix and the order of the inputs that its columns belong to."""

    format: ClassVar[str] = "permuted"
    order: Tensor  # int32 [K]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        sorted_columns = self.inner.dequantize(dtype)
        return torch.empty_like(sorted_columns).index_copy_(1, self.order.long(), sorted_columns)

    def tensors(self) -> dict[str, Tensor]:
        return {**self.inner.tensors(), "order": self.order}

    def with_scales(self, scales: Mapping[str, Tensor]) -> "PermutedTensor":
        return PermutedTensor(self.inner.with_scales(scales), self.order)

    def spec(self) -> Spec:
        return {"format": self.format, "shape": list(self.shape), "inner": self.inner.spec()}

    def rows(self, which: slice | Tensor) -> "PermutedTensor":
        return PermutedTensor(self.inner.rows(which), self.order)

    def cut(self, k: int) -> str:
        """Return why no inputs can be taken out."""
        return SCATTERED

    @classmethod
    def stacked(cls, matrices: Sequence[Any]) -> QuantTensor | None:
        """Return one matrix with the rows of all, if all have the same order of inputs."""
        order = matrices[0].order
        inner = stacked([m.inner for m in matrices]) if all(torch.equal(m.order, order) for m in matrices) else None
        return None if inner is None else cls(inner, order)

    def to(self, device: torch.device | str) -> "PermutedTensor":
        return PermutedTensor(self.inner.to(device), self.order.to(device))

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        inner = spec.get("inner")
        return [*_class_of(inner).parts(inner), "order"]  # type: ignore[arg-type]

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        take(spec, cls, {"format", "shape", "inner"})
        N, K = shape_of(spec)
        inner = _class_of(spec["inner"]).from_parts(spec["inner"], tensors)
        if inner.shape != (N, K):
            raise FormatError(f"{cls.format}: the matrix is {N} x {K}, but the inner matrix is {list(inner.shape)}")
        order = expect(tensors, "order", (K,), (torch.int32,), cls.format)
        if not torch.equal(order.sort().values, torch.arange(K, dtype=torch.int32, device=order.device)):
            raise FormatError(f"{cls.format}: 'order' must name each of the {K} inputs once")
        return cls(inner, order)

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        inner = _class_of(spec["inner"]).random(spec["inner"], generator)
        order = torch.randperm(inner.shape[1], generator=generator, device=generator.device)
        return cls(inner, order.to(torch.int32))

    @classmethod
    def row_bits(cls, spec: Mapping[str, Any]) -> int:
        """Those of a row inside; the order is stored once for all rows."""
        return _class_of(spec["inner"]).row_bits(spec["inner"])


def _class_of(spec: object) -> type[QuantTensor]:
    name = spec.get("format") if isinstance(spec, dict) else None
    if not isinstance(name, str) or name not in INNER:
        raise FormatError(f"permuted: 'inner' should be one of {', '.join(INNER)}, but is {shown(spec)}")
    return INNER[name]
