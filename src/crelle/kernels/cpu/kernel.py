"""The C++ kernels as two Kernels, `cpu` and `cpu-int8`: bit-plane, mixed and trellis tensors in their own layout.

Four-bit floats are multiplied as integers of 5 bits, which hold twice their values. Trellis tensors may have rotated
inputs and outputs: x is rotated when it is encoded, y when all of it is there.

precision  what x is rounded to, per 128 inputs*  error against f64 (Gaussian x, 4096 inputs)
exact      16 bits                                about 3e-5; the default
int8       8 bits                                 about 7e-3; up to twice as fast where the weights are in cache

* trellis: per up to 40 inputs
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.formats.fp4 import Fp4Tensor, Mxfp4Tensor, Nvfp4Tensor
from crelle.formats.mixed import MixedTensor
from crelle.formats.trellis import TrellisTensor
from crelle.formats.wrappers.hadamard import paley_matrix, paley_order
from crelle.formats.wrappers.rotated import RotatedTensor, Rotation
from crelle.kernels.base import Encoded, FloatInput, Prepared, Problem, floats, takes_floats
from crelle.kernels.cpu import available, core

Precision = Literal["exact", "int8"]
_ROW_BY_ROW = tuple(t.format for t in (BCQTensor, UniformTensor, AffineTensor))
_FORMATS = tuple(
    t.format for t in (BCQTensor, UniformTensor, AffineTensor, MixedTensor, TrellisTensor, Mxfp4Tensor, Nvfp4Tensor)
)


@dataclass(frozen=True, slots=True, eq=False)
class CpuWeight:
    """A prepared matrix and the precision to multiply by it in."""

    data: Any  # crelle.kernels.cpu._core.Weight
    precision: Precision


class Cpu(FloatInput):
    """Multiply by bit-plane, mixed and trellis tensors with the C++ kernels."""

    rotates: ClassVar[tuple[str, ...]] = (TrellisTensor.format,)
    any_rotation: ClassVar[bool] = True

    def __init__(self, precision: Precision = "exact") -> None:
        self.precision = precision
        self.name = "cpu" if precision == "exact" else f"cpu-{precision}"

    def supports(self, problem: Problem) -> str | None:
        if problem.format not in _FORMATS:
            names = ", ".join(f"'{name}'" for name in _FORMATS)
            return f"takes the formats {names}, not '{problem.format}'"
        if problem.device != "cpu":
            return f"runs on the CPU, the weight is on {problem.device}"
        if problem.group is None or (problem.group % 8 and problem.group != problem.K):
            return f"needs a group that is a multiple of 8 or the whole row, got {problem.group}"
        return takes_floats(problem) or available()

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> CpuWeight:
        if isinstance(w, MixedTensor):
            return CpuWeight(_mixed(w), self.precision)
        if isinstance(w, TrellisTensor | RotatedTensor):
            return CpuWeight(_trellis(w), self.precision)
        if isinstance(w, Fp4Tensor):
            w = w.as_uniform()
        planes = numpy_of(getattr(w, "planes", torch.empty(0)))
        if isinstance(w, BCQTensor):
            z = None if w.z is None else numpy_of(w.z.float())
            data = core().prepare_bcq(planes, w.K, w.group, numpy_of(w.alpha.float()), z)
        elif isinstance(w, UniformTensor):
            zero = None if w.zero is None else numpy_of(w.zeros())
            data = core().prepare_uniform(planes, w.K, w.group, numpy_of(w.scale.float()), zero)
        elif isinstance(w, AffineTensor):
            data = core().prepare_affine(planes, w.K, w.group, numpy_of(w.scale.float()), numpy_of(w.low.float()))
        else:
            raise UnsupportedError(f"kernel 'cpu' cannot lay out the format '{w.format}'")
        return CpuWeight(data, self.precision)

    def run(self, x: Tensor | Encoded, prepared: CpuWeight) -> Tensor:
        return multiply(floats(x), prepared)


def multiply(x: Tensor, w: CpuWeight) -> Tensor:
    """Return x [M, K] @ W.T as [M, N] in x.dtype: C++ widens and rounds f16 and bf16 next to the products."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    x = x.detach() if half or x.dtype == torch.float32 else x.detach().float()
    y = torch.empty(x.shape[0], w.data.shape[0], dtype=x.dtype)
    if half:
        bf16 = x.dtype == torch.bfloat16
        core().matmul_half(_bits(x.contiguous()), w.data, _bits(y), w.precision, bf16)
    else:
        core().matmul(numpy_of(x), w.data, y.numpy(), w.precision)
    return y


def look_up(rows: Tensor, w: Prepared, dtype: torch.dtype) -> Tensor | None:
    """Return some rows [M, K] of a prepared weight, dequantized in C++; None if it is not laid out row by row."""
    if not isinstance(w.data, CpuWeight) or w.problem.format not in _ROW_BY_ROW or w.problem.rotated:
        return None
    out = torch.empty(len(rows), w.problem.K, dtype=torch.float32)
    w.data.data.dequantize_rows(numpy_of(rows.long()), out.numpy())
    return out.to(dtype)


def _bits(t: Tensor) -> Any:
    """Return f16 or bf16 as an array of integers: numpy has no bf16."""
    return t.view(torch.uint16).numpy()


def _mixed(w: MixedTensor) -> Any:
    codes, row, outliers = w.codes(), None, None
    if w.row_scale is not None and w.row_zero is not None:
        row = numpy_of(w.row_scale.float()), numpy_of(w.row_zero)
    if w.outlier_values is not None and w.outlier_rows is not None:
        columns = w.outlier_places()[1].int()
        outliers = numpy_of(w.outlier_values.float()), numpy_of(columns), numpy_of(w.outlier_rows)
    second = numpy_of(w.second_scale.float())
    return core().prepare_mixed(w.K, w.block, numpy_of(w.four), *map(numpy_of, codes), second, row, outliers)


def _trellis(w: TrellisTensor | RotatedTensor) -> Any:
    inner: QuantTensor = w
    inputs, outputs = None, None
    if isinstance(w, RotatedTensor):
        inner, inputs, outputs = w.inner, _rotation(w.rotation), _rotation(w.outputs)
    if not isinstance(inner, TrellisTensor):
        raise UnsupportedError(f"kernel 'cpu' cannot lay out the format '{inner.format}' with rotated inputs")
    codes, scale = numpy_of(inner.codes), numpy_of(inner.scale.float())
    return core().prepare_trellis(codes, inner.K, inner.code.name, scale, inputs, outputs)


def _rotation(r: Rotation | None) -> tuple[Any, int, Any] | None:
    """Return the packed signs, the channels of a block, and Paley's part of its Hadamard matrix, f32."""
    if r is None:
        return None
    return numpy_of(r.packed), r.block, numpy_of(paley_matrix(paley_order(r.block) or 1).float())


def numpy_of(t: Tensor) -> Any:
    """Return a tensor as a contiguous array, as the core takes it."""
    return t.contiguous().numpy()
