"""Carries out steps: owns the pages of all layers, copies what the scheduler wants copied, runs the model.

    run(step)   1  copies       page to page in every layer, before anything is written
                2  one pass     of the model at the step's precision over all tokens of the step (crelle.models.batched;
                                on a GPU crelle.models.batched_cuda, where that can)
                3  logits       one row for each sequence that draws; n texts of one prompt get the same row
    start(step) the same on a GPU, but the likeliest tokens are taken there and nobody waits for them: the next step can
                be started behind it, on tokens that are UNKNOWN here

Who may use which page is the scheduler's business; the runner believes it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from crelle.engine.blocks import Copy
from crelle.engine.llm import LLM
from crelle.engine.memory import kv_heads
from crelle.engine.scheduler import UNKNOWN, Step
from crelle.engine.sequence import Sequence
from crelle.formats.kv import KVFormat, KVPages
from crelle.models.batched import Batched, View, page_dtype
from crelle.models.batched_cuda import CudaBatch, why_not
from crelle.models.loader import Model
from crelle.models.step_buffers import DRAWS, Drawn, Part


class Runner:
    """A model with all of its pages."""

    def __init__(self, llm: LLM, kv: KVFormat, pages: int, *, exact: bool | None = None) -> None:
        """Allocate the pages; exact: see crelle.models.batched; by default on a CPU."""
        model, c = llm.model, llm.model.c
        sizes = (pages, kv_heads(model), c.head_size, page_dtype(model), model.device)
        self.llm, self.kv, self.exact = llm, kv, model.device.type == "cpu" if exact is None else exact
        self.layers = [KVPages.new(kv, *sizes) for _ in c.layers]
        self._batched: dict[int | None, Batched] = {}
        self._on_gpu: dict[int | None, CudaBatch | None] = {}
        self._drawn: dict[Sequence, int] = {}  # which row of the tokens last drawn is whose

    @property
    def nbytes(self) -> int:
        return sum(pages.nbytes for pages in self.layers)

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """Return logits f32 [draws, V], a row for each of `step.draws` in order."""
        self._copy(step.copies)
        if (batch := self.on_gpu(step.precision)) is not None:
            return _for_draws(batch([Part(r.ids, r.start, r.pages, bool(r.draws)) for r in step.runs]), step)
        model = self.at(step.precision)
        tokens = [token for run in step.runs for token in run.ids]
        starts, wanted = [0], list[int]()
        for run in step.runs:
            starts.append(starts[-1] + run.end - run.start)
            wanted += [starts[-1] - 1] if run.draws else []
        view = View(
            self.layers,
            _table([run.pages for run in step.runs], model.model.device),
            starts,
            [run.start for run in step.runs],
            centers(model.model, self.kv),
            model.exact,
        )
        return _for_draws(model(tokens, view, wanted), step)

    def starts(self, step: Step) -> bool:
        """Whether `start` can run a step."""
        return len(step.draws) <= DRAWS and self.on_gpu(step.precision) is not None

    @torch.inference_mode()
    def start(self, step: Step) -> Drawn:
        """Return the likeliest token for each of `step.draws`, as soon as one asks for them."""
        batch = self.on_gpu(step.precision)
        assert batch is not None
        self._copy(step.copies)
        parts = []
        for r in step.runs:
            unknown = r.sequence.ids[r.start] == UNKNOWN
            follows = self._drawn[r.sequence] if unknown else -1
            parts.append(Part([0] if unknown else r.ids, r.start, r.pages, bool(r.draws), follows))
        logits = _for_draws(batch(parts), step)
        self._drawn = {s: i for i, s in enumerate(step.draws)}
        return batch.draw(logits)

    def at(self, bits: int | None) -> Batched:
        """Return the model at a precision, ready for batches."""
        if bits not in self._batched:
            self._batched[bits] = Batched(self.llm.at(bits), exact=self.exact)
        return self._batched[bits]

    def on_gpu(self, bits: int | None) -> CudaBatch | None:
        """Return the model at a precision as graphs on its GPU, or None where it has none (`why_not` says why)."""
        if bits not in self._on_gpu:
            model = self.llm.at(bits)
            able, exact = why_not(model, self.kv) is None, self.exact
            self._on_gpu[bits] = CudaBatch(model, self.layers, centers(model, self.kv), exact=exact) if able else None
        return self._on_gpu[bits]

    def _copy(self, copies: Iterable[Copy]) -> None:
        if not copies:
            return
        source, target = (torch.tensor(pages) for pages in zip(*copies, strict=True))
        for pages in self.layers:
            for t in pages.tensors():
                t[target.to(t.device)] = t[source.to(t.device)]  # all are read before any is written


def centers(model: Model, kv: KVFormat) -> list[Tensor] | list[None]:
    """Return what each layer's keys are stored relative to."""
    return model.key_centers if kv.center else [None] * len(model.spec.layers)


def _for_draws(logits: Tensor, step: Step) -> Tensor:
    """Return a row for each draw of logits [runs that draw, V]."""
    draws = [len(run.draws) for run in step.runs if run.draws]
    if all(n == 1 for n in draws):
        return logits
    return logits.repeat_interleave(torch.tensor(draws, device=logits.device), 0)


def _table(rows: list[list[int]], device: torch.device) -> Tensor:
    """Return int32 [B, max_pages]; behind a row's last page stands 0, which nobody looks at."""
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.int32, device=device)
