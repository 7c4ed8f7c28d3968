"""What `Engine.stats` returns and the server's metrics show: queue and pages now, totals since the start."""

from dataclasses import dataclass


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
