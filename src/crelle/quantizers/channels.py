"""Channels of an input whose groups share a scale per token: which belong together, and how large each should be."""

import torch
from torch import Tensor

_LEAST = 1e-4  # of the mean size: bounds the scale of channels that are almost always 0
_LARGE = 4.0  # times a channel's mean size: what lies beyond counts as that


def smoothing(energy: Tensor, weights: Tensor) -> Tensor:
    """Return by what to divide channels with mean squares `energy` [K] that weights [N, K] read, 1 on average.

    With size x of a channel and w of its column, channels of x / s share a step, so their error in the output is
    proportional to s w, and s to x / s. If the step goes by the mean square of a group, the sum of all errors is least
    at x / s = s w, s = (x / w)^½; if by the largest channel, at s = x. Between them, because the step goes by the
    largest value, which any of the large channels may have.
    """
    x = energy.clamp(min=0).sqrt()
    w = weights.square().mean(0).sqrt()
    x, w = (t.clamp(min=_LEAST * float(t.mean().clamp(min=1e-30))) for t in (x, w))
    s = x**0.75 / w**0.25
    return s / s.log().mean().exp()


def signs(x: Tensor) -> Tensor:
    """Return the signs [K] by which to multiply channels of x [T, K] so that their largest values are negative.

    Codes of 4 bits are -8 … 7: a clip factor that cuts positive values off leaves most negative ones whole.
    """
    return torch.where(x.pow(3).sum(0) > 0, -1.0, 1.0)


def clustered(x: Tensor, group: int) -> Tensor:
    """Return an order of the channels of x [T, K] in which those that are large for the same tokens share a group.

    Halves by the first principal component of the sizes |x|, over and over, down to single groups.
    """
    size = x.abs()
    size = (size / size.mean(0).clamp(min=1e-30)).clamp(max=_LARGE)
    groups = -(-x.shape[1] // group)
    return torch.cat(
        _halves(size - size.mean(1, keepdim=True), torch.arange(x.shape[1], device=x.device), groups, group)
    )


def _halves(size: Tensor, channels: Tensor, groups: int, group: int) -> list[Tensor]:
    if groups <= 1:
        return [channels]
    here = size[:, channels]
    here = here - here.mean(1, keepdim=True)
    axis = torch.linalg.eigh((here.T @ here).double()).eigenvectors[:, -1]
    ordered, first = channels[axis.argsort(stable=True)], groups // 2
    parts = (ordered[: first * group], first), (ordered[first * group :], groups - first)
    return [found for part, count in parts for found in _halves(size, part, count, group)]
