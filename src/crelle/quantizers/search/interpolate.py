"""Losses of settings that were not measured, from neighbours that were.

The loss of a matrix is a smooth function of the group size at given bits, and of the share of 4-bit groups: the
logarithm of the loss is interpolated linearly, over the logarithm of the group and over the share. What is measured is
itself off by some 10%, by how the roundings of few rows happen to fall, and interpolating adds no more than that.

Measured are the ends of such a curve and, between them, groups that are a power of two (a source that is quantized
already loses nothing in its own groups, which have such sizes) and every other share.
"""

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise

from crelle.quantizers.base import BitConfig
from crelle.quantizers.schemes.mixed import Mixed
from crelle.quantizers.solvers.fast_error import Setting

_GAP = 2.0  # in powers of two: groups further apart are not interpolated between


def _place(s: Setting) -> tuple[Hashable, float]:
    """Return the curve that a setting lies on, and where."""
    if isinstance(s, Mixed):
        return replace(s, four=0.0), s.four
    if isinstance(s, BitConfig) and s.group != "row":
        return s.bits, math.log2(s.group)
    return str(s), 0.0


def _curves(settings: Iterable[Setting]) -> list[list[Setting]]:
    found: dict[Hashable, list[Setting]] = {}
    for s in settings:
        found.setdefault(_place(s)[0], []).append(s)
    return [sorted(curve, key=lambda s: _place(s)[1]) for curve in found.values()]


def to_measure(settings: Iterable[Setting]) -> list[Setting]:
    """Return the settings from which the others follow."""
    return [s for curve in _curves(settings) for s in _of_curve(curve)]


def _of_curve(curve: list[Setting]) -> list[Setting]:
    if not isinstance(curve[0], BitConfig):
        return [s for i, s in enumerate(curve) if i % 2 == 0 or i == len(curve) - 1]
    places = [_place(s)[1] for s in curve]
    fixed = [i in (0, len(curve) - 1) or place.is_integer() for i, place in enumerate(places)]
    taken: list[int] = []
    for i in range(len(curve)):
        if fixed[i] or places[fixed.index(True, i)] - places[taken[-1]] > _GAP:
            taken.append(i)
    return [curve[i] for i in taken]


def fill_in(measured: Mapping[Setting, float], settings: Iterable[Setting]) -> dict[Setting, float]:
    """Return the loss of every setting."""
    by_curve: dict[Hashable, list[tuple[float, float]]] = {}
    for s, loss in measured.items():
        curve, x = _place(s)
        by_curve.setdefault(curve, []).append((x, loss))
    points = {curve: sorted(some) for curve, some in by_curve.items()}
    return {s: measured[s] if s in measured else _between(points[_place(s)[0]], _place(s)[1]) for s in settings}


def _between(points: list[tuple[float, float]], x: float) -> float:
    (x0, a), (x1, b) = next((low, high) for low, high in pairwise(points) if low[0] <= x <= high[0])
    share = (x - x0) / (x1 - x0)
    if not (a > 0 and b > 0):  # a setting that loses nothing has no logarithm
        return a + share * (b - a)
    return math.exp((1 - share) * math.log(a) + share * math.log(b))
