"""What `Engine.stats` returns and the server's metrics show: queue and pages now, totals since the start."""

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


class StepClock:
    """How long steps ran, by kind. A step that was started while another ran counts from that one's end."""

    def __init__(self) -> None:
        self.prefill = self.decode = 0.0  # seconds
        self._last = 0.0

    def ended(self, prefills: bool, begun: float) -> float:
        """Take note of the end of a step that was begun at a time of perf_counter; return its seconds."""
        now = perf_counter()
        took, self._last = now - max(begun, self._last), now
        if prefills:
            self.prefill += took
        else:
            self.decode += took
        return took
