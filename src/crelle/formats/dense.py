"""Weights that are not quantized: f32, f16 or bf16 [N, K]. 32 or 16 bits per weight.

The stored tensor tells its own dtype; only the spec of a matrix that does not exist yet (`random`, `row_bits`) may name
one: {"format": "dense", "shape": [N, K], "dtype": "bfloat16"}; float16 where it does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.base import QuantTensor, Spec, expect, register_format, shape_of, take
from crelle.formats.parallel import stack_tensors
from crelle.formats.storage.io import shown

DENSE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@register_format
@dataclass(frozen=True, slots=True, eq=False)
class DenseTensor:
    """A plain matrix behind the interface that the encoded ones have."""

    format: ClassVar[str] = "dense"
    quantized: ClassVar[bool] = False
    weight: Tensor  # [N, K]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def bits(self) -> int:
        return 8 * self.weight.element_size()

    @property
    def group(self) -> int:
        return self.shape[1]

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.weight.to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def scales(self) -> dict[str, Tensor]:
        return {}

    def with_scales(self, scales: Mapping[str, Tensor]) -> "DenseTensor":
        return self

    def spec(self) -> Spec:
        return {"format": self.format, "shape": list(self.shape)}

    def rows(self, which: slice | Tensor) -> "DenseTensor":
        return DenseTensor(self.weight[which])

    def cut(self, k: int) -> str | None:
        return None

    def columns(self, begin: int, end: int) -> "DenseTensor":
        return DenseTensor(self.weight[:, begin:end])

    @classmethod
    def stacked(cls, matrices: Sequence[QuantTensor]) -> QuantTensor | None:
        return stack_tensors(matrices)

    def to(self, device: torch.device | str) -> "DenseTensor":
        return DenseTensor(self.weight.to(device))

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        return ["weight"]

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        take(spec, cls, {"format", "shape"})
        return cls(expect(tensors, "weight", shape_of(spec), DENSE_DTYPES, cls.format))

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        N, K = shape_of(spec)
        weight = torch.randn(N, K, generator=generator, dtype=_dtype_of(spec), device=generator.device)
        return cls(weight.mul_(K**-0.5))

    @classmethod
    def row_bits(cls, spec: Mapping[str, Any]) -> int:
        return 8 * _dtype_of(spec).itemsize * shape_of(spec)[1]


def _dtype_of(spec: Mapping[str, Any]) -> torch.dtype:
    name = spec.get("dtype", "float16")
    names = {str(d).removeprefix("torch."): d for d in DENSE_DTYPES}
    if name not in names:
        raise FormatError(f"dense: the dtype should be one of {', '.join(names)}, got {shown(name)}")
    return names[name]
