"""The CUDA kernels of mixed 2/4-bit weights as two Kernels: `cuda-mixed`, and `cuda-mixed-async`.

The second decodes the scales of a warp's next unit beside the multiplication of this one, as in the paper; it is
selected only by name, since it was slower (mixed_gemv.cu).

A few rows of x are encoded once for all weights with the same 4-bit groups (mixed_gemv.cu), many are packed
(mixed_gemm.cu); for very many the weight is dequantized and torch multiplies (dispatch.py). Behind them stands a torch
operator, `crelle::mixed_matmul`, with a fake implementation, so that torch.compile sees through it; without a compiler
it is skipped (crelle.kernels.eager).
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.mixed import MixedTensor
from crelle.kernels import cuda
from crelle.kernels.base import Encoded, Problem, takes_floats
from crelle.kernels.cuda import dispatch
from crelle.kernels.cuda.launch import on_device
from crelle.kernels.cuda.mixed.mixed_layout import MixedWeight, lay_out, same_inputs
from crelle.kernels.eager import is_eager

if TYPE_CHECKING:
    from crelle.kernels.cuda.mixed.mixed_gemv import MixedX
    from crelle.kernels.cuda.planes.gemm import PackedX


class CudaMixed:
    """Multiply by mixed 2/4-bit tensors on a GPU."""

    def __init__(self, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self.name = "cuda-mixed-async" if asynchronous else "cuda-mixed"

    def supports(self, problem: Problem) -> str | None:
        if problem.format != MixedTensor.format:
            return f"takes the format '{MixedTensor.format}', not '{problem.format}'"
        if problem.device != "cuda":
            return f"runs on a GPU, the weight is on {problem.device}"
        if problem.dtype not in (torch.float16, torch.bfloat16):
            return f"takes float16 and bfloat16 activations, not {str(problem.dtype).removeprefix('torch.')}"
        return takes_floats(problem) or cuda.available()

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> MixedWeight:
        if not isinstance(w, MixedTensor):
            raise UnsupportedError(f"kernel '{self.name}' cannot lay out the format '{w.format}'")
        return lay_out(w)

    def encode(self, x: Tensor, prepared: MixedWeight) -> Encoded:
        return Encoded((x.dtype, _encode(x, prepared, self.asynchronous)))

    def shares(self, a: MixedWeight, b: MixedWeight) -> bool:
        return same_inputs(a, b)

    def run(self, x: Tensor | Encoded, prepared: MixedWeight) -> Tensor:
        w = prepared
        if isinstance(x, Encoded):
            dtype, encoded = x.data
            return _multiply(encoded, w, dtype, self.asynchronous)
        if is_eager(x):
            return _matmul(x, w, self.asynchronous)
        sizes = (w.N, w.K, w.U2, w.U4, w.subs, w.tile_base, w.runs, w.outlier_exponent, self.asynchronous)
        parts = (w.tiles, w.rows, w.perm, w.outliers, w.outlier_rows, w.starts, w.spans)
        return _mixed_matmul(x, *parts, w.block_outliers, w.block_starts, *sizes)  # type: ignore[no-any-return]


_on_device = on_device(lambda w: w.tiles)


@_on_device
def _encode(x: Tensor, w: MixedWeight, asynchronous: bool) -> "MixedX | PackedX | Tensor":
    from crelle.kernels.cuda.mixed import mixed_decode, mixed_gemm, mixed_gemv

    route = dispatch.mixed_route(x.shape[0]) if x.shape[0] else "torch"
    if route == "gemm":
        return mixed_gemm.pack(x, w)
    encodes_itself = not asynchronous and mixed_decode.supports(x, [w])
    return mixed_gemv.encode(x, w) if route == "gemv" and not encodes_itself else x


@_on_device
def _multiply(x: "MixedX | PackedX | Tensor", w: MixedWeight, dtype: torch.dtype, asynchronous: bool) -> Tensor:
    from crelle.kernels.cuda.mixed import mixed_gemm, mixed_gemv
    from crelle.kernels.cuda.planes.gemm import PackedX

    if isinstance(x, Tensor):
        return mixed_gemv.matmul(x, w)
    if isinstance(x, PackedX):
        return mixed_gemm.product(x, w)
    return mixed_gemv.product(x, w, dtype, asynchronous=asynchronous)


@_on_device
def _matmul(x: Tensor, w: MixedWeight, asynchronous: bool) -> Tensor:
    from crelle.kernels.cuda.mixed import mixed_gemv

    return mixed_gemv.matmul(x, w, asynchronous=asynchronous)


@torch.library.custom_op("crelle::mixed_matmul", mutates_args=())
def _mixed_matmul(
    x: Tensor,
    tiles: Tensor,
    rows: Tensor,
    perm: Tensor,
    outliers: Tensor | None,
    outlier_rows: Tensor | None,
    starts: Tensor | None,
    spans: Tensor | None,
    block_outliers: Tensor | None,
    block_starts: Tensor | None,
    N: int,
    K: int,
    U2: int,
    U4: int,
    subs: int,
    tile_base: int,
    runs: int,
    outlier_exponent: int,
    asynchronous: bool,
) -> Tensor:
    """Return x [M, K] @ W.T for a weight in the layout of mixed_layout.py."""
    sizes = (tile_base, spans, runs, outlier_exponent, block_outliers, block_starts)
    w = MixedWeight(N, K, U2, U4, subs, tiles, rows, perm, outliers, outlier_rows, starts, *sizes)
    return _matmul(x, w, asynchronous)


@_mixed_matmul.register_fake
def _(
    x: Tensor, tiles: Any, rows: Any, perm: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, N: int, *_: Any
) -> Tensor:
    return x.new_empty(x.shape[0], N)
