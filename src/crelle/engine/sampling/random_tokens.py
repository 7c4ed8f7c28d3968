"""Random tokens of a batch, each row by its own temperature, truncation and random numbers.

A token is where the running sum of the probabilities exceeds u times their total, u uniform in [0, 1). Probabilities
are integers here, so a sum has the same value in any order: the token of a row does not depend on the rows beside it,
and the rest is elementwise but for maxima. One pass over [R, V] for all rows, and one random number for each.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from crelle.engine.sampling.sampler import Sampler, Sampling
from crelle.engine.sampling.upload import upload

_ONE = float(1 << 40)  # the largest probability, as an integer: a sum of 2^20 tokens fits 63 bits
_LEAST = -60.0  # of the logarithm of a probability over the largest: below it the integer is 0, and exp is slow


def random_tokens(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Return a token for each row of logits f32 [R, V], int64 [R]; -1 where the largest logit is not finite."""
    largest = logits.amax(-1, keepdim=True)
    settings = [sampler.s for sampler in samplers]
    numbers = [(s.temperature, sampler.random.random()) for s, sampler in zip(settings, samplers, strict=True)]
    temperature, u = upload(torch.tensor(numbers, dtype=torch.float64), logits.device).T[:, :, None]  # [R, 1] each
    scores = (logits - largest) / temperature.to(logits.dtype)
    truncate(scores, settings)
    sums = _masses(scores).cumsum(-1)
    total = sums[:, -1:]
    aim = torch.minimum((u * total.double()).long(), total - 1)
    found = torch.searchsorted(sums, aim, right=True)
    return torch.where(largest.isfinite(), found, -1)[:, 0]


def _masses(scores: Tensor) -> Tensor:
    """Return probabilities in units of 2^-40 of the largest one, int64."""
    return (scores.clamp(min=_LEAST).exp_() * _ONE).long()


def truncate(scores: Tensor, settings: Sequence[Sampling]) -> None:
    """Set to -inf what top_k, top_p and min_p leave out, in that order, in place; the most likely token always stays.

    scores: [R, V], logits over temperature of which the largest is 0.
    """
    V = scores.shape[1]
    steps: list[tuple[Callable[[Tensor, list[Sampling]], Tensor], Callable[[Sampling], bool]]] = [
        (_beyond_k, lambda s: 0 < s.top_k < V),
        (_beyond_p, lambda s: s.top_p < 1),
        (_below_min, lambda s: s.min_p > 0),
    ]
    for left_out, applies in steps:
        some = [i for i, s in enumerate(settings) if applies(s)]
        if len(some) == len(settings):
            scores.masked_fill_(left_out(scores, list(settings)), -torch.inf)
        elif some:
            at = upload(some, scores.device)
            part = scores[at]
            scores[at] = part.masked_fill(left_out(part, [settings[i] for i in some]), -torch.inf)


def _beyond_k(scores: Tensor, settings: list[Sampling]) -> Tensor:
    """Whether a token is less likely than the k-th one, [R, V]."""
    largest = scores.topk(max(s.top_k for s in settings)).values
    last = upload([s.top_k - 1 for s in settings], scores.device)[:, None]
    return scores < largest.gather(1, last)


def _beyond_p(scores: Tensor, settings: list[Sampling]) -> Tensor:
    """Whether the tokens before one, in the order of their probability, have at least top_p together, [R, V]."""
    ordered, index = scores.sort(descending=True, stable=True)
    mass = _masses(ordered)
    sums = mass.cumsum(-1)
    limits = upload(torch.tensor([s.top_p for s in settings], dtype=torch.float64), scores.device)
    left_out = (sums - mass).double() >= limits[:, None] * sums[:, -1:].double()
    left_out[:, 0] = False  # also where top_p is next to nothing
    return torch.zeros_like(left_out).scatter_(1, index, left_out)


def _below_min(scores: Tensor, settings: list[Sampling]) -> Tensor:
    """Whether a token is less likely than min_p times the likeliest one, [R, V]."""
    limits = upload(torch.tensor([s.min_p for s in settings], dtype=scores.dtype), scores.device)
    return scores.exp() < limits[:, None]
