"""`crelle::linear`, a torch custom op: what torch.compile, transformers and vLLM call instead of `ops.matmul`.

A custom op takes tensors and numbers, so a prepared weight enters it by its number:

    number = linear_op.number(prepared)                     # once; lives as long as prepared does
    y = torch.ops.crelle.linear(x, number, prepared.problem.N)
"""

import itertools
import weakref

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.kernels import ops
from crelle.kernels.base import Prepared

_numbers = itertools.count()
_weights: weakref.WeakValueDictionary[int, Prepared] = weakref.WeakValueDictionary()


def number(w: Prepared) -> int:
    """Return a number by which `crelle::linear` of this process finds w; the caller keeps w alive."""
    n = next(_numbers)
    _weights[n] = w
    return n


@torch.library.custom_op("crelle::linear", mutates_args=())
def linear(x: Tensor, weight: int, N: int) -> Tensor:
    """Return x [..., K] @ W.T as [..., N]."""
    w = _weights.get(weight)
    if w is None:
        raise UnsupportedError(
            f"weight {weight} of crelle::linear is gone: its layer was deleted, or another process's"
        )
    return ops.matmul(x, w)


@linear.register_fake
def _(x: Tensor, weight: int, N: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], N)
