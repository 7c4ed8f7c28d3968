"""Symmetric integer weights in groups of input channels, with outlier channels in 8 bits (Atom, arXiv 2310.19102).

    W[:, perm[j]] = column j        the channels are stored in an order of their own, outliers last; where activations
                                    are rotated (`hadamard`), columns are as well, and this is said of W times H
    w = s q                         q of `bits` bits (3, 4, 8), s of an output and `group` columns
                                    the last n columns, the outliers: q of 8 bits, in groups of their own
    codes lie in -2^(bits-1) … 2^(bits-1) - 1, those of 8 bits in -127 … 127

Stored:
    codes    uint8 [N, ceil((K - n) bits / 8)]   two's complement, a dense bit stream per row (crelle.formats.packing)
    scale    f16 [N, C]                          C = ceil((K - n) / group) + ceil(n / group)
    outliers int8 [N, n], or f16 (w itself, and no scales for it) with outlier_bits = 16        where n > 0
    perm     int32 [K]                           column j belongs to input perm[j]; not stored where the producer
                                                 gives its outputs in this order already
Bits per weight: (K - n)/K bits + n/K 8 + 16 C/K, and perm 32 / N.

`activation` says what the input must be before the product (crelle.formats.activations); None: floats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.activations import BITS, MAX_GROUP, ActivationSpec, group_slices, least_and_top, spread
from crelle.formats.base import QuantTensor, Spec, expect, register_format, shape_of, take
from crelle.formats.packing import pack_stream, unpack_stream
from crelle.formats.packing.random_parts import RandomParts
from crelle.formats.parallel import SCATTERED, TOGETHER, stack_tensors
from crelle.formats.storage.io import shown

_KEYS = {"format", "shape", "bits", "group", "outliers", "outlier_bits", "permuted", "activation"}
_SCALES = (torch.float16, torch.float32)


class GroupedSizes(NamedTuple):
    """What the shapes of the stored tensors follow from."""

    N: int
    K: int
    bits: int
    group: int
    outliers: int
    outlier_bits: int = 8

    @property
    def normal(self) -> int:
        """Return the number of columns that are no outliers."""
        return self.K - self.outliers

    @property
    def groups(self) -> tuple[int, int]:
        """Return the groups of normal columns, and those of outliers that have a scale."""
        return -(-self.normal // self.group), -(-self.outliers // self.group) if self.outlier_bits == 8 else 0

    def of_columns(self, t: Tensor) -> Tensor:
        """Return values of the groups of normal columns [N, C] for each of their columns, [N, K - n]."""
        return spread(t, self.normal, self.group, 0)

    def within(self, begin: int, end: int) -> tuple[slice, slice]:
        """Return which normal columns, and which outliers, are among the columns begin … end - 1."""
        n = self.normal
        return slice(min(begin, n), min(end, n)), slice(max(begin - n, 0), max(end - n, 0))

    def groups_within(self, begin: int, end: int) -> list[int]:
        """Return the groups that have a scale and lie among the columns begin … end - 1."""
        return [i for i, s in enumerate(self.slices()) if begin <= s.start and s.stop <= end]

    def slices(self) -> list[slice]:
        """Return the columns of each group that has a scale."""
        return group_slices(self.K, self.group, self.outliers)[: sum(self.groups)]


@register_format
@dataclass(frozen=True, slots=True, eq=False)
class GroupedTensor:
    """Symmetric integers in groups, outlier channels last."""

    format: ClassVar[str] = "grouped"
    quantized: ClassVar[bool] = True
    sizes: GroupedSizes
    packed: Tensor  # uint8, stored as "codes"
    scale: Tensor  # float [N, C]
    outliers: Tensor | None = None  # int8 or float [N, n]
    perm: Tensor | None = None  # int32 [K]
    activation: ActivationSpec | None = None

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        bits: int,
        scale: Tensor,
        group: int,
        outliers: Tensor | None = None,
        perm: Tensor | None = None,
        activation: ActivationSpec | None = None,
    ) -> Self:
        """Pack codes int8 [N, K - n]; outliers [N, n] are int8 codes, or floats as they are."""
        N, normal = codes.shape
        n = 0 if outliers is None else outliers.shape[1]
        wide = 16 if outliers is not None and outliers.is_floating_point() else 8
        sizes = GroupedSizes(N, normal + n, bits, group, n, wide if n else 8)
        order = None if perm is None else perm.to(torch.int32)
        packed = pack_stream(codes.view(torch.uint8) & (2**bits - 1), bits)
        return cls(sizes, packed, scale.contiguous(), outliers if n else None, order, activation)

    @property
    def shape(self) -> tuple[int, int]:
        return self.sizes.N, self.sizes.K

    @property
    def bits(self) -> float:
        s = self.sizes
        return (s.normal * s.bits + s.outliers * s.outlier_bits) / s.K

    @property
    def group(self) -> int:
        return self.sizes.group

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def codes(self) -> Tensor:
        """Return the codes of normal columns, int8 [N, K - n]."""
        s = self.sizes
        return _signed(unpack_stream(self.packed, s.bits, s.normal), s.bits)

    def integers(self) -> Tensor:
        """Return the codes of all columns that have a scale, int8, in stored order."""
        if self.outliers is None or self.sizes.outlier_bits == 16:
            return self.codes()
        return torch.cat([self.codes(), self.outliers], 1)

    def scale_slices(self) -> list[slice]:
        """Return the columns of each scale."""
        return self.sizes.slices()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        integers, s = self.integers().to(wide), self.sizes
        floats = self.outliers if s.outlier_bits == 16 else None
        coded = integers.shape[1] - s.normal  # outliers that have a scale
        w = integers * spread(self.scale.to(wide), integers.shape[1], s.group, coded)
        w = w if floats is None else torch.cat([w, floats.to(wide)], 1)
        return in_input_order(unrotated(w, self.activation), self.perm).to(dtype)

    def round_input(self, x: Tensor) -> Tensor:
        """Return x [..., K] as the integer product sees it; the gradient is passed through."""
        if self.activation is None:
            return x
        return self.activation.round(x, None if self.perm is None else self.perm.long())

    def tensors(self) -> dict[str, Tensor]:
        found = {"codes": self.packed, "scale": self.scale, "outliers": self.outliers, "perm": self.perm}
        return {name: t for name, t in found.items() if t is not None}

    def scales(self) -> dict[str, Tensor]:
        return {"scale": self.scale}

    def with_scales(self, scales: Mapping[str, Tensor]) -> "GroupedTensor":
        return replace(self, scale=scales.get("scale", self.scale))

    def spec(self) -> Spec:
        s = self.sizes
        return {
            "format": self.format,
            "shape": [s.N, s.K],
            "bits": s.bits,
            "group": s.group,
            "outliers": s.outliers,
            "outlier_bits": s.outlier_bits,
            "permuted": self.perm is not None,
            "activation": None if self.activation is None else self.activation.to_json(),
        }

    def rows(self, which: slice | Tensor) -> "GroupedTensor":
        packed, outliers = self.packed[which], None if self.outliers is None else self.outliers[which]
        sizes = self.sizes._replace(N=len(packed))
        return replace(self, sizes=sizes, packed=packed, scale=self.scale[which], outliers=outliers)

    def cut(self, k: int) -> str | None:
        return cuts_columns(self.sizes, self.perm, self.activation, k)

    def columns(self, begin: int, end: int) -> "GroupedTensor":
        """Return the inputs begin … end - 1."""
        normal, last = self.sizes.within(begin, end)
        scale = self.scale[:, self.sizes.groups_within(begin, end)]
        outliers = None if self.outliers is None else self.outliers[:, last]
        activation = activation_within(self.activation, last)
        return GroupedTensor.from_codes(
            self.codes()[:, normal], self.sizes.bits, scale, self.group, outliers, None, activation
        )

    @classmethod
    def stacked(cls, matrices: Sequence[QuantTensor]) -> QuantTensor | None:
        return stack_tensors(matrices)

    def to(self, device: torch.device | str) -> "GroupedTensor":
        moved = {name: t.to(device) for name, t in self.tensors().items()}
        return replace(self, packed=moved.pop("codes"), **moved)  # type: ignore[arg-type]

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        s = sizes_of(spec, cls.format)
        return ["codes", "scale"] + ["outliers"] * (s.outliers > 0) + ["perm"] * spec["permuted"]

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        take(spec, cls, _KEYS)
        s, where = sizes_of(spec, cls.format), cls.format
        packed = expect(tensors, "codes", (s.N, -(-s.normal * s.bits // 8)), (torch.uint8,), where)
        scale = expect(tensors, "scale", (s.N, sum(s.groups)), _SCALES, where)
        outliers = read_outliers(s, tensors, where)
        if s.bits == 8 and (packed == 0x80).any():
            raise FormatError(f"{where}: 8-bit codes must be -127 to 127, but one is -128")
        perm = read_perm(tensors, s.K, where) if spec["permuted"] else None
        return cls(s, packed, scale, outliers, perm, activation_of(spec, s, where))

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        s, device = sizes_of(spec, cls.format), generator.device
        sample = RandomParts(s.N, s.K, sum(s.groups), generator)
        C, n = s.groups[0], s.groups[1]
        codes = random_integers(s.bits, (s.N, s.normal), generator)
        steps = torch.tensor([sample.step(s.bits)] * C + [sample.step(8)] * n, device=device)
        scale = (steps * sample.jitter(s.N, C + n)).half()
        outliers = random_integers(8, (s.N, s.outliers), generator) if s.outliers else None
        if outliers is not None and s.outlier_bits == 16:
            outliers = (outliers * sample.step(8)).half()
        perm = torch.randperm(s.K, generator=generator, device=device) if spec["permuted"] else None
        return cls.from_codes(codes, s.bits, scale, s.group, outliers, perm, activation_of(spec, s, cls.format))

    @classmethod
    def row_bits(cls, spec: Mapping[str, Any]) -> int:
        """Those of a row; perm is stored once for all rows."""
        s = sizes_of(spec, cls.format)
        return 8 * -(-s.normal * s.bits // 8) + 16 * sum(s.groups) + s.outliers * s.outlier_bits


def _signed(codes: Tensor, bits: int) -> Tensor:
    """Return unsigned codes, uint8, as the two's complement numbers that they are, int8."""
    shift = 8 - bits
    return (codes << shift).view(torch.int8) >> shift


