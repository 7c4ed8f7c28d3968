"""A smaller model that guesses tokens, greedily.

Its keys and values lie in pages of its own under the numbers of the target's: a sequence's block table addresses both,
so that shared prefixes, forks and copies are those of the target. It runs what it has not run of a sequence when it is
asked to guess, so its pages may be behind, or hold tokens that were not accepted: that makes guesses worse, never
answers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import torch

from crelle.engine.block_manager import Copy
from crelle.engine.memory.plan import draft_kv, kv_heads
from crelle.engine.requests.sequence import Sequence
from crelle.engine.sampling.sampler import likeliest
from crelle.engine.speculation.settings import MOST
from crelle.formats.kv.pages import KVPages
from crelle.kernels.cuda.executor import CudaExecutor
from crelle.kernels.executor import Chunk, Executor
from crelle.models.executors import make_executor, page_dtype
from crelle.models.loader import Model

CATCH_UP = 512  # tokens that it runs before a guess, at most: else none is made in that step
_FEW = 8  # tokens that a GPU runs as rows of a decode step: those of an accepted draft that were not run yet
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
        chunks, ready, room = list[Chunk](), list[Sequence](), CATCH_UP
        for s in wanted:
            known = self._known(s)
            ids = s.ids[known : known + room]
            room -= len(ids)
            self._ran[s] = s.preemptions, known + len(ids), []
            if known + len(ids) == len(s.ids):
                ready.append(s)
                chunks.append(self._chunk(s, ids, known, True))
            elif ids:
                self._run([self._chunk(s, ids, known, False)])
        if not ready:
            return {}
        begun, captures = perf_counter(), self.captures
        guessed = self._continue(chunks, [wanted[s] for s in ready])
        if all(len(chunk.ids) <= _FEW for chunk in chunks) and captures == self.captures:
            each = (perf_counter() - begun) / max(wanted[s] for s in ready)
            self._seconds = each if self._seconds is None else 0.8 * self._seconds + 0.2 * each
        found = dict[Sequence, list[int]]()
        for s, tokens in zip(ready, guessed, strict=True):
            finite = next((i for i, token in enumerate(tokens) if not 0 <= token < self._vocabulary), len(tokens))
            found[s] = tokens[:finite]
            self._ran[s] = s.preemptions, len(s.ids), tokens[: len(tokens) - 1]
        return found

    def _continue(self, chunks: list[Chunk], counts: list[int]) -> list[list[int]]:
        """Return that many likeliest tokens after each chunk, below 0 where logits are not finite."""
        executor = self.executor
        if isinstance(executor, CudaExecutor):
            return executor.continue_greedily(chunks, counts)
        found, going, tokens = [list[int]() for _ in chunks], list(range(len(chunks))), self._run(chunks)
        while going:
            for i, token in zip(going, tokens, strict=True):
                found[i].append(token)
            going = [i for i in going if len(found[i]) < counts[i] and found[i][-1] >= 0]
            at = [chunks[i].end + len(found[i]) - 1 for i in going]
            tokens = self._run([replace(chunks[i], ids=found[i][-1:], start=n) for i, n in zip(going, at, strict=True)])
        return found

    @property
    def captures(self) -> int:
        """How many graphs there are."""
        return self._executor.captures if isinstance(self._executor, CudaExecutor) else 0

    def _known(self, s: Sequence) -> int:
        """Return how many of a sequence's tokens have been run, all but the last one at most."""
        preemptions, before, tokens = self._ran.get(s, (-1, 0, []))
        if preemptions != s.preemptions:
            return 0
        same = next((i for i, (a, b) in enumerate(zip(tokens, s.ids[before:], strict=False)) if a != b), len(tokens))
        return min(before + same, len(s.ids) - 1)

    def _chunk(self, s: Sequence, ids: list[int], start: int, wanted: bool) -> Chunk:
        """Return tokens to run; a few that a GPU runs as rows of a decode graph, which has all of their logits."""
        if wanted and 1 < len(ids) <= _FEW and isinstance(self.executor, CudaExecutor):
            return Chunk(ids, start, s.table.pages, True, prompt=0, scored=True)
        return Chunk(ids, start, s.table.pages, wanted, prompt=len(s.request.prompt))

    @property
    def executor(self) -> Executor:
        if self._executor is None:
            self._executor = make_executor(
                self.draft.model, self.layers, self._kv, batch_invariant=self._batch_invariant
            )
        return self._executor

    def _run(self, chunks: list[Chunk]) -> list[int]:
        """Return the likeliest token after each chunk of which it is wanted."""
        if not chunks:
            return []
        found: list[int] = likeliest(self.executor.run(chunks)[:, : self._vocabulary]).tolist()
        return found
