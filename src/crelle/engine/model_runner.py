"""Runs the scheduler's steps: owns the pages of all layers, copies what the scheduler wants copied, runs the model.

    run(step)   1  copies       page to page in every layer, before anything is written
                2  one pass     of the model at the step's precision over all tokens of the step, by the executor that
                                crelle.models.executors chooses
                3  logits       one row for each sampled token; n sequences of one prompt get the same row; a sequence
                                with a draft has a row for its last token and for each one guessed
    start(step) the same on a GPU, but tokens are sampled there, greedily, and the host does not wait for them: the next
                step can be started behind it, on tokens that are UNKNOWN here

Who may use which page is the scheduler's business; the runner believes it.
"""

from collections.abc import Iterable
from itertools import count

import torch
from torch import Tensor

from crelle.engine.block_manager import Copy
from crelle.engine.loaded_model import LoadedModel
from crelle.engine.memory.plan import kv_heads
from crelle.engine.requests.sequence import Sequence
from crelle.engine.scheduler import UNKNOWN, Step
from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels.cuda.executor import CudaExecutor
from crelle.kernels.cuda.step.graph_inputs import MAX_SAMPLES, PendingTokens
from crelle.kernels.executor import Chunk, Executor
from crelle.models.executors import make_executor, page_dtype


class ModelRunner:
    """A model with all of its pages."""

    def __init__(self, llm: LoadedModel, kv: KVFormat, pages: int, *, batch_invariant: bool | None = None) -> None:
        """Allocate the pages; batch_invariant: see crelle.models.eager_executor; default: on a CPU."""
        model, c = llm.model, llm.model.spec
        sizes = (pages, kv_heads(model), c.head_size, page_dtype(model), model.device)
        self.llm, self.kv = llm, kv
        self.batch_invariant = model.device.type == "cpu" if batch_invariant is None else batch_invariant
        self.layers = [KVPages.new(own, *sizes) for own in kv.layers(len(c.layers))]
        self._executors: dict[int | None, Executor] = {}
        self._rows: dict[Sequence, int] = {}  # of the tokens sampled last
        self._scored: list[tuple[Sequence, int, Tensor]] = []  # see `take_scored`

    @property
    def nbytes(self) -> int:
        return sum(pages.nbytes for pages in self.layers)

    @property
    def captures(self) -> int:
        """How many graphs there are: a step that captures one takes much longer than the next."""
        return sum(executor.captures for executor in self._executors.values() if isinstance(executor, CudaExecutor))

    def grow(self, pages: int) -> None:
        """Grow to that many pages, keeping what is in those that there are; no step is under way."""
        self._executors.clear()  # they hold tensors, and graphs over them
        for i, layer in enumerate(self.layers):  # one after the other: only one is there twice at a time
            if pages > layer.count:
                self.layers[i] = layer.grown(pages - layer.count)

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """Return logits f32 [rows, V], for each of `step.samples` in order 1 row and 1 for each token of its draft."""
        self._copy(step.copies)
        logits = self.executor(step.precision).run(self._chunks(step))
        if step.scored:
            logits = self._split(logits, step)
        return _for_samples(logits, step)

    def take_scored(self) -> list[tuple[Sequence, int, Tensor]]:
        """Return of the last `run`, for each chunk that is scored: sequence, first token, logits [tokens, V]."""
        found, self._scored = self._scored, []
        return found

    def _split(self, logits: Tensor, step: Step) -> Tensor:
        """Put the rows of scored chunks aside; return the rows that are sampled from."""
        at, last = 0, list[int]()
        for chunk in step.chunks:
            rows = len(chunk.ids) if chunk.scored or chunk.draft else bool(chunk.samples)
            if chunk.scored:
                self._scored.append((chunk.sequence, chunk.start, logits[at : at + rows]))
            at += rows
            if chunk.samples:
                last += range(at - 1 - len(chunk.draft), at)
        return logits[torch.tensor(last, dtype=torch.int64, device=logits.device)]

    def starts(self, step: Step) -> bool:
        """Whether `start` can run a step."""
        rows = len(step.samples) + sum(chunk.lookahead for chunk in step.chunks)
        return rows <= MAX_SAMPLES and self.cuda_executor(step.precision) is not None

    @torch.inference_mode()
    def start(self, step: Step) -> PendingTokens:
        """Return the likeliest token of each row that `run` has logits of, as soon as one asks for them.

        The next step may run on the tokens of one without drafts before they are here.
        """
        executor = self.executor(step.precision)
        assert isinstance(executor, CudaExecutor)
        self._copy(step.copies)
        logits = _for_samples(executor.run(self._chunks(step)), step)
        self._rows = {} if step.drafted else dict(zip(step.samples, count()))
        return executor.sample(logits)

    def _chunks(self, step: Step) -> list[Chunk]:
        chunks = []
        for r in step.chunks:
            ids, source, prompt = r.ids, -1, len(r.sequence.request.prompt)
            if ids[0] == UNKNOWN:
                ids, source = [0], self._rows[r.sequence]
            chunks.append(Chunk(ids, r.start, r.pages, bool(r.samples), source, prompt, r.scored or bool(r.draft)))
        return chunks

    def executor(self, bits: int | None) -> Executor:
        """Return what runs the model at a precision; made when it is first asked for."""
        if (found := self._executors.get(bits)) is None:
            with self.llm.lock:
                found = self._executors[bits] = self._executors.get(bits) or make_executor(
                    self.llm.at(bits), self.layers, self.kv, batch_invariant=self.batch_invariant
                )
        return found

    def prefill_differs(self, bits: int | None) -> bool:
        """Whether a token has other bits as part of a prompt than when it was sampled, and that matters."""
        return self.batch_invariant and self.executor(bits).prefill_differs

    def cuda_executor(self, bits: int | None) -> CudaExecutor | None:
        """Return the executor of a precision where it runs CUDA graphs, else None."""
        executor = self.executor(bits)
        return executor if isinstance(executor, CudaExecutor) else None

    def _copy(self, copies: Iterable[Copy]) -> None:
        if not copies:
            return
        source, target = (torch.tensor(pages) for pages in zip(*copies, strict=True))
        for pages in self.layers:
            for t in pages.tensors():
                t[target.to(t.device)] = t[source.to(t.device)]  # all are read before any is written


def _for_samples(logits: Tensor, step: Step) -> Tensor:
    """Return a row for each sampled token of logits, which have the rows of each chunk that samples once."""
    samples = [len(chunk.samples) for chunk in step.chunks if chunk.samples for _ in (0, *chunk.draft)]
    if all(n == 1 for n in samples):
        return logits
    return logits.repeat_interleave(torch.tensor(samples, device=logits.device), 0)
