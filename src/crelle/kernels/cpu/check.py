"""The C++ matrix product against its fp64 oracle, on any instruction set of this machine; benchmarks check with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from crelle.errors import SchemeError, UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.grouped import GroupedTensor
from crelle.formats.two_level import TwoLevelTensor
from crelle.kernels import cpu, ops
from crelle.kernels.base import Problem
from crelle.kernels.cpu.integer_kernel import CpuInteger
from crelle.kernels.reference import matmul_fp64


@contextmanager
def instruction_set(name: str | None) -> Iterator[None]:
    """Pack weights for the given instruction set while the block runs; None: the best of this machine."""
    if name is None:
        yield
        return
    if reason := cpu.available():
        raise UnsupportedError(f"there are no instruction sets to choose from: the C++ extension {reason}")
    core = cpu.core()
    if name not in core.isas():
        raise SchemeError(f"this machine has no instruction set '{name}'; choose one of: {', '.join(core.isas())}")
    before = core.isa()
    core.set_isa(name)
    try:
        yield
    finally:
        core.set_isa(before)


def kernel_for(w: QuantTensor, precision: str) -> str:
    """Return the C++ kernel for w; the precision is that of float activations, integer ones have their own."""
    if Problem.of(w, torch.float32).activation != "float":
        return CpuInteger.name
    return "cpu" if precision == "exact" else f"cpu-{precision}"


def max_relative_error(x: Tensor, w: QuantTensor, precision: str) -> float:
    """Return the largest error of x @ W.T against fp64, relative to the largest output; the output is poisoned.

    Where activations are integers, x is first rounded to what they stand for.
    """
    prepared: Any = ops.prepare(w, torch.float32, kernel_for(w, "exact")).data.data
    y = torch.full((x.shape[0], w.shape[0]), torch.nan)
    cpu.core().matmul(x.numpy(), prepared, y.numpy(), precision)
    oracle = matmul_fp64(w.round_input(x) if isinstance(w, GroupedTensor | TwoLevelTensor) else x, w)
    return ((y - oracle).abs().max() / oracle.abs().max()).item()
