"""2, 4 and 16 bits in one weight matrix (ICCAD 2024, doi 10.1145/3676536.3676796).

Input channels in groups of G (8, 16, 32, 64). A group has 2 or 4 bits for all outputs: C2 groups of 2 bits, C4 of 4.

    2-bit group    w = s (q - z)        z = (zero_code + 1) / 2      s = second_scale (scale_code + second_zero)
                                        q, zero_code 2 bits; z in half steps, so that a grid may be symmetric
                                        scale_code 4 (or 3) bits for each output and group
                                        second_scale f16 and second_zero 4 bits for `block` (16) outputs and a group
                                        (+, since scales are positive: their range begins above zero)
    4-bit group    w = row_scale (q - row_zero)      row_scale f16, row_zero 4 bits, for each output
    outliers       added to that: CSR, f16 values, 16-bit columns, 32-bit row pointers. The quantizer takes them from
                   2-bit groups only; what is stored is the difference to what their code stands for.

Stored beside the codes (crelle.formats.packing.mixed says how those are packed):
    four             uint8 [C]        1: the group has 4 bits
    second_scale     f16 [B, C2]      B = ceil(N / block)
    row_scale        f16 [N]          row_zero  uint8 [N]                              where C4 > 0
    outlier_values   f16 [n]          outlier_columns  int16 [n], read as unsigned     where n > 0
    outlier_rows     int32 [N + 1]    the outliers of row i are outlier_rows[i] up to outlier_rows[i + 1]

Bits per weight with a share a of 2-bit groups, G = block = 16 (equation 10):  a (2 + 6/16 + 20/256) + (1 - a) 4, which
is 2.84 at a = 3/4; the row scales add 24/K, outliers 32 each and 32/K.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.base import Spec, expect, register_format, shape_of, take
from crelle.formats.packing.mixed import (
    PACKINGS,
    MixedCodes,
    Packing,
    Sizes,
    can_be_aligned,
    pack,
    packed_shapes,
    scale_widths,
    unpack,
)
from crelle.formats.packing.random_parts import RandomParts
from crelle.formats.parallel import cuts_group
from crelle.formats.storage.io import shown

GROUPS = (8, 16, 32, 64)
BLOCK = 16  # outputs that share a second-order scale
_KEYS = {"format", "shape", "group", "packing", "block", "four", "outliers"}
_OUTLIERS = ("outlier_values", "outlier_columns", "outlier_rows")


@register_format
@dataclass(frozen=True, slots=True, eq=False)
class MixedTensor:
    """A weight matrix with groups of 2 and of 4 bits, second-order scales and sparse outliers."""

    format: ClassVar[str] = "mixed"
    quantized: ClassVar[bool] = True
    N: int
    K: int
    G: int
    block: int
    packing: Packing
    four: Tensor  # uint8 [C]
    packed: dict[str, Tensor]  # the codes, see mixed_packing
    second_scale: Tensor  # float [B, C2]
    row_scale: Tensor | None  # float [N]
    row_zero: Tensor | None  # uint8 [N]
    outlier_values: Tensor | None = None  # float [n]
    outlier_columns: Tensor | None = None  # int16 [n]
    outlier_rows: Tensor | None = None  # int32 [N + 1]

    @classmethod
    def from_codes(
        cls,
        shape: tuple[int, int],
        four: Tensor,
        codes: MixedCodes,
        second_scale: Tensor,
        row: tuple[Tensor, Tensor] | None,
        outliers: Tensor | None = None,
        packing: Packing | None = None,
        block: int = BLOCK,
    ) -> Self:
        """Pack codes. `row`: scales and zeros of the 4-bit groups; `outliers`: sparse [N, K] with the values to add."""
        N, K = shape
        G = codes.codes2.shape[-1]
        C4 = int(four.sum())
        if packing is None:
            packing = "aligned" if can_be_aligned(G, len(four) - C4, C4) else "general"
        csr: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        if outliers is not None and outliers.count_nonzero():
            at = outliers.nonzero()  # in the order of rows, then columns
            counts = torch.bincount(at[:, 0], minlength=N)
            pointers = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
            csr = outliers[at[:, 0], at[:, 1]].half(), _as_int16(at[:, 1]), pointers
        scale, zero = row if row is not None else (None, None)
        return cls(N, K, G, block, packing, four, pack(packing, codes), second_scale, scale, zero, *csr)

    @property
    def shape(self) -> tuple[int, int]:
        return self.N, self.K

    @property
    def bits(self) -> float:
        width = _widths(self.four, self.G, self.K)
        return float((width * (2 + 2 * self.four.to(width.dtype))).sum()) / self.K

    @property
    def group(self) -> int:
        return self.G

    @property
    def group_bits(self) -> Tensor:
        """Return the bits of each group's codes, uint8 [C]."""
        return 2 + 2 * self.four

    @property
    def device(self) -> torch.device:
        return self.four.device

    @property
    def outliers(self) -> int:
        """Return the number of outliers."""
        return 0 if self.outlier_values is None else len(self.outlier_values)

    def sizes(self) -> Sizes:
        C4 = int(self.four.sum())
        return Sizes(self.N, -(-self.N // self.block), len(self.four) - C4, C4, self.G)

    def codes(self) -> MixedCodes:
        return unpack(self.packing, self.sizes(), self.packed)

    def of_rows(self, blocks: Tensor) -> Tensor:
        """Return values of blocks [B, …] for each of their rows, [N, …]."""
        return blocks.repeat_interleave(min(self.block, self.N), 0)[: self.N]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        codes, C = self.codes(), len(self.four)
        second = self.of_rows(self.second_scale.to(wide))  # [N, C2]
        second_zeros = self.of_rows(codes.second_zeros).to(wide)
        scale = second * (codes.scale_codes.to(wide) + second_zeros)
        two = (codes.codes2.to(wide) - zero_of(codes.zeros).to(wide)[..., None]) * scale[..., None]  # [N, C2, G]
        w = two.new_zeros(self.N, C, self.G)
        mask = self.four.bool()
        w[:, ~mask] = two
        if self.row_scale is not None and self.row_zero is not None:
            q = codes.codes4.to(wide) - self.row_zero.to(wide)[:, None, None]
            w[:, mask] = q * self.row_scale.to(wide)[:, None, None]
        w = w.flatten(1)[:, : self.K]
        if self.outlier_values is not None:
            w = w.index_put(self.outlier_places(), self.outlier_values.to(wide), accumulate=True)
        return w.to(dtype)

    def outlier_places(self) -> tuple[Tensor, Tensor]:
        """Return the rows and columns (int64) of the outliers."""
        assert self.outlier_rows is not None
        assert self.outlier_columns is not None
        counts = self.outlier_rows.diff().long()
        rows = torch.arange(self.N, device=self.device).repeat_interleave(counts)
        return rows, self.outlier_columns.long() & 0xFFFF

    def tensors(self) -> dict[str, Tensor]:
        rest = {"row_scale": self.row_scale, "row_zero": self.row_zero}
        rest |= {name: getattr(self, name) for name in _OUTLIERS}
        found = {"four": self.four, **self.packed, "second_scale": self.second_scale}
        return found | {name: t for name, t in rest.items() if t is not None}

    def scales(self) -> dict[str, Tensor]:
        given = {"second_scale": self.second_scale, "row_scale": self.row_scale, "outlier_values": self.outlier_values}
        return {name: t for name, t in given.items() if t is not None and t.numel()}

    def with_scales(self, scales: Mapping[str, Tensor]) -> "MixedTensor":
        return replace(self, **{name: scales[name] for name in self.scales() if name in scales})  # type: ignore[arg-type]

    def spec(self) -> Spec:
        return {
            "format": self.format,
            "shape": [self.N, self.K],
            "group": self.G,
            "packing": self.packing,
            "block": self.block,
            "four": int(self.four.sum()),
            "outliers": self.outliers,
        }

    def cut(self, k: int) -> str | None:
        return cuts_group(self.G, self.K, k)

    def columns(self, begin: int, end: int) -> "MixedTensor":
        """Return the inputs begin … end - 1."""
        four, codes = self.four.bool(), self.codes()
        inside = torch.zeros_like(four)
        inside[begin // self.G : -(-end // self.G)] = True
        two, wide = inside[~four], inside[four]  # of the groups of 2 and of 4 bits
        scale_codes, zeros, second_zeros = (t[:, two] for t in (codes.scale_codes, codes.zeros, codes.second_zeros))
        taken = MixedCodes(codes.codes2[:, two], codes.codes4[:, wide], scale_codes, zeros, second_zeros)
        row = (
            None
            if self.row_scale is None or self.row_zero is None or not wide.any()
            else (self.row_scale, self.row_zero)
        )
        outliers = None
        if self.outlier_values is not None:
            dense = self.outlier_values.new_zeros(self.shape)
            outliers = dense.index_put(self.outlier_places(), self.outlier_values)[:, begin:end]
        shape, second = (self.N, end - begin), self.second_scale[:, two]
        return MixedTensor.from_codes(shape, self.four[inside], taken, second, row, outliers, "general", self.block)

    def rows(self, which: slice | Tensor) -> "MixedTensor":
        """Return some rows; the scales of blocks that are cut are repeated, one for each row."""
        index = torch.arange(self.N, device=self.device)[which]
        whole = isinstance(which, slice) and which.step in (None, 1) and (which.start or 0) % self.block == 0
        codes = self.codes()
        block = min(self.block, max(len(index), BLOCK)) if whole else 1
        pick = index[:: self.block] // self.block if whole else index // self.block
        codes2, codes4, scale_codes, zeros = (t[index] for t in codes[:4])
        codes = MixedCodes(codes2, codes4, scale_codes, zeros, codes.second_zeros[pick])
        row = None
        if self.row_scale is not None and self.row_zero is not None:
            row = self.row_scale[index], self.row_zero[index]
        outliers = None
        if self.outlier_values is not None:
            rows, columns = self.outlier_places()
            dense = self.outlier_values.new_zeros(self.N, self.K)
            outliers = dense.index_put((rows, columns), self.outlier_values)[index]
        second = self.second_scale[pick]
        shape = len(index), self.K
        return MixedTensor.from_codes(shape, self.four, codes, second, row, outliers, self.packing, block)

    def to(self, device: torch.device | str) -> "MixedTensor":
        moved = {name: t.to(device) for name, t in self.tensors().items()}
        packed = {name: moved.pop(name) for name in self.packed}
        return replace(self, packed=packed, **moved)  # type: ignore[arg-type]

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        s = _sizes(spec)
        row, outliers = ["row_scale", "row_zero"], list(_OUTLIERS)
        names = ["four", *packed_shapes(spec["packing"], s), "second_scale"]
        return names + (row if s.C4 else []) + (outliers if spec["outliers"] else [])

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        take(spec, cls, _KEYS)
        s, (N, K), where = _sizes(spec), shape_of(spec), cls.format
        four = expect(tensors, "four", (s.C2 + s.C4,), (torch.uint8,), where)
        if four.amax() > 1 or int(four.sum()) != s.C4:
            raise FormatError(f"{where}: 'four' must mark {s.C4} groups with 1 and the others with 0")
        shapes = packed_shapes(spec["packing"], s)
        packed = {name: expect(tensors, name, shape, (dtype,), where) for name, (shape, dtype) in shapes.items()}
        if spec["packing"] == "aligned" and packed["second_zeros"].amax() > 15:
            raise FormatError(f"{where}: 'second_zeros' contains a value above 15")
        second = expect(tensors, "second_scale", (s.B, s.C2), (torch.float16, torch.float32), where)
        row: tuple[Tensor | None, Tensor | None] = (None, None)
        if s.C4:
            row_scale = expect(tensors, "row_scale", (N,), (torch.float16, torch.float32), where)
            row_zero = expect(tensors, "row_zero", (N,), (torch.uint8,), where)
            if row_zero.amax() > 15:
                raise FormatError(f"{where}: 'row_zero' contains a value above 15")
            row = row_scale, row_zero
        found = cls(N, K, s.G, spec["block"], spec["packing"], four, packed, second, *row)
        if not spec["outliers"]:
            return found
        n = (spec["outliers"],)
        values = expect(tensors, "outlier_values", n, (torch.float16, torch.float32), where)
        columns = expect(tensors, "outlier_columns", n, (torch.int16,), where)
        pointers = expect(tensors, "outlier_rows", (N + 1,), (torch.int32,), where)
        found = replace(found, outlier_values=values, outlier_columns=columns, outlier_rows=pointers)
        found._check_outliers()
        return found

    def _check_outliers(self) -> None:
        """Refuse outliers that a kernel would look for outside of the matrix."""
        assert self.outlier_rows is not None
        pointers, where = self.outlier_rows, self.format
        if pointers[0] != 0 or pointers[-1] != self.outliers or (pointers.diff() < 0).any():
            raise FormatError(f"{where}: 'outlier_rows' must ascend from 0 to {self.outliers}")
        rows, columns = self.outlier_places()
        if columns.amax() >= self.K:
            raise FormatError(f"{where}: an outlier is in column {int(columns.amax())} of {self.K}")
        if ((rows.diff() == 0) & (columns.diff() <= 0)).any():
            raise FormatError(f"{where}: the columns of a row's outliers must ascend")

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        s, (N, K), device = _sizes(spec), shape_of(spec), generator.device
        C, packing = s.C2 + s.C4, spec["packing"]
        sample = RandomParts(N, K, C, generator)

        def integers(top: int, *shape: int) -> Tensor:
            return torch.randint(top, shape, generator=generator, device=device, dtype=torch.uint8)

        four = torch.zeros(C, dtype=torch.uint8, device=device)
        four[torch.rand(C, generator=generator, device=device).topk(s.C4).indices] = 1
        narrow = torch.tensor(scale_widths(packing, s.C2), device=device) == 3
        scale_codes = torch.where(narrow, integers(3, N, s.C2) + 5, integers(6, N, s.C2) + 10).to(torch.uint8)
        zeros, second_zeros = integers(3, N, s.C2) + 1, integers(2, s.B, s.C2)  # zeros of 1.5 on average, as the codes
        codes = MixedCodes(integers(4, N, s.C2, s.G), integers(16, N, s.C4, s.G), scale_codes, zeros, second_zeros)
        second = sample.step(2) / torch.where(narrow, 7.2, 14.4) * sample.jitter(s.B, s.C2)
        row = ((sample.step(4) * sample.jitter(N)).half(), integers(2, N) + 7) if s.C4 else None
        outliers = None
        if n := spec["outliers"]:
            two = (torch.arange(K, device=device) // s.G)[None].expand(N, K)
            places = (1 - four)[two].flatten().float()
            chosen = torch.rand(N * K, generator=generator, device=device).mul_(places).topk(n).indices
            values = (integers(2, n).float() * 8 - 4) * sample.std
            outliers = torch.zeros(N * K, device=device).index_copy_(0, chosen, values).reshape(N, K)
        return cls.from_codes((N, K), four, codes, second.half(), row, outliers, packing, spec["block"])

    @classmethod
    def row_bits(cls, spec: Mapping[str, Any]) -> int:
        """The average of all rows: those of a block share scales, and outliers lie anywhere."""
        s, (N, _) = _sizes(spec), shape_of(spec)
        bits = 8 * sum(_count(shape) * dtype.itemsize for shape, dtype in packed_shapes(spec["packing"], s).values())
        bits += 16 * s.B * s.C2 + 8 * (s.C2 + s.C4) + (24 * N if s.C4 else 0)
        bits += 32 * (spec["outliers"] + N + 1) if spec["outliers"] else 0
        return -(-bits // N)


def zero_of(codes: Tensor) -> Tensor:
    """Return the zeros of 2-bit groups, in steps, that their codes stand for."""
    return (codes.float() + 1) / 2


def _sizes(spec: Mapping[str, Any]) -> Sizes:
    """Return the sizes that a spec means, or refuse it."""
    (N, K), G, block = shape_of(spec), spec.get("group"), spec.get("block")
    if type(G) is not int or G not in GROUPS:
        raise FormatError(f"mixed: the group size should be one of {', '.join(map(str, GROUPS))}, got {shown(G)}")
    if type(block) is not int or not 1 <= block <= max(N, BLOCK):
        raise FormatError(f"mixed: 'block' should be a positive number of rows, at most {N}, got {shown(block)}")
    C, four, outliers, packing = -(-K // G), spec.get("four"), spec.get("outliers"), spec.get("packing")
    if type(four) is not int or not 0 <= four <= C:
        raise FormatError(f"mixed: 'four' should be a number of groups from 0 to {C}, got {shown(four)}")
    if type(outliers) is not int or not 0 <= outliers <= N * K:
        raise FormatError(f"mixed: 'outliers' should be a number from 0 to {N * K}, got {shown(outliers)}")
    if outliers and K > 1 << 16:
        raise FormatError(f"mixed: outlier columns are stored in 16 bits, so {K} inputs are too many")
    if packing not in PACKINGS:
        raise FormatError(f"mixed: the packing should be one of {', '.join(PACKINGS)}, got {shown(packing)}")
    if packing == "aligned" and not can_be_aligned(G, C - four, four):
        found = f"{four} of {C} groups of {G}"
        raise FormatError(
            f"mixed: aligned packing needs groups of 16, and a quarter of the groups in 4 bits; got {found}"
        )
    return Sizes(N, -(-N // block), C - four, four, G)


def _widths(four: Tensor, G: int, K: int) -> Tensor:
    """Return the number of inputs in each group: the last one may be cut."""
    begin = torch.arange(len(four), device=four.device) * G
    return (K - begin).clamp(max=G)


def _as_int16(columns: Tensor) -> Tensor:
    return torch.where(columns > 0x7FFF, columns - 0x10000, columns).to(torch.int16)


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
