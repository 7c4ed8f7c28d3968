"""Which kernel multiplies by a given weight, and why not the others.

A Kernel may lay a weight out anew (`prepare`, once, at load; never saved) and multiplies any number of rows with it
(`run`). It says itself what it cannot do: `supports` returns None for yes, or the sentence a user will read.
The list below is in order of preference; the first kernel that supports the problem wins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.permuted import PermutedTensor


@dataclass(frozen=True, slots=True)
class Problem:
    """y [M, N] = x [M, K] @ W.T for any M: all that a kernel's answer may depend on."""

    format: str
    N: int
    K: int
    bits: int
    group: int
    device: str  # "cpu" or "cuda"
    dtype: torch.dtype  # of x and y
    permuted: bool = False  # the inputs are put in another order first; any kernel can have that done for it

    @classmethod
    def of(cls, w: QuantTensor, dtype: torch.dtype) -> "Problem":
        N, K = w.shape
        inner = w.inner if isinstance(w, PermutedTensor) else w
        return cls(inner.format, N, K, w.bits, w.group, w.device.type, dtype, inner is not w)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        order = ", inputs permuted" if self.permuted else ""
        return f"{self.format} {self.N}x{self.K}, {self.bits} bits, group {self.group}{order}, {dtype} on {self.device}"


class Kernel(Protocol):
    """One way to multiply. Implementations hold no state: what they need travels in what `prepare` returns."""

    @property
    def name(self) -> str: ...

    def supports(self, problem: Problem) -> str | None: ...

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> Any: ...

    def run(self, x: Tensor, prepared: Any) -> Tensor:
        """Return x [M, K] @ W.T as [M, N] in x.dtype, accumulated at least in f32."""
        ...


@cache
def kernels() -> tuple[Kernel, ...]:
    """All kernels of this installation, most preferred first."""
    from crelle.kernels.cpu.kernel import Cpu
    from crelle.kernels.cuda.planes import Cuda, CudaLut
    from crelle.kernels.reference import Dense, Dequantized, Reference

    return (Dense(), Cuda(), CudaLut(), Cpu("exact"), Cpu("int8"), Dequantized(), Reference())


def _for(problem: Problem, kernel: Kernel) -> Kernel:
    from crelle.kernels.permuting import Permuting

    return Permuting(kernel) if problem.permuted and not getattr(kernel, "permutes", False) else kernel


def explain(problem: Problem, among: Sequence[Kernel] | None = None) -> list[tuple[str, str | None]]:
    """Return (kernel, reason) for every kernel: None for those that could run it."""
    return [(k.name, k.supports(problem)) for k in (kernels() if among is None else among)]


def select(problem: Problem, name: str | None = None) -> Kernel:
    """Return the kernel called `name`, or the most preferred one; an error lists every reason."""
    if name is not None:
        named = {k.name: k for k in kernels()}
        if name not in named:
            raise UnsupportedError(f"there is no kernel '{name}' here; choose one of: {', '.join(named)}")
        if reason := named[name].supports(problem):
            raise UnsupportedError(f"kernel '{name}' cannot multiply {problem}: it {reason}")
        return _for(problem, named[name])
    for kernel in kernels():
        if kernel.supports(problem) is None:
            return _for(problem, kernel)
    reasons = "; ".join(f"{who} {why}" for who, why in explain(problem))
    raise UnsupportedError(f"no kernel can multiply {problem}: {reasons}")
