"""The CUDA kernels as two Kernels: `cuda` for bit-plane weights, and `cuda-lut`, the papers' way.

`cuda` runs what dispatch.py says for the number of rows. `cuda-lut` is selected only by name: on an H200 `cuda` takes
0.75 to 0.95 of its time at 2 to 4 bits, and 1.01 in the one 8-bit case that was measured (docs/notes/cuda-kernels.md).

Behind each stands a torch operator, `crelle::plane_matmul` and `crelle::lut_matmul`, with a fake implementation, so
that torch.compile sees through it; without a compiler it is skipped (crelle.kernels.eager).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.kernels import cuda
from crelle.kernels.base import Encoded, FloatInput, Problem, floats, takes_floats
from crelle.kernels.cuda import dispatch
from crelle.kernels.cuda.launch import on_device
from crelle.kernels.cuda.planes import bmma_gemv
from crelle.kernels.cuda.planes.weight_layout import CudaWeight, ScaleKind, lay_out, same_inputs
from crelle.kernels.eager import is_eager

if TYPE_CHECKING:
    from crelle.kernels.cuda.lut.lut import LutWeight
    from crelle.kernels.cuda.planes.bmma_gemv import BitSerialX
    from crelle.kernels.cuda.planes.gemm import PackedX

_FORMATS = (BCQTensor.format, UniformTensor.format, AffineTensor.format)


def supports(problem: Problem) -> str | None:
    """What no kernel on planes can do here."""
    if problem.format not in _FORMATS:
        return f"takes the formats 'bcq', 'uniform' and 'affine', not '{problem.format}'"
    if problem.device != "cuda":
        return f"runs on a GPU, the weight is on {problem.device}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16 activations, not {str(problem.dtype).removeprefix('torch.')}"
    return takes_floats(problem) or cuda.available()


class Cuda:
    """Multiply by bit-plane tensors on a GPU."""

    name = "cuda"
    permutes = True  # x is encoded in the order of the columns

    def supports(self, problem: Problem) -> str | None:
        return supports(problem)

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> CudaWeight:
        return lay_out(w)

    def encode(self, x: Tensor, prepared: CudaWeight) -> Encoded:
        return Encoded(_encode_there(x, prepared))

    def shares(self, a: CudaWeight, b: CudaWeight) -> bool:
        return same_inputs(a, b)

    def run(self, x: Tensor | Encoded, prepared: CudaWeight) -> Tensor:
        w = prepared
        if isinstance(x, Encoded):
            return _multiply_there(x.data, w)
        if is_eager(x):
            return _matmul(x, w)
        return _plane_matmul(x, w.words, w.scales, w.perm, w.N, w.K, w.P, w.kind.name, w.groups, w.blocks_per_scale)  # type: ignore[no-any-return]


class CudaLut(FloatInput):
    """The same by table look-up in shared memory, as in the papers: here to be measured, only by name."""

    name = "cuda-lut"
    permutes = True

    def supports(self, problem: Problem) -> str | None:
        return supports(problem)

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> "LutWeight":
        from crelle.kernels.cuda.lut import lut

        return lut.lay_out(w)

    def run(self, x: Tensor | Encoded, prepared: "LutWeight") -> Tensor:
        x, w = floats(x), prepared
        if is_eager(x):
            return _look_up(x, w)
        form = (w.N, w.K, w.P, w.kind.name, w.groups, w.blocks_per_scale)
        return _lut_matmul(x, w.words, w.scales, w.semaphores, w.perm, *form)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class _Input:
    """x as the kernel for so many rows takes it."""

    dtype: torch.dtype
    x: "list[BitSerialX] | Tensor | PackedX"  # of gemv, skinny_gemm, gemm; a Tensor also where there are no rows


def _encode(x: Tensor, w: CudaWeight) -> _Input:
    from crelle.kernels.cuda.planes import gemm, skinny_gemm

    x, rows = x.contiguous(), x.shape[0]
    if rows == 0:
        return _Input(x.dtype, x)
    route = dispatch.route(rows)
    if route == "gemv":
        parts = [x] if rows <= dispatch.GEMV_ROWS else torch.split(x, dispatch.GEMV_ROWS)
        return _Input(x.dtype, [bmma_gemv.encode(part, w) for part in parts])
    return _Input(x.dtype, skinny_gemm.permuted_rows(x, w) if route == "skinny_gemm" else gemm.pack(x, w))


def _multiply(encoded: _Input, w: CudaWeight) -> Tensor:
    from crelle.kernels.cuda.planes import gemm, skinny_gemm

    x = encoded.x
    if isinstance(x, list):
        parts = [bmma_gemv.product(part, w, encoded.dtype) for part in x]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    if not isinstance(x, Tensor):
        return gemm.product(x, w)
    return skinny_gemm.product(x, w) if x.shape[0] else x.new_empty(0, w.N)


_on_device = on_device(lambda w: w.words)
_encode_there, _multiply_there = _on_device(_encode), _on_device(_multiply)


@_on_device
def _matmul(x: Tensor, w: CudaWeight) -> Tensor:
    if 0 < x.shape[0] <= dispatch.GEMV_ROWS:
        return bmma_gemv.matmul(x.contiguous(), w)
    return _multiply(_encode(x, w), w)


@torch.library.custom_op("crelle::plane_matmul", mutates_args=())
def _plane_matmul(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    perm: Tensor | None,
    N: int,
    K: int,
    P: int,
    kind: str,
    groups: int,
    blocks_per_scale: int,
) -> Tensor:
    """Return x [M, K] @ W.T for a weight in the layout of weight_layout.py."""
    return _matmul(x, CudaWeight(N, K, P, ScaleKind[kind], groups, blocks_per_scale, words, scales, perm))


@_plane_matmul.register_fake
def _(x: Tensor, words: Tensor, scales: Tensor, perm: Tensor | None, N: int, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], N)


@_on_device
def _look_up(x: Tensor, w: "LutWeight") -> Tensor:
    from crelle.kernels.cuda.lut import lut

    if x.shape[0] == 0:
        return x.new_empty(0, w.N)
    parts = [lut.matmul(part.contiguous(), w) for part in torch.split(x, dispatch.GEMV_ROWS)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@torch.library.custom_op("crelle::lut_matmul", mutates_args=())
def _lut_matmul(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    semaphores: Tensor,
    perm: Tensor | None,
    N: int,
    K: int,
    P: int,
    kind: str,
    groups: int,
    blocks_per_scale: int,
) -> Tensor:
    """Return x [M, K] @ W.T for a weight in the layout of lut.py; `semaphores` are zeros before and after."""
    from crelle.kernels.cuda.lut import lut

    w = lut.LutWeight(N, K, P, ScaleKind[kind], groups, blocks_per_scale, words, scales, semaphores, perm)
    return _look_up(x, w)


@_lut_matmul.register_fake
def _(x: Tensor, words: Tensor, scales: Tensor, semaphores: Tensor, perm: Tensor | None, N: int, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], N)
