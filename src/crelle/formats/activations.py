"""Quantized activations: what a matrix wants its input x [M, K] to be before the product; part of the matrix's spec.

The K channels come in the matrix's stored order. The first K - n lie in groups of `group` and have `bits` bits; the
last n are outliers in groups of their own, with `outlier_bits` (8; 16: as they are). A group has one scale per token:

    scale = max|x| f32(factor / top)      top = 2^(bits-1) - 1; factor: `clip`, and 1 for outliers; f32
    q     = clamp(round(x f32(1 / scale)), least, top)      half to even; least = -top - 1, and -127 at 8 bits
    x ≈ scale q

With `hadamard`, x is rotated first, in f32: blocks of 128 channels (fewer where the group is no multiple of 128, and
behind the last whole block) are multiplied by a Hadamard matrix (crelle.formats.wrappers.hadamard), outliers are not. A
large value is then shared by its block, and a few bits lose much less; the matrix's columns are stored rotated too.

All steps are single IEEE f32 operations, so every backend finds the same integers: one division per group, one
product per value. A group with scale < 2^-100 is all zeros with scale 0 (so flushing denormals changes nothing). NaN
or infinity in a group makes its scale NaN or infinite and its codes 0, so the token's whole output is NaN.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crelle.errors import FormatError
from crelle.formats.storage.io import shown
from crelle.formats.wrappers.hadamard import block_size, hadamard_blocks

BITS = (3, 4, 8)
MAX_GROUP = 1 << 17  # channels of a group, or all of a row: a scheme's group size may exceed a short row
_SMALLEST = 2.0**-100
_MOST_ROTATED = 128  # channels of a Hadamard block: kernels keep one in registers


def least_and_top(bits: int) -> tuple[int, int]:
    """Return the range of symmetric integer codes, of activations and weights: two's complement, but ±127 at 8 bits."""
    top = 2 ** (bits - 1) - 1
    return (-top if bits == 8 else -top - 1), top


def group_slices(K: int, group: int, outliers: int) -> list[slice]:
    """Return the channels of each group in stored order: no group mixes outliers with others."""
    normal = K - outliers
    ends = ((0, normal), (normal, K))
    return [slice(k, min(k + group, end)) for begin, end in ends for k in range(begin, end, group)]


