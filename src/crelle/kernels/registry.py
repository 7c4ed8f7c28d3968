"""Which kernel multiplies by a given weight, and why not the others.

`kernels` lists them in order of preference; the first that supports the problem is selected. A kernel that takes
the same problems as one before it is selected only by name: `cuda-lut` behind `cuda`, `cuda-mixed-async` behind
`cuda-mixed`, `cpu-int8` behind `cpu`.
"""

from collections.abc import Sequence
from functools import cache

from crelle.errors import UnsupportedError
from crelle.kernels.base import Kernel, Problem
from crelle.kernels.cpu.integer_kernel import CpuInteger
from crelle.kernels.cpu.kernel import Cpu
from crelle.kernels.cuda.fp4.fp4_kernel import CudaFp4
from crelle.kernels.cuda.integer.integer_kernel import CudaInteger
from crelle.kernels.cuda.mixed.mixed_kernel import CudaMixed
from crelle.kernels.cuda.planes.kernel import Cuda, CudaLut
from crelle.kernels.cuda.trellis.trellis_kernel import CudaTrellis
from crelle.kernels.integer_reference import IntegerReference
from crelle.kernels.permuted_kernel import PermutedKernel
from crelle.kernels.reference import Dense, Dequantized, Reference
from crelle.kernels.rotated_kernel import RotatedKernel


@cache
def kernels() -> tuple[Kernel, ...]:
    """All kernels of this installation, most preferred first."""
    return (
        Dense(),
        Cuda(),
        CudaLut(),
        CudaMixed(),
        CudaMixed(asynchronous=True),
        CudaInteger(),
        CudaTrellis(),
        CudaFp4(),
        Cpu("exact"),
        Cpu("int8"),
        CpuInteger(),
        IntegerReference(),
        Dequantized(),
        Reference(),
    )


def _for(problem: Problem, kernel: Kernel) -> Kernel:
    """Return the kernel, or one around it that has x permuted and rotated first, and y rotated."""
    rotates = getattr(kernel, "rotates", ())  # formats that the kernel takes inside `rotated`
    by_itself = problem.format in rotates and (not problem.any_rotation or getattr(kernel, "any_rotation", False))
    if problem.rotated and not by_itself:
        kernel = RotatedKernel(kernel)
    return PermutedKernel(kernel) if problem.permuted and not getattr(kernel, "permutes", False) else kernel


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
