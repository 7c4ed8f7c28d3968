"""Matrices for tensor parallelism: some inputs of one matrix, and several matrices as one.

    columns(w, begin, end)    the inputs begin … end - 1, exactly: a group has scales of its own, so none may be cut
    why_not_split(w, ranks)   None if equal shares of the inputs can be taken, else the reason; the same on every rank
    stacked([q, k, v])        one matrix with the rows of all, or None where they do not have everything else in common

Formats answer with their hooks `cut`, `columns` and `stacked` (base.py); those without them are refused, or not
stacked. Some rows of a matrix are `w.rows`, which every format has: what cannot be split along its inputs is split
along its rows, and every rank reads all inputs.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor


def columns(w: QuantTensor, begin: int, end: int) -> QuantTensor:
    """Return the inputs begin … end - 1 of a matrix, in the same format; refuse what cannot be cut there."""
    K = w.shape[1]
    if (begin, end) == (0, K):
        return w
    for k in (begin, end):
        if (reason := _why_not_cut(w, k)) is not None:
            raise UnsupportedError(f"inputs {begin} to {end - 1} of {K} cannot be extracted: {reason}")
    taken: QuantTensor = w.columns(begin, end)  # type: ignore[attr-defined]
    return taken


def why_not_split(w: QuantTensor, ranks: int) -> str | None:
    """Return why the inputs cannot be split into equal shares, one for each rank; None: they can."""
    K = w.shape[1]
    if K % ranks:
        return f"{K} inputs are no multiple of {ranks}"
    reasons = (_why_not_cut(w, K * rank // ranks) for rank in range(1, ranks))
    return next((reason for reason in reasons if reason is not None), None)


def _why_not_cut(w: QuantTensor, k: int) -> str | None:
    """Return why no share can begin or end at input k; None: it can."""
    if k in (0, w.shape[1]):
        return None
    cut = getattr(w, "cut", None)
    found: str | None = f"the format '{w.format}' does not support it" if cut is None else cut(k)
    return found


def stacked(matrices: Sequence[QuantTensor]) -> QuantTensor | None:
    """Return one matrix with the rows of all, or None where they differ in more than their rows."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    if any(_but_rows(a) != _but_rows(b) for a, b in pairwise(matrices)):
        return None
    stack = getattr(first, "stacked", None)
    whole: QuantTensor | None = None if stack is None else stack(matrices)
    return whole


def _but_rows(w: QuantTensor) -> object:
    """Return what two matrices must have in common to be stacked, besides the order of their inputs."""
    spec = {k: v for k, v in w.spec().items() if k not in ("shape", "inner")}
    inner = getattr(w, "inner", None)
    dtypes = [(name, t.dtype) for name, t in w.tensors().items()]
    return spec, w.shape[1], None if inner is None else _but_rows(inner), dtypes, w.device


SCATTERED = "its groups contain inputs from the whole matrix (act-order or outlier channels)"
TOGETHER = "its activations are quantized over all inputs together"

# --- for formats that answer ------------------------------------------------------------------------------------------


def cuts_group(group: int, K: int, k: int) -> str | None:
    """Return why groups of K inputs that are stored in bytes cannot be cut at input k; None: they can."""
    if k % group and group < K:
        return f"that would split a group of {group} inputs"
    return "codes are stored in bytes of 8 inputs" if k % 8 else None


def stack_tensors(
    matrices: Sequence[QuantTensor], row_dim: Callable[[Tensor], int] = lambda _: 0
) -> QuantTensor | None:
    """Return matrices of one format as one, whose tensors are those of all along the dimension of the rows.

    `perm`, where a format has it, must be the same: it orders the inputs.
    """
    first, tensors = matrices[0], [m.tensors() for m in matrices]
    perm = tensors[0].get("perm")
    if perm is not None and not all(torch.equal(t["perm"], perm) for t in tensors):
        return None
    parts = {
        name: t if name == "perm" else torch.cat([m[name] for m in tensors], row_dim(t))
        for name, t in tensors[0].items()
    }
    N = sum(m.shape[0] for m in matrices)
    return type(first).from_parts({**first.spec(), "shape": [N, first.shape[1]]}, parts)
