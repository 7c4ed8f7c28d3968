"""One HTTP request for completions, from its tokens to its last event."""

from time import monotonic
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from crelle.engine.requests.output import Event, Output
from crelle.server.answers.response_items import ItemBuilder
from crelle.server.errors import failed, of_engine, unavailable
from crelle.server.event_queue import EventQueue
from crelle.server.http.request_context import REQUEST_CONTEXT
from crelle.server.logs import describe
from crelle.server.requests import GenerationRequest
from crelle.server.responses import ResponseBuilder, usage
from crelle.server.state import State

_LOGGED = 4096  # token ids of a prompt that --log-prompts writes
_ON_ITS_WAY = 3.0  # seconds in which an event surely comes from the engine's thread to the loop


class Generation:
    """The sequences of one HTTP request. Leaving the `async with` block, for any reason, ends what still runs."""

    def __init__(self, state: State, request: web.Request, params: GenerationRequest, prompts: list[list[int]]) -> None:
        self.state, self.request, self.params = state, request, params
        self._prompts: list[list[int]] = prompts  # until they are submitted
        self._prompt_tokens = sum(map(len, prompts))
        self.context = REQUEST_CONTEXT.get()
        self.choices = len(prompts) * params.n
        builder = ResponseBuilder if params.responds is None else ItemBuilder
        self.response = builder(params, self.choices, state.info.name, state.tokens, prompts)
        if isinstance(self.response, ItemBuilder) and params.responds is not None:
            self.response.begin(params.responds)
        self._outputs: dict[int, Output] = {}
        # only a stream can be read slowly: other answers are kept whole
        self.queue = EventQueue(state.settings.backlog + self.choices if params.stream else None, self._too_slow)
        self._begun = False  # a token has come
        self._quiet = 0  # times in a row that nothing came for `patience` seconds
        self._missing_since: float | None = None  # when a finished sequence was first seen without its last event

    async def __aenter__(self) -> Self:
        """Submit the prompts, all or none. What an error leaves behind is ended here: no __aexit__ would follow."""
        self.state.generations.add(self)
        self.state.metrics.waiting += 1
        try:
            await self.state.submit(self.params, self._prompts, self.context.cache_salt, self.queue)
        except BaseException:
            self._leave()
            raise
        self._prompts = []
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._leave()
        for output in self._outputs.values():
            self.state.metrics.finished(output)
        self.context.log_fields.update(self._log_fields())

    def _leave(self) -> None:
        self.state.generations.discard(self)
        self.state.metrics.running -= self._begun
        self.state.metrics.waiting -= not self._begun
        self.queue.close()

    @property
    def finished(self) -> bool:
        return len(self._outputs) == self.choices

    @property
    def outputs(self) -> list[Output]:
        """All outputs, when they are finished."""
        return [self._outputs[i] for i in range(self.choices)]

    @property
    def tokens(self) -> int:
        """Tokens sampled so far, in sequences that have ended or not."""
        return sum(len(s.new) for handle in self.queue.handles for s in handle.request.sequences)

    @property
    def values(self) -> int:
        """Return how many tokens or logprobs the answer tells of, when it is finished."""
        scored = self.params.n * self._prompt_tokens * (1 + self.params.scores) if self.params.scores is not None else 0
        sampled = sum(len(o.completion.tokens) for o in self.outputs) * (1 + (self.params.logprobs or 0))
        return sampled + scored + self.choices

    async def take(self) -> list[tuple[int, Event]]:
        """Return what came since the last call, by choice; nothing if that took long. Raises what went wrong."""
        found = []
        items = await self.queue.take(self.state.settings.patience)
        self._quiet = 0 if items else self._quiet + 1
        if self.queue.error is not None or self._quiet > 1:
            self._require_life()
        for prompt, event in items:
            index = prompt * self.params.n + event.index
            found.append((index, event))
            if not self._begun and event.token is not None:
                self._begun = True
                self.state.metrics.waiting -= 1
                self.state.metrics.running += 1
            if event.output is not None:
                self._outputs[index] = event.output
                if event.output.error is not None:
                    self.context.log_fields["fault"] = describe(event.output.error)
                    if event.output.error is self.state.service.error:  # it took all requests with it
                        self.state.require_ready()
                    raise of_engine(event.output.error, self.context.id)
        if found and self.finished and not any(o.completion.tokens for o in self.outputs) and self._were_cut():
            raise unavailable("the server is shutting down and did not start this request")
        return found

    def _require_life(self) -> None:
        """Raise if the events that are missing will never come."""
        if self.queue.error is not None:
            self.context.log_fields["fault"] = describe(self.queue.error)
            raise failed(self.context.id)
        if self.state.service.error is not None:
            self.state.require_ready()
        n = self.params.n
        for prompt, handle in enumerate(self.queue.handles):
            missing = any(prompt * n + i not in self._outputs for i in range(n))
            if missing and (handle.failure is not None or (handle.finished and self._is_late())):
                self.context.log_fields["fault"] = (
                    describe(handle.failure) if handle.failure else "the last event was lost"
                )
                raise failed(self.context.id)

    def _is_late(self) -> bool:
        """Whether a last event has been missing for longer than its way from the engine's thread can take."""
        now = monotonic()
        self._missing_since = self._missing_since or now
        return now - self._missing_since > _ON_ITS_WAY

    def cancel(self) -> None:
        """End the sequences now; what they have so far still comes."""
        for handle in self.queue.handles:
            handle.cancel()

    def _were_cut(self) -> bool:
        return any(o.completion.finish_reason == "cancelled" for o in self.outputs)

    def _too_slow(self) -> None:
        """The client does not read the stream: hang up. Closing politely would wait for the reader once more."""
        self.state.metrics.slow_readers += 1
        self.context.log_fields["slow_reader"] = True
        if self.request.transport is not None:
            self.request.transport.abort()

    def _log_fields(self) -> dict[str, Any]:
        """What the log says about the request."""
        fields: dict[str, Any] = {"stream": self.params.stream, "n": self.choices, "precision": self.params.bits}
        if self.finished:
            counts = usage(self.outputs, self.params.n)
            fields |= {"prompt_tokens": counts.prompt_tokens, "completion_tokens": counts.completion_tokens}
            fields["total_tokens"] = counts.total_tokens
            fields["finish"] = sorted({o.completion.finish_reason for o in self.outputs})
            fields["first_token_seconds"] = round(min(o.completion.first_token_seconds for o in self.outputs), 4)
        else:
            fields |= {"prompt_tokens": self._prompt_tokens, "completion_tokens": self.tokens}
        if self.state.settings.log_prompts:
            fields["prompt"] = [p[:_LOGGED] if isinstance(p, list) else p for p in self.params.prompts]
            fields["answer"] = [o.completion.text for o in self._outputs.values()]
        return fields
