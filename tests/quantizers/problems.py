"""Weights and the statistics of inputs that they might have."""

from functools import cache

import torch
from torch import Tensor

from crelle.formats.base import QuantTensor
from crelle.quantizers.calibration.stats import Stats


def weight(N: int, K: int, seed: int = 0) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.02


def stats_of(hessian: Tensor, cross: Tensor | None = None) -> Stats:
    size = hessian.diagonal().clamp(min=0).sqrt()
    return Stats(hessian, size, 1000, cross)


def correlated(K: int, seed: int = 0, tokens: int = 4000) -> Stats:
    """Inputs as a model has them: correlated, and a few channels much larger than the rest."""
    return stats_of(_correlated(K, seed, tokens).clone())


@cache
def _correlated(K: int, seed: int, tokens: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, K, generator=rng)
    x = x @ (torch.eye(K) + torch.randn(K, K, generator=rng) / K**0.5)
    x = x * torch.randn(K, generator=rng).exp()
    return x.T @ x / tokens


def output_error(q: QuantTensor, target: Tensor, stats: Stats) -> float:
    error = target.double() - q.dequantize(torch.float64)
    return float(((error @ stats.hessian.double()) * error).sum())
