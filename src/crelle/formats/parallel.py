"""Matrices for tensor parallelism: some inputs of one matrix, and several matrices as one.

    columns(w, begin, end)    the inputs begin … end - 1, exactly: a group has scales of its own, so none may be cut
    stacked([q, k, v])        one matrix with the rows of all, or None where they do not have everything else in common

Some rows of a matrix are `w.rows`, which every format has.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.affine import AffineTensor, NestedTensor
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import BCQTensor, Planes, UniformTensor
from crelle.formats.composite import PermutedTensor
from crelle.formats.dense import DenseTensor
from crelle.formats.grouped import GroupedTensor
from crelle.formats.mixed import MixedTensor
from crelle.formats.mixed_packing import MixedCodes
from crelle.formats.packing import pack_stream
from crelle.formats.two_level import TwoLevelTensor


def columns(w: QuantTensor, begin: int, end: int) -> QuantTensor:
    """Return the inputs begin … end - 1 of a matrix, in the same format; refuse what cannot be cut there."""
    K = w.shape[1]
    if (begin, end) == (0, K):
        return w
    if isinstance(w, DenseTensor):
        return DenseTensor(w.weight[:, begin:end])
    reason = _uncuttable(w) or _cuts_a_group(w, begin, end)
    if reason is not None:
        raise UnsupportedError(f"inputs {begin} to {end - 1} of {K} cannot be taken out: {reason}")
    if isinstance(w, MixedTensor):
        return _mixed_columns(w, begin, end)
    assert isinstance(w, Planes), w.format
    return _plane_columns(w, begin, end)


def _uncuttable(w: QuantTensor) -> str | None:
    if isinstance(w, PermutedTensor) or getattr(w, "perm", None) is not None:
        return "its groups hold inputs from all over the matrix (act-order or outlier channels)"
    if isinstance(w, GroupedTensor | TwoLevelTensor):
        return "its activations are quantized over all inputs together"
    return None if isinstance(w, Planes | MixedTensor) else f"the format '{w.format}' does not say how"


def _cuts_a_group(w: QuantTensor, begin: int, end: int) -> str | None:
    G, K = w.group, w.shape[1]
    assert G is not None, w.format
    for at in (begin, end):
        if at % G and at != K and G < K:
            return f"that would cut a group, which has {G} of them"
        if at % 8 and at != K:
            return "codes are stored in bytes of 8 inputs"
    return None


def _plane_columns(w: Planes, begin: int, end: int) -> QuantTensor:
    G, K = min(w.group, end - begin), end - begin
    planes, groups = w.planes[..., begin // 8 : -(-end // 8)], slice(begin // w.group, -(-end // w.group))
    if isinstance(w, BCQTensor):
        return BCQTensor(planes, K, G, w.alpha[..., groups], None if w.z is None else w.z[..., groups])
    if isinstance(w, UniformTensor):
        zero = None if w.zero is None else pack_stream(w.zeros()[..., groups], w.bits)
        return UniformTensor(planes, K, G, w.scale[..., groups], zero)
    assert isinstance(w, AffineTensor | NestedTensor), w
    return replace(w, planes=planes, K=K, group=G, scale=w.scale[..., groups], low=w.low[..., groups])


def _mixed_columns(w: MixedTensor, begin: int, end: int) -> MixedTensor:
    first, last = begin // w.G, -(-end // w.G)
    four, codes = w.four.bool(), w.codes()
    inside = torch.zeros_like(four)
    inside[first:last] = True
    two, wide = inside[~four], inside[four]  # of the groups of 2 and of 4 bits
    scale_codes, zeros, second_zeros = (t[:, two] for t in (codes.scale_codes, codes.zeros, codes.second_zeros))
    taken = MixedCodes(codes.codes2[:, two], codes.codes4[:, wide], scale_codes, zeros, second_zeros)
    row = None if w.row_scale is None or w.row_zero is None or not wide.any() else (w.row_scale, w.row_zero)
    outliers = None
    if w.outlier_values is not None:
        dense = w.outlier_values.new_zeros(w.shape)
        outliers = dense.index_put(w.outlier_places(), w.outlier_values)[:, begin:end]
    second = w.second_scale[:, two]
    shape = w.N, end - begin
    return MixedTensor.from_codes(shape, w.four[inside], taken, second, row, outliers, "general", w.block)


def stacked(matrices: Sequence[QuantTensor]) -> QuantTensor | None:
    """Return one matrix with the rows of all, or None where they differ in more than their rows."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    if any(_but_rows(a) != _but_rows(b) for a, b in pairwise(matrices)):
        return None
    stack = next((f for kind, f in _STACKS.items() if isinstance(first, kind)), None)
    return None if stack is None else stack(matrices)


def _but_rows(w: QuantTensor) -> object:
    """Return what two matrices must have in common to be stacked, besides the order of their inputs."""
    spec = {k: v for k, v in w.spec().items() if k not in ("shape", "inner")}
    inner = _but_rows(w.inner) if isinstance(w, PermutedTensor) else None
    dtypes = [(name, t.dtype) for name, t in w.tensors().items()]
    return spec, w.shape[1], inner, dtypes, w.device


def _stack_planes(matrices: Sequence[QuantTensor]) -> QuantTensor:
    first = matrices[0]
    parts = {name: torch.cat([m.tensors()[name] for m in matrices], _row_dim(t)) for name, t in first.tensors().items()}
    N = sum(m.shape[0] for m in matrices)
    return type(first).from_parts({**first.spec(), "shape": [N, first.shape[1]]}, parts)


def _row_dim(t: Tensor) -> int:
    return t.dim() - 2  # [..., N, groups or bytes]


def _stack_permuted(matrices: Sequence[QuantTensor]) -> QuantTensor | None:
    permuted = [m for m in matrices if isinstance(m, PermutedTensor)]
    order = permuted[0].order
    inner = stacked([m.inner for m in permuted]) if all(torch.equal(m.order, order) for m in permuted) else None
    return None if inner is None else PermutedTensor(inner, order)


def _stack_rows(matrices: Sequence[QuantTensor]) -> QuantTensor | None:
    """Stack formats whose tensors all begin with the rows, but for `perm`, which must be the same."""
    first, tensors = matrices[0], [m.tensors() for m in matrices]
    perm = tensors[0].get("perm")
    if perm is not None and not all(torch.equal(t["perm"], perm) for t in tensors):
        return None
    parts = {name: t if name == "perm" else torch.cat([m[name] for m in tensors]) for name, t in tensors[0].items()}
    N = sum(m.shape[0] for m in matrices)
    return type(first).from_parts({**first.spec(), "shape": [N, first.shape[1]]}, parts)


_STACKS: dict[type, Callable[[Sequence[QuantTensor]], QuantTensor | None]] = {
    Planes: _stack_planes,
    PermutedTensor: _stack_permuted,
    GroupedTensor: _stack_rows,
    TwoLevelTensor: _stack_rows,
    DenseTensor: _stack_rows,
}
