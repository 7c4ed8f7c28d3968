"""Rotary positions: pair (i, i + D/2) of a head is turned by position * theta^(-2i/D), always computed in f32.

Scalings: `linear` divides all frequencies; `llama3` (Llama 3.1 and later) divides the slow ones and blends between.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from crelle.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of a model, found once from its config."""

    frequency: Tensor = field(repr=False)  # f32 [D/2], radians per position

    @classmethod
    def from_hf(cls, c: dict[str, Any], head_size: int) -> Self:
        """Read either way of writing it: `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
        p: dict[str, Any] = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
        theta = p.get("rope_theta", c.get("rope_theta", 10000.0))
        frequency = 1.0 / theta ** (torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size)
        kind = p.get("rope_type", p.get("type", "default"))
        if kind == "linear":
            frequency = frequency / p["factor"]
        elif kind == "llama3":
            frequency = _llama3(frequency, p)
        elif kind != "default":
            raise UnsupportedError(f"rope scaling '{kind}' is not supported (default, linear, llama3 are)")
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
    original: float = p["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequency
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    smooth: Tensor = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    blended: Tensor = (1 - smooth) * frequency / p["factor"] + smooth * frequency
    return blended
