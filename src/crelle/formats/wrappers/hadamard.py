"""Products with Hadamard matrices: rotations that spread a large value over all channels of a block.

H has entries ±1/sqrt(n), is its own inverse, and takes n log n sums: no matrix is stored.
"""

import math

import torch
from torch import Tensor


def block_size(channels: int) -> int:
    """Return how many channels a block of H has: the greatest power of two that divides their number."""
    return channels & -channels


def hadamard_blocks(x: Tensor, block: int | None = None) -> Tensor:
    """Return H x for x [..., D], each block of channels by itself, in f32 (or f64 as x); it is its own inverse.

    By sums and differences at distance 1, 2, 4 …, then 1/sqrt: the same bits for a row wherever it is computed.
    """
    x = x if x.dtype == torch.float64 else x.float()
    shape, block = x.shape, block_size(x.shape[-1]) if block is None else block
    for step in (1 << i for i in range(block.bit_length() - 1)):
        a, b = x.reshape(*shape[:-1], shape[-1] // (2 * step), 2, step).unbind(-2)  # [..., D/2/step, step]
        x = torch.stack([a + b, a - b], -2).reshape(shape)
    return x * (1 / math.sqrt(max(1, block)))
