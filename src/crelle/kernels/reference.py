"""Readable torch kernels: the oracle of every other kernel, and the last resort.

dense        a weight that is not quantized, as it is
dequantized  quantized weights dequantized once, at load: quick anywhere, 2 or 4 bytes a weight
reference    dequantized at every call, a slab of rows at a time: small, slow, plain

They know a weight by the hooks of crelle.formats.base alone, so they run every format.
"""

from typing import ClassVar

import torch
from torch import Tensor

from crelle.formats import builtin  # noqa: F401  # registers the formats
from crelle.formats.base import QuantTensor, format_of
from crelle.kernels.base import Encoded, FloatInput, Problem, floats, takes_floats

_SLAB = 1 << 22  # weights that `reference` holds dequantized at one time


def matmul_fp64(x: Tensor, w: QuantTensor) -> Tensor:
    """Return x @ W.T in f64: what every kernel is measured against."""
    return x.double() @ w.dequantize(torch.float64).T


def _quantized(problem: Problem) -> bool:
    return format_of({"format": problem.format}).quantized


class Dense(FloatInput):
    """Multiply by a plain matrix."""

    name: ClassVar[str] = "dense"

    def supports(self, problem: Problem) -> str | None:
        if _quantized(problem):
            return f"takes plain matrices only, not '{problem.format}'"
        return takes_floats(problem)

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> Tensor:
        return w.dequantize(dtype)

    def run(self, x: Tensor | Encoded, prepared: Tensor) -> Tensor:
        return torch.nn.functional.linear(floats(x), prepared)


class Dequantized(Dense):
    """Multiply by the dequantized weight, computed once."""

    name: ClassVar[str] = "dequantized"

    def supports(self, problem: Problem) -> str | None:
        return takes_floats(problem) if problem.format != "dense" else "has nothing to dequantize in a plain matrix"


class Reference(FloatInput):
    """Dequantize a slab of rows, multiply, free it, take the next."""

    name: ClassVar[str] = "reference"

    def supports(self, problem: Problem) -> str | None:
        return takes_floats(problem)

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> QuantTensor:
        return w

    def run(self, x: Tensor | Encoded, prepared: QuantTensor) -> Tensor:
        x = floats(x)
        N, K = prepared.shape
        step = max(1, _SLAB // K)
        wide = torch.promote_types(x.dtype, torch.float32)
        slabs = [x.to(wide) @ prepared.rows(slice(n, n + step)).dequantize(wide).T for n in range(0, N, step)]
        return torch.cat(slabs, dim=-1).to(x.dtype)
