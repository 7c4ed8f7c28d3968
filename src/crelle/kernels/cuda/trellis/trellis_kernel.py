"""The CUDA kernels of trellis codes, rotated or not, as a Kernel: `cuda-trellis`.

A few rows of x are encoded once for all weights with the same rotation, signs and Hadamard matrices on the way; for
many the weight is dequantized, and torch multiplies (trellis_gemv.py). Behind them stands a torch operator,
`crelle::trellis_matmul`, with a fake implementation, so that torch.compile sees through it; without a compiler it is
skipped (crelle.kernels.eager).
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.trellis import CODES, TrellisTensor
from crelle.formats.wrappers.rotated import RotatedTensor
from crelle.kernels import cuda
from crelle.kernels.base import Encoded, Problem, takes_floats
from crelle.kernels.cuda.launch import on_device
from crelle.kernels.cuda.trellis.trellis_layout import MOST_INPUTS, TrellisWeight, lay_out, same_inputs
from crelle.kernels.eager import is_eager

if TYPE_CHECKING:
    from crelle.kernels.cuda.trellis.trellis_gemv import TrellisX


class CudaTrellis:
    """Multiply by trellis tensors on a GPU."""

    name = "cuda-trellis"
    rotates = (TrellisTensor.format,)  # x of these, itself

    def supports(self, problem: Problem) -> str | None:
        if problem.format != TrellisTensor.format:
            return f"takes the format '{TrellisTensor.format}', not '{problem.format}'"
        if problem.device != "cuda":
            return f"runs on a GPU, the weight is on {problem.device}"
        if problem.dtype not in (torch.float16, torch.bfloat16):
            return f"takes float16 and bfloat16 activations, not {str(problem.dtype).removeprefix('torch.')}"
        if problem.K > MOST_INPUTS:
            return f"takes rows of up to {MOST_INPUTS} inputs, not of {problem.K}"
        return takes_floats(problem) or cuda.available()

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> TrellisWeight:
        inner = w.inner if isinstance(w, RotatedTensor) else w
        if not isinstance(inner, TrellisTensor):
            raise UnsupportedError(f"kernel '{self.name}' cannot lay out the format '{inner.format}'")
        assert isinstance(w, TrellisTensor | RotatedTensor)
        return lay_out(w)

    def encode(self, x: Tensor, prepared: TrellisWeight) -> Encoded:
        return Encoded(_encode(x, prepared))

    def shares(self, a: TrellisWeight, b: TrellisWeight) -> bool:
        return same_inputs(a, b)

    def run(self, x: Tensor | Encoded, prepared: TrellisWeight) -> Tensor:
        w = prepared
        if isinstance(x, Encoded):
            return _multiply(x.data, w)
        if is_eager(x):
            return _matmul(x, w)
        return _trellis_matmul(x, w.units, w.scale, w.signs, w.N, w.K, w.block, w.bits, w.code.name)  # type: ignore[no-any-return]


_on_device = on_device(lambda w: w.units)


@_on_device
def _encode(x: Tensor, w: TrellisWeight) -> "TrellisX | Tensor":
    from crelle.kernels.cuda.trellis import trellis_gemv

    return trellis_gemv.encode(x, w) if x.shape[0] <= trellis_gemv.GEMV_ROWS else trellis_gemv.rotate(x, w)


@_on_device
def _multiply(x: "TrellisX | Tensor", w: TrellisWeight) -> Tensor:
    from crelle.kernels.cuda.trellis import trellis_gemv

    return trellis_gemv.dense_product(x, w) if isinstance(x, Tensor) else trellis_gemv.product(x, w)


@_on_device
def _matmul(x: Tensor, w: TrellisWeight) -> Tensor:
    from crelle.kernels.cuda.trellis import trellis_gemv

    return trellis_gemv.matmul(x, w)


@torch.library.custom_op("crelle::trellis_matmul", mutates_args=())
def _trellis_matmul(
    x: Tensor, units: Tensor, scale: Tensor, signs: Tensor | None, N: int, K: int, block: int, bits: float, code: str
) -> Tensor:
    """Return x [M, K] @ W.T for a weight in the layout of trellis_layout.py."""
    return _matmul(x, TrellisWeight(N, K, CODES[code], bits, units, scale, signs, block, b""))


@_trellis_matmul.register_fake
def _(x: Tensor, units: Any, scale: Any, signs: Any, N: int, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], N)
