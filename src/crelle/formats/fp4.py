"""Four-bit floats in small groups: w = value(code) * step, value in {0, 0.5, 1, 1.5, 2, 3, 4, 6} and its negatives.

    Mxfp4Tensor (OCP MX)    step = 2^(scale - 127)                          groups of 32
    Nvfp4Tensor             step = scale / global_scale (compressed-tensors, `divides`), or
                            step = scale * global_scale (ModelOpt), in f32  groups of 16

Layout:
    codes         uint8 [N, ceil(K/2)]   E2M1: sign, 2 bits of exponent, 1 of mantissa; input 2j in the low four bits
    scale         mxfp4: uint8 E8M0 [N, C], 255 is not a number; nvfp4: the bits of E4M3 [N, C]      C = ceil(K/G)
    global_scale  nvfp4: f32 [1]
Bits per weight: mxfp4 4 + 8/32, nvfp4 4 + 8/16. Twice a value is an integer, 0, 1, 2, 3, 4, 6, 8 or
12: `as_uniform` has it on a grid of 25, which integer kernels multiply exactly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.base import QuantTensor, Spec, expect, register_format, shape_of, take
from crelle.formats.bcq import UniformTensor, expand_groups
from crelle.formats.parallel import cuts_group, stack_tensors
from crelle.formats.storage.io import shown

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = torch.float8_e4m3fn
_UNIFORM_BITS = 5
_STD = 2.926  # of values whose codes are uniformly distributed


@dataclass(frozen=True, slots=True, eq=False)
class Fp4Tensor:
    """What both kinds share."""

    format: ClassVar[str]
    quantized: ClassVar[bool] = True
    size: ClassVar[int]  # inputs of a group
    packed: Tensor  # uint8 [N, ceil(K/2)]
    K: int
    scale: Tensor  # [N, C]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.packed), self.K

    @property
    def bits(self) -> int:
        return 4

    @property
    def group(self) -> int:
        return self.size

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def step(self) -> Tensor:
        """Return what the values of each group are multiplied by, f32 [N, C]."""
        raise NotImplementedError

    def codes(self) -> Tensor:
        """Return the codes uint8 [N, K]."""
        return torch.stack([self.packed & 15, self.packed >> 4], -1).flatten(1)[:, : self.K]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        levels = torch.tensor([*LEVELS, *(-level for level in LEVELS)], dtype=wide, device=self.device)
        w = levels[self.codes().int()]
        return w.mul_(expand_groups(self.step().to(wide), self.size, self.K)).to(dtype)

    def as_uniform(self) -> UniformTensor:
        """Return the same values on a grid of integers: half a step times (q - 16)."""
        levels = torch.tensor([int(2 * s * level) for s in (1, -1) for level in LEVELS], device=self.device)
        codes = (levels[self.codes().int()] + (1 << (_UNIFORM_BITS - 1))).to(torch.uint8)
        return UniformTensor.from_codes(codes, _UNIFORM_BITS, self.step() / 2, None, self.size)

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.packed, "scale": self.scale}

    def scales(self) -> dict[str, Tensor]:
        return {}

    def with_scales(self, scales: Mapping[str, Tensor]) -> Self:
        return self

    def spec(self) -> Spec:
        return {"format": self.format, "shape": list(self.shape), "bits": 4, "group": self.size}

    def rows(self, which: slice | Tensor) -> Self:
        return replace(self, packed=self.packed[which], scale=self.scale[which])

    def cut(self, k: int) -> str | None:
        """Return why no share of the inputs can begin or end at input k; None: it can."""
        return cuts_group(self.size, self.K, k)

    def columns(self, begin: int, end: int) -> Self:
        """Return some inputs."""
        groups = slice(begin // self.size, -(-end // self.size))
        codes = self.packed[:, begin // 2 : -(-end // 2)].contiguous()
        return replace(self, packed=codes, K=end - begin, scale=self.scale[:, groups].contiguous())

    def to(self, device: torch.device | str) -> Self:
        return replace(self, packed=self.packed.to(device), scale=self.scale.to(device))

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        return ["codes", "scale"]

    @classmethod
    def _codes(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return codes and scales, checked."""
        N, K = shape_of(spec)
        if spec["bits"] != 4 or spec["group"] != cls.size:
            found = shown(spec["bits"]), shown(spec["group"])
            raise FormatError(
                f"{cls.format} has 4 bits in groups of {cls.size}, not {found[0]} in groups of {found[1]}"
            )
        codes = expect(tensors, "codes", (N, -(-K // 2)), (torch.uint8,), cls.format)
        if K % 2 and codes.device.type != "meta" and bool((codes[:, -1] > 15).any()):
            raise FormatError(f"{cls.format}: a code beyond the last of {K} inputs is not 0")
        return codes, expect(tensors, "scale", (N, -(-K // cls.size)), (torch.uint8,), cls.format)

    @classmethod
    def _random_codes(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        N, K = shape_of(spec)
        shape = N, -(-K // 2)
        codes = torch.randint(256, shape, generator=generator, dtype=torch.uint8, device=generator.device)
        if K % 2:
            codes[:, -1] &= 15
        return codes

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        raise NotImplementedError

    @classmethod
    def row_bits(cls, spec: Mapping[str, Any]) -> int:
        """Of nvfp4 without the global scale, which belongs to no row."""
        K = shape_of(spec)[1]
        return 8 * (-(-K // 2) + -(-K // cls.size))


@register_format
@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Tensor(Fp4Tensor):
    """Steps are powers of two."""

    format: ClassVar[str] = "mxfp4"
    size: ClassVar[int] = 32

    def step(self) -> Tensor:
        return torch.ldexp(torch.ones(self.scale.shape, device=self.device), self.scale.int() - 127)

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        take(spec, cls, {"format", "shape", "bits", "group"})
        codes, scale = cls._codes(spec, tensors)
        if scale.device.type != "meta" and bool((scale == 255).any()):
            raise FormatError("mxfp4: a scale is 255, which is not a number")
        return cls(codes, shape_of(spec)[1], scale)

    @classmethod
    def stacked(cls, matrices: Sequence[QuantTensor]) -> QuantTensor | None:
        return stack_tensors(matrices)

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        N, K = shape_of(spec)
        codes, where = cls._random_codes(spec, generator), generator.device
        wanted = torch.tensor(K**-0.5 / _STD)
        low = int(wanted.log2().floor())
        share = float((wanted**2 / 4.0**low - 1) / 3)  # of groups with twice the step, so that squares have the mean
        up = torch.rand((N, -(-K // cls.size)), generator=generator, device=where) < share
        return cls(codes, K, (up + (127 + low)).to(torch.uint8))


@register_format
@dataclass(frozen=True, slots=True, eq=False)
class Nvfp4Tensor(Fp4Tensor):
    """Steps are 8-bit floats times or divided by a scale of the whole matrix."""

    format: ClassVar[str] = "nvfp4"
    size: ClassVar[int] = 16
    global_scale: Tensor  # f32 [1]
    divides: bool = True

    def step(self) -> Tensor:
        scale, whole = self.scale.view(E4M3).float(), self.global_scale
        return scale / whole if self.divides else scale * whole

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.packed, "scale": self.scale, "global_scale": self.global_scale}

    def spec(self) -> Spec:
        return {**Fp4Tensor.spec(self), "divides": self.divides}

    def to(self, device: torch.device | str) -> Self:
        return replace(Fp4Tensor.to(self, device), global_scale=self.global_scale.to(device))

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        return ["codes", "scale", "global_scale"]

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        take(spec, cls, {"format", "shape", "bits", "group", "divides"})
        if type(spec["divides"]) is not bool:
            raise FormatError(f"nvfp4: 'divides' should be true or false, but is {shown(spec['divides'])}")
        codes, scale = cls._codes(spec, tensors)
        whole = expect(tensors, "global_scale", (1,), (torch.float32,), cls.format)
        made = cls(codes, shape_of(spec)[1], scale, whole, spec["divides"])
        if scale.device.type != "meta" and not bool(made.step().isfinite().all()):
            raise FormatError("nvfp4: a scale is not a number, or divided by a global scale of 0")
        return made

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        N, K = shape_of(spec)
        codes, where = cls._random_codes(spec, generator), generator.device
        scale = (
            torch.rand((N, -(-K // cls.size)), generator=generator, device=where)
            .mul_(0.4)
            .add_(0.8)
            .to(E4M3)
            .view(torch.uint8)
        )
        divides = bool(spec.get("divides", True))
        whole = torch.full((1,), K**-0.5 / _STD, device=where)
        return cls(codes, K, scale, 1 / whole if divides else whole, divides)
