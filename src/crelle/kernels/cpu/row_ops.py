"""What lies between the products of a forward pass, over many rows: one pass over memory each, in f32, rounded once.

Inputs are f32 or bf16 on the CPU; nothing is kept for gradients. Where torch.autocast is on, it does not reach in here:
the caller says which dtype the result has.
"""

import torch
from torch import Tensor

from crelle.kernels import cpu
from crelle.kernels.spec import Activation

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu")  # that C++ has, gated or plain
_TYPES = (torch.float32, torch.bfloat16)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight for x [..., n] and weight [n] in f32."""
    x = _plain("x", x)
    if x.ndim < 1:
        raise ValueError("x must be [..., n], got a single number")
    weight = _f32("weight", weight, x.shape[-1:])
    y = _empty(x.shape, dtype)
    cpu.core().norm_rows(x, weight.numpy(), eps, y)
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [..., T, H, D] with its first R channels rotated: crelle.models.rope.rotate.

    cos and sin [T, 1, R] in f32 are those of crelle.models.rope.angles: the first R/2 are read, since the others repeat
    them.
    """
    x = _plain("x", x)
    if x.ndim < 3:
        raise ValueError(f"x must be [..., T, H, D], got {list(x.shape)}")
    T, _, D = x.shape[-3:]
    R = cos.shape[-1] if cos.ndim else 0
    if R % 2 or R > D:
        raise ValueError(f"cos and sin must have an even number of channels up to the {D} of x, got {R}")
    cos, sin = _f32("cos", cos, (T, 1, R)), _f32("sin", sin, (T, 1, R))
    y = _empty(x.shape, dtype)
    cpu.core().rotate_rows(x, cos.numpy(), sin.numpy(), y)
    return y


def gated(activation: Activation, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """Return f(gate) * up."""
    gate, up = _alike("gate", gate, "up", up)
    y = _empty(gate.shape, dtype)
    cpu.core().gate_rows(activation, gate, up, y)
    return y


def added(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x + y; they may be of different dtypes."""
    x, y = _alike("x", x, "y", y)
    total = _empty(x.shape, dtype)
    cpu.core().add_rows(x, y, total)
    return total


def _plain(name: str, x: Tensor) -> Tensor:
    """Return a tensor as the core reads it."""
    if x.dtype not in _TYPES or x.device.type != "cpu":
        raise ValueError(f"{name} must be f32 or bf16 on the CPU, got {x.dtype} on {x.device}")
    return x.detach().contiguous()


def _f32(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    if x.dtype != torch.float32 or x.shape != shape:
        raise ValueError(f"{name} must be f32 {list(shape)}, got {x.dtype} {list(x.shape)}")
    return _plain(name, x)


def _alike(name: str, x: Tensor, other: str, y: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape != y.shape:
        raise ValueError(f"{name} and {other} must have one shape, got {list(x.shape)} and {list(y.shape)}")
    return _plain(name, x), _plain(other, y)


def _empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if dtype not in _TYPES:
        raise ValueError(f"the result can be f32 or bf16, not {dtype}")
    return torch.empty(shape, dtype=dtype)
