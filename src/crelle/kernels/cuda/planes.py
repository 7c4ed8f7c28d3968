"""The CUDA kernels as one Kernel, `cuda`: bit-planes by digits on the binary tensor cores, tiles for many tokens.

Behind it stands a torch operator, `crelle::plane_matmul`, with a description for tracing, so that torch.compile sees
through it.

tokens      what runs
1 … 4       decode.cu: x as 16-bit integers, exact counts; reads each weight byte once
5 and more  tiles.cu: a tile of weights turned into numbers in registers, for the tensor cores
"""

from typing import Any

import torch
from torch import Tensor

from crelle.formats.affine import AffineTensor
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.kernels import cuda
from crelle.kernels.cuda.layout import CudaWeight, Kind, lay_out
from crelle.kernels.select import Problem

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
    from crelle.kernels.cuda import decode

    w = CudaWeight(N, K, P, Kind[kind], groups, span, words, scales, order)
    x = x.contiguous()
    if x.shape[0] == 0:
        return x.new_empty(0, N)
    portions = torch.split(x, decode.TOKENS)
    return torch.cat([decode.product(decode.encode(part, w), w, x.dtype) for part in portions])


@_plane_matmul.register_fake
def _(x: Tensor, words: Tensor, scales: Tensor, order: Tensor | None, N: int, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], N)
