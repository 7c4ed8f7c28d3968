"""Trellis weights as the CUDA kernels read them, and how the weight wants its input.

    units  uint8 [ceil(N/256), units of 16 inputs, 512 bits]      units: padded to a multiple of 4

A unit holds 32 rings, one for each lane of a warp, which has row block lane / 4 and column group lane % 4 of it. Their
words are interleaved: 16 bytes of each lane, then the next 16 (8 where a ring has no multiple of 16), so that a warp
loads whole lines. Padding is never read, or multiplied by an x of 0.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from crelle.formats.trellis import Code, TrellisTensor
from crelle.formats.wrappers.rotated import RotatedTensor

ROWS, COLUMNS = 256, 16  # of a unit
_PADDED = 4  # units: the most that a pipeline loads at a time
MOST_INPUTS = 1 << 16  # beyond, the sum of a token's codes may not fit into 32 bits


@dataclass(frozen=True, slots=True, eq=False)
class TrellisWeight:
    """A weight in the layout above."""

    N: int
    K: int
    code: Code
    bits: float
    units: Tensor
    scale: Tensor  # f16 [N]
    signs: Tensor | None  # uint8 [ceil(K/8)] of the rotation
    block: int  # of the rotation; 1: none
    rotation: bytes  # a digest of it, to compare on the host

    @property
    def shift(self) -> int:
        return self.code.shift(self.bits)

    @property
    def nbytes(self) -> int:
        return self.units.nbytes + self.scale.nbytes


def lay_out(w: TrellisTensor | RotatedTensor) -> TrellisWeight:
    """Return a weight in the layout above, on its device."""
    signs, block, digest, inner = None, 1, b"", w
    if isinstance(w, RotatedTensor):
        assert isinstance(w.inner, TrellisTensor), w.inner.format
        inner, signs, block = w.inner, w.rotation.packed, w.rotation.block
        digest = hashlib.sha256(signs.cpu().numpy().tobytes() + block.to_bytes(4, "little")).digest()
    assert isinstance(inner, TrellisTensor)
    codes = inner.codes
    size = 16 if codes.shape[2] % 16 == 0 else 8
    codes = pad(codes, (0, 0, 0, -codes.shape[1] % (4 * _PADDED), 0, -codes.shape[0] % 8))
    parts = codes.view(len(codes) // 8, 8, codes.shape[1] // 4, 4, codes.shape[2] // size, size)
    units = parts.permute(0, 2, 4, 1, 3, 5).reshape(parts.shape[0], parts.shape[2], 32 * codes.shape[2])
    N, K = inner.shape
    return TrellisWeight(N, K, inner.code, inner.bits, units, inner.scale, signs, block, digest)


def same_inputs(a: TrellisWeight, b: TrellisWeight) -> bool:
    """Whether x encoded for one serves the other."""
    return a.K == b.K and a.rotation == b.rotation


def join(weights: Sequence[TrellisWeight]) -> tuple[TrellisWeight, list[TrellisWeight]] | None:
    """Return weights of the same input as one, and parts that point into it; None where they do not fit."""
    first = weights[0]
    if any(w.N % ROWS for w in weights[:-1]) or not all(same_inputs(first, w) for w in weights):
        return None
    if any((w.code, w.bits) != (first.code, first.bits) for w in weights):
        return None
    units, scale = torch.cat([w.units for w in weights]), torch.cat([w.scale for w in weights])
    whole = replace(first, N=len(scale), units=units, scale=scale)
    tiles = pairwise([0, *accumulate(len(w.units) for w in weights)])
    rows = pairwise([0, *accumulate(w.N for w in weights)])
    parts = [
        replace(whole, N=n - m, units=units[a:b], scale=scale[m:n]) for (a, b), (m, n) in zip(tiles, rows, strict=True)
    ]
    return whole, parts
