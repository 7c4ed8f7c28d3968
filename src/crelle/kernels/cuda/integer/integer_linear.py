"""Linears with quantized activations: x encoded once, with what comes before fused in, then one GEMM for each weight.

    y, x = multiply(weights, plan, x, "RMS_NORM", norm, addend)      # norm(x + addend) @ W.T of all, and x + addend

Batch-invariant: chunks of INVARIANT_INTEGER_ROWS rows, some of them padding, so that the GEMM has one order of sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from crelle.kernels.cuda.dispatch import INVARIANT_INTEGER_ROWS
from crelle.kernels.cuda.integer.integer_encode import EncodeForm, EncodePlan, bind, encode, encode_each
from crelle.kernels.cuda.integer.integer_x import IntegerX
from crelle.kernels.cuda.launch import Launch, is_recording
from crelle.kernels.cuda.runtime.plans import Plans
from crelle.kernels.cuda.step.activations import Prologue

if TYPE_CHECKING:
    from crelle.kernels.cuda.step.fused_linear import Norm

_BOUND_ROWS = 16  # more take so long on the GPU that the host's time does not matter
_TILE = 64  # rows of a weight that lie together: whole tiles can be joined


@dataclass(frozen=True, slots=True, eq=False)
class CudaIntegerWeight:
    """A weight as the GEMM reads it, and how it wants its input."""

    N: int
    tiles: Any  # integer_layout.IntegerTiles
    form: EncodeForm
    plans: Plans = field(default_factory=Plans, init=False, repr=False)

    @property
    def nbytes(self) -> int:
        return int(self.tiles.nbytes)


def product(
    x: IntegerX, w: CudaIntegerWeight, bias: Tensor | None = None, residual: Tensor | None = None, out: Any = None
) -> Tensor:
    """Return x @ W.T (+ bias) (+ residual) as [M, N]."""
    from crelle.kernels.cuda.integer import integer_gemm

    y: Tensor = integer_gemm.product(x, w.tiles, bias, residual, out)
    return y


class _Bound(NamedTuple):
    """Both launches of `matmul`, and where in its scratch memory scales and partial sums begin, and where it ends."""

    encode: Launch
    product: Any  # integer_gemm.BoundProduct
    scales_at: int
    partial_at: int
    bytes: int


def matmul(x: Tensor, w: CudaIntegerWeight) -> Tensor:
    """Return x @ W.T for x [M, K]; as encode and `product`, with less work for the host."""
    M, dtype = x.shape[0], x.dtype
    bound: _Bound | None = w.plans.get((M, dtype))
    if bound is None or is_recording():
        xs, _ = encode(x, w.form)
        if 0 < M <= _BOUND_ROWS and (made := _bind(xs, w)) is not None:
            w.plans[M, dtype] = made
        return product(xs, w)
    scratch = torch.empty(bound.bytes, dtype=torch.uint8, device=x.device)
    y = torch.empty(M, w.N, dtype=dtype, device=x.device)
    x, codes = x.contiguous(), scratch.data_ptr()
    scales = codes + bound.scales_at
    bound.encode(x.data_ptr(), codes, scales)
    bound.product(codes, scales, y.data_ptr(), codes + bound.partial_at)
    return y


def _bind(x: IntegerX, w: CudaIntegerWeight) -> _Bound | None:
    """Return the launches for inputs like x; None where kernels are recorded or emulated."""
    if (encodes := bind(w.form, x.dtype, x.tokens)) is None:
        return None
    from crelle.kernels.cuda.integer import integer_gemm

    if (multiplies := integer_gemm.bind(w.tiles, x.dtype, x.tokens)) is None:
        return None
    scales_at = _aligned(x.codes.numel())
    partial_at = scales_at + _aligned(4 * x.scales.numel())
    return _Bound(encodes, multiplies, scales_at, partial_at, partial_at + 4 * multiplies.partial)


def _aligned(size: int) -> int:
    return -(-size // 512) * 512


def multiply(
    weights: Sequence[CudaIntegerWeight],
    plan: EncodePlan,
    x: Tensor,
    op: Prologue = "PLAIN",
    norm: "Norm | None" = None,
    addend: Tensor | None = None,
    biases: Sequence[Tensor | None] = (None,),
    residual: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return op(x + addend) @ W.T + bias + residual of all weights, side by side, and x + addend.

    `plan`: of the weights' forms; residual: only of one weight.
    """
    if batch_invariant:
        return _in_chunks(weights, plan, x, op, norm, addend, biases, residual)
    each, total = encode_each(x, plan, op, norm, addend)
    if len(weights) == 1:
        return product(each[0], weights[0], biases[0], residual), total
    assert residual is None, "only single matrices write back to the residual stream"
    return _side_by_side(each, weights, biases), total