def cuts_columns(s: GroupedSizes, perm: Tensor | None, activation: ActivationSpec | None, k: int) -> str | None:
    """Return why no share of the inputs can begin or end at column k; None: it can."""
    if perm is not None:
        return SCATTERED
    if activation is not None and (activation.group != s.group or activation.outliers != s.outliers):
        return TOGETHER
    cuts = k % s.group if k <= s.normal else (k - s.normal) % s.group if s.outlier_bits == 8 else 0
    return f"that would split a group of {s.group} inputs" if cuts and k != s.normal else None


def activation_within(activation: ActivationSpec | None, outliers: slice) -> ActivationSpec | None:
    """Return the activations of a share of the inputs that has some of the outliers."""
    return None if activation is None else replace(activation, outliers=outliers.stop - outliers.start)


def unrotated(w: Tensor, activation: ActivationSpec | None) -> Tensor:
    """Return columns [N, K] in stored order without the rotation that `activation` asks for."""
    return w if activation is None else activation.rotated(w)


def in_input_order(w: Tensor, perm: Tensor | None) -> Tensor:
    """Return columns [N, K] in the order of the inputs."""
    return w if perm is None else torch.empty_like(w).index_copy(1, perm.long(), w)


def random_integers(bits: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return codes int8 of every value, equally likely."""
    least, top = least_and_top(bits)
    return torch.randint(least, top + 1, shape, generator=generator, device=generator.device, dtype=torch.int8)


def sizes_of(spec: Mapping[str, Any], where: str) -> GroupedSizes:
    """Return the sizes that a spec means, or refuse it."""
    (N, K), bits, group, n = shape_of(spec), spec.get("bits"), spec.get("group"), spec.get("outliers")
    if type(bits) is not int or bits not in BITS:
        raise FormatError(f"{where}: weights must have {', '.join(map(str, BITS))} bits, got {shown(bits)}")
    if type(group) is not int or group < 1:
        raise FormatError(f"{where}: the group size should be a positive number of inputs, got {shown(group)}")
    if group > max(K, MAX_GROUP):
        raise FormatError(f"{where}: a group of {shown(group)} inputs is too large for rows of {K}")
    if type(n) is not int or not 0 <= n <= K:
        raise FormatError(f"{where}: 'outliers' should be a number of inputs from 0 to {K}, got {shown(n)}")
    wide = spec.get("outlier_bits", 8)
    if type(wide) is not int or wide not in (8, 16):
        raise FormatError(f"{where}: outliers must have 8 or 16 bits, got {shown(wide)}")
    if not isinstance(spec.get("permuted"), bool):
        raise FormatError(f"{where}: 'permuted' should be true or false, got {shown(spec.get('permuted'))}")
    return GroupedSizes(N, K, bits, group, n, wide)


def activation_of(spec: Mapping[str, Any], s: GroupedSizes, where: str) -> ActivationSpec | None:
    """Return the activations of a spec; refuse groups that do not fit those of the weight."""
    act = ActivationSpec.from_json(spec.get("activation"), where)
    if act is None:
        return None
    if act.group > max(s.K, MAX_GROUP):
        raise FormatError(f"{where}: a group of {shown(act.group)} activations is too large for rows of {s.K}")
    one_kind = act.outliers == 0 and act.bits == 8 and s.outlier_bits == 8
    if act.outliers != s.outliers and not one_kind:
        raise FormatError(
            f"{where}: the weight has {s.outliers} outlier channels, but its activations have {act.outliers}"
        )
    if act.outliers and act.outlier_bits != s.outlier_bits:
        raise FormatError(f"{where}: outliers have {s.outlier_bits} bits in the weight, but {act.outlier_bits} in x")
    if act.group < s.K and (act.group != s.group or act.outliers != s.outliers):
        raise FormatError(f"{where}: activations in groups of {act.group} do not fit weights in groups of {s.group}")
    return act


def read_outliers(s: GroupedSizes, tensors: Mapping[str, Tensor], where: str) -> Tensor | None:
    """Return the outlier columns, checked."""
    if not s.outliers:
        return None
    kinds = (torch.int8,) if s.outlier_bits == 8 else _SCALES
    outliers = expect(tensors, "outliers", (s.N, s.outliers), kinds, where)
    if s.outlier_bits == 8 and (outliers == -128).any():
        raise FormatError(f"{where}: 8-bit codes must be -127 to 127, but an outlier is -128")
    return outliers


def read_perm(tensors: Mapping[str, Tensor], K: int, where: str) -> Tensor:
    """Return the order of the columns, checked."""
    perm = expect(tensors, "perm", (K,), (torch.int32,), where)
    if not torch.equal(perm.sort().values, torch.arange(K, dtype=torch.int32, device=perm.device)):
        raise FormatError(f"{where}: 'perm' must name each of the {K} inputs once")
    return perm
