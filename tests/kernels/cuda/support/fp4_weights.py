"""Random weights of four-bit floats for the tests of their CUDA kernels."""

from dataclasses import replace
from typing import Any

import torch

from crelle.formats.base import format_of
from crelle.formats.fp4 import Fp4Tensor, Mxfp4Tensor, Nvfp4Tensor

FORMATS = (Mxfp4Tensor.format, Nvfp4Tensor.format)


def random_fp4(N: int, K: int, kind: str, device: str = "cpu", seed: int = 0, divides: bool = True) -> Fp4Tensor:
    """Return random codes and plausible scales."""
    spec: dict[str, Any] = {"format": kind, "shape": [N, K], "bits": 4, "group": 32 if kind == "mxfp4" else 16}
    spec |= {"divides": divides} if kind == "nvfp4" else {}
    w = format_of(spec).random(spec, torch.Generator(device).manual_seed(seed))
    assert isinstance(w, Fp4Tensor)
    return w


def extreme_fp4(N: int, K: int, kind: str, device: str = "cpu") -> Fp4Tensor:
    """Return all scales that the kernels keep side by side: 30 powers of two; E4M3 of both signs and 0."""
    w = random_fp4(N, K, kind, device)
    generator = torch.Generator(device).manual_seed(1)
    low, high = (98, 128) if kind == "mxfp4" else (0, 127)
    scale = torch.randint(low, high, w.scale.shape, generator=generator, dtype=torch.uint8, device=device)
    if kind == "nvfp4":
        scale |= (torch.rand(scale.shape, generator=generator, device=device) < 0.3).to(torch.uint8) << 7
    return replace(w, scale=scale)
