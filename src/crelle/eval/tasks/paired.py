"""Two models on the same items. Most items are easy or hard for both, so that only pairs tell a small difference.

difference   mean of d = correct(model) - correct(other), item by item
stderr       standard deviation of d / sqrt(items)
p-value      McNemar's exact test, two-sided: of the items that only one has right, each is as likely the model's
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Paired:
    """What a model has right that another has not."""

    difference: float
    stderr: float | None  # None for a single item
    p_value: float
    only_model: int  # items that only the model has right
    only_other: int


def paired(model: Sequence[bool], other: Sequence[bool]) -> Paired:
    """Compare which items two models have right."""
    d = [float(a) - float(b) for a, b in zip(model, other, strict=True)]
    gained, lost = d.count(1.0), d.count(-1.0)
    return Paired(sum(d) / len(d), standard_error(d), mcnemar(gained, lost), gained, lost)


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p-value of so many items that changed for the better and for the worse."""
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << n))


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of a mean; None for a single value."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
