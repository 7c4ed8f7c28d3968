"""Guesses tokens for the sequences of a step. docs/notes/engine.md says what stays equal.

    looks(sequences)      where a GPU runs ahead of Python: whether to wait for tokens that drafts need
    lookahead(decoding)   before a step is chosen: how many tokens each sequence may get
    fill(step)            after: the tokens themselves
    note(step, …)         when it is over: what was right, and how long it took

The model's own samplers choose every token; a draft only says for which positions logits are there already. So a draft
may be anything: answers do not depend on it, where a row has the same bits in any batch.
"""

from bisect import bisect
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from time import perf_counter

from crelle.engine.requests.sequence import Sequence
from crelle.engine.scheduler import UNKNOWN, Step
from crelle.engine.speculation.draft_model import DraftModel
from crelle.engine.speculation.ngram import NgramLookup
from crelle.engine.speculation.pace import Odds, Pauses, StepTimes, best_lengths, trial, worth_waiting
from crelle.engine.speculation.settings import Speculation
from crelle.kernels.cuda.executor import CudaExecutor

ROWS = 16  # of a step with drafts: what the C++ step runs in one call
_MATCHES = (3, 5, 8, 16)  # tokens that match, by which proposals differ
# Right and wrong; assumed at the start. SmolLM2's answers: 0.7 to 0.9, 0.4, 0.9, 0.95 and 0.98 (copies), by match.
_FIRST_ODDS = ((4.0, 6.0), (4.0, 6.0), (7.0, 3.0), (8.5, 1.5), (9.5, 0.5))
_DRAFT_MODEL = 2  # of them: what is assumed of a model

_Kind = tuple[int | None, int, bool]  # of steps: precision, sequences, and whether they are started on a GPU
_Choice = tuple[list[float], list[int], list[int], Callable[[int, int], float]]


@dataclass(slots=True)
class _Track:
    """What is known of one sequence."""

    lookup: NgramLookup = field(default_factory=NgramLookup)
    odds: list[Odds] = field(default_factory=lambda: [Odds.of_sequence() for _ in _FIRST_ODDS])
    kind: int = _DRAFT_MODEL  # of the proposal: which odds are its
    proposal: list[int] = field(default_factory=list)


