"""The CUDA kernels of four-bit floats as a Kernel: `cuda-fp4`.

Up to 8 rows take the GEMV (fp4_gemv.py), more the GEMM, for which x is packed once for all weights of an input
(fp4_gemm.py). Behind them stands a torch operator, `crelle::fp4_matmul`, with a fake implementation, so that
torch.compile sees through it; without a compiler it is skipped (crelle.kernels.eager).
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.fp4 import Fp4Tensor, Mxfp4Tensor, Nvfp4Tensor
from crelle.kernels import cuda
from crelle.kernels.base import Encoded, Problem, takes_floats
from crelle.kernels.cuda import dispatch
from crelle.kernels.cuda.fp4.fp4_layout import Fp4Weight, lay_out, same_inputs
from crelle.kernels.cuda.launch import on_device
from crelle.kernels.eager import is_eager

if TYPE_CHECKING:
    from crelle.kernels.cuda.planes.gemm import PackedX

_FORMATS = (Mxfp4Tensor.format, Nvfp4Tensor.format)


class CudaFp4:
    """Multiply by four-bit floats on a GPU."""

    name = "cuda-fp4"

    def supports(self, problem: Problem) -> str | None:
        if problem.format not in _FORMATS:
            return f"takes the formats 'mxfp4' and 'nvfp4', not '{problem.format}'"
        if problem.device != "cuda":
            return f"runs on a GPU, the weight is on {problem.device}"
        if problem.dtype not in (torch.float16, torch.bfloat16):
            return f"takes float16 and bfloat16 activations, not {str(problem.dtype).removeprefix('torch.')}"
        return takes_floats(problem) or cuda.available()

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> Fp4Weight:
        if not isinstance(w, Fp4Tensor):
            raise UnsupportedError(f"kernel '{self.name}' cannot lay out the format '{w.format}'")
        return lay_out(w)

    def encode(self, x: Tensor, prepared: Fp4Weight) -> Encoded:
        return Encoded(_encode(x, prepared))

    def shares(self, a: Fp4Weight, b: Fp4Weight) -> bool:
        return same_inputs(a, b)

    def run(self, x: Tensor | Encoded, prepared: Fp4Weight) -> Tensor:
        w = prepared
        if isinstance(x, Encoded):
            return _multiply(x.data, w)
        if is_eager(x):
            return _matmul(x, w)
        return _fp4_matmul(x, w.data, w.N, w.K, w.format)  # type: ignore[no-any-return]


_on_device = on_device(lambda w: w.data)


@_on_device
def _encode(x: Tensor, w: Fp4Weight) -> "Tensor | PackedX":
    from crelle.kernels.cuda.planes import gemm

    return x if dispatch.fp4_route(x.shape[0]) == "gemv" else gemm.pack(x, w)


@_on_device
def _multiply(x: "Tensor | PackedX", w: Fp4Weight) -> Tensor:
    from crelle.kernels.cuda.fp4 import fp4_gemm

    return fp4_gemm.matmul(x, w) if isinstance(x, Tensor) else fp4_gemm.product(x, w)


@_on_device
def _matmul(x: Tensor, w: Fp4Weight) -> Tensor:
    from crelle.kernels.cuda.fp4 import fp4_gemm

    return fp4_gemm.matmul(x, w)


@torch.library.custom_op("crelle::fp4_matmul", mutates_args=())
def _fp4_matmul(x: Tensor, data: Tensor, N: int, K: int, format: str) -> Tensor:  # noqa: A002
    """Return x [M, K] @ W.T for a weight in the layout of fp4_layout.py."""
    return _matmul(x, Fp4Weight(N, K, format, data))


@_fp4_matmul.register_fake
def _(x: Tensor, data: Any, N: int, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], N)
