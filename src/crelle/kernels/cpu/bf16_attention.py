"""Causal attention over whole sequences as bf16 tiles (AMX): what calibration forward passes need beside products."""

import torch
from torch import Tensor

from crelle.kernels import cpu

_TYPES = (torch.float32, torch.bfloat16)


def supports(q: Tensor, k: Tensor) -> bool:
    """Whether there are tiles for q [B, T, H, D] and k [B, T, Hkv, D]: D a multiple of 32 up to 256, H one of Hkv."""
    return _objection(q, k) is None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, emulate: bool = False) -> Tensor:
    """Return bf16(softmax(q kᵀ D^-0.5) v) [B, T, H, D] for k and v [B, T, Hkv, D]; token t sees tokens 0 ... t.

    Inputs are bf16, or f32 that is rounded to it; query head h reads head h // (H / Hkv) of k and v. Scores, softmax
    and sums are f32, weights are rounded to bf16 for the product with v. A sequence's result has the same bits alone as
    among others, on any number of threads; what is not finite reaches only tokens that see it. `emulate`: tiles in
    plain C++, for tests.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in _TYPES or x.device.type != "cpu":
            raise ValueError(f"{name} must be f32 or bf16 on the CPU, got {x.dtype} on {x.device}")
    if (reason := _objection(q, k)) is not None:
        raise ValueError(reason)
    if v.shape != k.shape:
        raise ValueError(f"k and v must have one shape, got {list(k.shape)} and {list(v.shape)}")
    y = torch.empty(q.shape, dtype=torch.bfloat16)
    cpu.core().causal_attention(*(x.detach().bfloat16().contiguous() for x in (q, k, v)), y, emulate)
    return y


def _objection(q: Tensor, k: Tensor) -> str | None:
    """Return why these shapes cannot be taken, or None."""
    shapes = f"got {list(q.shape)} and {list(k.shape)}"
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        return f"q must be [B, T, H, D] and k [B, T, Hkv, D], {shapes}"
    H, D, Hkv = *q.shape[2:], k.shape[2]
    if not H or not Hkv or H % Hkv:
        return f"the heads of q must be a multiple of those of k, {shapes}"
    if not 32 <= D <= 256 or D % 32:
        return f"heads must have a multiple of 32 channels, at most 256; {shapes}"
    return None
