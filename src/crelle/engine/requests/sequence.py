"""What is asked for (Request), and each sequence that grows from it (Sequence).

    submit                 admitted                  end token, stop string, max_tokens, context full
    ──────▶ WAITING ─────────────────▶ RUNNING ───────────────────────────────────────────────────▶ FINISHED
               ▲     pages run out:       │          cancelled, or the runner failed: from any state
               └─────── PREEMPTED ◀───────┘

A preempted sequence gave its pages back and waits again; it keeps its tokens and will run over them once more.
A request with n > 1 is computed once: its first sequence runs over the prompt, and when that is done all n sample
their first token from the same logits and go separate ways. Until then the others are the `forks` of the first.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, Literal

from crelle.engine.block_manager import BlockTable
from crelle.errors import SchemeError

if TYPE_CHECKING:
    from crelle.engine.sampling.sampler import Sampling

Reason = Literal["stop", "length", "cancelled", "error"]
_numbers = count(1)


class State(Enum):
    """Where a sequence stands; the module's docstring shows the transitions."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Token ids in, n sequences of token ids out."""

    prompt: tuple[int, ...]
    sampling: "Sampling"
    n: int = 1
    precision: int | None = None  # bits, of a nested checkpoint; None: as the model was loaded
    end_ids: frozenset[int] = frozenset()  # tokens that end a sequence and are not part of it
    priority: int = 0  # smaller goes first; among equals the earlier arrival
    cache_salt: Hashable = None  # prefixes are shared only among requests of one cache_salt: a customer, say
    prefill_differs: bool = False  # prompts run through other kernels than sampled tokens, and bits matter
    scored: bool = False  # the log-probabilities of the prompt's tokens are wanted
    speculate: bool = True  # tokens may be drafted for it
    id: str = field(default_factory=lambda: f"request-{next(_numbers)}")
    arrival: int = -1  # given by the scheduler: 0 for its first request
    sequences: "list[Sequence]" = field(default_factory=list)  # made by the scheduler
    cancelled: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise SchemeError("the prompt is empty: it needs at least one token")
        if self.n < 1:
            raise SchemeError(f"n must be at least 1, got {self.n}")

    def cancel(self) -> None:
        """Ask for an end; the scheduler heeds it before the next step. May be called from any thread."""
        self.cancelled = True

    @property
    def finished(self) -> bool:
        return bool(self.sequences) and all(s.finished for s in self.sequences)

    def seed(self, index: int) -> int | None:
        """Give each of the n sequences a seed of its own; the first has the request's, as if it were alone."""
        if self.sampling.seed is None or index == 0:
            return self.sampling.seed
        digest = blake2b(f"{self.sampling.seed}/{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1  # below 2^63


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the tokens sampled so far; `computed` of them have keys and values in the pages of `table`."""

    request: Request
    index: int  # among the n of the request
    limit: int  # tokens at most, the prompt included
    table: BlockTable
    ids: list[int] = field(init=False)
    seed: int | None = field(init=False)
    precision: int | None = field(init=False)
    state: State = State.WAITING
    reason: Reason | None = None  # why it finished
    error: BaseException | None = None  # what failed, where the reason is "error"
    forks: "list[Sequence]" = field(default_factory=list)  # will take over its pages when the prompt is computed
    reused: int = 0  # tokens that it did not run over, because their keys and values were there already
    preemptions: int = 0
    drafted: int = 0  # tokens that were guessed and verified
    accepted: int = 0  # of these, those that were right

    def __post_init__(self) -> None:
        self.ids = list(self.request.prompt)
        self.seed = self.request.seed(self.index)
        self.precision = self.request.precision

    def __repr__(self) -> str:
        said = f", {self.reason}" if self.reason else ""
        return f"<{self.request.id}/{self.index} {self.state.value}{said}, {self.computed} of {len(self.ids)} computed>"

    @property
    def new(self) -> list[int]:
        """The tokens sampled so far."""
        return self.ids[len(self.request.prompt) :]

    @property
    def order(self) -> tuple[int, int, int]:
        """Who goes first is smaller: by priority, by arrival, by place in the request."""
        return self.request.priority, self.request.arrival, self.index

    @property
    def computed(self) -> int:
        return self.table.length

    @property
    def remaining(self) -> int:
        """Tokens to run over before the next one can be sampled: 1 when decoding, more in a prompt."""
        return len(self.ids) - self.table.length

    @property
    def answering(self) -> bool:
        """Whether all of its prompt is computed."""
        return self.table.length >= len(self.request.prompt)

    @property
    def slots(self) -> int:
        """Places it takes, or will take, in a batch."""
        return 1 + len(self.forks)

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED

    def push(self, token: int) -> Reason | None:
        """Add a sampled token; say why the sequence ends with it, if it does. An end token is not added."""
        assert not self.finished
        if token in self.request.end_ids:
            return "stop"
        self.ids.append(token)
        return "length" if len(self.ids) >= self.limit else None
