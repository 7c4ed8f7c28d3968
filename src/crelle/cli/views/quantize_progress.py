"""Progress of `crelle quantize`: the stage by name, elapsed time, and an estimate of what is left.

The time left in the current stage follows from its speed so far. The time of later stages follows from the estimate
before the start, corrected by its error for the finished stages. Without either, no time is shown.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic

from crelle.cli.common.console import Track, err
from crelle.cli.views.quantize_plan import duration

_LAYER = re.compile(r"\.(\d+)$")
_ORDER = ("sampling", "search", "guidance", "layers", "sampling for training", "teacher", "end to end", "writing")
_NOTES = {  # how the notes of a stage begin
    "sampling calibration": "sampling",
    "sampling training": "sampling for training",
    "search": "search",
    "guidance": "guidance",
    "full-precision": "teacher",
    "training": "end to end",
}
_PRIOR = 0.25  # of the estimated time: how much its own pace of 1 counts
_SEEN = 0.05  # of a stage, from where on its own pace counts


class StageClock:
    """Which stage is under way, and how long the rest will take."""

    def __init__(self, parts: Mapping[str, float] | None, layers: int, clock: Callable[[], float] = monotonic) -> None:
        """Begin. parts: estimated seconds, by stage; None: there is no estimate."""
        self._parts = dict(parts or {})
        self._parts["layers"] = self._parts.get("layers", 0.0) + self._parts.pop("training", 0.0)
        self._known, self._layers, self._clock = parts is not None, layers, clock
        self._begun = self._stage_begun = self._last = clock()
        self._past = 0.0  # estimated seconds of the stages that are over
        self.stage, self.note, self._fraction = "", "starting", 0.0
        self._taken: dict[str, float] = {}  # seconds of the stages that are over

    def update(self, done: int, total: int, note: str) -> bool:
        """Take a progress report of the run; return whether a new stage began."""
        stage = next((s for begin, s in _NOTES.items() if note.startswith(begin)), "")
        if not stage:  # a shard that is finished
            layer = _LAYER.search(note)
            finished = int(layer[1]) + 1 if layer else self._layers if self.stage in ("layers", "writing") else 0
            done, total = finished, max(1, self._layers)
            stage = "layers" if finished < total else "writing"
            note = f"layer {finished + 1} of {total}" if finished < total else "writing"
        now = self._clock()
        began = stage != self.stage
        if began:
            self._past += self._parts.get(self.stage, 0.0)
            self._taken[self.stage] = self._taken.get(self.stage, 0.0) + self._last - self._stage_begun
            self._stage_begun = self._last
        self.stage, self.note, self._fraction, self._last = stage, note, done / max(1, total), now
        return began

    @property
    def elapsed(self) -> float:
        return self._clock() - self._begun

    def taken(self) -> dict[str, float]:
        """Return the seconds of each stage so far."""
        so_far = self._taken | {self.stage: self._taken.get(self.stage, 0.0) + self._clock() - self._stage_begun}
        return {stage or "starting": seconds for stage, seconds in so_far.items()}

    def left(self) -> float | None:
        """Return the seconds left, or None if there is no estimate yet."""
        here = self._last - self._stage_begun  # at the latest news
        since = self._clock() - self._last
        planned = self._parts.get(self.stage, 0.0)
        if self._fraction >= _SEEN and here > 0:
            rest = here / self._fraction * (1 - self._fraction)
        elif self._known:
            rest = planned * (1 - self._fraction) * self._pace()
        else:
            return None
        order = _ORDER.index(self.stage) if self.stage in _ORDER else -1
        later = sum(s for name, s in self._parts.items() if name in _ORDER and _ORDER.index(name) > order)
        return max(0.0, rest - since) + later * self._pace()

    def _pace(self) -> float:
        """Return how many seconds pass for each that was estimated; a short stage alone says little of later ones."""
        trust = _PRIOR * sum(self._parts.values())
        expected = self._past + self._parts.get(self.stage, 0.0) * self._fraction
        return (self._last - self._begun + trust) / (expected + trust) if expected + trust > 0 else 1.0

    def sentence(self) -> str:
        left = self.left()
        return f"elapsed {duration(self.elapsed)}, left {'?' if left is None else duration(left)}"


@contextmanager
def stages(parts: Mapping[str, float] | None, layers: int) -> Iterator[tuple[Track, StageClock]]:
    """Show the stages on standard error while the block runs: a bar on a terminal, one line per stage otherwise."""
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    clock = StageClock(parts, layers)

    class Times(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(clock.sentence())

    with Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), Times(), console=err, transient=True
    ) as bar:
        task = bar.add_task(clock.note, total=None)

        def track(done: int, total: int, note: str) -> None:
            began, left, elapsed = clock.update(done, total, note), clock.left(), clock.elapsed
            whole = None if left is None else elapsed + left
            bar.update(task, description=clock.note, completed=elapsed, total=whole)
            if began and not err.is_terminal:
                err.print(f"{clock.note}: {clock.sentence()}", highlight=False, markup=False, soft_wrap=True)

        yield track, clock
