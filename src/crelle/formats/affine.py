"""A uniform grid that may begin anywhere, and several grids nested in the same codes.

    AffineTensor   w = low + scale * q                     q = 0 ... 2^P - 1, low any value, not a multiple of scale
    NestedTensor   w = low_p + scale_p * (q >> (P - p))    for each precision p on offer: the first p planes of the same
                                                           codes with a scale and a low of their own

Against an integer zero point, a free `low` costs 16 - P bits a group more and lets the grid sit where the weights are:
at 2 and 3 bits that is worth more than a smaller group. It is also what GGUF's Q4_1 and Q5_1 store.

Layout, planes and groups as in crelle.formats.bcq (plane 0 is the most significant, so p planes are the top p bits):
    affine:  scale, low  f16 [N, C]             bits per weight  P + 32 / G
    nested:  scale, low  f16 [precisions, N, C]                  P + 32 precisions / G
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.base import Spec, expect, register_format, take
from crelle.formats.bcq import (
    SCALE_DTYPES,
    Planes,
    expand_groups,
    groups_in,
    plane_bits,
    plane_sizes,
    planes_of,
)
from crelle.formats.packing import pack_planes
from crelle.formats.packing.random_parts import RandomParts
from crelle.formats.storage.io import shown


@dataclass(frozen=True, slots=True, eq=False)
class _Grid(Planes):
    """Planes with a scale and a lowest level per group."""

    scale: Tensor  # float [N, C]; nested: [precisions, N, C]
    low: Tensor  # of the same shape

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        return ["planes", "scale", "low"]

    def tensors(self) -> dict[str, Tensor]:
        return {"planes": self.planes, "scale": self.scale, "low": self.low}

    def with_scales(self, scales: Mapping[str, Tensor]) -> Self:
        return replace(self, scale=scales.get("scale", self.scale), low=scales.get("low", self.low))

    def _of_groups(self, groups: slice, **changed: Any) -> Self:
        return replace(self, scale=self.scale[..., groups], low=self.low[..., groups], **changed)


@register_format
@dataclass(frozen=True, slots=True, eq=False)
class AffineTensor(_Grid):
    """w = low + scale * q, group-wise."""

    format: ClassVar[str] = "affine"

    @classmethod
    def from_codes(cls, codes: Tensor, bits: int, scale: Tensor, low: Tensor, group: int) -> Self:
        """Build from codes [N, K]."""
        return cls(pack_planes(codes, bits), codes.shape[-1], group, scale.contiguous(), low.contiguous())

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        take(spec, cls, {"format", "shape", "bits", "group"})
        planes, K, group = planes_of(spec, tensors, cls.format)
        per_group = (planes.shape[1], groups_in(K, group))
        scale = expect(tensors, "scale", per_group, SCALE_DTYPES, cls.format)
        return cls(planes, K, group, scale, expect(tensors, "low", per_group, SCALE_DTYPES, cls.format))

    def spec(self) -> Spec:
        return {"format": self.format, **self.dimensions()}

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        P, N, K, G, C = plane_sizes(spec)
        sample = RandomParts(N, K, C, generator)
        scale, low = sample.grid(P)
        return cls(sample.planes(P), K, G, scale, low)

    @classmethod
    def row_bits(cls, spec: Mapping[str, Any]) -> int:
        P, _, K, _, C = plane_sizes(spec)
        return plane_bits(P, K) + 32 * C

    def scales(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "low": self.low}

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        w = self.codes().to(wide).mul_(expand_groups(self.scale.to(wide), self.group, self.K))
        return w.add_(expand_groups(self.low.to(wide), self.group, self.K)).to(dtype)

    def rows(self, which: slice | Tensor) -> "AffineTensor":
        return AffineTensor(self.planes[:, which], self.K, self.group, self.scale[which], self.low[which])

    def to(self, device: torch.device | str) -> "AffineTensor":
        planes, scale, low = (t.to(device) for t in (self.planes, self.scale, self.low))
        return AffineTensor(planes, self.K, self.group, scale, low)


@register_format
@dataclass(frozen=True, slots=True, eq=False)
class NestedTensor(_Grid):
    """Affine grids of several precisions that share their leading planes; as a weight it is its finest one."""

    format: ClassVar[str] = "nested"
    precisions: tuple[int, ...]  # ascending; the last is the number of planes

    @classmethod
    def from_codes(
        cls, codes: Tensor, precisions: tuple[int, ...], scale: Tensor, low: Tensor, group: int
    ) -> "NestedTensor":
        """Build from the finest codes [N, K]."""
        planes = pack_planes(codes, precisions[-1])
        return cls(planes, codes.shape[-1], group, scale.contiguous(), low.contiguous(), precisions)

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        take(spec, cls, {"format", "shape", "bits", "group", "precisions"})
        planes, K, group = planes_of(spec, tensors, cls.format)
        precisions = spec["precisions"]
        if not (
            isinstance(precisions, list | tuple)
            and all(type(p) is int and p >= 1 for p in precisions)
            and list(precisions) == sorted(set(precisions))
            and precisions
            and precisions[-1] == planes.shape[0]
        ):
            raise FormatError(
                f"{cls.format}: precisions must ascend to the number of planes, {planes.shape[0]}; "
                f"got {shown(precisions)}"
            )
        per_group = (len(precisions), planes.shape[1], groups_in(K, group))
        scale = expect(tensors, "scale", per_group, SCALE_DTYPES, cls.format)
        low = expect(tensors, "low", per_group, SCALE_DTYPES, cls.format)
        return cls(planes, K, group, scale, low, tuple(precisions))

    def spec(self) -> Spec:
        return {"format": self.format, **self.dimensions(), "precisions": list(self.precisions)}

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        P, N, K, G, C = plane_sizes(spec)
        sample = RandomParts(N, K, C, generator)
        grids = [sample.grid(p) for p in spec["precisions"]]
        scale, low = (torch.stack(parts) for parts in zip(*grids, strict=True))  # [precisions, N, C]
        return cls(sample.planes(P), K, G, scale, low, tuple(spec["precisions"]))

    @classmethod
    def row_bits(cls, spec: Mapping[str, Any]) -> int:
        P, _, K, _, C = plane_sizes(spec)
        return plane_bits(P, K) + 32 * C * len(spec["precisions"])

    def scales(self) -> dict[str, Tensor]:
        """None that train: a loss at the finest precision would not see the other ones."""
        return {}

    def at(self, bits: int) -> AffineTensor:
        """Return the model of the first `bits` planes: a view, nothing is copied."""
        if bits not in self.precisions:
            offered = ", ".join(map(str, self.precisions))
            raise UnsupportedError(f"this checkpoint supports {offered} bits, not {bits}")
        i = self.precisions.index(bits)
        return AffineTensor(self.planes[:bits], self.K, self.group, self.scale[i], self.low[i])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.at(self.bits).dequantize(dtype)

    def rows(self, which: slice | Tensor) -> "NestedTensor":
        scale, low = self.scale[:, which], self.low[:, which]
        return NestedTensor(self.planes[:, which], self.K, self.group, scale, low, self.precisions)

    def to(self, device: torch.device | str) -> "NestedTensor":
        planes, scale, low = (t.to(device) for t in (self.planes, self.scale, self.low))
        return NestedTensor(planes, self.K, self.group, scale, low, self.precisions)
