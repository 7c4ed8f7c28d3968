"""Rotary positions: pair (i, i + R/2) of a head's first R channels is rotated by position * frequency[i], in f32.

Scalings: `linear` divides all frequencies; `llama3` (Llama 3.1 and later) and `yarn` (arXiv 2309.00071) divide the slow
ones and blend between; `longrope` (arXiv 2402.13753) has a divisor for each, of which there is a second list for long
sequences: keys of one list cannot be read by queries of the other, so that only the short one and its context are used.
`dynamic` changes nothing within the context.
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

_LONG = ("longrope", "su")
_BLOCK = 1024  # positions by which a table of angles grows


def rope_of(c: Mapping[str, Any], channels: int, interleaved: bool = False) -> RopeSpec:
    """Read either way of writing it: `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
    p = parameters(c)
    if nested := [k for k, v in p.items() if isinstance(v, dict)]:
        raise UnsupportedError(f"rotary positions that differ from layer to layer ({shown(nested)}) are not supported")
    theta = setting(p if "rope_theta" in p else c, "rope_theta")
    frequency = 1.0 / theta ** (torch.arange(0, channels, 2, dtype=torch.int64).float() / channels)
    kind, attention_factor = setting(p, "rope_type") or setting(p, "type"), 1.0
    if kind == "linear":
        frequency = frequency / setting(p, "factor")
    elif kind == "llama3":
        frequency = _llama3(frequency, p)
    elif kind == "yarn":
        frequency, attention_factor = _yarn(frequency, theta, c, p)
    elif kind in _LONG:
        frequency, attention_factor = _longrope(frequency, c, p)
    elif kind == "dynamic":
        setting(p, "factor")  # of longer sequences than the context, which do not occur here
    elif kind != "default":
        raise UnsupportedError(
            f"rope scaling {shown(kind)} is not supported (default, linear, dynamic, llama3, yarn, longrope are)"
        )
    return RopeSpec(frequency, interleaved, attention_factor)


def parameters(c: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config says about rope, by keys of its own or in the config itself."""
    return setting(c, "rope_parameters") or setting(c, "rope_scaling") or {}


def rotated_channels(c: Mapping[str, Any], head_size: int, share: float = 1.0) -> int:
    """Return how many channels of a head are rotated; share: the family's default."""
    p = parameters(c)
    channels = int(head_size * setting(p if "partial_rotary_factor" in p else c, "partial_rotary_factor", share))
    if channels < 2 or channels % 2:
        raise FormatError(
            f"'partial_rotary_factor' rotates {channels} of a head's {head_size} channels, which should be an even "
            "number of at least 2"
        )
    return channels


def context_of(c: Mapping[str, Any]) -> int:
    """Return the tokens that a model takes; with longrope, those for which its short factors were made."""
    p, context = parameters(c), int(setting(c, "max_position_embeddings"))
    long = (setting(p, "rope_type") or setting(p, "type")) in _LONG
    return min(context, _original(c, p)) if long else context


def angles(rope: RopeSpec, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, 1, R] for positions [T]."""
    angle = position.float()[:, None] * rope.frequency.to(position.device)  # [T, R/2]
    angle = torch.cat([angle, angle], dim=-1)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def halves(rope: RopeSpec, heads: int, head_size: int) -> Tensor | None:
    """Return the order of rows that makes interleaved pairs those of the other kind; None where they are."""
    if not rope.interleaved:
        return None
    head = torch.arange(head_size)
    head[: rope.channels] = torch.cat([torch.arange(first, rope.channels, 2) for first in (0, 1)])
    return (head_size * torch.arange(heads)[:, None] + head).flatten()


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


def _original(c: Mapping[str, Any], p: dict[str, Any]) -> int:
    """Return the context of the model before its ropes were scaled; Phi-3 has it outside of the parameters."""
    where = p if "original_max_position_embeddings" in p else c
    found: int = setting(where, "original_max_position_embeddings", setting(c, "max_position_embeddings"))
    return found


def _yarn(frequency: Tensor, theta: float, c: Mapping[str, Any], p: dict[str, Any]) -> tuple[Tensor, float]:
    """Channels that turn often within the original context stay, those that turn once or less are divided."""
    half, original = len(frequency), _original(c, p)
    factor = setting(p, "factor", setting(c, "max_position_embeddings") / original)

    def channel(turns: float) -> float:
        """Return the channel that turns so often within the original context."""
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    fast, slow = setting(p, "beta_fast"), setting(p, "beta_slow")
    if theta == 1 or not slow < fast:
        raise FormatError(
            f"yarn needs 'beta_slow' < 'beta_fast' and 'rope_theta' > 1, got {slow:g}, {fast:g}, {theta:g}"
        )
    low, high = channel(fast), channel(slow)
    if setting(p, "truncate"):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    divided = ((torch.arange(half) - low) / ((high - low) or 1e-3)).clamp(0, 1)
    return frequency / factor * divided + frequency * (1 - divided), _yarn_attention_factor(factor, p)


def _yarn_attention_factor(factor: float, p: dict[str, Any]) -> float:
    if (told := setting(p, "attention_factor")) is not None:
        return float(told)

    def of(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, every = setting(p, "mscale"), setting(p, "mscale_all_dim")
    return of(mscale) / of(every) if mscale and every else of(1.0)


def _longrope(frequency: Tensor, c: Mapping[str, Any], p: dict[str, Any]) -> tuple[Tensor, float]:
    """A divisor for each frequency; the factor of cos and sin grows with the longest context."""
    short = setting(p, "short_factor")
    if len(short) != len(frequency) or not all(type(x) in (int, float) and 1e-3 <= x <= 1e6 for x in short):
        raise FormatError(
            f"'short_factor' should be {len(frequency)} numbers from 0.001 to 1,000,000, one for each rotary "
            f"frequency, but is {shown(short)}"
        )
    original = _original(c, p)
    factor = setting(p, "factor", setting(c, "max_position_embeddings") / original)
    told = setting(p, "attention_factor")
    if told is None:
        told = math.sqrt(1 + math.log(factor) / math.log(max(original, 2))) if factor > 1 else 1.0
    return frequency / torch.tensor(short, dtype=torch.float32), float(told)
