"""What `Engine.stats` returns and the server's metrics show: queue and pages now, totals since the start."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter


@dataclass(frozen=True, slots=True)
class Stats:
    """What an engine is doing and has done."""

    waiting: int
    running: int
    pages: int
    pages_used: int  # in sequences that run
    pages_cached: int  # kept for prompts with the same prefix
    steps: int
    tokens_run: int  # the model ran over so many, prompts and repetitions after preemption included
    tokens_sampled: int
    tokens_reused: int  # found in the cache
    preemptions: int
    finished: int
    failed: int
    tokens_drafted: int = 0  # guessed and verified
    tokens_accepted: int = 0  # of these, those that were right
    prefill_seconds: float = 0.0  # in steps with tokens of prompts, decoding sequences beside them included
    decode_seconds: float = 0.0  # in steps of decoding alone
    expert_uses: int = 0  # experts that tokens took, where experts are streamed
    expert_hits: int = 0  # of these, those that were on the GPU


class StepClock:
    """How long steps take, by kind: from the end of one to the end of the next, while the engine works.

    All that happens between counts, as it bounds the tokens per second; what callers do between two calls does not.
    """

    def __init__(self) -> None:
        self.prefill = self.decode = 0.0  # seconds
        self._passed, self._since = 0.0, 0.0  # of the step under way: before the last call, and when that began

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the time within count."""
        self._since = perf_counter()
        try:
            yield
        finally:
            self._passed += perf_counter() - self._since

    def ended(self, prefills: bool) -> float:
        """Take note of the end of a step; return its seconds."""
        now = perf_counter()
        took, self._passed, self._since = self._passed + now - self._since, 0.0, now
        if prefills:
            self.prefill += took
        else:
            self.decode += took
        return took
