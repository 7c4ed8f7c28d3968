"""Seconds in each stage of quantizing: what `crelle bench quantize` and `crelle quantize --dry-run` show.

    with recording(device) as times:         and wherever work is done:   with timed(SOLVE): …

A stage inside another one counts for itself alone, so that all stages together are the time that passed. Without a
recording a stage costs nothing. With one, both ends of a stage wait for the GPU, which would otherwise be charged to
whatever waits for it first. Other threads are not recorded: what they do costs what the main one waits for them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter

import torch

READ = "read"
FULL = "full-precision forward"
QUANTIZED = "quantized forward"
HESSIAN = "Hessian"
TARGET = "target"  # the weight that compensates the error of the inputs
FACTOR = "factor"
SOLVE = "solve"
TRAIN = "train"
GUIDANCE = "guidance"
GUIDANCE_HEAD = "guidance: output head"  # once a model
SEARCH = "search"
SEARCH_FITS = "search: fits"
SEARCH_HEAD = "search: output head"  # once a model
WRITE = "pack and write"
COMMUNICATION = "communication"  # between ranks, and waiting for them
OTHER = "other"


class StageTimes:
    """Seconds by stage, in the order in which they first ended."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._stack = [OTHER]
        self._since = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()

    def settle(self) -> None:
        """Charge the time since the last change to the stage that is under way."""
        now = self._now()
        name = self._stack[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.settle()
        self._stack.append(name)
        try:
            yield
        finally:
            self.settle()
            self._stack.pop()

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        self.settle()
        taken, self.seconds = self.seconds, {}
        return taken


_recorded: ContextVar[StageTimes | None] = ContextVar("stage_times", default=None)


@contextmanager
def recording(device: torch.device) -> Iterator[StageTimes]:
    """Record the stages of this thread while the block runs."""
    times = StageTimes(device)
    token = _recorded.set(times)
    try:
        yield times
    finally:
        _recorded.reset(token)


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Charge what the block does to a stage."""
    times = _recorded.get()
    if times is None:
        yield
        return
    with times.stage(name):
        yield
