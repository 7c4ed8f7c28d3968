"""A smaller model that guesses tokens, greedily.

Its keys and values lie in pages of its own under the numbers of the target's: a sequence's block table addresses both,
so that shared prefixes, forks and copies are those of the target. It runs what it has not run of a sequence when it is
asked to guess, so its pages may be behind, or hold tokens that were not accepted: that makes guesses worse, never
answers.
"""

from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import NamedTuple

import torch

from crelle.engine.block_manager import Copy
from crelle.engine.memory.plan import draft_kv, kv_heads
from crelle.engine.requests.sequence import Sequence
from crelle.engine.sampling.sampler import likeliest
from crelle.engine.speculation.settings import MOST
from crelle.formats.kv.pages import KVPages
from crelle.kernels.executor import Chunk, Executor
from crelle.models.executors import make_executor, page_dtype
from crelle.models.loader import Model

CATCH_UP = 512  # tokens that it runs before a guess, at most: else none is made in that step
_ASSUMED = 0.3  # of the target's time, for one token: until it is measured


class Draft(NamedTuple):
    """The model that guesses for another one."""

    model: Model
    name: str  # as the user gave it
    bits: int | None = None  # where it is the target itself at a lower precision


class DraftModel:
    """A draft model and its pages."""

    def __init__(self, draft: Draft, vocabulary: int, pages: int, page: int, *, batch_invariant: bool) -> None:
        """vocabulary: tokens that the target has."""
        self.draft, self._vocabulary, self._batch_invariant = draft, vocabulary, batch_invariant
        self._kv, model = draft_kv(page), draft.model
        sizes = (pages, kv_heads(model), model.spec.head_size, page_dtype(model), model.device)
        self.layers = [KVPages.new(own, *sizes) for own in self._kv.layers(len(model.spec.layers))]
        self._executor: Executor | None = None
        self._ran: dict[Sequence, tuple[int, int, list[int]]] = {}  # preemptions, then tokens before, and tokens run
        self._seconds: float | None = None  # of a token

    def grow(self, pages: int) -> None:
        """Grow to that many pages, keeping what is in those that there are."""
        self._executor = None
        self.layers = [layer.grown(pages - layer.count) if pages > layer.count else layer for layer in self.layers]

    def copy(self, copies: Iterable[Copy]) -> None:
        """Copy pages as the target does."""
        if not copies:
            return
        source, target = (torch.tensor(pages) for pages in zip(*copies, strict=True))
        for layer in self.layers:
            for t in layer.tensors():
                t[target.to(t.device)] = t[source.to(t.device)]

    def serves(self, s: Sequence) -> bool:
        """Whether it can guess for a sequence."""
        own = self.draft.bits is not None and s.precision is not None and s.precision <= self.draft.bits
        return not own and len(s.ids) + MOST < self.draft.model.spec.context

    def seconds(self, step: float) -> float:
        """Return the time of a token of each draft; step: of the target's step."""
        return _ASSUMED * step if self._seconds is None else self._seconds

    def forget(self, s: Sequence) -> None:
        self._ran.pop(s, None)

    @torch.inference_mode()
    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Guess that many tokens for each sequence, whose pages have room for them."""
        chunks, room = list[Chunk](), CATCH_UP
        for s in wanted:
            known = self._known(s)
            ids = s.ids[known : known + room]
            room -= len(ids)
            if ids:
                chunks.append(self._chunk(s, ids, known, known + len(ids) == len(s.ids)))
                self._ran[s] = s.preemptions, known + len(ids), []
        ready = [s for s in wanted if self._ran.get(s, (0, 0))[1] == len(s.ids)]
        found: dict[Sequence, list[int]] = {s: [] for s in ready}
        tokens, rounds, begun = self._run(chunks), 1, 0.0
        while ready:
            for s, token in zip(ready, tokens, strict=True):
                if token >= 0:  # else logits are not finite
                    found[s].append(token)
            ready = [s for s in ready if rounds <= len(found[s]) < wanted[s]]
            if ready:
                begun = begun or perf_counter()
                for s in ready:
                    self._ran[s][2].append(found[s][-1])
                tokens = self._run([self._chunk(s, found[s][-1:], len(s.ids) + rounds - 1, True) for s in ready])
                rounds += 1
        if rounds > 1:
            each = (perf_counter() - begun) / (rounds - 1)
            self._seconds = each if self._seconds is None else 0.8 * self._seconds + 0.2 * each
        return found

    def _known(self, s: Sequence) -> int:
        """Return how many of a sequence's tokens have been run, all but the last one at most."""
        preemptions, before, tokens = self._ran.get(s, (-1, 0, []))
        if preemptions != s.preemptions:
            return 0
        same = next((i for i, (a, b) in enumerate(zip(tokens, s.ids[before:], strict=False)) if a != b), len(tokens))
        return min(before + same, len(s.ids) - 1)

    def _chunk(self, s: Sequence, ids: list[int], start: int, wanted: bool) -> Chunk:
        return Chunk(ids, start, s.table.pages, wanted, prompt=len(s.request.prompt))

    def _run(self, chunks: list[Chunk]) -> list[int]:
        """Return the likeliest token after each chunk of which it is wanted."""
        if not chunks:
            return []
        if self._executor is None:
            self._executor = make_executor(
                self.draft.model, self.layers, self._kv, batch_invariant=self._batch_invariant
            )
        return likeliest(self._executor.run(chunks)[:, : self._vocabulary])
