"""Round to nearest on four-bit floats (crelle.formats.fp4).

    mxfp4   step = 2^e, e the exponent of max|w| less 2, or one more: whichever leaves the smaller squared error
    nvfp4   global scale = 448 * 6 / max|w| of the matrix; step = max|w| of the group / 6, as an 8-bit float
Ties go to the even code.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.base import Spec
from crelle.formats.fp4 import E4M3, LEVELS, Fp4Tensor, Mxfp4Tensor, Nvfp4Tensor
from crelle.quantizers.base import Group, GroupedConfig
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.solvers.grouping import TINY, from_groups, require_finite, row_slabs, to_groups

_TOP, _TOP_SCALE = LEVELS[-1], 448.0


@dataclass(frozen=True, slots=True)
class _FP4(GroupedConfig):
    """Base of both; bits and group are the format's."""

    made: ClassVar[type[Fp4Tensor]]
    bits: int = 4
    group: Group = 32

    def __post_init__(self) -> None:
        if (self.bits, self.group) != (4, self.made.size):
            raise SchemeError(
                f"{self.scheme} has 4 bits in groups of {self.made.size}, got bits={self.bits},group={self.group}"
            )

    def group_for(self, K: int) -> int:
        return self.made.size

    def storage(self, shape: tuple[int, int]) -> Spec:
        return {**self.format_settings(), "shape": list(shape), "bits": self.bits, "group": self.made.size}

    def format_settings(self) -> Spec:
        return {"format": self.made.format}


@dataclass(frozen=True, slots=True)
class MXFP4(_FP4):
    """Four-bit floats whose groups of 32 share a power of two."""

    scheme: ClassVar[str] = "mxfp4"
    made: ClassVar[type[Fp4Tensor]] = Mxfp4Tensor

    def fit(self, weight: Tensor, stats: Stats | None = None) -> Mxfp4Tensor:
        """Return the weight [N, K] on its grid."""
        weight = require_finite(weight)
        N, K = weight.shape
        parts = [self._fit_rows(weight[rows].float()) for rows in row_slabs(N, K, weight.device)]
        codes, scale = (torch.cat(t) for t in zip(*parts, strict=True))
        return Mxfp4Tensor(packed(codes), K, scale)

    def _fit_rows(self, w: Tensor) -> tuple[Tensor, Tensor]:
        g, _ = to_groups(w, Mxfp4Tensor.size)  # [N, C, G]
        least = g.abs().amax(-1).clamp(min=TINY).log2().floor() - 2
        tried = []
        for exponent in (least, least + 1):
            stored = exponent.clamp(-127, 127)
            step = torch.ldexp(torch.ones_like(stored), stored.int()).unsqueeze(-1)
            codes = nearest(g / step)
            tried.append((codes, stored, (values(codes) * step - g).square().sum(-1)))
        (a, low, error), (b, high, other) = tried
        up = other < error
        codes = torch.where(up.unsqueeze(-1), b, a)
        return from_groups(codes, w.shape[1]), (torch.where(up, high, low) + 127).to(torch.uint8)


@dataclass(frozen=True, slots=True)
class NVFP4(_FP4):
    """Four-bit floats whose groups of 16 share an 8-bit float, and all of a matrix one f32."""

    scheme: ClassVar[str] = "nvfp4"
    made: ClassVar[type[Fp4Tensor]] = Nvfp4Tensor
    group: Group = 16

    def format_settings(self) -> Spec:
        return {"format": Nvfp4Tensor.format, "divides": True}

    def fit(self, weight: Tensor, stats: Stats | None = None) -> Nvfp4Tensor:
        """Return the weight [N, K] on its grid."""
        weight = require_finite(weight)
        N, K = weight.shape
        whole = (_TOP_SCALE * _TOP / weight.abs().amax().float().clamp(min=1e-30)).reshape(1)
        parts = []
        for rows in row_slabs(N, K, weight.device):
            g, _ = to_groups(weight[rows].float(), Nvfp4Tensor.size)
            scale = (g.abs().amax(-1) / _TOP * whole).clamp(max=_TOP_SCALE).to(E4M3)
            codes = nearest(g / (scale.float() / whole).clamp(min=TINY).unsqueeze(-1))
            parts.append((from_groups(codes, K), scale))
        return Nvfp4Tensor(
            packed(torch.cat([c for c, _ in parts])), K, torch.cat([s for _, s in parts]).view(torch.uint8), whole
        )


def nearest(w: Tensor) -> Tensor:
    """Return the codes uint8 of the nearest values."""
    a = w.abs()
    code = torch.zeros_like(a, dtype=torch.uint8)
    for i, (low, high) in enumerate(pairwise(LEVELS)):
        middle = (low + high) / 2
        code += (a >= middle) if i % 2 else (a > middle)  # to the even one of codes i and i + 1
    return code + ((w < 0) & (code > 0)).to(torch.uint8) * 8


def values(codes: Tensor) -> Tensor:
    """Return what codes stand for, f32."""
    return torch.tensor([*LEVELS, *(-level for level in LEVELS)], device=codes.device)[codes.int()]


def packed(codes: Tensor) -> Tensor:
    """Return two codes a byte, [N, ceil(K/2)]."""
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, 0::2] | codes[:, 1::2] << 4
