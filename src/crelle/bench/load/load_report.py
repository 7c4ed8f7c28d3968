"""What a load showed: every request as its client saw it, and the figures that sum them up; http_load.py makes them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """One request as its client saw it. Seconds count from `begun`: when it was sent, in a trace when it was due."""

    begun: float  # seconds from the beginning of the run
    seconds: float  # until the answer was complete, or had failed
    prompt: str
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    first: float | None = None  # seconds until the first token
    per_token: float | None = None  # seconds, mean over the tokens after the first
    stall: float | None = None  # the longest wait between two pieces of text
    within: float = 1.0  # the share of its text that came before the run's time was over
    cut: bool = False  # the run was ended while it was under way
    status: int | None = None  # of HTTP; None where no answer came
    error: str | None = None  # a sentence; None: all went well
    retry_after: float | None = None  # seconds of patience that a server asked for which refused


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a list of seconds. Between two values that were seen the line is straight."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles | None":
        """Return None for no values."""
        if not values:
            return None
        ordered = sorted(values)

        def at(share: float) -> float:
            below, rest = divmod(share * (len(ordered) - 1), 1)
            i = int(below)
            return ordered[i] + rest * (ordered[min(i + 1, len(ordered) - 1)] - ordered[i])

        return cls(sum(ordered) / len(ordered), at(0.5), at(0.9), at(0.99), ordered[-1])


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a run showed. Waits are over answers that did not fail; None where there was none."""

    url: str
    model: str
    clients: int | None  # None: a trace
    seconds: float  # that throughput counts: the time asked for, or a trace's until its last answer
    requests: int
    failures: int
    cut: int  # under way or waiting when the run was ended; neither whole nor failed
    tokens: int  # of answers that did not fail, as far as they came within `seconds`
    prompt_tokens: int
    tokens_per_second: float
    requests_per_second: float  # whole answers
    first_token: Percentiles | None  # seconds
    per_token: Percentiles | None  # seconds between tokens, each answer's mean
    stall: Percentiles | None  # seconds, each answer's longest wait between two pieces
    answer: Percentiles | None  # seconds for a whole answer
    errors: dict[str, int]  # sentence: how often
    calls: tuple[Call, ...]  # in the order in which they began
    chat: bool = True  # over HTTP: whether chats were asked for, or completions

    @property
    def reasons(self) -> str:
        """The most frequent errors as one sentence."""
        return "; ".join(f"{times} times: {sentence}" for sentence, times in list(self.errors.items())[:3])

    def summary(self) -> dict[str, Any]:
        """Return all but the single calls, ready for JSON."""
        found = asdict(self)
        del found["calls"]
        return found

    @classmethod
    def of(
        cls, url: str, model: str, clients: int | None, seconds: float, calls: Sequence[Call], *, chat: bool = True
    ) -> "LoadReport":
        fine = [c for c in calls if c.error is None]
        whole = [c for c in fine if not c.cut]
        tokens = round(sum(c.tokens * c.within for c in fine))
        return cls(
            url=url,
            model=model,
            clients=clients,
            seconds=seconds,
            requests=len(calls),
            failures=len(calls) - len(fine),
            cut=len(fine) - len(whole),
            tokens=tokens,
            prompt_tokens=sum(c.prompt_tokens for c in calls),
            tokens_per_second=tokens / seconds,
            requests_per_second=sum(c.begun + c.seconds <= seconds for c in whole) / seconds,
            first_token=Percentiles.of([c.first for c in fine if c.first is not None]),
            per_token=Percentiles.of([c.per_token for c in fine if c.per_token is not None]),
            stall=Percentiles.of([c.stall for c in fine if c.stall is not None]),
            answer=Percentiles.of([c.seconds for c in whole]),
            errors=dict(Counter(c.error for c in calls if c.error is not None).most_common()),
            calls=tuple(sorted(calls, key=lambda c: c.begun)),
            chat=chat,
        )
