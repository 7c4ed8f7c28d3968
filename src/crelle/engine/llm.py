"""LLM: a model with its tokenizer, for generation. One object from quantizer to server.

A single prompt is a batch of one: `generate`, `stream` and `chat` run through the same Engine as a list of prompts.
The engine of a call that has ended waits for the next one. Its cache has pages for the prompt and the first tokens, and
grows as the sequence does.

Threads. An LLM may be used by any number of threads at once, and beside engines over it. Calls that run at the same
time have an engine each, and `LLM.lock` is held for one step of the model at a time: never while a stream waits to be
read.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, overload
from weakref import proxy

from crelle.engine.engine import Engine
from crelle.engine.loaded_model import LoadedModel, Prompt
from crelle.engine.memory.defaults import most_pages
from crelle.engine.memory.experts import expert_offload
from crelle.engine.memory.plan import page_bytes, parse_bytes
from crelle.engine.offline import generate_all
from crelle.engine.requests.output import Completion, StreamChunk
from crelle.engine.sampling.sampler import Sampling, sampling_of
from crelle.engine.speculation.load_draft import load_draft
from crelle.engine.speculation.settings import Speculation
from crelle.engine.tokenization.tokenizer import Message, Tokenizer
from crelle.errors import SchemeError
from crelle.formats.kv.format import kv_of_checkpoint
from crelle.formats.kv.pages import KVFormat
from crelle.formats.storage.open import Weights, open_weights
from crelle.formats.storage.task_scales import with_scales
from crelle.kernels.threads import set_threads
from crelle.models.loader import Model, build, choose_device

__all__ = ["LLM", "Completion", "Prompt", "StreamChunk"]

_BUDGET = 2048  # tokens of a prompt in one step
_FIRST = 256  # new tokens that a cache has room for before it grows
_ON_GPU = 1 << 30  # bytes of a cache on a GPU that are taken at once, where a context has as much
_KEPT = 256 << 20  # bytes of the largest cache on a CPU that is kept for the next call


class LLM(LoadedModel):
    """A loaded language model with its tokenizer.

    >>> llm = LLM.load("out/smollm2-3bit")                                     # doctest: +SKIP
    >>> llm.generate("Once upon a time", Sampling(max_tokens=40)).text         # doctest: +SKIP
    >>> [c.text for c in llm.generate(["Once upon a time", "There was"])]      # doctest: +SKIP
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, weights: Weights, kv: KVFormat | None = None) -> None:
        super().__init__(model, tokenizer, weights, kv)
        self._idle: list[Engine] = []  # of calls that have ended

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "auto",
        threads: int | None = None,
        kernel: str | None = None,
        bits: int | None = None,
        kv: KVFormat | str | int | None = None,
        scales: str | Path | None = None,
        speculate: Speculation | str | None = None,
        draft: str | Path | int | None = None,
        memory: str | int | None = None,
    ) -> "LLM":
        """Load a Crelle checkpoint, a Hugging Face directory or a .gguf file.

        device: cpu, cuda or auto.  threads: on the CPU.  kernel: insist on one (see `crelle explain`).
        bits: of a nested checkpoint, the precision for calls that ask for none; default: the finest.
        kv: bits of the cache, 16, 8, 4, 3 or 2, or a string: k4v2, kv4:group=64, 4,layers.0=8 (KVFormat); default: what
            the checkpoint was made for (`atom:kv=4`), else 16.
        scales: those of a task, from `crelle tune --scales`, instead of the checkpoint's own.
        speculate: how tokens are guessed: off, ngram or draft; default: draft where there is one, else ngram, where
            answers stay the same.  draft: a smaller model with the same vocabulary, or the bits of a nested checkpoint.
        memory: GPU memory that weights, working space and cache may take, such as 24GB. Experts that do not fit it are
            streamed from host memory; default: those that do not fit the GPU.
        """
        wanted = None if speculate is None else Speculation.parse(speculate)
        given, limit = None if kv is None else KVFormat.parse(kv), None if memory is None else parse_bytes(memory)
        if threads is not None:
            set_threads(threads)
        weights = open_weights(path)
        weights = weights if scales is None else with_scales(weights, scales)
        with ThreadPoolExecutor(1) as beside:  # preparing weights is C++, which leaves Python to the tokenizer
            tokenizer = beside.submit(Tokenizer.of, weights)
            where, cache = choose_device(device), given or kv_of_checkpoint(weights.config)
            offload = expert_offload(weights, where, limit, cache)
            model = build(weights, where, kernel=kernel, bits=bits, offload=offload)
            llm = cls(model, tokenizer.result(), weights, cache)
        llm.memory = limit
        llm.speculation = wanted
        if draft is not None:
            llm.draft = load_draft(llm, draft)
        if wanted is not None:
            wanted.require_draft(llm.draft is not None)
        return llm

    def __repr__(self) -> str:
        return f"<LLM {self.weights.path}: {self.describe()}>"

    @overload
    def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, *, bits: int | None = None, **options: Any
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        bits: int | None = None,
        **options: Any,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | list[str] | list[list[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        bits: int | None = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """Continue a prompt (text or token ids), or all of a list of prompts side by side; `bits` as in `at`.

        The sequences of a list share every reading of the weights. Each has the sampling, or the one at its place in a
        list of them, and gets what it would get in any other list. Instead of a Sampling, its fields may be given:
        `generate(prompt, max_tokens=24)`.
        """
        if options:
            sampling = sampling_of(sampling, options)  # type: ignore[arg-type]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            return generate_all(self, prompt, sampling, bits=bits)
        if isinstance(sampling, Sequence):
            raise SchemeError("one prompt takes one Sampling, not a list")
        for chunk in self.stream(prompt, sampling, bits=bits):  # type: ignore[arg-type]
            if chunk.completion:
                return chunk.completion
        raise AssertionError("a stream ends with its completion")

    def chat(
        self, messages: list[Message], sampling: Sampling | None = None, *, bits: int | None = None
    ) -> Iterator[StreamChunk]:
        """Stream the assistant's answer to a conversation."""
        with self.lock:  # the template is compiled when it is first used
            ids = self.tokenizer.encode_chat(messages)
        return self.stream(ids, sampling, bits=bits)

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, bits: int | None = None
    ) -> Iterator[StreamChunk]:
        """Stream the continuation of a prompt, in pieces of text that later tokens cannot change."""
        ids = self.encode(prompt)
        self.at(bits)  # which says why, where there is no such precision
        return self._stream(ids, sampling or Sampling(), bits)

    def _stream(self, ids: list[int], sampling: Sampling, bits: int | None) -> Iterator[StreamChunk]:
        engine = self._take_engine(len(ids), sampling.max_tokens)
        handle = engine.add(ids, sampling, bits=bits)
        try:
            for event in handle:
                if event.output is None:
                    if event.text:
                        yield StreamChunk(event.text)
                elif event.output.error is not None:
                    raise event.output.error
                else:
                    yield StreamChunk(event.text, event.output.completion)
        finally:  # also where the caller closes or drops the stream
            if not handle.finished:
                handle.cancel()
                engine.run()
            self._keep(engine)

    def _take_engine(self, prompt: int, more: int) -> Engine:
        """Return an engine for one sequence that no other call uses, with pages for its prompt and its first tokens."""
        whole = -(-(min(prompt + more, self.model.spec.context) - 1) // self.kv.page)  # the last token is not stored
        pages = min(whole, -(-(prompt + _FIRST) // self.kv.page))
        if self.model.device.type == "cuda":  # a cache that grows has its graphs captured again
            context = -(-self.model.spec.context // self.kv.page)
            pages = max(pages, min(context, _ON_GPU // page_bytes(self.model, self.kv)))
        while True:
            try:
                engine = self._idle.pop()  # atomic: no lock is held where a stream may be collected
            except IndexError:
                break
            if engine.kv == self.kv and engine.stopped is None and engine.blocks.max_pages >= whole:
                engine.reserve(pages)
                return engine
        # A proxy: an engine that held its owner would keep the weights in memory until the next garbage collection.
        # Without prefix sharing, so that a prompt's second run takes the time, and on a GPU has the bits, of its first.
        draft = None if self.draft is None else self.draft.model
        most = most_pages(self.model, self.kv, draft, self.memory)
        limits = {"pages": min(pages, max(1, most)), "max_pages": most, "max_batch": 1, "budget": _BUDGET}
        return Engine(proxy(self), **limits, sharing=False)  # type: ignore[arg-type]

    def _keep(self, engine: Engine) -> None:
        """Keep one engine for the next call; on a GPU it has captured graphs."""
        small = engine.runner.nbytes <= _KEPT or self.model.device.type != "cpu"
        if small and not self._idle and engine.stopped is None:
            self._idle.append(engine)
