"""The C++ kernel for integer weights and integer activations: formats grouped and two-level, as `cpu-integer`.

The integers of x are those of crelle.formats.activations, bit by bit, and the int32 sums are exact; y differs from the
integer reference only by the rounding of f32 where sums are scaled (there: product, then sum; here: one multiply-add).
A row has the same bits in any batch.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.grouped import GroupedTensor
from crelle.formats.two_level import TwoLevelTensor
from crelle.kernels.base import Encoded, Problem
from crelle.kernels.cpu import available, core
from crelle.kernels.cpu.kernel import CpuWeight, numpy_of
from crelle.kernels.integer_reference import FORMATS

_MOST_INPUTS = 1 << 17  # products of 8 by 8 bits: more of them may not fit 32 bits
_ZERO = 8  # codes of 3 and 4 bits are laid out as q + 8


class CpuInteger:
    """Quantize x per token and group, multiply integers, scale: in C++."""

    name: ClassVar[str] = "cpu-integer"

    def supports(self, problem: Problem) -> str | None:
        if problem.format not in FORMATS:
            return f"takes weights in integer groups, not '{problem.format}'"
        if problem.device != "cpu":
            return f"runs on the CPU, the weight is on {problem.device}"
        if problem.activation == "float":
            return "takes quantized activations, not floats"
        if problem.activation.endswith("f"):
            return "takes outliers of 8 bits, not floats"
        if problem.K > _MOST_INPUTS:
            return f"takes at most {_MOST_INPUTS} inputs, which 32-bit sums hold, not {problem.K}"
        return available()

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> CpuWeight:
        if not isinstance(w, GroupedTensor | TwoLevelTensor) or w.activation is None:
            raise UnsupportedError(f"kernel '{self.name}' cannot lay out the format '{w.format}'")
        act, levels = w.activation, None
        if isinstance(w, TwoLevelTensor):
            levels = numpy_of(w.group_scale), numpy_of(w.group_zero)
        codes = w.codes()
        if codes.dtype == torch.int8:
            codes = codes.view(torch.uint8) if w.sizes.bits == 8 else (codes + _ZERO).view(torch.uint8)
        data = core().prepare_integer(
            numpy_of(codes),
            w.sizes.bits,
            min(w.sizes.group, w.sizes.K),
            numpy_of(w.scale.float().reshape(w.sizes.N, -1)),
            None if w.outliers is None else numpy_of(w.outliers),
            levels,
            None if w.perm is None else numpy_of(w.perm),
            (act.bits, min(act.group, w.sizes.K), act.outliers, float(act.clip), act.block if act.hadamard else 1),
        )
        return CpuWeight(data, "exact")

    def encode(self, x: Tensor, prepared: CpuWeight) -> Encoded:
        encoded = core().Activations()
        encoded.prepare(numpy_of(x.detach().float()), prepared.data, prepared.precision)
        return Encoded((encoded, len(x), x.dtype))

    def shares(self, a: CpuWeight, b: CpuWeight) -> bool:
        found: bool = core().same_integers(a.data, b.data)
        return found

    def run(self, x: Tensor | Encoded, prepared: CpuWeight) -> Tensor:
        N = prepared.data.shape[0]
        if isinstance(x, Tensor):
            y = torch.empty(len(x), N)
            core().matmul(numpy_of(x.detach().float()), prepared.data, y.numpy(), prepared.precision)
            return y.to(x.dtype)
        data: tuple[Any, int, torch.dtype] = x.data
        encoded, M, dtype = data
        y = torch.empty(M, N)
        encoded.matmul(prepared.data, y.numpy())
        return y.to(dtype)
