"""A conversation that fits a model's context: if it grows too long, its oldest turns are left out."""

from collections.abc import Generator
from typing import TYPE_CHECKING

from crelle.errors import CapacityError, CrelleError

if TYPE_CHECKING:
    from crelle.engine.llm import LLM
    from crelle.engine.requests.output import Completion
    from crelle.engine.sampling.sampler import Sampling
    from crelle.engine.tokenization.tokenizer import Message

_ROOM = 4  # an answer has at least this fraction (1/4) of the context, or max_tokens


class Conversation:
    """Messages between a user and a model."""

    def __init__(self, llm: "LLM", sampling: "Sampling", system: str | None) -> None:
        """Check that the model's chat template accepts such a conversation."""
        self.llm, self.sampling = llm, sampling
        self.system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.turns: list[Message] = []
        self.dropped = 0  # of these turns, the oldest, which the model no longer sees
        self.completion: Completion | None = None  # of the last answer; None: it was interrupted
        self._ids([{"role": "user", "content": "Hi"}])

    @property
    def messages(self) -> "list[Message]":
        """All messages so far, including those that the model no longer sees."""
        return self.system + self.turns

    def reset(self) -> None:
        """Start over, with the same system message."""
        self.turns, self.dropped = [], 0

    def answer(self, message: str) -> Generator[str]:
        """Return the pieces of the model's answer. A message that cannot be sent raises, and is forgotten.

        Whatever ends the answer early, an interrupt too, the text so far is part of the conversation.
        """
        self.turns.append({"role": "user", "content": message})
        try:
            ids = self._fit()
        except CrelleError:
            self.turns.pop()
            raise
        return self._pieces(ids)

    def _pieces(self, ids: list[int]) -> Generator[str]:
        text, self.completion = "", None
        try:
            for chunk in self.llm.stream(ids, self.sampling):
                text += chunk.text
                self.completion = chunk.completion
                yield chunk.text
        finally:
            self.turns.append({"role": "assistant", "content": text})

    def _fit(self) -> list[int]:
        """Return the ids of the newest turns that leave room for an answer; the others are counted as dropped."""
        context = self.llm.model.spec.context
        room = min(self.sampling.max_tokens, context // _ROOM)
        first = self.dropped
        while len(ids := self._ids(self.turns[first:])) + room > context and first + 1 < len(self.turns):
            first += 2  # a question and its answer
        if len(ids) >= context:
            raise CapacityError(
                f"this message has {len(ids):,} tokens, but the model's context is {context:,}; "
                "it was not sent; shorten it"
            )
        self.dropped = first
        return ids

    def _ids(self, turns: "list[Message]") -> list[int]:
        with self.llm.lock:  # the template is compiled when it is first used
            return self.llm.tokenizer.encode_chat(self.system + turns)
