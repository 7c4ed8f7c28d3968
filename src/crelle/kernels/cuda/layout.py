"""Bit-plane weights as the decode kernel reads them: every lane of a warp finds its words in one piece.

Rows are padded to tiles of 16, inputs to blocks of 256 (a half block of 128 is what one matrix instruction takes).
    words   int32 [tiles, blocks, P, 32, 4]   lane 4g + t: inputs 32t … 32t+31 of rows (g, g+8) in the first half block,
                                              then of the same rows in the second; bit i belongs to input 32t + i
    scales  S [tiles, ceil(blocks/span), 8, groups, words, 2]   for row pair (g, g+8): what a group stores, see `Kind`
A group of inputs is stored as 32, 64, 128 or a multiple of 256 of them. Others are padded up to 32 inputs and, where
that is none of these, stored as several groups with the same scales; `order` then tells which input stands where
(-1: none).
Nothing here needs a GPU.
"""

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.formats.permuted import PermutedTensor

ROWS, BLOCK, HALF = 16, 256, 128


class Kind(Enum):
    """What a group's scale words are; the names are those of decode.cu."""

    BCQ = "alpha of every plane, z"
    BCQ_SYMMETRIC = "alpha of every plane"
    UNIFORM = "scale, zero point"
    UNIFORM_SYMMETRIC = "scale"
    AFFINE = "scale, low"


@dataclass(frozen=True, slots=True, eq=False)
class CudaWeight:
    """A prepared matrix."""

    N: int
    K: int
    P: int  # planes that count; `words` may hold more (nested planes)
    kind: Kind
    groups: int  # in a block: 1, 2, 4, 8
    span: int  # blocks that share a set of scales
    words: Tensor
    scales: Tensor
    order: Tensor | None = None  # int32 [blocks * 256]

    @property
    def blocks(self) -> int:
        return self.words.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.words, self.scales))


def lay_out(w: QuantTensor) -> CudaWeight:
    """Lay a matrix of planes out anew, on the device it is on."""
    if isinstance(w, PermutedTensor):
        inner = lay_out(w.inner)
        order = w.order.to(torch.int32)
        if inner.order is None:
            order = torch.nn.functional.pad(order, (0, inner.blocks * BLOCK - w.shape[1]), value=-1)
        else:
            order = torch.where(inner.order < 0, -1, order[inner.order.clamp(min=0).long()])
        return replace(inner, order=order)
    if not isinstance(w, BCQTensor | UniformTensor | AffineTensor):
        raise UnsupportedError(f"kernel 'cuda' cannot lay out the format '{w.format}'")
    N, K = w.shape
    kind, scales = _scales(w)  # [words, N, C]
    unit, padded = _unit(K, w.group)
    C = scales.shape[-1]
    blocks = -(-C * padded // BLOCK)
    padding = _order(K, w.group, padded, blocks).to(w.device) if padded != w.group and C > 1 else None
    scales = scales.repeat_interleave(padded // unit, dim=-1)  # one per stored group
    groups, span = (BLOCK // unit, 1) if unit < BLOCK else (1, unit // BLOCK)
    return CudaWeight(
        N,
        K,
        w.bits,
        kind,
        groups,
        span,
        _words(w.planes, padding, blocks),
        _pairs(scales, blocks, groups, span),
        padding,
    )


def join(parts: list[CudaWeight]) -> tuple[CudaWeight, list[CudaWeight]] | None:
    """Return matrices of the same inputs as one of all their rows, and each again as a part of it; None if unlike."""
    first = parts[0]

    def form(w: CudaWeight) -> tuple[object, ...]:
        return w.K, w.P, w.kind, w.groups, w.span, w.blocks, w.words.shape[2], w.scales.dtype, w.order is None

    if any(form(w) != form(first) for w in parts) or any(w.N % ROWS for w in parts[:-1]):
        return None
    if first.order is not None and not all(w.order is not None and torch.equal(w.order, first.order) for w in parts):
        return None
    whole = replace(
        first,
        N=sum(w.N for w in parts),
        words=torch.cat([w.words for w in parts]),
        scales=torch.cat([w.scales for w in parts]),
    )
    tiles = [w.words.shape[0] for w in parts]
    pieces = zip(parts, torch.split(whole.words, tiles), torch.split(whole.scales, tiles), strict=True)
    return whole, [replace(w, words=words, scales=scales) for w, words, scales in pieces]


def _scales(w: BCQTensor | UniformTensor | AffineTensor) -> tuple[Kind, Tensor]:
    if isinstance(w, AffineTensor):
        return Kind.AFFINE, torch.stack([w.scale, w.low])
    if isinstance(w, UniformTensor):
        if w.zero is None:
            return Kind.UNIFORM_SYMMETRIC, w.scale[None]
        return Kind.UNIFORM, torch.stack([w.scale, w.zeros().to(w.scale.dtype)])
    if w.z is None:
        return Kind.BCQ_SYMMETRIC, w.alpha
    return Kind.BCQ, torch.cat([w.alpha, w.z[None]])


def _unit(K: int, group: int) -> tuple[int, int]:
    """Return (inputs of a stored group, inputs that a group is padded to)."""
    if group >= K:  # a whole row: padding at its end costs nothing
        padded = -(-K // BLOCK) * BLOCK
        return padded, padded
    padded = -(-group // 32) * 32
    if padded % BLOCK == 0:
        return padded, padded
    return next(u for u in (128, 64, 32) if padded % u == 0), padded


def _order(K: int, group: int, padded: int, blocks: int) -> Tensor:
    at = torch.arange(blocks * BLOCK)
    k = at // padded * group + at % padded
    return torch.where((at % padded < group) & (k < K), k, -1).to(torch.int32)


def _words(planes: Tensor, order: Tensor | None, blocks: int) -> Tensor:
    """Planes uint8 [P, N, K/8] as words; a plane at a time, so that what stands beside it stays small."""
    P, N, _ = planes.shape
    tiles = -(-N // ROWS)
    words = torch.zeros(tiles, blocks, P, 32, 4, dtype=torch.int32, device=planes.device)
    for p in range(P):
        plane = planes[p]
        if order is not None:
            plane = _reordered(plane, order)
        out = torch.zeros(tiles * ROWS, blocks * BLOCK // 8, dtype=torch.uint8, device=planes.device)
        out[:N, : plane.shape[1]] = plane
        six = out.view(torch.int32).view(tiles, 2, 8, blocks, 2, 4)  # tile, row half, g, block, half, t
        words[:, :, p] = six.permute(0, 3, 2, 5, 4, 1).reshape(tiles, blocks, 32, 4)
    return words


def _reordered(plane: Tensor, order: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=plane.device)
    bits = (plane[..., None] >> shifts & 1).flatten(1)  # [N, 8 * bytes]
    bits = torch.where(order < 0, 0, bits[:, order.clamp(min=0).long()])
    return (bits.view(plane.shape[0], -1, 8) << shifts).sum(-1, dtype=torch.uint8)


def _pairs(scales: Tensor, blocks: int, groups: int, span: int) -> Tensor:
    words, N, C = scales.shape
    tiles, sets = -(-N // ROWS), -(-blocks // span)
    out = torch.zeros(words, tiles * ROWS, sets * groups, dtype=scales.dtype, device=scales.device)
    out[:, :N, :C] = scales
    six = out.view(words, tiles, 2, 8, sets, groups)
    return six.permute(1, 4, 3, 5, 0, 2).contiguous()  # tile, set, g, group, word, row half
