"""Any kernel, for a matrix with rotated inputs (wrappers/rotated.py): torch rotates x, the kernel multiplies."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from crelle.formats.base import QuantTensor
from crelle.formats.wrappers.hadamard import hadamard_blocks
from crelle.formats.wrappers.rotated import RotatedTensor, Rotation
from crelle.kernels.base import Encoded, WrappedKernel


class Rotated(NamedTuple):
    """A prepared matrix and the rotation of its inputs."""

    rotation: Rotation
    signs: Tensor  # f32 [K], unpacked
    inner: Any

    def __call__(self, x: Tensor) -> Tensor:
        """Return x rotated, in its dtype: sums are f32."""
        return hadamard_blocks(x.float() * self.signs, self.rotation.block).to(x.dtype)


class RotatedKernel(WrappedKernel):
    """The kernel of the tensor inside, under its own name."""

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> Rotated:
        assert isinstance(w, RotatedTensor), w.format
        return Rotated(w.rotation, w.rotation.signs(), self.kernel.prepare(w.inner, dtype))

    def encode(self, x: Tensor, prepared: Rotated) -> Encoded:
        return Encoded(self.kernel.encode(prepared(x), prepared.inner))

    def shares(self, a: Rotated, b: Rotated) -> bool:
        one, other = a.rotation, b.rotation
        same = one.packed is other.packed or (one.packed.device.type == "cpu" and one.equal(other))  # no wait for a GPU
        return same and one.block == other.block and self.kernel.shares(a.inner, b.inner)

    def run(self, x: Tensor | Encoded, prepared: Rotated) -> Tensor:
        return self.kernel.run(prepared(x) if isinstance(x, Tensor) else x.data, prepared.inner)
