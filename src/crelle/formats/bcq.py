"""Binary-coded weights, and uniform grids as their special case.

    BCQTensor      w = z + sum_p alpha_p * b_p        b_p in {-1, +1}, P planes
    UniformTensor  w = scale * (q - zero)             q = 0 ... 2^P - 1, zero an integer of the same range

Both hold the codes as the same bit-planes and share scales among G inputs of one output row.
A uniform grid is the case  alpha_p = scale * 2^(P-2-p),  z = scale * ((2^P - 1)/2 - zero);  `to_bcq` is exact.

Layout (the only place it is defined; docs/notes/bcq.md draws it). N outputs, K inputs, C = ceil(K/G) groups:
    planes  uint8 [P, N, ceil(K/8)]    bit j of planes[p, n, k] belongs to input 8k+j; set means +1
                                       plane 0 is the most significant; bits beyond K are 0
    BCQ:      alpha  f16 [P, N, C]     z  f16 [N, C], absent when the grid is symmetric
    uniform:  scale  f16 [N, C]        zero  uint8 [N, ceil(C*P/8)], a dense stream of P-bit integers,
                                       absent when the grid is symmetric (zero = 2^(P-1))
    Scales may also be bf16 or f32. The last group of a row is shorter where G does not divide K.
Bits per weight: BCQ  P + 16 (P + 1) / G;  uniform  P + (16 + P) / G.   Source: LUT-GEMM, arXiv 2206.09557.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.base import QuantTensor, Spec, expect, register_format, shape_of, take
from crelle.formats.packing import pack_planes, pack_stream, unpack_planes, unpack_signs, unpack_stream
from crelle.formats.packing.random_parts import RandomParts
from crelle.formats.parallel import cuts_group, stack_tensors
from crelle.formats.storage.io import shown

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_BITS = 8


def groups_in(K: int, group: int) -> int:
    """Number of groups in a row of K inputs."""
    return -(-K // group)


def expand_groups(per_group: Tensor, group: int, K: int) -> Tensor:
    """Repeat one value per group [..., C] over the inputs [..., K]."""
    return per_group.repeat_interleave(group, dim=-1)[..., :K]


@dataclass(frozen=True, slots=True, eq=False)
class Planes:
    """What all plane encodings share: the planes, K (the packing rounds it up) and the group."""

    quantized: ClassVar[bool] = True
    planes: Tensor  # uint8 [P, N, ceil(K/8)]
    K: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.planes.shape[1], self.K

    @property
    def bits(self) -> int:
        return self.planes.shape[0]

    @property
    def device(self) -> torch.device:
        return self.planes.device

    def dimensions(self) -> Spec:
        return {"shape": list(self.shape), "bits": self.bits, "group": self.group}

    def codes(self) -> Tensor:
        """Return the integer codes uint8 [N, K]; plane 0 gives the top bit."""
        return unpack_planes(self.planes, self.K)

    def cut(self, k: int) -> str | None:
        return cuts_group(self.group, self.K, k)

    def columns(self, begin: int, end: int) -> Self:
        """Return the inputs begin … end - 1."""
        planes, K = self.planes[..., begin // 8 : -(-end // 8)], end - begin
        groups = slice(begin // self.group, -(-end // self.group))
        return self._of_groups(groups, planes=planes, K=K, group=min(self.group, K))

    def _of_groups(self, groups: slice, **changed: Any) -> Self:
        """Return the matrix with the scales of some groups, and other fields changed."""
        raise NotImplementedError

    @classmethod
    def stacked(cls, matrices: Sequence[QuantTensor]) -> QuantTensor | None:
        """Return one matrix with the rows of all."""
        return stack_tensors(matrices, lambda t: t.dim() - 2)  # [..., N, groups or bytes]


def plane_sizes(spec: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Return (P, N, K, G, C) of a spec: planes, outputs, inputs, group size, groups in a row."""
    N, K = shape_of(spec)
    P, G = spec["bits"], spec["group"]
    return P, N, K, G, groups_in(K, G)


