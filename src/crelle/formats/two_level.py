"""4-bit weights of two levels: per output to int8, per group to 4 bits with integer scales (QServe, LiquidGEMM).

    w = s v          s f16, one per output        v an integer of 8 bits
    v = a q - z      of `group` input channels: q 0 … 15, a 1 … 16, z 0 … 127, all integers
                     the last n columns, the outliers: v itself, int8
The quantizer limits v to ±119, so that a q - z, rounded to nearest, stays within ±127; a q ≤ 240 fits a byte. So four
weights become int8 by one integer multiply-add and an XOR, int32 sums need no rescaling along K, and with activations
of one scale per token (and one for its outliers) a float product or two per output are all that remain. Columns and
perm as in crelle.formats.grouped.

Stored:
    codes         uint8 [N, ceil((K - n) / 2)]   two to a byte, the first in the lower half
    group_scale   uint8 [N, C]     group_zero  uint8 [N, C]       C = ceil((K - n) / group)
    scale         f16 or f32 [N]
    outliers      int8 [N, n]      where n > 0                    perm  int32 [K]     where permuted
Bits per weight: (K - n)/K 4 + n/K 8 + 16 C/K + 16/K, and perm 32 / N.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.activations import ActivationSpec
from crelle.formats.base import QuantTensor, Spec, expect, register_format, take
from crelle.formats.grouped import (
    GroupedSizes,
    activation_of,
    activation_within,
    cuts_columns,
    in_input_order,
    random_integers,
    read_outliers,
    read_perm,
    sizes_of,
    unrotated,
)
from crelle.formats.packing import pack_stream, unpack_stream
from crelle.formats.packing.random_parts import RandomParts
from crelle.formats.parallel import stack_tensors

LIMIT = 119  # of v before it is rounded to 4 bits
_KEYS = {"format", "shape", "bits", "group", "outliers", "permuted", "activation"}


@register_format
@dataclass(frozen=True, slots=True, eq=False)
class TwoLevelTensor:
    """u4 codes with integer group scales, one float scale per output."""

    format: ClassVar[str] = "two-level"
    quantized: ClassVar[bool] = True
    sizes: GroupedSizes
    packed: Tensor  # uint8, stored as "codes"
    group_scale: Tensor  # uint8 [N, C]
    group_zero: Tensor  # uint8 [N, C]
    scale: Tensor  # float [N]
    outliers: Tensor | None = None  # int8 [N, n]
    perm: Tensor | None = None  # int32 [K]
    activation: ActivationSpec | None = None

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        group_scale: Tensor,
        group_zero: Tensor,
        scale: Tensor,
        group: int,
        outliers: Tensor | None = None,
        perm: Tensor | None = None,
        activation: ActivationSpec | None = None,
    ) -> Self:
        """Pack codes uint8 [N, K - n]."""
        N, normal = codes.shape
        n = 0 if outliers is None else outliers.shape[1]
        sizes = GroupedSizes(N, normal + n, 4, group, n)
        order = None if perm is None else perm.to(torch.int32)
        levels = group_scale.contiguous(), group_zero.contiguous(), scale.contiguous()
        return cls(sizes, pack_stream(codes, 4), *levels, outliers if n else None, order, activation)

    @property
    def shape(self) -> tuple[int, int]:
        return self.sizes.N, self.sizes.K

    @property
    def bits(self) -> float:
        return (4 * self.sizes.normal + 8 * self.sizes.outliers) / self.sizes.K

    @property
    def group(self) -> int:
        return self.sizes.group

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def codes(self) -> Tensor:
        """Return q, uint8 [N, K - n]."""
        return unpack_stream(self.packed, 4, self.sizes.normal)

    def integers(self) -> Tensor:
        """Return v of all columns, int8 [N, K], in stored order."""
        s = self.sizes
        a, z = (s.of_columns(t).short() for t in (self.group_scale, self.group_zero))
        v = (self.codes() * a - z).to(torch.int8)
        return v if self.outliers is None else torch.cat([v, self.outliers], 1)

    def scale_slices(self) -> list[slice]:
        """Return the columns of each scale: one for all."""
        return [slice(0, self.sizes.K)]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        w = self.integers().to(wide) * self.scale.to(wide)[:, None]
        return in_input_order(unrotated(w, self.activation), self.perm).to(dtype)

    def round_input(self, x: Tensor) -> Tensor:
        """Return x [..., K] as the integer product sees it; the gradient is passed through."""
        if self.activation is None:
            return x
        return self.activation.round(x, None if self.perm is None else self.perm.long())

    def tensors(self) -> dict[str, Tensor]:
        found = {"codes": self.packed, "group_scale": self.group_scale, "group_zero": self.group_zero}
        rest = {"scale": self.scale, "outliers": self.outliers, "perm": self.perm}
        return found | {name: t for name, t in rest.items() if t is not None}

    def scales(self) -> dict[str, Tensor]:
        return {"scale": self.scale}

    def with_scales(self, scales: Mapping[str, Tensor]) -> "TwoLevelTensor":
        return replace(self, scale=scales.get("scale", self.scale))

    def spec(self) -> Spec:
        s, act = self.sizes, self.activation
        return {
            "format": self.format,
            "shape": [s.N, s.K],
            "bits": 4,
            "group": s.group,
            "outliers": s.outliers,
            "permuted": self.perm is not None,
            "activation": None if act is None else act.to_json(),
        }

    def rows(self, which: slice | Tensor) -> "TwoLevelTensor":
        found = {name: t if name == "perm" else t[which] for name, t in self.tensors().items()}
        packed = found.pop("codes")
        return replace(self, sizes=self.sizes._replace(N=len(packed)), packed=packed, **found)  # type: ignore[arg-type]

    def cut(self, k: int) -> str | None:
        return cuts_columns(self.sizes, self.perm, self.activation, k)

    def columns(self, begin: int, end: int) -> "TwoLevelTensor":
        """Return the inputs begin … end - 1."""
        normal, last = self.sizes.within(begin, end)
        groups = [i for i in self.sizes.groups_within(begin, end) if i < self.sizes.groups[0]]
        outliers = None if self.outliers is None else self.outliers[:, last]
        levels = self.group_scale[:, groups], self.group_zero[:, groups], self.scale
        activation = activation_within(self.activation, last)
        return TwoLevelTensor.from_codes(self.codes()[:, normal], *levels, self.group, outliers, None, activation)

    @classmethod
    def stacked(cls, matrices: Sequence[QuantTensor]) -> QuantTensor | None:
        return stack_tensors(matrices)

    def to(self, device: torch.device | str) -> "TwoLevelTensor":
        moved = {name: t.to(device) for name, t in self.tensors().items()}
        return replace(self, packed=moved.pop("codes"), **moved)  # type: ignore[arg-type]

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        s = _sizes(spec)
        names = ["codes", "group_scale", "group_zero", "scale"]
        return names + ["outliers"] * (s.outliers > 0) + ["perm"] * spec["permuted"]

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        take(spec, cls, _KEYS)
        s, where = _sizes(spec), cls.format
        packed = expect(tensors, "codes", (s.N, -(-s.normal // 2)), (torch.uint8,), where)
        levels = (s.N, s.groups[0])
        a = expect(tensors, "group_scale", levels, (torch.uint8,), where)
        z = expect(tensors, "group_zero", levels, (torch.uint8,), where)
        if a.numel() and (a.amin() < 1 or a.amax() > 16 or z.amax() > 127):
            raise FormatError(f"{where}: 'group_scale' must be 1 to 16 and 'group_zero' 0 to 127")
        scale = expect(tensors, "scale", (s.N,), (torch.float16, torch.float32), where)
        perm = read_perm(tensors, s.K, where) if spec["permuted"] else None
        outliers = read_outliers(s, tensors, where)
        found = cls(s, packed, a, z, scale, outliers, perm, activation_of(spec, s, where))
        found._check_range()
        return found

    def _check_range(self) -> None:
        """Refuse weights that a kernel's byte arithmetic would wrap around."""
        s = self.sizes
        a, z = (s.of_columns(t).short() for t in (self.group_scale, self.group_zero))
        if s.normal and (self.codes() * a - z).amax() > 127:
            raise FormatError(f"{self.format}: a weight of 8 bits is above 127")

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        s, device = _sizes(spec), generator.device
        sample, levels = RandomParts(s.N, s.K, 1, generator), (s.N, s.groups[0])

        def integers(low: int, top: int, *shape: int) -> Tensor:
            return torch.randint(low, top, shape, generator=generator, device=device, dtype=torch.uint8)

        a, codes = integers(8, 16, *levels), integers(0, 16, s.N, s.normal)
        z = (a.short() * 15 // 2).to(torch.uint8)
        scale = (sample.step(4) / 12 * sample.jitter(s.N)).half()
        outliers = random_integers(8, (s.N, s.outliers), generator) if s.outliers else None
        perm = torch.randperm(s.K, generator=generator, device=device) if spec["permuted"] else None
        return cls.from_codes(codes, a, z, scale, s.group, outliers, perm, activation_of(spec, s, cls.format))

    @classmethod
    def row_bits(cls, spec: Mapping[str, Any]) -> int:
        """Those of a row; perm is stored once for all rows."""
        s = _sizes(spec)
        return 8 * -(-s.normal // 2) + 16 * s.groups[0] + 16 + 8 * s.outliers


def _sizes(spec: Mapping[str, Any]) -> GroupedSizes:
    s = sizes_of(spec, TwoLevelTensor.format)
    if s.bits != 4:
        raise FormatError(f"{TwoLevelTensor.format}: weights must have 4 bits, got {s.bits}")
    return s
