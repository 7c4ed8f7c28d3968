"""Where a value stands on an axis, and which values are marked on it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from crelle.bench.report.figures import Axis

_MOST_TICKS = 6  # as many as a phone has room for


@dataclass(frozen=True, slots=True)
class Scale:
    low: float
    high: float
    log: bool
    ticks: Sequence[float]

    def at(self, value: float) -> float:
        """Return the share of the axis that lies below a value: 0 to 1, or beyond."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def scale(axis: Axis, values: Sequence[float], from_zero: bool = False) -> Scale:
    """Return a scale that holds all values, up to the axis's limit."""
    shown = [min(v, axis.most) if axis.most else v for v in values]
    low, high = min(shown), max(shown)
    if axis.log:
        low, high = low / 1.08, high * 1.08
        return Scale(low, high, True, _log_ticks(low, high))
    if from_zero:
        low = 0.0
    room = 0.06 * ((high - low) or abs(high) or 1.0)
    low, high = (low if from_zero else low - room), high + room
    return Scale(low, high, False, _linear_ticks(low, high))


def tick_text(value: float) -> str:
    """Return a tick's label, short: 16.4k, 1.5."""
    if value >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:.6g}"


def _linear_ticks(low: float, high: float) -> list[float]:
    step = next(
        s
        for power in range(math.floor(math.log10((high - low) / _MOST_TICKS)), 99)
        for s in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)
        if (high - low) / s <= _MOST_TICKS
    )
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of 2 or, over a wide range, of 10; over a narrow one round values between."""
    if high / low < 4:
        return [t for t in _linear_ticks(low, high) if t > 0]
    powers = [2.0**i for i in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    if high / low > 1000:
        powers = [10.0**i for i in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    every = math.ceil(len(powers) / _MOST_TICKS)
    return powers[::every]
