"""The CUDA kernel of integer weights and activations (grouped, two-level) as a Kernel: `cuda-integer`.

x is encoded by integer_encode.cu, once for all weights that want the same groups in the same order, and multiplied by
integer_gemm.cu: the integers are those of crelle.kernels.integer_reference, sums over groups are f32 in a fixed order.
"""

import re

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.grouped import GroupedTensor
from crelle.formats.two_level import TwoLevelTensor
from crelle.kernels import cuda
from crelle.kernels.base import Encoded, Problem
from crelle.kernels.cuda.integer.integer_encode import encode, form_of
from crelle.kernels.cuda.integer.integer_linear import CudaIntegerWeight, matmul, product
from crelle.kernels.cuda.integer.integer_x import IntegerX
from crelle.kernels.cuda.launch import on_device

_FORMATS = (GroupedTensor.format, TwoLevelTensor.format)


class CudaInteger:
    """Quantize x per token and group, multiply integers on a GPU."""

    name = "cuda-integer"

    def supports(self, problem: Problem) -> str | None:
        if problem.format not in _FORMATS:
            return f"takes weights in integer groups, not '{problem.format}'"
        if problem.device != "cuda":
            return f"runs on a GPU, the weight is on {problem.device}"
        if problem.dtype not in (torch.float16, torch.bfloat16):
            return f"takes float16 and bfloat16 activations, not {str(problem.dtype).removeprefix('torch.')}"
        return _lacks(problem) or cuda.available()

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> CudaIntegerWeight:
        from crelle.kernels.cuda.integer import integer_layout

        if not isinstance(w, GroupedTensor | TwoLevelTensor):
            raise UnsupportedError(f"kernel '{self.name}' cannot lay out the format '{w.format}'")
        return CudaIntegerWeight(w.sizes.N, integer_layout.lay_out(w), form_of(w))

    def encode(self, x: Tensor, prepared: CudaIntegerWeight) -> Encoded:
        return Encoded(_encode(x, prepared))

    def shares(self, a: CudaIntegerWeight, b: CudaIntegerWeight) -> bool:
        return a.form.shares(b.form)

    def run(self, x: Tensor | Encoded, prepared: CudaIntegerWeight) -> Tensor:
        return _matmul(x, prepared) if isinstance(x, Tensor) else _multiply(x.data, prepared)


_on_device = on_device(lambda w: w.tiles.pieces)


@_on_device
def _encode(x: Tensor, w: CudaIntegerWeight) -> IntegerX:
    return encode(x, w.form)[0]


@_on_device
def _multiply(x: IntegerX, w: CudaIntegerWeight) -> Tensor:
    return product(x, w)


_matmul = _on_device(matmul)


def _lacks(problem: Problem) -> str | None:
    """What of the groups and activations of a problem these kernels lack, or None."""
    from crelle.kernels.cuda.integer import integer_encode

    found = re.fullmatch(r"int(\d+)(h?)/(\d+)(?:\+(\d+)(f?))?", problem.activation)
    if found is None:
        return "takes quantized activations, not floats"
    if found[5]:
        return "takes outlier channels of 8 bits, not floats, which are for comparisons of quality only"
    group, apart = int(found[3]), int(found[4] or 0)
    most = max(problem.K - problem.outliers, problem.outliers)
    for size in (group, problem.group or 0):
        if size not in (32, 64) and (size == 0 or size % 128) and size < most:
            return f"takes groups of 32, 64 or a multiple of 128, not of {size}"
    if found[2] and group not in integer_encode.ROTATED_GROUPS:
        return f"rotates activations in groups of 32, 64 or 128, not of {group}"
    groups = -(-(problem.K - apart) // group) + -(-apart // group)
    if problem.K > integer_encode.MOST_PERMUTED:
        return f"takes rows of up to {integer_encode.MOST_PERMUTED} inputs, not of {problem.K}"
    return integer_encode.supports(problem.K, problem.outliers, groups)
