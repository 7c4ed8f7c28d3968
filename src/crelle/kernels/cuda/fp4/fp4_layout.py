"""Weights of four-bit floats as the CUDA kernels read them: one piece of memory, a tile of 16 rows after the other.

    w = row_scale * scale * value      value: 0, 0.5, 1, 1.5, 2, 3, 4, 6 or its negative; scale * value is exact in f16

    data   uint8 [tiles, blocks * BYTES + 128]       a tile: its blocks of 256 inputs, then f32 row_scale [16], padding
    block  codes   int32 [4 chunks, 32 lanes, 4]     lane 4g + t: inputs 16t … 16t+15 of each 64, of rows g and g + 8
           scales  int32 [8 g, lanes of a row, 2]    of chunks (0, 1), (2, 3); nvfp4 has 4 lanes a row, mxfp4 2 (t / 2)

A word of codes is four inputs of both rows. Bits 0 … 2 of half byte i are the magnitude of input i, of row g for
i < 4, else of input i - 4 of row g + 8; bit 3 is the sign of input (i - 1) / 2 of row g in odd half bytes, that of
input i / 2 of row g + 8 in even ones. A word of scales has row g in its lower half, row g + 8 in its upper one; two
groups there, seven bits each, that are bits of an f16:

    nvfp4   bits 7 … 13, which is E4M3 times 2^-8 (its sign goes to the codes); row_scale: 2^8 times the global scale
    mxfp4   bits 8 … 14, a power of two relative to the largest of the row, which is 2^13 here. Of those 2^-30 of it and
            smaller nothing is left: they are less than the last bit of what an f32 sum makes of the others.

Bits per weight: those of the format, and 64 for a row. Nothing here needs a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from crelle.formats.fp4 import Fp4Tensor, Mxfp4Tensor, Nvfp4Tensor
from crelle.kernels.cuda.runtime.plans import Plans

ROWS, BLOCK, CHUNK = 16, 256, 64
CODES, ROW_SCALES = 2048, 128  # bytes of a block, of a tile
SCALES = {Mxfp4Tensor.format: 128, Nvfp4Tensor.format: 256}  # bytes of a block
_TOP = 13  # exponent of the largest scale of a row, of mxfp4
_SLAB = 1 << 25  # codes that are laid out at a time


@dataclass(frozen=True, slots=True, eq=False)
class Fp4Weight:
    """A matrix in the layout above."""

    N: int
    K: int
    format: str  # mxfp4 or nvfp4
    data: Tensor
    plans: Plans = field(default_factory=Plans, init=False, repr=False)

    @property
    def tiles(self) -> int:
        return self.data.shape[0]

    @property
    def blocks(self) -> int:
        """Blocks of 256 inputs."""
        return -(-self.K // BLOCK)

    @property
    def block_bytes(self) -> int:
        return CODES + SCALES[self.format]

    @property
    def kind(self) -> str:
        """Fp4Kind of fp4_codes.cuh."""
        return f"crelle::{self.format.upper()}"

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def perm(self) -> Tensor | None:
        """Inputs keep their order (planes/gemm.py)."""
        return None

    @property
    def places(self) -> int:
        """Inputs with those that are padding."""
        return self.blocks * BLOCK

    @property
    def order(self) -> int:
        """How x is packed for the GEMM (x_layout.cuh): 16 neighbours of 64 inputs for each lane."""
        return 2 + self.blocks


def lay_out(w: Fp4Tensor) -> Fp4Weight:
    """Return a weight in the layout above, on its device."""
    N, K = w.shape
    tiles, blocks = -(-N // ROWS), -(-K // BLOCK)
    block_bytes = CODES + SCALES[w.format]
    data = torch.zeros(tiles, blocks * block_bytes + ROW_SCALES, dtype=torch.uint8, device=w.device)
    step = max(1, _SLAB // (ROWS * BLOCK * blocks))
    for first in range(0, tiles, step):
        to = data[first : first + step]
        codes, scales, row_scale = _fields(w.rows(slice(first * ROWS, min(N, (first + step) * ROWS))))
        codes = pad(codes, (0, blocks * BLOCK - K, 0, to.shape[0] * ROWS - codes.shape[0]))
        groups = blocks * BLOCK // w.size
        scales = pad(scales, (0, groups - scales.shape[1], 0, to.shape[0] * ROWS - scales.shape[0]))
        inside = to[:, : blocks * block_bytes].view(-1, blocks, block_bytes)
        inside[..., :CODES] = _code_words(codes, blocks).view(torch.uint8).view(-1, blocks, CODES)
        inside[..., CODES:] = _scale_words(scales, blocks).view(torch.uint8).view(len(to), blocks, -1)
        row_scale = pad(row_scale, (0, to.shape[0] * ROWS - len(row_scale))).view(-1, ROWS)
        to[:, blocks * block_bytes : blocks * block_bytes + 4 * ROWS] = row_scale.contiguous().view(torch.uint8)
    return Fp4Weight(N, K, w.format, data)


def same_inputs(a: Fp4Weight, b: Fp4Weight) -> bool:
    """Whether x packed for one serves the other."""
    return a.K == b.K


def join(weights: Sequence[Fp4Weight]) -> tuple[Fp4Weight, list[Fp4Weight]] | None:
    """Return weights of the same input as one, and parts that point into it; None where they do not fit."""
    first = weights[0]
    if any(w.N % ROWS for w in weights[:-1]) or any((w.K, w.format) != (first.K, first.format) for w in weights):
        return None
    whole = replace(first, N=sum(w.N for w in weights), data=torch.cat([w.data for w in weights]))
    ends = pairwise([0, *accumulate(w.tiles for w in weights)])
    return whole, [replace(w, data=whole.data[a:b]) for w, (a, b) in zip(weights, ends, strict=True)]


def _fields(w: Fp4Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes uint8 [N, K], the bits of scales that are kept int32 [N, C], at 0 … 15, and row scales f32 [N]."""
    codes, stored = w.codes(), w.scale.int()
    if isinstance(w, Nvfp4Tensor):
        negative = (stored >> 7).to(torch.uint8).repeat_interleave(w.size, 1)[:, : w.K]
        whole = w.global_scale.double()
        row_scale = (256 / whole if w.divides else 256 * whole).float().expand(len(codes))
        return codes ^ negative << 3, (stored & 127) << 7, row_scale
    assert isinstance(w, Mxfp4Tensor)
    K = codes.shape[1]
    used = pad(codes & 7, (0, -K % w.size)).view(len(codes), -1, w.size).amax(-1) > 0
    top = torch.where(used, stored, 0).amax(1, keepdim=True)
    exponent = 15 + _TOP + (stored - top).clamp(max=0)  # of an f16, where it has one: else a half or a quarter of the
    small = torch.where(exponent == 0, 2, torch.where(exponent == -1, 1, 0))  # least, by its mantissa
    fields = torch.where(exponent > 0, 4 * exponent, small).int() << 8
    one = torch.ones(len(codes), dtype=torch.float64, device=codes.device)
    return codes, fields, torch.ldexp(one, top[:, 0] - 127 - _TOP).float()


