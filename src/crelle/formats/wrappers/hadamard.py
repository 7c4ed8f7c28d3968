"""Products with Hadamard matrices: rotations that spread a large value over all channels of a block.

H = P ⊗ S with entries ±1/sqrt(n), n = p 2^k: Sylvester's S of order 2^k takes k sums a channel, Paley's P of order p
takes p. All are symmetric, so H is its own inverse. No matrix is stored: one of 36 or 12 is made when it is needed.

    I    p = q + 1, q prime, q % 4 = 3         borders 1; else  χ(i + j), and -1 where i + j = 0 mod q
    II   p = 2 (q + 1), q prime, q % 4 = 1     C ⊗ [1 1; 1 -1] + I ⊗ [1 -1; -1 -1];  C borders 1, diagonal 0, χ(i - j)

χ: Legendre's symbol, 1 for squares mod q, -1 for others, 0 for 0. So 576 = 36 * 16, 1536 = 12 * 128, 14336 = 28 * 512.
Powers of primes and Williamson's matrices are not made: of the multiples of 4 up to 128, 52, 92, 100 and 116 are
missing, and the orders that only they lead to.
"""

import math
from functools import cache

import torch
from torch import Tensor

MOST_PALEY = 256  # order of P: the sums that it takes for a channel
MOST_CHANNELS = 1 << 15  # of a block


def block_size(channels: int) -> int:
    """Return how many channels a block of H has: the greatest power of two that divides their number."""
    return channels & -channels


def paley_order(order: int) -> int | None:
    """Return p of H = P ⊗ S of this order, the least there is, 1 for a power of two; None: no H of it is known here."""
    if order < 1:
        return None
    p = order // block_size(order)
    while p <= MOST_PALEY and order % p == 0:
        if p == 1 or _paley_prime(p) is not None:
            return p
        p *= 2
    return None


@cache
def known_orders(channels: int) -> list[int]:
    """Return the orders up to MOST_CHANNELS of blocks into which channels can be divided, ascending."""
    most = min(channels, MOST_CHANNELS)
    return [n for n in range(1, most + 1) if channels % n == 0 and paley_order(n) is not None]


@cache
def paley_matrix(p: int) -> Tensor:
    """Return P, ±1 int8 [p, p]; its square is p times the identity."""
    q = _paley_prime(p)
    if q is None:
        if p == 1:
            return torch.ones(1, 1, dtype=torch.int8)
        raise ValueError(f"no Paley matrix has the order {p}")
    i = torch.arange(q)
    squares = torch.full((q,), -1, dtype=torch.int8).index_fill_(0, i * i % q, 1)
    squares[0] = 0
    first = p == q + 1
    P = torch.ones(q + 1, q + 1, dtype=torch.int8)
    P[1:, 1:] = squares[(i[:, None] + (i if first else -i)) % q]
    if first:
        P[1 + i, 1 + -i % q] = -1
        return P
    P[0, 0] = 0
    plus, minus = torch.tensor([[1, 1], [1, -1]]), torch.tensor([[1, -1], [-1, -1]])
    return (torch.kron(P, plus) + torch.kron(torch.eye(q + 1, dtype=torch.int64), minus)).to(torch.int8)


def hadamard_blocks(x: Tensor, block: int | None = None) -> Tensor:
    """Return H x for x [..., D], each block of channels by itself, in f32 (or f64 as x); it is its own inverse.

    By sums and differences at distance 1, 2, 4 … 2^k / 2, then sums of p channels at distance 2^k in their order, then
    1/sqrt: the same bits for a row wherever it is computed.
    """
    x = x if x.dtype == torch.float64 else x.float()
    shape, block = x.shape, block_size(x.shape[-1]) if block is None else block
    p = paley_order(max(1, block))
    assert p is not None, f"no Hadamard matrix of order {block}"
    for step in (1 << i for i in range((block // p).bit_length() - 1)):
        a, b = x.reshape(*shape[:-1], shape[-1] // (2 * step), 2, step).unbind(-2)  # [..., D/2/step, step]
        x = torch.stack([a + b, a - b], -2).reshape(shape)
    if p > 1:
        parts = x.reshape(*shape[:-1], shape[-1] // block, p, block // p)
        P = paley_matrix(p).to(x.device, x.dtype).unsqueeze(-1)  # [p, p, 1]
        total = torch.zeros_like(parts)
        for j in range(p):
            total += parts[..., j : j + 1, :] * P[:, j]
        x = total.reshape(shape)
    return x * (1 / math.sqrt(max(1, block)))


@cache
def _paley_prime(p: int) -> int | None:
    """Return the prime that P of order p is made of, by either construction; None: there is none."""
    for q, rest in ((p - 1, 3), (p // 2 - 1, 1)):
        if p % 4 == 0 and q % 4 == rest and q > 2 and all(q % d for d in range(2, math.isqrt(q) + 1)):
            return q
    return None
