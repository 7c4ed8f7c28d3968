"""Integer weights (grouped, two-level) as integer_gemm.cu reads them: pieces of 64 rows and 128 inputs.

Inputs are in the format's stored order: normal ones, padded to a multiple of 128, then outliers, padded alike; rows are
padded to a multiple of 64. Blocks of 128 normal inputs have 4 bits (also codes of 3 bits) or 8, those of outliers 8.

pieces   uint8 [tiles of 64 rows][block][codes, scales]
codes    4 bits: [warp 4][half 2][lane 4g + t][step of the half 2][row g, g + 8][byte i]
             byte i: input 32 step + 4t + i in the low 4 bits, the one 16 inputs on in the high ones
             (signed: two's complement; two-level: q)
         8 bits: [warp 4][step 4][lane 4g + t][inputs, those 16 on][row g, g + 8][byte i]
scales   [warp 4][g 8][group of the block][row g, row g + 8], two bytes each: grouped: scale f16; two-level: a, 128 - z
A warp has 16 of the 64 rows; a step is 32 inputs. A word of four bytes is one operand of the tensor core instruction,
or, of 4 bits, two of them. Nothing here needs a GPU.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from crelle.errors import UnsupportedError
from crelle.formats.activations import ActivationSpec
from crelle.formats.base import QuantTensor
from crelle.formats.grouped import GroupedTensor
from crelle.formats.two_level import TwoLevelTensor
from crelle.kernels.cuda.runtime.plans import Plans

ROWS, BLOCK = 64, 128
_WHOLE = 1 << 30  # blocks with one scale of x: all
_MOST_INPUTS = 1 << 17  # that int32 sums of 16 q x hold
_SEMAPHORES = 1024  # at least as many as thread blocks run at once


@dataclass(frozen=True, slots=True, eq=False)
class IntegerTiles:
    """A weight as the kernel reads it. Products with the same weight run one after the other (semaphores)."""

    N: int
    K: int
    two_level: bool
    subs: int  # groups of a block: 1, 2, 4
    segments: int  # parts of K with one scale of a row and a token (2: outliers have their own); 0: scales of groups
    blocks: int
    narrow: int  # blocks of 4 bits, the first ones
    normal: int  # blocks before the outliers
    activation: ActivationSpec
    x_groups: int  # scales of a token
    x_span: int  # blocks with one scale of x
    x_outlier: int  # the scale of the first outliers
    pieces: Tensor  # uint8
    row_scale: Tensor | None  # f32 [N, padded]: of two levels
    semaphores: Tensor  # int32, 0 between products
    perm: Tensor | None  # int32 [K]: the input of each channel of x
    plans: Plans = field(default_factory=Plans, init=False, repr=False)

    @property
    def nbytes(self) -> int:
        return self.pieces.numel() + (0 if self.row_scale is None else 4 * self.row_scale.numel())

    @property
    def x_subs(self) -> int:
        """Return how many scales x has in a block, if more than one."""
        return _subs(self.activation.group)

    @property
    def columns(self) -> int:
        """Return how many columns x has, padded."""
        return self.blocks * BLOCK


def _subs(group: int) -> int:
    """Return how many groups a block has; one that is no divisor of it holds all inputs there are."""
    return BLOCK // group if group in (32, 64) else 1


def refuses(w: QuantTensor) -> str | None:
    """Return why there is no such layout, or None."""
    if not isinstance(w, GroupedTensor | TwoLevelTensor):
        return f"takes integer groups, not '{w.format}'"
    s, act = w.sizes, w.activation
    if act is None:
        return "takes quantized activations, not floats"
    if s.outlier_bits != 8 or (act.outliers and act.outlier_bits != 8):
        return "takes outliers of 8 bits"
    if isinstance(w, GroupedTensor) and w.scale.dtype != torch.float16:
        return "takes scales in f16"
    for size in (s.group, act.group):
        if size not in (32, 64) and size % BLOCK and size < max(s.normal, s.outliers):
            return f"takes groups of 32, 64 or a multiple of 128, not {size}"
    return f"takes up to {_MOST_INPUTS} inputs" if s.K > _MOST_INPUTS else None


def lay_out(w: QuantTensor) -> IntegerTiles:
    """Return the weight as the kernel reads it, on its device."""
    if (why := refuses(w)) is not None:
        raise UnsupportedError(f"integer_gemm {why}")
    assert isinstance(w, GroupedTensor | TwoLevelTensor)
    s, act, two_level = w.sizes, w.activation, isinstance(w, TwoLevelTensor)
    assert act is not None
    normal, blocks = -(-s.normal // BLOCK), -(-s.normal // BLOCK) + -(-s.outliers // BLOCK)
    narrow = normal if s.bits < 8 else 0
    subs = _subs(s.group)
    one_x = act.group >= max(s.K - act.outliers, act.outliers)
    # one scale of w for all normal inputs; two levels have one for all inputs
    one_w = two_level or s.group >= max(s.normal, s.outliers)
    codes, levels = _padded_codes(w), _levels(w, subs, normal, blocks)
    tiles = codes.shape[0] // ROWS
    parts = [
        torch.cat([_narrow(codes[:, : narrow * BLOCK]), levels[:, :narrow].flatten(2)], 2),
        torch.cat([_wide(codes[:, narrow * BLOCK :]), levels[:, narrow:].flatten(2)], 2),
    ]
    pieces = torch.cat([p.flatten(1) for p in parts], 1)
    x_normal = -(-(s.K - act.outliers) // act.group)
    apart = s.outliers > 0 and (not two_level or act.outliers > 0)  # outliers have other scales
    segments = (2 if apart else 1) if one_x and one_w else 0
    return IntegerTiles(
        *(s.N, s.K, two_level, subs, segments, blocks, narrow, normal, act),
        x_groups=x_normal + -(-act.outliers // act.group),
        x_span=_WHOLE if one_x else max(1, act.group // BLOCK),
        x_outlier=x_normal if act.outliers else 0,
        pieces=pieces,
        row_scale=pad(w.scale.float(), (0, tiles * ROWS - s.N)) if two_level else None,
        semaphores=torch.zeros(_SEMAPHORES, dtype=torch.int32, device=w.device),
        perm=w.perm,
    )


def _padded_codes(w: GroupedTensor | TwoLevelTensor) -> Tensor:
    """Return codes uint8 [rows, columns], both padded with zeros: q of two levels, two's complement otherwise."""
    s = w.sizes
    parts = [w.codes().view(torch.uint8), w.outliers.view(torch.uint8) if w.outliers is not None else None]
    padded = [pad(p, (0, -p.shape[1] % BLOCK, 0, -s.N % ROWS)) for p in parts if p is not None]
    return torch.cat(padded, 1)


