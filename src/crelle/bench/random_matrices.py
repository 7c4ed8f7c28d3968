"""Random weights straight in a quantized form: the bytes of a scheme without the time of its quantizer.

    codes    uniform: each bit of each plane is drawn by itself
    scales   such that a weight has the standard deviation 1/sqrt(K), and differ from group to group as real ones do

What comes out has the format, shape and bytes that the scheme's `fit` gives, so its speed is the scheme's speed.
"""

import math

import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.formats.affine import AffineTensor, NestedTensor
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import BCQTensor, UniformTensor, groups_in
from crelle.formats.dense import DenseTensor
from crelle.formats.packing import pack_stream
from crelle.quantizers.auto import Auto
from crelle.quantizers.awq import AWQ
from crelle.quantizers.bcq import BCQ
from crelle.quantizers.gptq import GPTQ
from crelle.quantizers.hbcq import HBCQ
from crelle.quantizers.nested import Nested
from crelle.quantizers.rtn import RTN
from crelle.quantizers.scheme import Grid, Quantizer, Store

_OFF_CENTRE = 0.1  # how far a group's mean is from zero, in standard deviations


def random_generator(seed: int, device: torch.device | str) -> torch.Generator:
    """Return a generator that draws on the device."""
    return torch.Generator(device).manual_seed(seed)


def random_matrix(scheme: Quantizer, N: int, K: int, random: torch.Generator) -> QuantTensor:
    """Return a matrix [N, K] as the scheme would store it, on the generator's device."""
    if isinstance(scheme, Auto):  # the same grid everywhere, as without its search
        scheme = scheme.grid_for(K)
    if isinstance(scheme, Store):
        weight = torch.randn(N, K, generator=random, dtype=scheme.DTYPES[scheme.name], device=random.device)
        return DenseTensor(weight.mul_(K**-0.5))
    if not isinstance(scheme, Grid):
        raise SchemeError(f"random weights cannot follow the scheme '{scheme}'; it takes them from a source")
    draw = _Draw(scheme.bits, N, K, scheme.group_for(K), random)
    if isinstance(scheme, BCQ | HBCQ):
        return draw.bcq(scheme.bias)
    if isinstance(scheme, Nested):
        return draw.nested(scheme.precisions)
    if isinstance(scheme, GPTQ) and scheme.free:
        return draw.affine()
    if isinstance(scheme, RTN | GPTQ | AWQ):
        return draw.uniform(getattr(scheme, "symmetric", False))
    raise SchemeError(f"random weights in the form of the scheme '{scheme}' are not known here")


class _Draw:
    """Draws the parts of one matrix: P planes, N outputs, K inputs, C groups of G."""

    def __init__(self, P: int, N: int, K: int, G: int, random: torch.Generator) -> None:
        self.P, self.N, self.K, self.G, self.C, self.random = P, N, K, G, groups_in(K, G), random
        self.std = 1 / math.sqrt(K)

    def bcq(self, bias: bool) -> BCQTensor:
        """Alphas halve from plane to plane, as those of real weights roughly do."""
        place = torch.tensor([2.0**-p for p in range(self.P)], device=self.random.device)
        place *= self.std / place.square().sum().sqrt()
        alpha = (place[:, None, None] * self._jitter(self.P, self.N, self.C)).half()
        return BCQTensor(self._planes(), self.K, self.G, alpha, self._off_centre().half() if bias else None)

    def uniform(self, symmetric: bool) -> UniformTensor:
        """Zero points are one of the two codes in the middle."""
        scale = (self._step(self.P) * self._jitter(self.N, self.C)).half()
        if symmetric:
            return UniformTensor(self._planes(), self.K, self.G, scale, None)
        middle = 1 << (self.P - 1)
        zero = torch.randint(middle - 1, middle + 1, (self.N, self.C), generator=self.random, device=scale.device)
        return UniformTensor(self._planes(), self.K, self.G, scale, pack_stream(zero, self.P))

    def affine(self) -> AffineTensor:
        scale, low = self._grid(self.P)
        return AffineTensor(self._planes(), self.K, self.G, scale, low)

    def nested(self, precisions: tuple[int, ...]) -> NestedTensor:
        grids = [self._grid(p) for p in precisions]
        scale, low = (torch.stack(parts) for parts in zip(*grids, strict=True))  # [precisions, N, C]
        return NestedTensor(self._planes(), self.K, self.G, scale, low, precisions)

    def _planes(self) -> Tensor:
        shape = (self.P, self.N, -(-self.K // 8))
        planes = torch.randint(256, shape, generator=self.random, dtype=torch.uint8, device=self.random.device)
        if self.K % 8:
            planes[..., -1] &= (1 << self.K % 8) - 1  # bits beyond K are 0
        return planes

    def _step(self, bits: int) -> float:
        """The distance of two levels at which codes drawn uniformly have our standard deviation."""
        return self.std / math.sqrt((4**bits - 1) / 12)

    def _grid(self, bits: int) -> tuple[Tensor, Tensor]:
        scale = self._step(bits) * self._jitter(self.N, self.C)
        low = self._off_centre() - scale * ((2**bits - 1) / 2)
        return scale.half(), low.half()

    def _jitter(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random, device=self.random.device).mul_(0.4).add_(0.8)

    def _off_centre(self) -> Tensor:
        shape = (self.N, self.C)
        return torch.randn(shape, generator=self.random, device=self.random.device).mul_(_OFF_CENTRE * self.std)
