"""What all handlers share: the engine, the settings, the schemas, the counts."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import time
from typing import Protocol, TypeVar

from torch import Tensor

from crelle.engine.async_engine import AsyncEngine
from crelle.engine.embedding import Pooling, embed
from crelle.errors import CapacityError, CrelleError, SchemeError
from crelle.server.errors import ApiError, refused, unavailable
from crelle.server.event_queue import EventBridge, EventQueue
from crelle.server.http.bodies import LARGE, Bodies
from crelle.server.metrics import Metrics
from crelle.server.requests import GenerationRequest, RequestParser
from crelle.server.schema.openapi import document
from crelle.server.schema.schemas import ModelInfo
from crelle.server.schema.strict_json import encode
from crelle.server.settings import Settings
from crelle.server.token_text import TokenTexts

T = TypeVar("T")
_CHARACTERS_A_TOKEN = 8  # few prompts have more on average, so longer prompts would not fit the context anyway
_PROMPTS = 64  # in one request
_QUICK = 4096  # characters that are tokenized at once, tokens submitted; more would hold up the loop
STUCK = 600.0  # seconds of one step, after which something hangs: the largest prompts of slow CPUs take less
_FEW = 8  # sequences that are submitted at once


class Cancellable(Protocol):
    """A request that runs: crelle.server.generation.Generation."""

    def cancel(self) -> None: ...


class State:
    """One served model."""

    def __init__(self, service: AsyncEngine, settings: Settings, name: str | None = None) -> None:
        self.service, self.settings = service, settings
        self.engine, self.llm = service.engine, service.engine.llm
        self.created = int(time())
        c, engine = self.llm.model.spec, self.engine
        self.room = min(
            c.context, engine.blocks.pages * engine.kv.page + 1
        )  # tokens of one sequence; the last is not kept
        self.info = ModelInfo(
            name=name or model_name(self.llm.weights.path),
            context=c.context,
            vocabulary=c.vocabulary,
            precisions=self.llm.precisions,
            max_prompt=settings.max_prompt or _CHARACTERS_A_TOKEN * c.context,
            max_tokens=min(settings.max_tokens or c.context, c.context),
            max_n=engine.scheduler.max_batch,
            max_prompts=min(_PROMPTS, engine.queue_limit or _PROMPTS),
        )
        self.parser, self.tokens, self.metrics = RequestParser(self.info), TokenTexts(self.llm.tokenizer), Metrics()
        self.document = encode(document(self.info, self.parser.schemas, keys=bool(settings.keys)))
        self.bodies = Bodies(settings)
        self.closing = False
        self.cut: str | None = None  # why sequences are ended before they are complete
        self.generations: set[Cancellable] = set()
        self.bridge: EventBridge | None = None  # set when the loop runs
        # One thread each: more would only take the interpreter lock from the loop, and memory for what is half done.
        # Two readers, since a small request should not wait until all large ones before it are tokenized.
        self._reader, self._large_reader, self._writer, self._embedder = (
            ThreadPoolExecutor(1, f"crelle-{name}") for name in ("reader", "large-reader", "writer", "embedder")
        )

    def warm_up(self) -> None:
        """Do now what the first requests would wait for: chat templates, every precision, graphs that verify."""
        with suppress(CrelleError):  # no template, say: whoever wants to chat will be told
            self.llm.tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
        for bits in self.info.precisions:
            self.llm.at(bits)
        if self.engine.speculator.settings.method != "off":
            self.engine.warm_up()

    @property
    def why_unhealthy(self) -> str | None:
        """Why the process must be restarted, if so."""
        if self.service.error is not None:
            return f"the engine has stopped: {self.service.stop_reason}; the server exits and must be restarted"
        if (seconds := self.service.step_seconds) > STUCK:
            return f"one step has been running for {seconds:.0f} s; if it never ends, the server must be restarted"
        return None

    @property
    def why_not_ready(self) -> str | None:
        return self.why_unhealthy or ("the server is shutting down" if self.closing else None)

    def require_ready(self) -> None:
        if why := self.why_not_ready:
            raise unavailable(why)

    async def reading(self, characters: int, work: Callable[[], T]) -> T:
        """Run something that tokenizes so many characters: in the loop, or in the reader for that size."""
        return work() if characters <= _QUICK else await _beside(self._reader_for(characters), work)

    def _reader_for(self, size: int) -> ThreadPoolExecutor:
        """Return the reader for so many bytes, characters or tokens."""
        return self._reader if size <= LARGE else self._large_reader

    async def writing(self, work: Callable[[], T]) -> T:
        """Build a large answer beside the loop."""
        return await _beside(self._writer, work)

    async def embedding(self, ids: list[int], pooling: Pooling, normalize: bool) -> Tensor:
        """Return the embedding of a text; between texts the engine steps."""
        self.require_ready()
        try:
            return await _beside(self._embedder, partial(embed, self.llm, ids, pooling, normalize=normalize))
        except CapacityError as e:
            raise ApiError(400, str(e), param="input", code="context_length_exceeded") from None

    async def submit(
        self, params: GenerationRequest, prompts: list[list[int]], cache_salt: int | None, queue: EventQueue
    ) -> None:
        """Hand all prompts to the engine, or none."""
        assert self.bridge is not None
        self.require_ready()
        tokens = sum(map(len, prompts))
        work = partial(self._submit, params, prompts, cache_salt, queue, self.bridge)
        try:
            plain = params.form is None and params.tools is None  # a grammar takes a while to compile
            if plain and tokens <= _QUICK and len(prompts) * params.n <= _FEW:
                work()
            else:
                await _beside(self._reader_for(tokens), work)
        except CrelleError as e:
            raise self.refused(e) from None
        self.metrics.prompt_tokens += tokens

    def _submit(
        self,
        params: GenerationRequest,
        prompts: list[list[int]],
        cache_salt: int | None,
        queue: EventQueue,
        bridge: EventBridge,
    ) -> None:
        grammar = params.grammar(self.llm.tokenizer, prompts[0]) if prompts else None
        if grammar is not None:
            try:
                self.llm.grammars.compile(grammar)
            except (SchemeError, CapacityError) as e:
                param = params.form.param if params.form is not None else "tools"
                raise ApiError(400, str(e), param=param, code="invalid_value") from None
        for i, ids in enumerate(prompts):
            if queue.closed:  # the client has left meanwhile
                return
            most = max(1, min(self.info.max_tokens, self.room - len(ids)))
            most = most if params.max_tokens is None else max(1, params.max_tokens)
            sampling = replace(params.sampling, max_tokens=most, min_tokens=min(params.sampling.min_tokens, most))
            handle = self.service.submit(
                ids,
                sampling,
                n=params.n,
                bits=params.bits,
                logprobs=params.logprobs,
                prompt_logprobs=params.scores,
                cache_salt=cache_salt,
                ignore_end=params.ignore_end,
                grammar=grammar,
                on_event=bridge.callback(queue, i),
            )
            try:
                queue.add(handle)
            except BaseException:  # no other code knows of it
                handle.cancel()
                raise

    def refused(self, error: CrelleError) -> ApiError:
        """Say to a client what is wrong with its request."""
        if why := self.why_not_ready:  # since a moment ago
            return unavailable(why)
        return refused(error, self.metrics.retry_after(self.engine.stats))

    def close(self) -> None:
        for worker in (self._reader, self._large_reader, self._writer, self._embedder):
            worker.shutdown(wait=False, cancel_futures=True)


async def _beside(worker: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Run something in a worker. If its caller is gone, what it holds is released before it runs."""
    held = [work]

    def run() -> T:
        try:
            return held.pop()()
        except StopIteration as e:  # a future cannot carry it: whoever waits would wait for ever
            raise RuntimeError("StopIteration") from e

    try:
        return await asyncio.get_running_loop().run_in_executor(worker, run)
    finally:
        held.clear()


def model_name(path: Path) -> str:
    """Return what clients call a model: its directory's name, or its file's."""
    whole = path.resolve()
    return whole.stem if whole.suffix == ".gguf" else whole.name
