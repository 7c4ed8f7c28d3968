"""How many tokens are worth guessing: those with which a step gives the most tokens per second.

    tokens of a step    1 for each sequence, and p + p² + … + p^k for a draft of k tokens, each right with probability p
    its seconds         as steps of that many sequences and rows were measured to take, and the drafting; what few
                        measurements leave open follows a slope on a CPU, and on a GPU the graphs' own times, which are
                        measured before the first draft

p is counted for each sequence, with older tokens counting less, and begins at what all sequences have shown for a match
of that length. Of all drafts the likeliest tokens come first; as many of them run as give the best rate, often none.
After steps in which none paid, two tokens are tried now and then, ever more rarely while that fails.
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import inf
from statistics import median

_SLOPE = 0.15  # of a step's time, for each further row: assumed until it is measured
_ASSUMED = 2  # measurements that what is assumed counts for
_RECENT = 8  # measurements of which the median counts
_STALE, _STALE_ROWS = 256, 2048  # steps after which a time is measured anew: without drafts, with them
_ENOUGH = 3  # measurements of a step without drafts, before any
_FORGET, _FORGET_ALL = 0.9, 0.995  # how much older tokens count: of one sequence, of all
_WEIGHT = 3.0  # tokens that what all have shown counts for in one sequence
_SURE = 0.98  # no token is likelier
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 512  # steps without a draft before another is tried
_TRIED = 2  # tokens of a trial
_LATE = 0.3  # of a step's time, that waiting for tokens costs: until it is measured


class StepTimes:
    """Seconds of steps by sequences and rows."""

    def __init__(self) -> None:
        self._graphs: Mapping[int, float] = {}  # rows up to which a graph verifies: its seconds; 0: of one plain row
        self._of: dict[Hashable, dict[int, tuple[deque[float], float, int]]] = {}  # rows: times, the usual one, when
        self._now = 0

    def add(self, kind: Hashable, rows: int, seconds: float) -> None:
        """Take note of a step; kind: what the steps have in common whose rows are compared."""
        self._now += 1
        times = self._of.setdefault(kind, {})
        fresh = rows in times and self._now - times[rows][2] <= _STALE
        recent = times[rows][0] if fresh else deque[float](maxlen=_RECENT)
        recent.append(seconds)
        usual = median(recent) if len(recent) >= _ENOUGH else min(recent)  # a step may have been interrupted
        times[rows] = recent, usual, self._now

    def take_graphs(self, seconds: Mapping[int, float]) -> None:
        """From now on, steps with drafts run padded to these rows, in about so much time; 0: of one row, without."""
        self._graphs = seconds

    def size(self, rows: int) -> int:
        """Return the rows with which a step with drafts runs."""
        return min((r for r in self._graphs if r >= rows), default=rows) if self._graphs else rows

    def known(self, kind: Hashable, rows: int, least: int = 1, stale: int = _STALE) -> bool:
        """Whether there are enough measurements that are not too old."""
        found = self._of.get(kind, {}).get(rows)
        return found is not None and len(found[0]) >= least and self._now - found[2] <= stale

    def measured(self, kind: Hashable, rows: int) -> bool:
        """Whether a step without drafts was timed often enough, and not long ago."""
        return self.known(kind, rows, _ENOUGH)

    def late(self, kind: Hashable, late: Hashable, base: int) -> float:
        """Return the seconds of a step that was started once the tokens of the last one were known; late: its kind."""
        plain = self._of[kind][base][1]
        return max(plain, self._of[late][base][1]) if self.known(late, base) else (1 + _LATE) * plain

    def seconds(self, kind: Hashable, base: int, most: int) -> list[float]:
        """Return the seconds of steps of base, base + 1, … most rows; base: of a step without drafts.

        Few measurements count as if others had shown what graphs took at the start, or what the rest shows of each
        further row. And more rows never take less time: what is measured of them bounds that of fewer.
        """
        times = self._of.get(kind, {})
        first = times[base][1] if base in times else 1.0
        known, bound = dict[int, tuple[int, float]](), inf
        for r in sorted((r for r in times if r > base and self.known(kind, r, stale=_STALE_ROWS)), reverse=True):
            bound = min(bound, times[r][1] / first - 1)
            known[r] = len(times[r][0]), bound
        weight = _ASSUMED + sum(n for n, _ in known.values())
        slope = (_ASSUMED * _SLOPE + sum(n * more / (r - base) for r, (n, more) in known.items())) / weight
        found = list[float]()
        for rows in range(most, base, -1):
            size = self.size(rows)
            n, more = known.get(size, (0, 0.0))
            assumed = self._graph(base, size) if self._graphs else slope * (size - base)
            more = (_ASSUMED * assumed + n * more) / (_ASSUMED + n)
            found.append(min(first * (1 + max(more, 0.0)), found[-1] if found else inf))
        return [*reversed([*found, first])]

    def _graph(self, base: int, size: int) -> float:
        """Return how much longer than without drafts a graph of that size takes, as a share."""
        plain = self._graphs[0] if base == 1 else self._graphs.get(self.size(base), self._graphs[0])
        return self._graphs[size] / plain - 1 if size in self._graphs else _SLOPE * (size - base)


class Odds:
    """How often tokens that were guessed are right."""

    def __init__(self, right: float, wrong: float, forget: float = _FORGET_ALL) -> None:
        self.right, self.wrong, self._forget = right, wrong, forget

    def add(self, right: int, wrong: int) -> None:
        self.right = self.right * self._forget + right
        self.wrong = self.wrong * self._forget + wrong

    def chance(self, of_all: float | None = None) -> float:
        """Return how likely the next one is right; of_all: what is assumed of a sequence that showed nothing yet."""
        weight = 0.0 if of_all is None else _WEIGHT
        chance = (self.right + weight * (of_all or 0.0)) / (self.right + self.wrong + weight)
        return min(chance, _SURE)

    @classmethod
    def of_sequence(cls) -> "Odds":
        return cls(0.0, 0.0, _FORGET)


class Pauses:
    """When to try again after drafts did not pay."""

    def __init__(self) -> None:
        self._pause = self._left = _FIRST_PAUSE

    @property
    def waiting(self) -> bool:
        return self._left > 0

    def skipped(self) -> None:
        """A step had no draft, though there were proposals, or no look-up was made."""
        self._left -= 1

    def tried(self, *, paid: bool) -> None:
        """A step had drafts: as they paid, or as a trial."""
        self._pause = _FIRST_PAUSE if paid else min(2 * self._pause, _LONGEST_PAUSE)
        self._left = self._pause


def best_lengths(
    sequences: int, chances: Sequence[float], limits: Sequence[int], room: int, seconds: Callable[[int, int], float]
) -> list[int]:
    """Return the tokens of each draft.

    chances: that a token of each is right, limits: of their tokens, room: of all. seconds: of a step by the
    tokens of its drafts and those of the longest.
    """
    steps = sorted(
        ((p ** (j + 1), -j, i) for i, (p, most) in enumerate(zip(chances, limits, strict=True)) for j in range(most)),
        reverse=True,
    )
    lengths, best = [0] * len(chances), [0] * len(chances)
    tokens, rate = float(sequences), sequences / seconds(0, 0)
    for drafted, (p, _, i) in enumerate(steps[:room], 1):
        lengths[i] += 1
        tokens += p
        if (found := tokens / seconds(drafted, max(lengths))) > rate:
            rate, best = found, lengths.copy()
    return best


def worth_waiting(chance: float, tokens: float, seconds: float, plain: float, late: float) -> bool:
    """Whether to wait for a step's tokens because they may be what is proposed, with a chance, and drafts then pay.

    tokens, seconds: of a step with drafts, relative to the sequences; plain: seconds of a step that is started before
    the tokens of the last one are known, late: of one that is not.
    """
    return (chance * tokens + 1 - chance) * plain > chance * seconds + (1 - chance) * late


def trial(chances: Sequence[float], limits: Sequence[int], room: int) -> list[int]:
    """Return the tokens of drafts to learn from: a short one of the sequence that is likeliest right."""
    i = max(range(len(chances)), key=lambda i: (limits[i] > 0, chances[i]))
    return [min(_TRIED, limits[i], room) if j == i else 0 for j in range(len(chances))]
