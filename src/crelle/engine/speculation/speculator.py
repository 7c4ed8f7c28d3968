"""Guesses tokens for the sequences of a step. docs/notes/engine.md says what stays equal.

    lookahead(decoding)   before a step is chosen: how many tokens each sequence may get
    fill(step)            after: the tokens themselves
    note(step, …)         when it is over: what was right, and how long it took

The model's own samplers choose every token; a draft only says for which positions logits are there already. So a draft
may be anything: answers do not depend on it, where a row has the same bits in any batch.
"""

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

from crelle.engine.requests.sequence import Sequence
from crelle.engine.scheduler import UNKNOWN, Step
from crelle.engine.speculation.draft_model import DraftModel
from crelle.engine.speculation.ngram import NgramLookup
from crelle.engine.speculation.pace import Odds, Pauses, StepTimes, best_lengths, trial
from crelle.engine.speculation.settings import Speculation

ROWS = 16  # of a step with drafts: what the C++ step runs in one call
_MATCHES = (3, 4, 6, 10)  # tokens that match, by which proposals differ
_FIRST_ODDS = ((3.0, 7.0), (4.0, 6.0), (6.0, 4.0), (7.0, 3.0), (8.5, 1.5))  # right and wrong; assumed at the start
_DRAFT_MODEL = 2  # of them: what is assumed of a model


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

    def __str__(self) -> str:
        return str(self.settings) if self.draft is None else f"{self.settings} ({self.draft.draft.name})"

    def looks(self, sequences: int) -> bool:
        """Whether the next step may have drafts: its last tokens must be known then, which a GPU has to wait for."""
        if self.settings.method == "off" or sequences >= ROWS:
            return False
        if not self.settings.adaptive or self._paid or not self._pauses.waiting:
            return True
        self._pauses.skipped()
        return False

    def lookahead(self, decoding: list[Sequence]) -> Mapping[Sequence, int]:
        """Return how many tokens to guess for some of the sequences that decode."""
        room = ROWS - len(decoding)
        if self.settings.method == "off" or room < 1:
            return {}
        able = [s for s in decoding if s.request.speculate and s.answering and s.ids[-1] != UNKNOWN]
        able = [s for s in able if s.limit - len(s.ids) > 1]
        if self.draft is not None:
            able = [s for s in able if self.draft.serves(s)]
        able = [s for s in able if self._propose(s, min(room, self.settings.tokens))]
        if not able:
            self._paid = False
            return {}
        limits = [min(room, self.settings.tokens, s.limit - len(s.ids) - 1) for s in able]
        return {s: n for s, n in zip(able, self._lengths(decoding, able, limits, room), strict=True) if n}

    def _propose(self, s: Sequence, most: int) -> bool:
        """Look for tokens that may follow; whether there are some."""
        track = self._tracks.setdefault(s, _Track())
        if self.draft is not None:
            return True
        track.proposal, matched = track.lookup.propose(s.ids, most)
        track.kind = bisect(_MATCHES, matched)
        return bool(track.proposal)

    def _lengths(self, decoding: list[Sequence], able: list[Sequence], limits: list[int], room: int) -> list[int]:
        if not self.settings.adaptive:
            return _share(limits, room)
        tracks, base = [self._tracks[s] for s in able], len(decoding)
        kind = decoding[0].precision, base
        chances = [t.odds[t.kind].chance(self._odds[t.kind].chance()) for t in tracks]
        if not self._times.measured(kind, base):
            return [0] * len(able)
        seconds = self._times.seconds(kind, base, ROWS)
        each = 0.0 if self.draft is None else self.draft.seconds(seconds[0])
        found = best_lengths(base, chances, limits, room, lambda drafted, longest: seconds[drafted] + each * longest)
        self._paid = any(found)
        if self._paid:
            return found
        if self._pauses.waiting:
            self._pauses.skipped()
            return found
        return trial(chances, limits, room)

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

    def note(self, step: Step, accepted: Mapping[Sequence, int], seconds: float | None) -> None:
        """Take note of a step that ended; seconds: of the model and the samplers, None: of no use for estimates."""
        drafted = 0
        for chunk in step.chunks:
            if chunk.draft and (track := self._tracks.get(chunk.sequence)) is not None:
                right = accepted.get(chunk.sequence, 0)
                wrong = int(right < len(chunk.draft))  # of those after it nothing is known
                track.odds[track.kind].add(right, wrong)
                self._odds[track.kind].add(right, wrong)
                drafted += len(chunk.draft)
        if drafted:
            self._pauses.tried(paid=self._paid)
        if not step.prefills and seconds is not None:
            rows = len(step.chunks)
            self._times.add((step.precision, rows), rows + drafted, seconds - self._drafting)
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