class Speculator:
    """Guesses for one engine."""

    def __init__(self, settings: Speculation, draft: DraftModel | None = None) -> None:
        """draft: the model of the method of that name."""
        assert (settings.method == "draft") == (draft is not None)
        self.settings, self.draft = settings, draft
        self._tracks: dict[Sequence, _Track] = {}
        self._times, self._pauses = StepTimes(), Pauses()
        self._odds = [Odds(*odds) for odds in _FIRST_ODDS]
        self._paid = True  # the last proposals did
        self._drafting = 0.0  # seconds of the step under way that the draft model took
        self._started = False  # steps are started on a GPU, and their tokens come later
        self._prepared = set[int | None]()  # precisions of which graphs are captured and timed

    def __str__(self) -> str:
        return str(self.settings) if self.draft is None else f"{self.settings} ({self.draft.draft.name})"

    def guesses(self, sequences: int) -> bool:
        """Whether a step of this number of sequences may have drafts."""
        return self.settings.method != "off" and 0 < sequences < ROWS

    def prepare(self, precision: int | None, executor: object) -> None:
        """Capture and time the graphs that verify, once for each precision: no step with drafts waits for a capture."""
        if precision in self._prepared or self.settings.method == "off":
            return
        self._prepared.add(precision)
        if isinstance(executor, CudaExecutor):
            self._times.take_graphs(executor.prepare_verification(ROWS))

    def looks(self, sequences: List[Sequence]) -> bool:
        """Whether to wait for the tokens of a step under way because the next one may have drafts.

        A GPU that starts the next step at once never waits for Python; this gives that up. What sequences will be
        offered is looked up without the token that is to come.
        """
        if not self.guesses(len(sequences)):
            return False
        if not self.settings.adaptive:
            return True
        base = len(sequences)
        kind = sequences[0].precision, base, True
        if not self._times.measured(kind, base):
            return False
        able = self._able(sequences)
        if not able:
            return False
        chances, _, lengths, seconds = self._choose(kind, base, able)
        best = max((p for p, n in zip(chances, lengths, strict=True) if n), default=0.0)
        tokens = base + sum(p * (1 - p**n) / (1 - p) for p, n in zip(chances, lengths, strict=True))
        took, plain = seconds(sum(lengths), max(lengths)), seconds(0, 0)
        late = self._times.late(kind, (*kind[:2], False), base)
        if any(lengths) and worth_waiting(best, tokens / base, took, plain, late):
            return True
        if not self._pauses.waiting:
            return True  # a trial
        self._pauses.skipped()
        return False

    def lookahead(self, decoding: list[Sequence]) -> Mapping[Sequence, int]:
        """Return how many tokens to guess for some of the sequences that decode."""
        if not self.guesses(len(decoding)):
            return {}
        able = self._able(decoding)
        if not able:
            return {}
        room = ROWS - len(decoding)
        if not self.settings.adaptive:
            return {s: n for s, n in zip(able, _share(self._limits(able, room), room), strict=True) if n}
        base = len(decoding)
        kind = decoding[0].precision, base, self._started
        if not self._times.measured(kind, base):
            return {}
        chances, limits, lengths, _ = self._choose(kind, base, able)
        self._paid = any(lengths)
        if not self._paid and self._pauses.waiting:
            self._pauses.skipped()
        elif not self._paid:
            lengths = trial(chances, limits, room)
        return {s: n for s, n in zip(able, lengths, strict=True) if n}

    def _able(self, sequences: List[Sequence]) -> list[Sequence]:
        """Return the sequences for which there are proposals."""
        able = [s for s in sequences if s.request.speculate and s.answering and s.ids[-1] != UNKNOWN]
        able = [s for s in able if s.limit - len(s.ids) > 1]
        if self.draft is not None:
            able = [s for s in able if self.draft.serves(s)]
        return [s for s in able if self._propose(s, min(ROWS - len(sequences), self.settings.tokens))]

    def _limits(self, able: list[Sequence], room: int) -> list[int]:
        return [min(room, self.settings.tokens, s.limit - len(s.ids) - 1) for s in able]

    def _propose(self, s: Sequence, most: int) -> bool:
        """Look for tokens that may follow; whether there are some."""
        track = self._tracks.setdefault(s, _Track())
        if self.draft is not None:
            return True
        track.proposal, matched = track.lookup.propose(s.ids, most)
        track.kind = bisect(_MATCHES, matched)
        return bool(track.proposal)

    def _choose(self, kind: "_Kind", base: int, able: list[Sequence]) -> "_Choice":
        """Return of the sequences: chances, limits and the lengths with the best rate; and the seconds of steps."""
        tracks, room = [self._tracks[s] for s in able], ROWS - base
        chances = [t.odds[t.kind].chance(self._odds[t.kind].chance()) for t in tracks]
        limits, times = self._limits(able, room), self._times.seconds(kind, base, ROWS)
        each = 0.0 if self.draft is None else self.draft.seconds(times[0])

        def seconds(drafted: int, longest: int) -> float:
            return times[drafted] + each * longest

        return chances, limits, best_lengths(base, chances, limits, room, seconds), seconds

    def fill(self, step: Step) -> Mapping[Sequence, list[int]]:
        """Return the tokens guessed for a step's sequences."""
        wanted = {chunk.sequence: chunk.lookahead for chunk in step.chunks if chunk.lookahead}
        if self.draft is None:
            return {s: self._tracks[s].proposal[:n] for s, n in wanted.items()}
        begun = perf_counter()
        self.draft.copy(step.copies)
        found = self.draft.propose(wanted) if wanted else {}
        self._drafting = perf_counter() - begun
        return found

    def note(
        self, step: Step, accepted: Mapping[Sequence, int], seconds: float | None, overlaps: bool | None = None
    ) -> None:
        """Take note of a step that ended; seconds: since the end of the one before, None: of no use for estimates.

        overlaps: of a step that was started on a GPU, whether that was before the tokens of the one before were known.
        """
        drafted, self._started = 0, overlaps is not None
        for chunk in step.chunks:
            if chunk.draft and (track := self._tracks.get(chunk.sequence)) is not None:
                right = accepted.get(chunk.sequence, 0)
                wrong = int(right < len(chunk.draft))  # of those after it nothing is known
                track.odds[track.kind].add(right, wrong)
                self._odds[track.kind].add(right, wrong)
                drafted += len(chunk.draft)
        if drafted and (
            any(accepted.values()) or not self._paid
        ):  # a draft that should have paid, and did not, says nothing yet
            self._pauses.tried(paid=self._paid)
        if not step.prefills and seconds is not None:
            rows = len(step.chunks)
            # Steps that were started compare with those that overlap, which is how they run where nothing is guessed.
            kind = step.precision, rows, self._started and (drafted > 0 or overlaps is True)
            self._times.add(kind, self._times.size(rows + drafted) if drafted else rows, seconds - self._drafting)
        self._drafting = 0.0

    def forget(self, s: Sequence) -> None:
        """A sequence has ended."""
        self._tracks.pop(s, None)
        if self.draft is not None:
            self.draft.forget(s)


def _share(limits: list[int], room: int) -> list[int]:
    """Return tokens for each within its limit, and within the room for all."""
    found = []
    for i, limit in enumerate(limits):
        found.append(min(limit, room // (len(limits) - i)))
        room -= found[-1]
    return found
