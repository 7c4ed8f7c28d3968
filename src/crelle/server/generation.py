"""One HTTP request for text, from its tokens to its last event."""

from types import TracebackType
from typing import Any, Self

from aiohttp import web

from crelle.engine.output import Event, Output
from crelle.server.ask import Ask
from crelle.server.faults import failed, unavailable
from crelle.server.inbox import Inbox
from crelle.server.logs import describe
from crelle.server.shapes import Answer, usage
from crelle.server.state import State
from crelle.server.visit import VISIT


class Generation:
    """Texts that are being drawn. Leave the `with` block, for whatever reason, and what still runs is ended."""

    def __init__(self, state: State, request: web.Request, ask: Ask, prompts: list[list[int]]) -> None:
        self.state, self.request, self.ask, self._prompts = state, request, ask, prompts
        self.visit = VISIT.get()
        self.choices = len(prompts) * ask.n
        self.answer = Answer(ask, self.choices, state.facts.name, state.tokens)
        self._outputs: dict[int, Output] = {}
        # only a stream can be read slowly: other answers are kept whole
        self.inbox = Inbox(state.settings.backlog + self.choices if ask.stream else None, self._too_slow)
        self._begun = False  # a token has come

    def __enter__(self) -> Self:
        self.state.submit(self.ask, self._prompts, self.visit.realm, self.inbox)
        self.state.metrics.waiting += 1
        self.state.generations.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.inbox.close()
        self.state.generations.discard(self)
        metrics, facts = self.state.metrics, self._facts()
        metrics.running -= self._begun
        metrics.waiting -= not self._begun
        for output in self._outputs.values():
            metrics.finished(output)
        self.visit.facts.update(facts)

    @property
    def finished(self) -> bool:
        return len(self._outputs) == self.choices

    @property
    def outputs(self) -> list[Output]:
        """All texts, when they are finished."""
        return [self._outputs[i] for i in range(self.choices)]

    @property
    def tokens(self) -> int:
        """Tokens drawn so far, in texts that have ended or not."""
        return sum(len(s.new) for handle in self.inbox.handles for s in handle.request.sequences)

    async def take(self) -> list[tuple[int, Event]]:
        """Return what came since the last call, by choice; nothing if that took long. Raises what went wrong."""
        found = []
        for prompt, event in await self.inbox.take(self.state.settings.patience):
            index = prompt * self.ask.n + event.index
            found.append((index, event))
            if not self._begun and event.token is not None:
                self._begun = True
                self.state.metrics.waiting -= 1
                self.state.metrics.running += 1
            if event.output is not None:
                self._outputs[index] = event.output
                if event.output.error is not None:
                    self.visit.facts["fault"] = describe(event.output.error)
                    raise failed(self.visit.id)
        if found and self.finished and not any(o.completion.tokens for o in self.outputs) and self._were_cut():
            raise unavailable("the server is shutting down and had not begun with this request")
        return found

    def cancel(self) -> None:
        """End the texts now; what they have so far still comes."""
        for handle in self.inbox.handles:
            handle.cancel()

    def _were_cut(self) -> bool:
        return any(o.completion.finish_reason == "cancelled" for o in self.outputs)

    def _too_slow(self) -> None:
        """Nobody reads the stream: hang up. Closing politely would wait for the reader once more."""
        self.state.metrics.slow_readers += 1
        self.visit.facts["slow_reader"] = True
        if self.request.transport is not None:
            self.request.transport.abort()

    def _facts(self) -> dict[str, Any]:
        """What the log says about the request."""
        facts: dict[str, Any] = {"stream": self.ask.stream, "n": self.choices, "precision": self.ask.bits}
        if self.finished:
            facts |= {k: v for k, v in usage(self.outputs, self.ask.n).items() if isinstance(v, int)}
            facts["finish"] = sorted({o.completion.finish_reason for o in self.outputs})
            facts["first_token_seconds"] = round(min(o.completion.first_token_seconds for o in self.outputs), 4)
        else:
            facts |= {"prompt_tokens": sum(map(len, self._prompts)), "completion_tokens": self.tokens}
        if self.state.settings.log_prompts:
            facts["prompt"] = self.ask.texts
            facts["answer"] = [o.completion.text for o in self._outputs.values()]
        return facts