def _in_chunks(
    weights: Sequence[CudaIntegerWeight],
    plan: EncodePlan,
    x: Tensor,
    op: Prologue,
    norm: "Norm | None",
    addend: Tensor | None,
    biases: Sequence[Tensor | None],
    residual: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The same, with products of INVARIANT_INTEGER_ROWS rows; those behind x's hold anything."""
    size, found, sums = INVARIANT_INTEGER_ROWS, list[Tensor](), list[Tensor]()
    for at in range(0, max(1, x.shape[0]), size):
        rows = slice(at, min(at + size, x.shape[0]))
        each, total = encode_each(x[rows], plan, op, norm, None if addend is None else addend[rows], size)
        found.append(_side_by_side(each, weights, biases)[: rows.stop - at])
        sums.append(total)
    y, total = (t[0] if len(t) == 1 else torch.cat(t) for t in (found, sums))
    return y if residual is None else y + residual, x if addend is None else total


def _side_by_side(
    each: Sequence[IntegerX], weights: Sequence[CudaIntegerWeight], biases: Sequence[Tensor | None]
) -> Tensor:
    at = [0, *accumulate(w.N for w in weights)]
    y = torch.empty(each[0].tokens, at[-1], dtype=each[0].dtype, device=each[0].codes.device)
    for x, w, bias, (begin, end) in zip(each, weights, biases, pairwise(at), strict=True):
        product(x, w, bias, out=y[:, begin:end])
    return y


def join(weights: Sequence[CudaIntegerWeight]) -> tuple[CudaIntegerWeight, list[CudaIntegerWeight]] | None:
    """Return weights that read the same input as one, and parts that point into it; None where they do not fit."""
    first = weights[0]
    if not all(first.form.shares(w.form) for w in weights) or any(w.N % _TILE for w in weights[:-1]):
        return None
    tiles = [w.tiles for w in weights]
    if len({_form(t) for t in tiles}) > 1:
        return None
    pieces = torch.cat([t.pieces for t in tiles])
    scales = None if tiles[0].row_scale is None else torch.cat([t.row_scale for t in tiles])
    N = sum(w.N for w in weights)
    whole = replace(tiles[0], N=N, pieces=pieces, row_scale=scales)
    starts = [0, *accumulate(len(t.pieces) for t in tiles)]
    parts = []
    for w, (begin, end) in zip(weights, pairwise(starts), strict=True):
        own = None if scales is None else scales[begin * _TILE : end * _TILE]
        # the semaphores of the whole: a product with a part and one with the whole do not run at once
        part = replace(whole, N=w.N, pieces=pieces[begin:end], row_scale=own)
        parts.append(replace(w, tiles=part, form=first.form))
    return replace(first, N=N, tiles=whole), parts


def _form(tiles: Any) -> tuple[Any, ...]:
    """All but the rows of a weight."""
    values = [getattr(tiles, f.name) for f in fields(tiles) if f.name not in ("N", "plans")]
    shapes = (tiles.pieces.shape[1:], None if tiles.row_scale is None else tiles.row_scale.dtype)
    return *(v for v in values if not isinstance(v, Tensor)), shapes
