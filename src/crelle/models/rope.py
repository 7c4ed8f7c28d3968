"""Rotary positions: pair (i, i + D/2) of a head is turned by position * theta^(-2i/D), always computed in f32.

Scalings: `linear` divides all frequencies; `llama3` (Llama 3.1 and later) divides the slow ones and blends between.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.io import shown
from crelle.models.settings import setting


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of a model, found once from its config."""

    frequency: Tensor = field(repr=False)  # f32 [D/2], radians per position

    @classmethod
    def from_hf(cls, c: dict[str, Any], head_size: int) -> Self:
        """Read either way of writing it: `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
        p: dict[str, Any] = setting(c, "rope_parameters") or setting(c, "rope_scaling") or {}
        if nested := [k for k, v in p.items() if isinstance(v, dict)]:
            raise UnsupportedError(
                f"rotary positions that differ from layer to layer ({shown(nested)}) are not supported"
            )
        theta = setting(p if "rope_theta" in p else c, "rope_theta")
        frequency = 1.0 / theta ** (torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size)
        kind = setting(p, "rope_type") or setting(p, "type")
        if kind == "linear":
            frequency = frequency / setting(p, "factor")
        elif kind == "llama3":
            frequency = _llama3(frequency, p)
        elif kind != "default":
            raise UnsupportedError(f"rope scaling {shown(kind)} is not supported (default, linear, llama3 are)")
        return cls(frequency)

    def angles(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, 1, D] for positions [T]."""
        turn = position.float()[:, None] * self.frequency.to(position.device)  # [T, D/2]
        turn = torch.cat([turn, turn], dim=-1)[:, None]
        return turn.cos().to(dtype), turn.sin().to(dtype)

    @staticmethod
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x [B, T, H, D] rotated."""
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], dim=-1) * sin


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
