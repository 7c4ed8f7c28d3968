"""Trellis codes: every weight depends on 16 bits of a stream that moves by only 1 to 4 bits from weight to weight.

    W[n, k] = scale[n] / 128 * value          value: an integer, computed from a state of 16 bits by a product

A sequence holds the 128 weights of 32 outputs and 4 inputs, output by output. Its codes are 128 * bits bits in a ring:
state i is the 16 bits from bit i * V * bits on, little end first, and stands for the V weights from V i on. Neighbours
share all but V * bits of their bits (a bitshift trellis, arXiv 2406.11235). So a weight costs 1 to 4 bits, and is one
of 2^16 values of a fine code book. With p the four bytes of state * multiplier mod 2^32:

    code   V   value                                    multiplier
    pair   2   p0 + p2 - 255 and p1 + p3 - 255          0xd2c2d6c9   any multiple of half a bit
    mul1   1   p0 + p1 + p2 + p3 - 510                  0x83dcd12d   whole bits; better from 3 bits on, twice the work

Layout:
    codes  uint8 [ceil(N/32), ceil(K/4), 16 bits]    the rings, first the outputs that come first
    scale  f16 [N]
Bits per weight: bits + 16 / K where 32 divides N and 4 divides K. The values of random states are nearly Gaussian, as
weights are after a rotation (crelle.formats.wrappers.rotated).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.base import QuantTensor, Spec, expect, register_format, shape_of, take
from crelle.formats.dense import DenseTensor
from crelle.formats.packing import pack_stream
from crelle.formats.storage.io import shown

ROWS, COLUMNS = 32, 4  # of the matrix, in a sequence
WEIGHTS = ROWS * COLUMNS
STATE_BITS = 16
STATES = 1 << STATE_BITS
BITS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
UNIT = 2.0**-7  # of a value: a scale is about the size of its row's weights, and no subnormal f16
_SLAB = 1 << 22  # weights that are decoded at a time


@dataclass(frozen=True, slots=True)
class Code:
    """How a state becomes weights."""

    name: str
    multiplier: int
    weights: int  # of a state
    zero: int
    std: float  # of the values of all states

    def values(self, states: Tensor) -> Tensor:
        """Return the values int16 [..., V] of states [...]."""
        product = states.long() * self.multiplier
        byte = [((product >> (8 * i)) & 255).to(torch.int16) for i in range(4)]
        if self.weights == 2:
            return torch.stack([byte[0] + byte[2], byte[1] + byte[3]], -1) - self.zero
        return (byte[0] + byte[1] + byte[2] + byte[3] - self.zero).unsqueeze(-1)

    def shift(self, bits: float) -> int:
        """Return the bits that a state has of its own."""
        return int(self.weights * bits)


CODES = {
    c.name: c
    for c in (
        Code("pair", 0xD2C2D6C9, 2, 255, 104.2),
        Code("mul1", 0x83DCD12D, 1, 510, 147.7),
    )
}


@register_format
@dataclass(frozen=True, slots=True, eq=False)
class TrellisTensor:
    """A matrix in trellis codes, one scale for each output."""

    format: ClassVar[str] = "trellis"
    quantized: ClassVar[bool] = True
    codes: Tensor  # uint8 [row blocks, column blocks, bytes of a ring]
    scale: Tensor  # f16 [N]
    K: int
    bits: float
    code: Code

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.scale), self.K

    @property
    def group(self) -> int:
        return self.K

    @property
    def device(self) -> torch.device:
        return self.scale.device

    def states(self, blocks: slice | Tensor) -> Tensor:
        """Return the states of some blocks of 32 rows, int32 [blocks, column blocks, states of a sequence]."""
        return states_of(self.codes[blocks], self.code.shift(self.bits))

    def values(self) -> Tensor:
        """Return the integers that the codes stand for, int16 [N, K]."""
        step = max(1, _SLAB // (ROWS * self.codes.shape[1] * COLUMNS))
        slabs = [self._values(slice(b, b + step)) for b in range(0, len(self.codes), step)]
        return torch.cat(slabs)[: len(self.scale)]

    def _values(self, blocks: slice | Tensor) -> Tensor:
        """Return the integers of all rows of some blocks, [rows, K]."""
        v = self.code.values(self.states(blocks))
        rows = v.reshape(v.shape[0], v.shape[1], ROWS, COLUMNS).transpose(1, 2)
        return rows.reshape(v.shape[0] * ROWS, v.shape[1] * COLUMNS)[:, : self.K]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        return (self.values().to(wide) * (self.scale.to(wide) * UNIT).unsqueeze(1)).to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.codes, "scale": self.scale}

    def scales(self) -> dict[str, Tensor]:
        return {"scale": self.scale}

    def with_scales(self, scales: Mapping[str, Tensor]) -> Self:
        return replace(self, scale=scales["scale"])

    def spec(self) -> Spec:
        return {"format": self.format, "shape": list(self.shape), "bits": self.bits, "code": self.code.name}

    def rows(self, which: slice | Tensor) -> "TrellisTensor | DenseTensor":
        """Return some rows: whole blocks in this format, others decoded."""
        N = len(self.scale)
        if isinstance(which, slice):
            begin, end, step = which.indices(N)
            if step == 1 and begin % ROWS == 0 and (end % ROWS == 0 or end == N):
                codes = self.codes[begin // ROWS : -(-end // ROWS)]
                return replace(self, codes=codes, scale=self.scale[begin:end])
            which = torch.arange(N, device=self.device)[which]
        which = torch.where(which < 0, which + N, which)
        blocks, place = torch.unique(which // ROWS, return_inverse=True)
        values = self._values(blocks)[place * ROWS + which % ROWS]
        return DenseTensor(values.float() * (self.scale[which].float() * UNIT).unsqueeze(1))

    def cut(self, k: int) -> str | None:
        """Return why no share of the inputs can begin or end at input k; None: it can."""
        return f"a sequence has {COLUMNS} inputs" if k % COLUMNS else None

    def columns(self, begin: int, end: int) -> Self:
        """Return some inputs."""
        codes = self.codes[:, begin // COLUMNS : -(-end // COLUMNS)].contiguous()
        return replace(self, codes=codes, K=end - begin)

    @classmethod
    def stacked(cls, matrices: Sequence[Any]) -> QuantTensor | None:
        """Return one matrix with the rows of all, where each but the last ends with a block."""
        if any(len(m.scale) % ROWS for m in matrices[:-1]):
            return None
        codes, scale = (torch.cat(t) for t in zip(*((m.codes, m.scale) for m in matrices), strict=True))
        first = matrices[0]
        return cls(codes, scale, first.K, first.bits, first.code)

    def to(self, device: torch.device | str) -> Self:
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device))

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        return ["codes", "scale"]

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        take(spec, cls, {"format", "shape", "bits", "code"})
        N, K = shape_of(spec)
        bits, code = settings(spec)
        codes = expect(tensors, "codes", codes_shape(N, K, bits), (torch.uint8,), cls.format)
        scale = expect(tensors, "scale", (N,), (torch.float16,), cls.format)
        return cls(codes, scale, K, bits, code)

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        (N, K), (bits, code), device = shape_of(spec), settings(spec), generator.device
        shape = codes_shape(N, K, bits)
        codes = torch.randint(256, shape, generator=generator, dtype=torch.uint8, device=device)
        return cls(codes, torch.full((N,), K**-0.5 / code.std / UNIT, device=device).half(), K, bits, code)

    @classmethod
    def row_bits(cls, spec: Mapping[str, Any]) -> int:
        """Of a row in a whole block."""
        K = shape_of(spec)[1]
        return int(-(-K // COLUMNS) * COLUMNS * settings(spec)[0]) + 16


def settings(spec: Mapping[str, Any]) -> tuple[float, Code]:
    """Return bits and code of a spec, or refuse it."""
    name, bits = spec.get("code"), spec.get("bits")
    if not isinstance(name, str) or name not in CODES:
        raise FormatError(f"trellis: 'code' should be one of {', '.join(CODES)}, but is {shown(name)}")
    if type(bits) not in (int, float) or bits not in BITS or (CODES[name].weights * bits) % 1:
        allowed = ", ".join(f"{b:g}" for b in BITS if not (CODES[name].weights * b) % 1)
        raise FormatError(f"trellis: 'bits' of the code '{name}' should be one of {allowed}, but is {shown(bits)}")
    return float(bits), CODES[name]


def codes_shape(N: int, K: int, bits: float) -> tuple[int, int, int]:
    """Return the shape of the codes of a matrix."""
    return -(-N // ROWS), -(-K // COLUMNS), int(WEIGHTS * bits) // 8


def states_of(rings: Tensor, shift: int) -> Tensor:
    """Return the states int32 [..., n] of rings of codes uint8 [..., n * shift / 8]."""
    n, count = rings.shape[-1], 8 * rings.shape[-1] // shift
    ring = torch.cat([rings, rings[..., :3]], -1).int()
    at = torch.arange(count, device=rings.device) * shift
    three = [ring[..., (at // 8) % n + i] << (8 * i) for i in range(3)]
    return ((three[0] | three[1] | three[2]) >> (at % 8)) & (STATES - 1)


def rings_of(states: Tensor, shift: int) -> Tensor:
    """Return the codes uint8 [..., n * shift / 8] of the states [..., n] of closed paths."""
    own = states.to(torch.int32) & (
        (1 << shift) - 1
    )  # the bits from its place on; the others are those of later states
    bit = (own.unsqueeze(-1) >> torch.arange(shift, device=states.device)) & 1
    return pack_stream(bit.flatten(-2), 1)
