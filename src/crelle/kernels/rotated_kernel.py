"""Any kernel, for a matrix with rotated inputs or outputs (wrappers/rotated.py): torch rotates around it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from crelle.formats.base import QuantTensor
from crelle.formats.wrappers.hadamard import hadamard_blocks
from crelle.formats.wrappers.rotated import MAX_BLOCK, RotatedTensor, Rotation
from crelle.kernels.base import Encoded, Problem, WrappedKernel


def rotates(problem: Problem) -> str:
    """Say what RotatedKernel rotates, for a sentence about a whole step without it."""
    if problem.any_rotation:
        return f"outputs of matrices, nor inputs in blocks that are not a power of two up to {MAX_BLOCK}"
    return f"the inputs of matrices of the format '{problem.format}'"


class Rotated(NamedTuple):
    """A prepared matrix, the rotation of its inputs, and of its outputs if they are rotated."""

    rotation: Rotation
    signs: Tensor  # f32 [K], unpacked
    inner: Any
    outputs: Rotation | None
    out_signs: Tensor | None  # f32 [N]

    def __call__(self, x: Tensor) -> Tensor:
        """Return x rotated, in its dtype: sums are f32."""
        return hadamard_blocks(x.float() * self.signs, self.rotation.block).to(x.dtype)

    def undone(self, y: Tensor) -> Tensor:
        """Return y [M, N] without the rotation of outputs, in its dtype: sums are f32."""
        if self.outputs is None or self.out_signs is None:
            return y
        return (hadamard_blocks(y, self.outputs.block) * self.out_signs).to(y.dtype)


class RotatedKernel(WrappedKernel):
    """The kernel of the tensor inside, under its own name."""

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> Rotated:
        assert isinstance(w, RotatedTensor), w.format
        out_signs = None if w.outputs is None else w.outputs.signs()
        return Rotated(w.rotation, w.rotation.signs(), self.kernel.prepare(w.inner, dtype), w.outputs, out_signs)

    def encode(self, x: Tensor, prepared: Rotated) -> Encoded:
        return Encoded(self.kernel.encode(prepared(x), prepared.inner))

    def shares(self, a: Rotated, b: Rotated) -> bool:
        one, other = a.rotation, b.rotation
        same = one.packed is other.packed or (one.packed.device.type == "cpu" and one.equal(other))  # no wait for a GPU
        return same and one.block == other.block and self.kernel.shares(a.inner, b.inner)

    def run(self, x: Tensor | Encoded, prepared: Rotated) -> Tensor:
        return prepared.undone(self.kernel.run(prepared(x) if isinstance(x, Tensor) else x.data, prepared.inner))
