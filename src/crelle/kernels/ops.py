"""The only door to the kernels: `prepare` a weight once, then `matmul` with it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.kernels.select import Kernel, Problem, select


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A weight in the layout of the kernel that was chosen for it."""

    problem: Problem
    kernel: Kernel
    data: Any


def prepare(w: QuantTensor, dtype: torch.dtype, kernel: str | None = None) -> Prepared:
    """Choose a kernel for w (or take the named one) and let it lay the weight out."""
    problem = Problem.of(w, dtype)
    chosen = select(problem, kernel)
    return Prepared(problem, chosen, chosen.prepare(w, dtype))


def matmul(x: Tensor, w: Prepared) -> Tensor:
    """Return x [..., K] @ W.T as [..., N], in x.dtype, accumulated at least in f32."""
    if x.shape[-1] != w.problem.K:
        raise UnsupportedError(f"x has {x.shape[-1]} inputs, the weight takes {w.problem.K}")
    y = w.kernel.run(x.reshape(-1, w.problem.K), w.data)  # [M, N]
    return y.reshape(*x.shape[:-1], w.problem.N)
