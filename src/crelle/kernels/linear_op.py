"""`crelle::linear`, a torch custom op: what torch.compile, transformers and vLLM call instead of `ops.matmul`.

A custom op takes tensors and numbers, so a prepared weight enters it by its number:

    number = linear_op.number(prepared)                     # once; lives as long as prepared does
    y = torch.ops.crelle.linear(x, number, prepared.problem.N)

What is prepared only when the first input comes (the input tells dtype and device) is a `LazyWeight`.
"""

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.kernels import ops
from crelle.kernels.base import Prepared


class LazyWeight(Protocol):
    """A weight that is prepared when it is first multiplied."""

    def prepared(self, x: Tensor) -> Prepared:
        """Return the weight prepared for inputs like x."""
        ...


_numbers = itertools.count()
_weights: weakref.WeakValueDictionary[int, Prepared | LazyWeight] = weakref.WeakValueDictionary()


def number(w: Prepared | LazyWeight) -> int:
    """Return a number by which `crelle::linear` of this process finds w; the caller keeps w alive."""
    n = next(_numbers)
    _weights[n] = w
    return n


def by_number(n: int) -> Prepared | LazyWeight:
    """Return the weight of a number."""
    w = _weights.get(n)
    if w is None:
        raise UnsupportedError(f"weight {n} of crelle::linear is gone: its layer was deleted, or another process's")
    return w


@torch.library.custom_op("crelle::linear", mutates_args=())
def linear(x: Tensor, weight: int, N: int) -> Tensor:
    """Return x [..., K] @ W.T as [..., N]."""
    w = by_number(weight)
    return ops.matmul(x, w if isinstance(w, Prepared) else w.prepared(x))


@linear.register_fake
def _(x: Tensor, weight: int, N: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], N)
