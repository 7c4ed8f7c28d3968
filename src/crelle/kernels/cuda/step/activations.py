"""The prologues of the CUDA products: norms, activations and gated activations, all computed in f32.

GELU is by erf, GELU_TANH its tanh approximation. A gated op takes x [M, 2K], gate then up, and gives act(gate) * up.
Activations of which no model that is often run has need (`by_torch`) have no prologue: torch applies them.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Prologue = Literal[
    "PLAIN", "RMS_NORM", "LAYER_NORM", "SILU_MUL", "RELU", "GELU", "GELU_TANH", "GELU_MUL", "GELU_TANH_MUL"
]

_OPS: dict[tuple[str, bool], Prologue] = {
    ("silu", True): "SILU_MUL",
    ("relu", False): "RELU",
    ("gelu", False): "GELU",
    ("gelu", True): "GELU_MUL",
    ("gelu_tanh", False): "GELU_TANH",
    ("gelu_tanh", True): "GELU_TANH_MUL",
}


def is_gated(op: str) -> bool:
    """Whether a prologue, or an epilogue that encodes, reads gate and up."""
    return "_MUL" in op


def width(op: Prologue) -> int:
    """How many values of x an input of the product takes: 2 where the op is gated."""
    return 2 if is_gated(op) else 1


def _gated_relu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.relu(gate) * up


def _swigluoai(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
    return gate * torch.sigmoid(1.702 * gate) * up


_BY_TORCH: dict[tuple[str, bool], Callable[[Tensor], Tensor]] = {
    ("silu", False): F.silu,
    ("relu", True): _gated_relu,
    ("swigluoai", True): _swigluoai,
}


def supports(activation: str, gated: bool) -> str | None:
    """Return None, or why the step cannot run a feed-forward with this activation."""
    if (activation, gated) in _OPS or (activation, gated) in _BY_TORCH:
        return None
    known = ", ".join(f"gated {name}" if with_gate else name for name, with_gate in (*_OPS, *_BY_TORCH))
    return f"has no {'gated ' if gated else ''}{activation} activation, only {known}"


def activation_op(activation: str, gated: bool) -> Prologue:
    """Return the prologue of a feed-forward's activation, PLAIN where it has none; `supports` has been asked."""
    return _OPS.get((activation, gated), "PLAIN")


def by_torch(activation: str, gated: bool) -> Callable[[Tensor], Tensor] | None:
    """Return what torch computes before the last product, for x [M, K], or [M, 2K] if gated; None: a prologue does."""
    return _BY_TORCH.get((activation, gated))
