"""Weights that nobody quantized: f32, f16 or bf16 [N, K], as they are. 32 or 16 bits per weight."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from crelle.formats.base import Spec, expect, shape_of, take

DENSE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class DenseTensor:
    """A plain matrix behind the interface that the encoded ones have."""

    format: ClassVar[str] = "dense"
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

    def spec(self) -> Spec:
        return {"format": self.format, "shape": list(self.shape)}

    def rows(self, which: slice | Tensor) -> "DenseTensor":
        return DenseTensor(self.weight[which])

    def to(self, device: torch.device | str) -> "DenseTensor":
        return DenseTensor(self.weight.to(device))

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        return ["weight"]

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        take(spec, cls, {"format", "shape"})
        return cls(expect(tensors, "weight", shape_of(spec), DENSE_DTYPES, cls.format))
