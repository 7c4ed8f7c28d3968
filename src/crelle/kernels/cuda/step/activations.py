"""The prologues of the CUDA products: norms, activations and gated activations, all computed in f32.

GELU is by erf, GELU_TANH its tanh approximation. A gated op takes x [M, 2K], gate then up, and gives act(gate) * up.
"""

from typing import Literal

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


def supports(activation: str, gated: bool) -> str | None:
    """Return None, or why the CUDA kernels cannot run a feed-forward with this activation."""
    if (activation, gated) in _OPS:
        return None
    known = ", ".join(f"gated {name}" if with_gate else name for name, with_gate in _OPS)
    return f"has no {'gated ' if gated else ''}{activation} activation, only {known}"


def activation_op(activation: str, gated: bool) -> Prologue:
    """Return the prologue of a feed-forward's activation; `supports` has been asked."""
    return _OPS[activation, gated]
