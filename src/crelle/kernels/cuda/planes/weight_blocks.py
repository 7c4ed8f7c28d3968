"""The first step of every GPU weight layout: scales by kind, groups padded to what a kernel takes.

A kernel works on blocks of so many inputs and stores groups of 32, 64, … inputs or of whole blocks. Other groups are
padded up to 32 inputs and, where that is none of these, stored as several groups with the same scales.
"""

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.formats.wrappers.composite import PermutedTensor

ROWS = 16  # of a tile, in every layout


class ScaleKind(Enum):
    """What a group's scales are; the names are those of bmma_gemv.cu."""

    BCQ = "alpha of every plane, z"
    BCQ_SYMMETRIC = "alpha of every plane"
    UNIFORM = "scale, zero point"
    UNIFORM_SYMMETRIC = "scale"
    AFFINE = "scale, low"


@dataclass(frozen=True, slots=True, eq=False)
class BlockedWeight:
    """A matrix in blocks of inputs, as stored, with the padding that a kernel's blocks need."""

    planes: Tensor  # uint8 [P, N, K/8], as stored
    kind: ScaleKind
    scales: Tensor  # [words, N, stored groups]
    blocks: int
    groups: int  # in a block
    blocks_per_scale: int  # blocks that share a set of scales
    padding: (
        Tensor | None
    )  # int32 [blocks * block]: which input of `planes` stands where, -1 for none; None: as they are
    perm: Tensor | None  # the same for inputs of x

    def plane(self, p: int, block: int) -> Tensor:
        """Return one plane uint8 [tiles * ROWS, blocks * block / 8], padded with zeros."""
        plane = self.planes[p] if self.padding is None else _reordered(self.planes[p], self.padding)
        N = plane.shape[0]
        rows = torch.zeros(-(-N // ROWS) * ROWS, self.blocks * block // 8, dtype=torch.uint8, device=plane.device)
        rows[:N, : plane.shape[1]] = plane
        return rows

    def padded_scales(self) -> Tensor:
        """Return [words, tiles * ROWS, sets * groups], padded with zeros."""
        words, N, C = self.scales.shape
        sets = -(-self.blocks // self.blocks_per_scale)
        out = self.scales.new_zeros(words, -(-N // ROWS) * ROWS, sets * self.groups)
        out[:, :N, :C] = self.scales
        return out


def blocked(w: QuantTensor, block: int) -> BlockedWeight:
    """Return a matrix in blocks of `block` inputs, a power of two."""
    if isinstance(w, PermutedTensor):
        inner = blocked(w.inner, block)
        perm = w.order.to(torch.int32)
        if inner.padding is None:
            perm = torch.nn.functional.pad(perm, (0, inner.blocks * block - w.shape[1]), value=-1)
        else:
            perm = torch.where(inner.padding < 0, -1, perm[inner.padding.clamp(min=0).long()])
        return replace(inner, perm=perm)
    if not isinstance(w, BCQTensor | UniformTensor | AffineTensor):
        raise UnsupportedError(f"kernel 'cuda' cannot lay out the format '{w.format}'")
    K = w.shape[1]
    kind, scales = _scales(w)  # [words, N, C]
    stored, padded = _stored_group(K, w.group, block)
    C = scales.shape[-1]
    blocks = -(-C * padded // block)
    padding = _padding(K, w.group, padded, blocks * block).to(w.device) if padded != w.group and C > 1 else None
    scales = scales.repeat_interleave(padded // stored, dim=-1)  # one per stored group
    groups, blocks_per_scale = (block // stored, 1) if stored < block else (1, stored // block)
    return BlockedWeight(w.planes, kind, scales, blocks, groups, blocks_per_scale, padding, padding)


def _scales(w: BCQTensor | UniformTensor | AffineTensor) -> tuple[ScaleKind, Tensor]:
    if isinstance(w, AffineTensor):
        return ScaleKind.AFFINE, torch.stack([w.scale, w.low])
    if isinstance(w, UniformTensor):
        if w.zero is None:
            return ScaleKind.UNIFORM_SYMMETRIC, w.scale[None]
        return ScaleKind.UNIFORM, torch.stack([w.scale, w.zeros().to(w.scale.dtype)])
    if w.z is None:
        return ScaleKind.BCQ_SYMMETRIC, w.alpha
    return ScaleKind.BCQ, torch.cat([w.alpha, w.z[None]])


def _stored_group(K: int, group: int, block: int) -> tuple[int, int]:
    """Return (inputs of a stored group, inputs that a group is padded to)."""
    if group >= K:  # a whole row: padding at its end costs nothing
        padded = -(-K // block) * block
        return padded, padded
    padded = -(-group // 32) * 32
    if padded % block == 0:
        return padded, padded
    return padded & -padded, padded  # the greatest power of two that divides it, 32 or more


def _padding(K: int, group: int, padded: int, inputs: int) -> Tensor:
    at = torch.arange(inputs)
    k = at // padded * group + at % padded
    return torch.where((at % padded < group) & (k < K), k, -1).to(torch.int32)


def _reordered(plane: Tensor, perm: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=plane.device)
    bits = (plane[..., None] >> shifts & 1).flatten(1)  # [N, 8 * bytes]
    bits = torch.where(perm < 0, 0, bits[:, perm.clamp(min=0).long()])
    return (bits.view(plane.shape[0], -1, 8) << shifts).sum(-1, dtype=torch.uint8)