def spread(scales: Tensor, K: int, group: int, outliers: int) -> Tensor:
    """Return the scale of each channel [..., K] from those of groups [..., C]; asks nothing of the CPU."""
    normal = K - outliers
    C = -(-normal // group)
    each = [(scales[..., :C], normal), (scales[..., C:], outliers)]
    return torch.cat([s.repeat_interleave(min(group, max(1, n)), -1)[..., :n] for s, n in each], -1)


class QuantizedX(NamedTuple):
    """Activations as integers; `floats` are the outlier channels where those are not quantized."""

    codes: Tensor  # int8 [M, K], in stored order; 0 in the channels of `floats`
    scales: Tensor  # f32 [M, C]
    floats: Tensor | None  # f32 [M, n]


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """Bits, groups and outlier channels of an input, and how far its range is clipped."""

    bits: int
    group: int  # K or more: one scale for a token
    outliers: int = 0
    outlier_bits: int = 8
    clip: float = 1.0
    hadamard: bool = False  # channels that are no outliers are rotated before they are rounded

    def __str__(self) -> str:
        last = "" if not self.outliers else f"+{self.outliers}" + ("f" if self.outlier_bits == 16 else "")
        return f"int{self.bits}{'h' if self.hadamard else ''}/{self.group}{last}"

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        return found if self.hadamard else {k: v for k, v in found.items() if k != "hadamard"}  # as it was before

    @classmethod
    def from_json(cls, found: Any, where: str) -> "ActivationSpec | None":
        """Read what `to_json` wrote (None: activations are not quantized); refuse all else with a sentence."""
        if found is None:
            return None
        names = [f.name for f in fields(cls)]
        if not isinstance(found, Mapping) or sorted({"hadamard", *found}) != sorted(names):
            raise FormatError(f"{where}: 'activation' should have {', '.join(names)}, got {shown(found)}")
        spec = cls(**found)
        wholes = (spec.bits, spec.group, spec.outliers, spec.outlier_bits)
        if any(type(n) is not int for n in wholes) or spec.bits not in BITS or spec.outlier_bits not in (8, 16):
            raise FormatError(
                f"{where}: activations must have 3, 4 or 8 bits, and outliers 8 or 16, got {shown(found)}"
            )
        if not isinstance(spec.hadamard, bool):
            raise FormatError(f"{where}: 'hadamard' should be true or false, got {shown(spec.hadamard)}")
        if spec.group < 1 or spec.outliers < 0:
            raise FormatError(f"{where}: groups of activations must have at least one channel, got {shown(found)}")
        if not isinstance(spec.clip, int | float) or not 0 < spec.clip <= 1:
            raise FormatError(f"{where}: 'clip' should be above 0 and at most 1, got {shown(spec.clip)}")
        return spec

    def slices(self, K: int) -> list[slice]:
        return group_slices(K, self.group, self.outliers)

    @property
    def block(self) -> int:
        """Return how many channels are rotated together; fewer behind the last whole block."""
        return min(block_size(self.group), _MOST_ROTATED)

    def rotated(self, x: Tensor) -> Tensor:
        """Return x [..., K], channels in stored order, times the Hadamard blocks, if any; it is its own inverse."""
        normal = x.shape[-1] - self.outliers
        if not self.hadamard or normal == 0:
            return x
        end = normal - normal % self.block
        parts = (hadamard_blocks(x[..., :end], self.block), hadamard_blocks(x[..., end:normal]))
        return torch.cat([*parts, x[..., normal:].to(parts[0].dtype)], -1)

    def quantize(self, x: Tensor) -> QuantizedX:
        """Return x [M, K], channels in stored order, as integers."""
        x = self.rotated(x.float())
        M, K = x.shape
        normal = K - self.outliers
        codes, scales = _groups(x[:, :normal], self.group, self.bits, self.clip)
        if not self.outliers:
            return QuantizedX(codes, scales, None)
        if self.outlier_bits == 16:
            rest = torch.zeros(M, self.outliers, dtype=torch.int8, device=x.device)
            return QuantizedX(torch.cat([codes, rest], 1), scales, x[:, normal:])
        more, its_scales = _groups(x[:, normal:], self.group, self.outlier_bits, 1.0)
        return QuantizedX(torch.cat([codes, more], 1), torch.cat([scales, its_scales], 1), None)

    def dequantize(self, q: QuantizedX) -> Tensor:
        """Return the values f32 [M, K] that the integers stand for."""
        K = q.codes.shape[1]
        if q.floats is not None:
            K -= self.outliers
            return self.rotated(torch.cat([q.codes[:, :K] * spread(q.scales, K, self.group, 0), q.floats], 1))
        return self.rotated(q.codes * spread(q.scales, K, self.group, self.outliers))

    def round(self, x: Tensor, perm: Tensor | None = None) -> Tensor:
        """Return x [..., K] as the product sees it, in x's own order of channels; straight-through gradient."""
        with torch.no_grad():
            flat = x.detach().reshape(-1, x.shape[-1])
            seen = self.dequantize(self.quantize(flat if perm is None else flat[:, perm]))
            seen = seen if perm is None else torch.empty_like(seen).index_copy_(1, perm, seen)
            seen = seen.reshape(x.shape).to(x.dtype)
        return x + (seen - x).detach() if x.requires_grad else seen


def _groups(x: Tensor, group: int, bits: int, clip: float) -> tuple[Tensor, Tensor]:
    """Quantize x [M, K] in groups of one kind: codes int8 [M, K], scales f32 [M, C]."""
    M, K = x.shape
    G = min(group, K)
    if K == 0:
        return x.to(torch.int8), x
    C = -(-K // G)
    least, top = least_and_top(bits)
    grouped = torch.nn.functional.pad(x, (0, C * G - K)).reshape(M, C, G)
    scale = grouped.abs().amax(-1) * (clip / top)  # torch rounds the factor to f32
    scale = torch.where(scale < _SMALLEST, 0.0, scale)  # NaN stays
    usable = (scale > 0) & scale.isfinite()
    inverse = torch.where(usable, scale, 1.0).reciprocal()
    codes = (grouped * inverse[..., None]).round().clamp(least, top)
    codes = torch.where(usable[..., None], codes, 0.0).to(torch.int8)
    return codes.reshape(M, C * G)[:, :K], scale
