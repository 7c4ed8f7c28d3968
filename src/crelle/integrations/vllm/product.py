"""The matrices of one layer as kernels multiply by them, and the custom ops through which a compiled model calls them.

    torch.ops.crelle.layer(x, handle, N)             x [..., K] @ W.T as [..., N]
    torch.ops.crelle.lookup(tokens, handle, K, dtype)    rows of W [tokens, K]

W is found by `handle`, an int64 tensor of one element on the CPU, a buffer of the layer. `crelle::linear` takes a plain
number instead, which a compiled graph would hold as a constant: every layer would then be compiled for itself, and a
graph from a cache on disk would name the layers of another process.
"""

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.parallel import stacked
from crelle.kernels import cpu, ops
from crelle.kernels.base import Prepared


class Product:
    """y = [x @ W.T of each matrix, side by side]; matrices that agree in everything but rows are multiplied as one."""

    def __init__(self, weights: Sequence[QuantTensor], dtype: torch.dtype) -> None:
        one = stacked(weights)
        self.prepared = [_prepare(w, dtype) for w in (weights if one is None else [one])]
        self.N = sum(p.problem.N for p in self.prepared)
        first = self.prepared[0]
        # Asked once: on a GPU the answer may read memory, which a captured graph must not.
        self.encodes_once = all(ops.shares(first, p) for p in self.prepared)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(self.prepared) == 1:
            y = self.prepared[0].kernel.run(rows, self.prepared[0].data)
        else:
            first = self.prepared[0]
            seen = first.kernel.encode(rows, first.data) if self.encodes_once else rows
            y = torch.cat([p.kernel.run(seen, p.data) for p in self.prepared], -1)
        return y.reshape(*x.shape[:-1], self.N)


def _prepare(w: QuantTensor, dtype: torch.dtype) -> Prepared:
    """Refuse to dequantize a whole model behind the user's back where the C++ kernels are not built."""
    if w.quantized and w.device.type == "cpu" and (reason := cpu.available()) is not None:
        raise UnsupportedError(
            f"vLLM needs Crelle's C++ kernels to serve a checkpoint on a CPU: the extension {reason}"
        )
    return ops.prepare(w, dtype)


class Table:
    """Rows of a matrix, dequantized when they are looked up."""

    def __init__(self, w: QuantTensor) -> None:
        self.weight = w

    def __call__(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        rows = self.weight.rows(tokens.flatten()).dequantize(dtype)  # [tokens, K]
        return rows.reshape(*tokens.shape, -1)


_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, Product | Table] = weakref.WeakValueDictionary()


def handle_of(layer: Product | Table) -> Tensor:
    """Return a handle by which the ops of this process find a layer; the caller keeps the layer alive."""
    n = next(_numbers)
    _layers[n] = layer
    return torch.tensor(n, dtype=torch.int64, device="cpu")


def _found(handle: Tensor) -> Product | Table:
    layer = _layers.get(int(handle))
    if layer is None:
        raise UnsupportedError(f"layer {int(handle)} of crelle::layer is gone: it was deleted, or another process's")
    return layer


@torch.library.custom_op("crelle::layer", mutates_args=())
def layer(x: Tensor, handle: Tensor, N: int) -> Tensor:
    """Return x [..., K] @ W.T as [..., N]."""
    found = _found(handle)
    assert isinstance(found, Product)
    return found(x)


@layer.register_fake
def _(x: Tensor, handle: Tensor, N: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], N)


@torch.library.custom_op("crelle::lookup", mutates_args=())
def lookup(tokens: Tensor, handle: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    """Return the rows [..., K] of some tokens."""
    found = _found(handle)
    assert isinstance(found, Table)
    return found(tokens, dtype)


@lookup.register_fake
def _(tokens: Tensor, handle: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    return tokens.new_empty(*tokens.shape, K, dtype=dtype)