def plane_bits(P: int, K: int) -> int:
    """Return the stored bits of a row of P planes: whole bytes."""
    return P * 8 * -(-K // 8)


def planes_of(spec: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> tuple[Tensor, int, int]:
    """Check what all plane encodings share and return (planes, K, group)."""
    N, K = shape_of(spec)
    bits, group = spec["bits"], spec["group"]
    if type(bits) is not int or not 1 <= bits <= MAX_BITS:
        raise FormatError(f"{where}: bits must be 1 to {MAX_BITS}, got {shown(bits)}")
    if type(group) is not int or not 1 <= group <= K:
        raise FormatError(f"{where}: group must be 1 to K = {K}, got {shown(group)}")
    return expect(tensors, "planes", (bits, N, -(-K // 8)), (torch.uint8,), where), K, group


@register_format
@dataclass(frozen=True, slots=True, eq=False)
class BCQTensor(Planes):
    """w = z + sum_p alpha_p b_p, group-wise."""

    format: ClassVar[str] = "bcq"
    alpha: Tensor  # float [P, N, C]
    z: Tensor | None = None  # float [N, C]

    @classmethod
    def from_codes(cls, codes: Tensor, alpha: Tensor, z: Tensor | None, group: int) -> Self:
        """Build from codes [N, K] whose top bit belongs to alpha[0]."""
        return cls(pack_planes(codes, alpha.shape[0]), codes.shape[-1], group, alpha.contiguous(), z)

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        return ["planes", "alpha", "z"] if spec.get("bias") else ["planes", "alpha"]

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        take(spec, cls, {"format", "shape", "bits", "group", "bias"})
        planes, K, group = planes_of(spec, tensors, cls.format)
        P, N, C = planes.shape[0], planes.shape[1], groups_in(K, group)
        alpha = expect(tensors, "alpha", (P, N, C), SCALE_DTYPES, cls.format)
        z = expect(tensors, "z", (N, C), SCALE_DTYPES, cls.format) if spec["bias"] else None
        return cls(planes, K, group, alpha, z)

    def spec(self) -> Spec:
        return {"format": self.format, **self.dimensions(), "bias": self.z is not None}

    def tensors(self) -> dict[str, Tensor]:
        return {"planes": self.planes, **self.scales()}

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        """Alphas halve from plane to plane, as those of real weights roughly do."""
        P, N, K, G, C = plane_sizes(spec)
        sample = RandomParts(N, K, C, generator)
        place = torch.tensor([2.0**-p for p in range(P)], device=generator.device)
        place *= sample.std / place.square().sum().sqrt()
        alpha = (place[:, None, None] * sample.jitter(P, N, C)).half()
        return cls(sample.planes(P), K, G, alpha, sample.offset().half() if spec["bias"] else None)

    @classmethod
    def row_bits(cls, spec: Mapping[str, Any]) -> int:
        P, _, K, _, C = plane_sizes(spec)
        return plane_bits(P, K) + 16 * C * (P + bool(spec["bias"]))

    def scales(self) -> dict[str, Tensor]:
        return {"alpha": self.alpha} if self.z is None else {"alpha": self.alpha, "z": self.z}

    def with_scales(self, scales: Mapping[str, Tensor]) -> "BCQTensor":
        return replace(self, alpha=scales.get("alpha", self.alpha), z=scales.get("z", self.z))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        N, K = self.shape
        w = torch.zeros(N, K, dtype=wide, device=self.device)
        for p in reversed(range(self.bits)):  # small terms first, so that the sum rounds least
            w += expand_groups(self.alpha[p].to(wide), self.group, K) * unpack_signs(self.planes[p], K, wide)
        if self.z is not None:
            w += expand_groups(self.z.to(wide), self.group, K)
        return w.to(dtype)

    def _of_groups(self, groups: slice, **changed: Any) -> Self:
        z = None if self.z is None else self.z[..., groups]
        return replace(self, alpha=self.alpha[..., groups], z=z, **changed)

    def rows(self, which: slice | Tensor) -> "BCQTensor":
        z = None if self.z is None else self.z[which]
        return BCQTensor(self.planes[:, which], self.K, self.group, self.alpha[:, which], z)

    def to(self, device: torch.device | str) -> "BCQTensor":
        z = None if self.z is None else self.z.to(device)
        return BCQTensor(self.planes.to(device), self.K, self.group, self.alpha.to(device), z)


@register_format
@dataclass(frozen=True, slots=True, eq=False)
class UniformTensor(Planes):
    """w = scale * (q - zero), group-wise."""

    format: ClassVar[str] = "uniform"
    scale: Tensor  # float [N, C]
    zero: Tensor | None = None  # uint8 [N, ceil(C*P/8)]

    @classmethod
    def from_codes(cls, codes: Tensor, bits: int, scale: Tensor, zero: Tensor | None, group: int) -> Self:
        """Build from codes [N, K] and integer zero points [N, C] (None: 2^(bits-1) everywhere)."""
        packed = None if zero is None else pack_stream(zero, bits)
        return cls(pack_planes(codes, bits), codes.shape[-1], group, scale.contiguous(), packed)

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        return ["planes", "scale"] if spec.get("symmetric") else ["planes", "scale", "zero"]

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        take(spec, cls, {"format", "shape", "bits", "group", "symmetric"})
        planes, K, group = planes_of(spec, tensors, cls.format)
        P, N, C = planes.shape[0], planes.shape[1], groups_in(K, group)
        scale = expect(tensors, "scale", (N, C), SCALE_DTYPES, cls.format)
        zero = None
        if not spec["symmetric"]:
            zero = expect(tensors, "zero", (N, -(-C * P // 8)), (torch.uint8,), cls.format)
        return cls(planes, K, group, scale, zero)

    def spec(self) -> Spec:
        return {"format": self.format, **self.dimensions(), "symmetric": self.zero is None}

    def tensors(self) -> dict[str, Tensor]:
        parts = {"planes": self.planes, "scale": self.scale}
        return parts if self.zero is None else parts | {"zero": self.zero}

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        """Zero points are one of the two codes in the middle."""
        P, N, K, G, C = plane_sizes(spec)
        sample = RandomParts(N, K, C, generator)
        scale = (sample.step(P) * sample.jitter(N, C)).half()
        if spec["symmetric"]:
            return cls(sample.planes(P), K, G, scale, None)
        middle = 1 << (P - 1)
        zero = torch.randint(middle - 1, middle + 1, (N, C), generator=generator, device=scale.device)
        return cls(sample.planes(P), K, G, scale, pack_stream(zero, P))

    @classmethod
    def row_bits(cls, spec: Mapping[str, Any]) -> int:
        P, _, K, _, C = plane_sizes(spec)
        return plane_bits(P, K) + 16 * C + (0 if spec["symmetric"] else 8 * -(-C * P // 8))

    def scales(self) -> dict[str, Tensor]:
        return {"scale": self.scale}

    def with_scales(self, scales: Mapping[str, Tensor]) -> "UniformTensor":
        return replace(self, scale=scales.get("scale", self.scale))

    def zeros(self) -> Tensor:
        """Return the zero points as integers uint8 [N, C]."""
        if self.zero is None:
            return torch.full(self.scale.shape, 1 << (self.bits - 1), dtype=torch.uint8, device=self.device)
        return unpack_stream(self.zero, self.bits, self.scale.shape[-1])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        zero, scale = self.zeros().to(wide), self.scale.to(wide)
        w = (
            self.codes()
            .to(wide)
            .sub_(expand_groups(zero, self.group, self.K))
            .mul_(expand_groups(scale, self.group, self.K))
        )
        return w.to(dtype)

    def to_bcq(self) -> BCQTensor:
        """Return the same values as planes with alphas; exact for f16 and bf16 scales: every product fits f32."""
        scale = self.scale.to(torch.float32)
        place = torch.tensor([2.0 ** (self.bits - 2 - p) for p in range(self.bits)], device=self.device)
        alpha = place[:, None, None] * scale  # [P, N, C]
        z = scale * ((2**self.bits - 1) / 2 - self.zeros().to(torch.float32))
        return BCQTensor(self.planes, self.K, self.group, alpha, z)

    def _of_groups(self, groups: slice, **changed: Any) -> Self:
        zero = None if self.zero is None else pack_stream(self.zeros()[..., groups], self.bits)
        return replace(self, scale=self.scale[..., groups], zero=zero, **changed)

    def rows(self, which: slice | Tensor) -> "UniformTensor":
        zero = None if self.zero is None else self.zero[which]
        return UniformTensor(self.planes[:, which], self.K, self.group, self.scale[which], zero)

    def to(self, device: torch.device | str) -> "UniformTensor":
        zero = None if self.zero is None else self.zero.to(device)
        return UniformTensor(self.planes.to(device), self.K, self.group, self.scale.to(device), zero)
