"""Rotary positions: pair (i, i + R/2) of a head's first R channels is rotated by position * frequency[i], in f32.

Scalings: `linear` divides all frequencies; `llama3` (Llama 3.1 and later) divides the slow ones and blends between.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.storage.io import shown
from crelle.kernels.spec import RopeSpec
from crelle.models.settings import setting

_BLOCK = 1024  # positions by which a table of angles grows


def rope_of(c: Mapping[str, Any], channels: int) -> RopeSpec:
    """Read either way of writing it: `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
    p: dict[str, Any] = setting(c, "rope_parameters") or setting(c, "rope_scaling") or {}
    if nested := [k for k, v in p.items() if isinstance(v, dict)]:
        raise UnsupportedError(f"rotary positions that differ from layer to layer ({shown(nested)}) are not supported")
    theta = setting(p if "rope_theta" in p else c, "rope_theta")
    frequency = 1.0 / theta ** (torch.arange(0, channels, 2, dtype=torch.int64).float() / channels)
    kind = setting(p, "rope_type") or setting(p, "type")
    if kind == "linear":
        frequency = frequency / setting(p, "factor")
    elif kind == "llama3":
        frequency = _llama3(frequency, p)
    elif kind != "default":
        raise UnsupportedError(f"rope scaling {shown(kind)} is not supported (default, linear, llama3 are)")
    return RopeSpec(frequency)


def angles(rope: RopeSpec, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, 1, R] for positions [T]."""
    angle = position.float()[:, None] * rope.frequency.to(position.device)  # [T, R/2]
    angle = torch.cat([angle, angle], dim=-1)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [..., T, H, D] with its first R channels rotated, for cos and sin [T, 1, R]."""
    if (R := cos.shape[-1]) < x.shape[-1]:
        return torch.cat([rotate(x[..., :R], cos, sin), x[..., R:]], dim=-1)
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class AngleTable:
    """cos and sin of all positions so far asked for, in whole blocks: a position's bits do not depend on the others."""

    def __init__(self, rope: RopeSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._rope, self._dtype, self._device = rope, dtype, device
        self._table: tuple[Tensor, Tensor] | None = None  # [positions, 1, R] each

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, 1, R] for positions [T]."""
        table = self._table  # once: another thread may put another one in its place, which need not be as long
        need = int(positions.max()) + 1
        if table is None or need > len(table[0]):
            blocks = [torch.arange(at, at + _BLOCK, device=self._device) for at in range(0, need, _BLOCK)]
            found = [angles(self._rope, block, self._dtype) for block in blocks]
            table = self._table = torch.cat([cos for cos, _ in found]), torch.cat([sin for _, sin in found])
        cos, sin = table
        return cos[positions], sin[positions]


def _llama3(frequency: Tensor, p: dict[str, Any]) -> Tensor:
    """Slow frequencies are divided by the factor, fast ones stay, those between are blended by wavelength."""
    original: int = setting(p, "original_max_position_embeddings")
    wavelength = 2 * math.pi / frequency
    low, high = setting(p, "low_freq_factor"), setting(p, "high_freq_factor")
    if not low < high:
        raise FormatError(f"'low_freq_factor' is {low:g}, which should be less than 'high_freq_factor', {high:g}")
    smooth: Tensor = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    blended: Tensor = (1 - smooth) * frequency / setting(p, "factor") + smooth * frequency
    return blended
