"""What a kernel is: a Problem that it answers for, and prepare, encode and run.

    prepared = kernel.prepare(w, dtype)         once at load: the weight in the kernel's own layout, never saved
    encoded = kernel.encode(x, prepared)        once per input: x in the form that the kernel multiplies
    y = kernel.run(encoded, prepared)           for every weight that shares it (`shares`): q, k and v; gate and up

A kernel says itself what it cannot do: `supports` returns None for yes, or the sentence a user will read.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from crelle.formats.base import QuantTensor
from crelle.formats.grouped import GroupedTensor
from crelle.formats.two_level import TwoLevelTensor
from crelle.formats.wrappers.composite import PermutedTensor
from crelle.formats.wrappers.rotated import RotatedTensor


@dataclass(frozen=True, slots=True)
class Problem:
    """y [M, N] = x [M, K] @ W.T for any M: all that a kernel's answer may depend on."""

    format: str
    N: int
    K: int
    bits: float  # of a code; the average where they differ
    group: int | None  # None where group sizes differ
    device: str  # "cpu" or "cuda"
    dtype: torch.dtype  # of x and y
    permuted: bool = False  # the weight's columns are permuted; any kernel can have x permuted for it
    activation: str = "float"  # of x as it is multiplied: "float" (of dtype), or an ActivationSpec
    outliers: int = 0  # input channels at the end that have bits of their own (formats grouped, two-level)
    code_bits: int | None = None  # of the other channels, there
    rotated: bool = False  # the format is of a matrix whose inputs are rotated; any kernel can have x rotated for it
    any_rotation: bool = False  # in blocks that few kernels rotate (Rotation.simple), or the outputs are rotated, too

    @classmethod
    def of(cls, w: QuantTensor, dtype: torch.dtype) -> "Problem":
        N, K = w.shape
        ordered = w.inner if isinstance(w, PermutedTensor) else w
        inner, rotated, any_rotation = ordered, False, False
        if isinstance(ordered, RotatedTensor):
            inner, rotated = ordered.inner, True
            any_rotation = not ordered.rotation.simple or ordered.outputs is not None
        activation = getattr(inner, "activation", None)  # an ActivationSpec, where the format has one
        x = "float" if activation is None else str(activation)
        outliers, code_bits = 0, None
        if isinstance(inner, GroupedTensor | TwoLevelTensor):
            outliers, code_bits = inner.sizes.outliers, inner.sizes.bits
        device, permuted = w.device.type, ordered is not w
        sizes = inner.format, N, K, w.bits, w.group
        return cls(*sizes, device, dtype, permuted, x, outliers, code_bits, rotated, any_rotation)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        perm = (", inputs permuted" if self.permuted else "") + (", inputs rotated" if self.rotated else "")
        act = "" if self.activation == "float" else f", {self.activation} activations"
        group = "several group sizes" if self.group is None else f"group {self.group}"
        what = f"{self.format} {self.N}x{self.K}, {self.bits:g} bits, {group}"
        return f"{what}{perm}{act}, {dtype} on {self.device}"


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """An input in the form in which a kernel multiplies it; serves every weight that `Kernel.shares` says."""

    data: Any  # the kernel's own: x itself, BitSerialX, PackedX, …
    weight: "Prepared | None" = None  # that it was encoded for (ops.encode)
    lead: tuple[int, ...] = ()  # x was [*lead, K]


class Kernel(Protocol):
    """One way to multiply. Implementations hold no state: what they need travels in what `prepare` returns."""

    @property
    def name(self) -> str: ...

    def supports(self, problem: Problem) -> str | None: ...

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> Any: ...

    def encode(self, x: Tensor, prepared: Any) -> Encoded:
        """Return x [M, K] in the form that `run` multiplies."""
        ...

    def shares(self, a: Any, b: Any) -> bool:
        """Whether an input encoded for the prepared weight `a` serves `b` too; both have as many inputs."""
        ...

    def run(self, x: Tensor | Encoded, prepared: Any) -> Tensor:
        """Return x [M, K] @ W.T as [M, N] in x.dtype, accumulated at least in f32; a Tensor is encoded on the way."""
        ...


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Prepared:
    """A weight in the layout of the kernel that was chosen for it."""

    problem: Problem
    kernel: Kernel
    data: Any


class FloatInput:
    """Mixin of the kernels that multiply x as it is: to encode is to do nothing."""

    def encode(self, x: Tensor, prepared: Any) -> Encoded:
        return Encoded(x)

    def shares(self, a: Any, b: Any) -> bool:
        return True


def floats(x: Tensor | Encoded) -> Tensor:
    """Return x itself, encoded by FloatInput or not."""
    return x if isinstance(x, Tensor) else x.data


def takes_floats(problem: Problem) -> str | None:
    """Return None, or that a kernel without quantized activations cannot multiply them."""
    return None if problem.activation == "float" else f"takes float activations, not '{problem.activation}'"


class WrappedKernel:
    """Base of the kernels that change x for another one, under its name: for formats that wrap a format."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    @property
    def name(self) -> str:
        return self.kernel.name

    def supports(self, problem: Problem) -> str | None:
        return self.kernel.supports(problem)