def _narrow(codes: Tensor) -> Tensor:
    """Return codes of 4 bits [rows, columns] as bytes [tiles, blocks, 4096]."""
    # tile, warp, row half, g; block, two steps, step, 16 inputs on, t, i
    tiles, blocks = codes.shape[0] // ROWS, codes.shape[1] // BLOCK
    ten = (codes & 15).reshape(tiles, 4, 2, 8, blocks, 2, 2, 2, 4, 4)
    joined = ten[..., 0, :, :] | ten[..., 1, :, :] << 4
    return joined.permute(0, 4, 1, 5, 3, 7, 6, 2, 8).reshape(tiles, blocks, 4096)


def _wide(codes: Tensor) -> Tensor:
    """Return codes of 8 bits [rows, columns] as bytes [tiles, blocks, 8192]."""
    # tile, warp, row half, g; block, step, 16 inputs on, t, i
    tiles, blocks = codes.shape[0] // ROWS, codes.shape[1] // BLOCK
    nine = codes.reshape(tiles, 4, 2, 8, blocks, 4, 2, 4, 4)
    return nine.permute(0, 4, 1, 5, 3, 7, 6, 2, 8).reshape(tiles, blocks, 8192)


def _levels(w: GroupedTensor | TwoLevelTensor, subs: int, normal: int, blocks: int) -> Tensor:
    """Return what lies behind the codes of each block, uint8 [tiles, blocks, warp, g, group, row half, 2]."""
    s = w.sizes
    if isinstance(w, TwoLevelTensor):
        each = torch.stack([w.group_scale, 128 - w.group_zero], -1)  # [N, C, 2]
        kinds = [(each, normal), (each[:, :0], blocks - normal)]
    else:
        each = w.scale.contiguous().view(torch.uint8).reshape(s.N, -1, 2)
        kinds = [(each[:, : s.groups[0]], normal), (each[:, s.groups[0] :], blocks - normal)]
    parts = []
    for levels, count in kinds:
        wide = levels.repeat_interleave(min(-(-s.group // BLOCK), max(1, count)), 1)[:, : count * subs]
        parts.append(pad(wide, (0, 0, 0, count * subs - wide.shape[1], 0, -s.N % ROWS)))
    # tile, warp, row half, g; block, group; byte
    seven = torch.cat(parts, 1).reshape(-1, 4, 2, 8, blocks, subs, 2)
    return seven.permute(0, 4, 1, 3, 5, 2, 6)
