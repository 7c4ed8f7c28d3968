"""Causal attention over whole sequences in f32, on every instruction set: for calibration on CPUs without AMX."""

import torch
from torch import Tensor

from crelle.kernels import cpu


def supports(q: Tensor, k: Tensor) -> bool:
    """Whether q [B, T, H, D] and k [B, T, Hkv, D] can be taken: D a multiple of 16, H one of Hkv."""
    return q.shape[-1] % 16 == 0 and q.shape[-1] <= 1024 and q.shape[-2] % k.shape[-2] == 0


def causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Return softmax(q kᵀ D^-0.5) v [B, T, H, D] for k and v [B, T, Hkv, D]; token t sees tokens 0 ... t.

    window: of these the last `window`; None: all. Query head h reads head h // (H / Hkv) of k and v. A sequence's
    result has the same bits alone as among others, on any number of threads.
    """
    y = torch.empty(q.shape)
    given = (x.detach().float().contiguous().numpy() for x in (q, k, v))
    cpu.core().causal_attention_f32(*given, y.numpy(), window or 0)
    return y
