"""Bit-plane weights as all GPU kernels but lut.cu read them: every lane of a warp finds its words in one piece.

Rows are padded to tiles of 16, inputs to blocks of 256 (a half block of 128 is what one matrix instruction takes).
    words   int32 [tiles, blocks, P, 32, 4]   lane 4g + t: inputs 32t … 32t+31 of rows (g, g+8) in the first half block,
                                              then of the same rows in the second; bit i belongs to input 32t + i
    scales  S [tiles, ceil(blocks/blocks_per_scale), 8, groups, words, 2]   for row pair (g, g+8): see ScaleKind
A group of inputs is stored as 32, 64, 128 or a multiple of 256 of them; others are padded (weight_blocks.py), and
`perm` then tells which input stands where (-1: none).
Nothing here needs a GPU.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from crelle.formats.base import QuantTensor
from crelle.kernels.cuda.planes.weight_blocks import ROWS, BlockedWeight, ScaleKind, blocked
from crelle.kernels.cuda.runtime.plans import Plans

__all__ = ["BLOCK", "ROWS", "CudaWeight", "ScaleKind", "join", "lay_out", "same_inputs"]

BLOCK = 256  # inputs; two instructions' worth


@dataclass(frozen=True, slots=True, eq=False)
class CudaWeight:
    """A prepared matrix."""

    N: int
    K: int
    P: int  # planes that count; `words` may hold more (nested planes)
    kind: ScaleKind
    groups: int  # in a block: 1, 2, 4, 8
    blocks_per_scale: int  # blocks that share a set of scales
    words: Tensor
    scales: Tensor
    perm: Tensor | None = None  # int32 [blocks * 256]
    plans: Plans = field(default_factory=Plans, init=False, repr=False)

    @property
    def blocks(self) -> int:
        return self.words.shape[1]

    @property
    def stride16(self) -> bool:
        """Whether gemm.cu takes x with the two inputs of a pair 16 apart (x_layout.cuh)."""
        return self.kind not in (ScaleKind.BCQ, ScaleKind.BCQ_SYMMETRIC) and self.P > 3

    @property
    def order(self) -> int:
        """Return how inputs are paired, for kernels that pack x (x_layout.cuh)."""
        return int(self.stride16)

    @property
    def places(self) -> int:
        """Return the length of `perm`."""
        return self.blocks * BLOCK

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.words, self.scales))


def lay_out(w: QuantTensor) -> CudaWeight:
    """Lay a matrix of planes out anew, on the device it is on."""
    a = blocked(w, BLOCK)
    N, K = w.shape
    return CudaWeight(N, K, a.planes.shape[0], a.kind, a.groups, a.blocks_per_scale, _words(a), _pairs(a), a.perm)


def join(parts: list[CudaWeight]) -> tuple[CudaWeight, list[CudaWeight]] | None:
    """Return matrices of the same inputs as one of all their rows, and each again as a part of it; None if unlike."""
    first = parts[0]

    def form(w: CudaWeight) -> tuple[object, ...]:
        return (
            w.K,
            w.P,
            w.kind,
            w.groups,
            w.blocks_per_scale,
            w.blocks,
            w.words.shape[2],
            w.scales.dtype,
            w.perm is None,
        )

    if any(form(w) != form(first) for w in parts) or any(w.N % ROWS for w in parts[:-1]):
        return None
    if first.perm is not None and not all(w.perm is not None and torch.equal(w.perm, first.perm) for w in parts):
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


def same_inputs(a: CudaWeight, b: CudaWeight) -> bool:
    """Whether x encoded for a, by any kernel, serves b: blocks, groups in half a block, order of inputs, pairs."""
    if (a.K, a.blocks, max(a.groups, 2), a.stride16) != (b.K, b.blocks, max(b.groups, 2), b.stride16):
        return False
    if a.perm is None or b.perm is None:
        return a.perm is b.perm
    return a.perm is b.perm or torch.equal(a.perm, b.perm)


def _words(a: BlockedWeight) -> Tensor:
    """Planes as words; a plane at a time, so that what stands beside it stays small."""
    P, N, _ = a.planes.shape
    tiles = -(-N // ROWS)
    words = torch.empty(tiles, a.blocks, P, 32, 4, dtype=torch.int32, device=a.planes.device)
    for p in range(P):
        six = a.plane(p, BLOCK).view(torch.int32).view(tiles, 2, 8, a.blocks, 2, 4)  # tile, row half, g, block, half, t
        words[:, :, p] = six.permute(0, 3, 2, 5, 4, 1).reshape(tiles, a.blocks, 32, 4)
    return words


def _pairs(a: BlockedWeight) -> Tensor:
    scales = a.padded_scales()
    six = scales.view(scales.shape[0], -1, 2, 8, scales.shape[2] // a.groups, a.groups)
    return six.permute(1, 4, 3, 5, 0, 2).contiguous()  # tile, set, g, group, word, row half
