"""The CUDA kernels as two Kernels. `cuda`: bit-planes by digits on the binary tensor cores, tiles for many tokens.

Behind each stands a torch operator, `crelle::plane_matmul` and `crelle::lut_matmul`, with a description for tracing, so
that torch.compile sees through it.

tokens       what runs
1 … 4        decode.cu: x as 16-bit integers, exact counts; reads each weight byte once
5 … 32       dozens.cu: weights turned into numbers in registers, for a warp's matrix instructions
33 and more  tiles.cu: the same for those of a warpgroup
Before Hopper decode.cu takes up to 8, in two portions, and tiles.cu the rest.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.kernels import cuda
from crelle.kernels.cuda.layout import CudaWeight, Kind, lay_out
from crelle.kernels.select import Problem

if TYPE_CHECKING:
    from crelle.kernels.cuda.lut import LutWeight

_FORMATS = (BCQTensor.format, UniformTensor.format, AffineTensor.format)


def unsupported(problem: Problem) -> str | None:
    """What no kernel on planes can do here."""
    if problem.format not in _FORMATS:
        return f"takes the formats 'bcq', 'uniform' and 'affine', not '{problem.format}'"
    if problem.device != "cuda":
        return f"runs on a GPU, the weight is on {problem.device}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16 activations, not {str(problem.dtype).removeprefix('torch.')}"
    return cuda.available()


class Cuda:
    """Multiply by bit-plane tensors on a GPU."""

    name = "cuda"
    permutes = True  # the digits are taken in the order of the columns

    def supports(self, problem: Problem) -> str | None:
        return unsupported(problem)

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> CudaWeight:
        return lay_out(w)

    def run(self, x: Tensor, prepared: CudaWeight) -> Tensor:
        w = prepared
        return _plane_matmul(x, w.words, w.scales, w.order, w.N, w.K, w.P, w.kind.name, w.groups, w.span)  # type: ignore[no-any-return]


class CudaLut:
    """The same by looking up, as the papers do: beaten by `cuda`, here to be measured and for chips without BMMA."""

    name = "cuda-lut"
    permutes = True

    def supports(self, problem: Problem) -> str | None:
        return unsupported(problem)

    def prepare(self, w: QuantTensor, dtype: torch.dtype) -> "LutWeight":
        from crelle.kernels.cuda import lut

        return lut.lay_out(w)

    def run(self, x: Tensor, prepared: "LutWeight") -> Tensor:
        w = prepared
        form = (w.N, w.K, w.P, w.kind.name, w.groups, w.span)
        return _lut_matmul(x, w.words, w.scales, w.tickets, w.order, *form)  # type: ignore[no-any-return]


@torch.library.custom_op("crelle::plane_matmul", mutates_args=())
def _plane_matmul(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    order: Tensor | None,
    N: int,
    K: int,
    P: int,
    kind: str,
    groups: int,
    span: int,
) -> Tensor:
    """Return x [M, K] @ W.T for a weight in the layout of layout.py."""
    from crelle.kernels.cuda import decode, tiles

    w = CudaWeight(N, K, P, Kind[kind], groups, span, words, scales, order)
    x = x.contiguous()
    if x.shape[0] == 0:
        return x.new_empty(0, N)
    if x.shape[0] > (decode.TOKENS if tiles.takes_rows(w, x.shape[0]) else 2 * decode.TOKENS):
        return tiles.matmul(x, w)
    parts = [decode.product(decode.encode(part, w), w, x.dtype) for part in torch.split(x, decode.TOKENS)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@_plane_matmul.register_fake
def _(x: Tensor, words: Tensor, scales: Tensor, order: Tensor | None, N: int, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], N)


@torch.library.custom_op("crelle::lut_matmul", mutates_args=())
def _lut_matmul(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    tickets: Tensor,
    order: Tensor | None,
    N: int,
    K: int,
    P: int,
    kind: str,
    groups: int,
    span: int,
) -> Tensor:
    """Return x [M, K] @ W.T for a weight in the layout of lut.py; `tickets` are zeros before and after."""
    from crelle.kernels.cuda import lut

    w = lut.LutWeight(N, K, P, Kind[kind], groups, span, words, scales, tickets, order)
    parts = [lut.matmul(part.contiguous(), w) for part in torch.split(x, lut.TOKENS)]
    return parts[0] if len(parts) == 1 else torch.cat([x.new_empty(0, N), *parts])


@_lut_matmul.register_fake
def _(x: Tensor, words: Tensor, scales: Tensor, tickets: Tensor, order: Tensor | None, N: int, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], N)
