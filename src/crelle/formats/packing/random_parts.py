"""Random parts of quantized matrices: the bytes of a format without the time of a quantizer.

codes    uniform: every bit of every plane is sampled independently
scales   such that a weight has the standard deviation 1/sqrt(K); they vary from group to group as real ones do
"""

import math

import torch
from torch import Tensor

_OFFSET = 0.1  # standard deviation of a group's mean, in standard deviations of a weight


class RandomParts:
    """Samples the parts of one matrix: N outputs, K inputs, C groups."""

    def __init__(self, N: int, K: int, C: int, generator: torch.Generator) -> None:
        self.N, self.K, self.C, self.generator = N, K, C, generator
        self.std = 1 / math.sqrt(K)

    def planes(self, P: int) -> Tensor:
        """Return bit-planes uint8 [P, N, ceil(K/8)]."""
        shape, device = (P, self.N, -(-self.K // 8)), self.generator.device
        planes = torch.randint(256, shape, generator=self.generator, dtype=torch.uint8, device=device)
        if self.K % 8:
            planes[..., -1] &= (1 << self.K % 8) - 1  # bits beyond K are 0
        return planes

    def step(self, bits: int) -> float:
        """Return the distance of two levels at which uniformly distributed codes have our standard deviation."""
        return self.std / math.sqrt((4**bits - 1) / 12)

    def grid(self, bits: int) -> tuple[Tensor, Tensor]:
        """Return scale and lowest level f16 [N, C] of a uniform grid."""
        scale = self.step(bits) * self.jitter(self.N, self.C)
        low = self.offset() - scale * ((2**bits - 1) / 2)
        return scale.half(), low.half()

    def jitter(self, *shape: int) -> Tensor:
        """Return factors between 0.8 and 1.2."""
        return torch.rand(shape, generator=self.generator, device=self.generator.device).mul_(0.4).add_(0.8)

    def offset(self) -> Tensor:
        """Return the mean of each group, f32 [N, C]."""
        sampled = torch.randn((self.N, self.C), generator=self.generator, device=self.generator.device)
        return sampled.mul_(_OFFSET * self.std)
