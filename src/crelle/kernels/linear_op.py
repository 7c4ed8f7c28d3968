"""`crelle::linear`, a torch custom op: what compiled graphs and models of transformers call instead of `ops.matmul`.

    n = handles.number(prepared)                            # once; lives as long as prepared does
    y = torch.ops.crelle.linear(x, n, prepared.problem.N)

The gradient to x is dy @ W, with W dequantized for it alone; the weight has none: adapters train, it stays.

vLLM's layers have an op of their own, which takes the number as a tensor (crelle.integrations.vllm.product says why).

What is prepared only when the first input comes (the input tells dtype and device) is a `LazyWeight`.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from crelle.errors import UnsupportedError
from crelle.kernels import ops
from crelle.kernels.base import Prepared
from crelle.kernels.handles import by_number


class LazyWeight(ABC):
    """A weight that is prepared when it is first multiplied."""

    @abstractmethod
    def prepared(self, x: Tensor) -> Prepared:
        """Return the weight prepared for inputs like x."""

    @abstractmethod
    def dequantized(self, x: Tensor) -> Tensor:
        """Return the weight [N, K] in the dtype and on the device of x."""


@torch.library.custom_op("crelle::linear", mutates_args=())
def linear(x: Tensor, weight: int, N: int) -> Tensor:
    """Return x [..., K] @ W.T as [..., N]."""
    w = by_number(weight, object)
    if isinstance(w, LazyWeight):
        w = w.prepared(x)
    if not isinstance(w, Prepared):
        raise UnsupportedError(
            f"weight {weight} of crelle::linear is a {type(w).__name__}, which cannot be multiplied by"
        )
    return ops.matmul(x, w)


@linear.register_fake
def _(x: Tensor, weight: int, N: int) -> Tensor:
    """Prepare the weight while a graph is traced: memory taken in its first run would count as the CUDA graph's own."""
    w = by_number(weight, object) if type(weight) is int else None  # or symbolic; that of a module never is
    if isinstance(w, LazyWeight) and x.device.type != "meta":
        with _disable_current_modes():
            w.prepared(x)
    return x.new_empty(*x.shape[:-1], N)


def _remember(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
    _, ctx.weight, _ = inputs


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    w = by_number(ctx.weight, object)
    if not isinstance(w, LazyWeight):
        raise UnsupportedError(
            f"weight {ctx.weight} of crelle::linear is in its kernel's layout only, which has no gradient; train "
            "through a model of transformers"
        )
    return dy @ w.dequantized(dy), None, None


linear.register_autograd(_backward, setup_context=_remember)
