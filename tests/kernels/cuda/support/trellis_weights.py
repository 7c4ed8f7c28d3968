"""Random trellis weights for the tests of their CUDA kernels."""

import torch

from crelle.formats.base import format_of
from crelle.formats.trellis import BITS, CODES, TrellisTensor
from crelle.formats.wrappers.rotated import RotatedTensor

KINDS = [(c.name, bits) for c in CODES.values() for bits in BITS if not (c.weights * bits) % 1]


def random_trellis(
    N: int, K: int, code: str, bits: float, block: int = 0, device: str = "cpu", seed: int = 0
) -> TrellisTensor | RotatedTensor:
    """Return random codes and scales; block: of a rotation, 0 for none."""
    generator = torch.Generator(device).manual_seed(seed)
    inner = {"format": "trellis", "shape": [N, K], "bits": bits, "code": code}
    spec = {"format": "rotated", "shape": [N, K], "block": block, "inner": inner} if block else inner
    w = format_of(spec).random(spec, generator)
    scale = next(iter(w.scales().values()))
    varied = scale * (0.5 + torch.rand(N, generator=generator, device=device))
    return w.with_scales({"scale": varied.half()})