def _code_words(codes: Tensor, blocks: int) -> Tensor:
    """Return codes [16 tiles, 256 blocks] as words int32 [tiles, blocks, chunk, g, t, step]."""
    eight = codes.view(-1, 2, 8, blocks, 4, 4, 4, 4)  # tile, row half, g, block, chunk, t, step, input
    words = torch.zeros(eight.shape[0], 8, blocks, 4, 4, 4, dtype=torch.int32, device=codes.device)
    for half in range(2):
        for i in range(4):
            code = eight[:, half, ..., i].int()
            words |= (code & 7) << (4 * i + 16 * half)
            words |= (code >> 3) << (8 * i + (3 if half else 7))
    return words.permute(0, 2, 3, 1, 4, 5).contiguous()


def _scale_words(fields: Tensor, blocks: int) -> Tensor:
    """Return scales [16 tiles, groups] as words int32 [tiles, blocks, g, lane of a row, pair of chunks]."""
    lanes = fields.shape[1] // (4 * blocks)
    seven = fields.view(-1, 2, 8, blocks, 2, 2, lanes)  # tile, row half, g, block, pair of chunks, chunk, lane
    halves = seven[..., 0, :] | seven[..., 1, :] >> 7
    words = halves[:, 0] | halves[:, 1] << 16  # tile, g, block, pair, lane
    return words.permute(0, 2, 1, 4, 3).contiguous()
