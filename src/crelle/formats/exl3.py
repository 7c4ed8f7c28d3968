"""EXL3 of exllamav3, as it is stored: trellis codes in tiles of 16 x 16, rotated on both sides.

    W = diag(svh) H w H diag(suh)          w [N, K]: 16-bit floats from states; H: Hadamard blocks of 128, over rows and
                                           over columns

A tile holds the weights of 16 inputs and 16 outputs in 256 * bits bits, a ring: state i is the 16 bits that end at bit
(i + 1) * bits, and stands for one weight. Bits count from the top of each 32-bit word, words are pairs of int16, low
half first. Lane l of a warp owns states 8 l … 8 l + 7, which are inputs 2 (l % 4) + {0, 1, 8, 9} of output l / 4, then
the same of output l / 4 + 8. With x = state * multiplier + addend mod 2^32, in 16-bit arithmetic:

    code    multiplier   addend      weight
    3inst   89226354     64248484    the two halves of (x & 0x8fff8fff) ^ 0x3b603b60 as f16, added
    mcg     0xcbac1fed   0           the same
    mul1    0x83dcd12d   0           (1024 + sum of the four bytes) * 0.00677 - 10.39

Layout:
    trellis  int16 [K/16, N/16, 16 bits]     bits: 1 to 8
    suh      f16 [K]       svh  f16 [N]
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.base import Spec, expect, register_format, shape_of, take
from crelle.formats.dense import DenseTensor
from crelle.formats.storage.io import shown
from crelle.formats.wrappers.hadamard import hadamard_blocks

TILE, BLOCK = 16, 128
CODES = {"3inst": (89226354, 64248484), "mcg": (0xCBAC1FED, 0), "mul1": (0x83DCD12D, 0)}
_INVERSE, _BIAS = 1774 / 2**18, -10.3828125  # of mul1: the f16 next to 0.00677 and to -10.39
_STD = {"3inst": 1.24, "mcg": 1.24, "mul1": 1.0}  # of the weights of all states
_SLAB = 1 << 22  # weights that are decoded at a time


@register_format
@dataclass(frozen=True, slots=True, eq=False)
class Exl3Tensor:
    """A matrix of an EXL3 checkpoint."""

    format: ClassVar[str] = "exl3"
    quantized: ClassVar[bool] = True
    trellis: Tensor  # int16 [K/16, N/16, 16 bits]
    suh: Tensor  # f16 [K]
    svh: Tensor  # f16 [N]
    code: str

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.svh), len(self.suh)

    @property
    def bits(self) -> int:
        return self.trellis.shape[2] // TILE

    @property
    def group(self) -> int:
        return len(self.suh)

    @property
    def device(self) -> torch.device:
        return self.trellis.device

    def weights(self) -> Tensor:
        """Return the weights between the rotations, f16 [N, K]."""
        step = max(1, _SLAB // (TILE * len(self.svh)))
        tiles = [_tiles(self.trellis[k : k + step], self.code) for k in range(0, len(self.trellis), step)]
        return torch.cat(tiles).T.contiguous()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        w = hadamard_blocks(self.weights().to(wide), BLOCK) * self.suh.to(wide)
        return (hadamard_blocks(w.T.contiguous(), BLOCK).T * self.svh.to(wide).unsqueeze(1)).to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {"trellis": self.trellis, "suh": self.suh, "svh": self.svh}

    def scales(self) -> dict[str, Tensor]:
        return {}

    def with_scales(self, scales: Mapping[str, Tensor]) -> Self:
        return self

    def spec(self) -> Spec:
        return {"format": self.format, "shape": list(self.shape), "bits": self.bits, "code": self.code}

    def rows(self, which: slice | Tensor) -> "Exl3Tensor | DenseTensor":
        """Return some rows: whole blocks of 128 in this format, others decoded."""
        N = len(self.svh)
        if isinstance(which, slice):
            begin, end, step = which.indices(N)
            if step == 1 and begin % BLOCK == end % BLOCK == 0:
                tiles = self.trellis[:, begin // TILE : end // TILE].contiguous()
                return replace(self, trellis=tiles, svh=self.svh[begin:end])
        return DenseTensor(self.dequantize()[which])

    def cut(self, k: int) -> str | None:
        """Return why no share of the inputs can begin or end at input k; None: it can."""
        return f"{BLOCK} inputs are rotated together" if k % BLOCK else None

    def columns(self, begin: int, end: int) -> Self:
        """Return some inputs."""
        return replace(self, trellis=self.trellis[begin // TILE : end // TILE], suh=self.suh[begin:end])

    def to(self, device: torch.device | str) -> Self:
        trellis, suh, svh = (t.to(device) for t in (self.trellis, self.suh, self.svh))
        return replace(self, trellis=trellis, suh=suh, svh=svh)

    @classmethod
    def parts(cls, spec: Mapping[str, Any]) -> list[str]:
        return ["trellis", "suh", "svh"]

    @classmethod
    def from_parts(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        take(spec, cls, {"format", "shape", "bits", "code"})
        N, K = shape_of(spec)
        bits, code = spec["bits"], spec["code"]
        if type(bits) is not int or not 1 <= bits <= 8:
            raise FormatError(f"exl3: 'bits' should be 1 to 8, but is {shown(bits)}")
        if not isinstance(code, str) or code not in CODES:
            raise FormatError(f"exl3: 'code' should be one of {', '.join(CODES)}, but is {shown(code)}")
        if N % BLOCK or K % BLOCK:
            raise FormatError(f"exl3: a matrix of {N} x {K} is not made of blocks of {BLOCK}")
        trellis = expect(tensors, "trellis", (K // TILE, N // TILE, TILE * bits), (torch.int16,), cls.format)
        suh = expect(tensors, "suh", (K,), (torch.float16,), cls.format)
        return cls(trellis, suh, expect(tensors, "svh", (N,), (torch.float16,), cls.format), code)

    @classmethod
    def random(cls, spec: Mapping[str, Any], generator: torch.Generator) -> Self:
        (N, K), device = shape_of(spec), generator.device
        shape = K // TILE, N // TILE, TILE * spec["bits"]
        words = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16, device=device)
        signs = 1 - 2.0 * torch.randint(2, (K,), generator=generator, device=device)
        scale = torch.full((N,), K**-0.5 / _STD[spec["code"]], device=device)
        return cls(words, signs.half(), scale.half(), spec["code"])

    @classmethod
    def row_bits(cls, spec: Mapping[str, Any]) -> int:
        """Of a row; `suh` is stored once for all rows."""
        return int(shape_of(spec)[1] * spec["bits"]) + 16


def _tiles(trellis: Tensor, code: str) -> Tensor:
    """Return the weights f16 [16 tiles of inputs, 16 tiles of outputs] of tiles int16 [., ., 16 bits]."""
    rows, columns, _ = trellis.shape
    w = _values(_states(trellis), code)  # [rows, columns, 256]
    w = w.reshape(rows, columns, 8, 4, 2, 2, 2)  # lane / 4, lane % 4, output + 8, input + 8, input + 1
    # Input: + 8, lane % 4, + 1; output: + 8, lane / 4.
    return w.permute(0, 5, 3, 6, 1, 4, 2).reshape(rows * TILE, columns * TILE)


def _states(trellis: Tensor) -> Tensor:
    """Return the states int32 [., ., 256] of tiles."""
    bits = trellis.shape[2] // TILE
    n = trellis.shape[2]
    half = (trellis.int() & 0xFFFF).reshape(*trellis.shape[:2], n // 2, 2).flip(-1).flatten(-2)  # in the order of bits
    begin = (torch.arange(1, 257, device=trellis.device) * bits - 16) % (16 * n)
    first, second = half[..., begin // 16], half[..., (begin // 16 + 1) % n]
    states: Tensor = ((first << 16 | second) >> (16 - begin % 16)) & 0xFFFF
    return states


def _values(states: Tensor, code: str) -> Tensor:
    """Return the weights f16 of states."""
    multiplier, addend = CODES[code]
    x = states.long() * multiplier + addend
    if code == "mul1":
        total = torch.stack([(x >> (8 * i)) & 255 for i in range(4)]).sum(0) + 1024
        return (total.float() * _INVERSE + _BIAS).half()  # exact in f32, so rounded once
    bits = ((x & 0x8FFF8FFF) ^ 0x3B603B60) & 0xFFFFFFFF
    low, high = (((bits >> s) & 0xFFFF).to(torch.int16).view(torch.half) for s in (0, 16))
    return low + high
