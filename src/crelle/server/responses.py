"""Responses in OpenAI's format: whole, and as chunks of a stream."""

import secrets
from codecs import getincrementaldecoder
from collections.abc import Sequence
from math import inf, isfinite
from time import time
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from crelle.engine.output import Event, Output, TokenLogprob
from crelle.server.requests import GenerationRequest
from crelle.server.schema.response_schemas import (
    Answer,
    CachedTokens,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatTokenLogprob,
    Delta,
    TextChoice,
    TextChunk,
    TextChunkChoice,
    TextCompletion,
    TextLogprobs,
    TopLogprob,
    Usage,
)
from crelle.server.schema.strict_json import encode
from crelle.server.token_text import TokenTexts
from crelle.version import __version__

DONE = b"data: [DONE]\n\n"
_IMPOSSIBLE = -9999.0
PING = b": working\n\n"  # a comment: clients skip it, proxies see that the connection lives


def sse(value: Struct) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


class TextOffset:
    """Where in a text its tokens begin, in characters, though a token may end within one."""

    def __init__(self) -> None:
        self._characters, self._decoder = 0, getincrementaldecoder("utf-8")("replace")

    def take(self, token: bytes) -> int:
        """Return where a token begins, and go on to its end."""
        begins = self._characters
        self._characters += len(self._decoder.decode(token))
        return begins


class ResponseBuilder:
    """Builds the answers to one request. Sequence i of prompt p is choice p * n + i."""

    def __init__(self, params: GenerationRequest, choices: int, model: str, tokens: TokenTexts) -> None:
        self.params, self._tokens = params, tokens
        self.id = f"{'chatcmpl' if params.chat else 'cmpl'}-{secrets.token_hex(12)}"
        fingerprint = f"crelle-{__version__}"
        self._head: dict[str, Any] = {"id": self.id, "created": int(time()), "model": model}
        self._head["system_fingerprint"] = fingerprint
        self._usage: UnsetType | None = None if params.usage else UNSET  # of all chunks but the last
        self._offsets = [TextOffset() for _ in range(choices)]

    def whole(self, outputs: Sequence[Output], cut: str | None = None) -> ChatCompletion | TextCompletion:
        """Return the answer in one piece; outputs: of all prompts, in order; cut: why some are not complete."""
        choices = [self._choice(index, output, _end(output, cut)) for index, output in enumerate(outputs)]
        kind = ChatCompletion if self.params.chat else TextCompletion
        return kind(choices=choices, usage=usage(outputs, self.params.n), **self._head)

    def _choice(self, index: int, output: Output, end: dict[str, Any]) -> Any:
        text = output.completion.text
        logprobs = None if output.logprobs is None else self._logprobs(output.logprobs, index)
        if self.params.chat:
            return ChatChoice(index=index, message=Answer(text, None), logprobs=logprobs, **end)
        return TextChoice(index=index, text=text, logprobs=logprobs, **end)

    def opening(self) -> bytes:
        """Return what a chat's stream begins with."""
        if not self.params.chat:
            return b""
        delta = Delta(role="assistant", content="", refusal=None)
        choices = (ChatChunkChoice(index=i, delta=delta, logprobs=None) for i in range(len(self._offsets)))
        return b"".join(sse(ChatChunk(choices=[choice], usage=self._usage, **self._head)) for choice in choices)

    def chunk(self, index: int, event: Event, cut: str | None = None) -> bytes:
        """Return an event as part of a stream; nothing where it holds nothing to tell."""
        if not (event.text or event.output or event.logprob is not None):
            return b""
        logprobs = None if event.logprob is None else self._logprobs([event.logprob], index)
        end = _end(event.output, cut) if event.output else {}
        if self.params.chat:
            choice = ChatChunkChoice(index=index, delta=Delta(content=event.text or UNSET), logprobs=logprobs, **end)
            return sse(ChatChunk(choices=[choice], usage=self._usage, **self._head))
        text = TextChunkChoice(index=index, text=event.text, logprobs=logprobs, **end)
        return sse(TextChunk(choices=[text], usage=self._usage, **self._head))

    def closing(self, outputs: Sequence[Output]) -> bytes:
        """Return what ends a stream."""
        if not self.params.usage:
            return DONE
        kind = ChatChunk if self.params.chat else TextChunk
        return sse(kind(choices=[], usage=usage(outputs, self.params.n), **self._head)) + DONE

    def _logprobs(self, found: Sequence[TokenLogprob], index: int) -> Any:
        if self.params.chat:
            return ChatLogprobs([ChatTokenLogprob(*self._one(t.token, t.logprob), self._top(t)) for t in found])
        text, offset = self._tokens.text, self._offsets[index]
        return TextLogprobs(
            tokens=[text(t.token) for t in found],
            token_logprobs=[_log(t.logprob) for t in found],
            top_logprobs=[{text(i): _log(v) for i, v in t.top} for t in found] if self.params.logprobs else None,
            text_offset=[offset.take(self._tokens.raw(t.token)) for t in found],
        )

    def _top(self, found: TokenLogprob) -> list[TopLogprob]:
        return [TopLogprob(*self._one(token, logprob)) for token, logprob in found.top]

    def _one(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        return self._tokens.text(token), _log(logprob), list(self._tokens.raw(token))


def _log(value: float) -> float:
    """Write a log-probability as OpenAI does where the probability is 0: JSON has no infinity, and no NaN either."""
    if isfinite(value):
        return value
    if value == -inf:
        return _IMPOSSIBLE
    raise ValueError(f"a log-probability is {value}: not JSON compliant")


def usage(outputs: Sequence[Output], n: int) -> Usage:
    """Count tokens; a prompt counts once, however many sequences are sampled for it."""
    firsts = outputs[::n]
    prompt = sum(o.completion.prompt_tokens for o in firsts)
    sampled = sum(len(o.completion.tokens) for o in outputs)
    cached = sum(min(o.reused, o.completion.prompt_tokens) for o in firsts)
    return Usage(prompt, sampled, prompt + sampled, CachedTokens(cached))


def _end(output: Output, cut: str | None) -> dict[str, Any]:
    """Say why a sequence ended: OpenAI has no reason for a server that shuts down, so `cut` names it."""
    reason = output.completion.finish_reason
    return {"finish_reason": reason} if reason in ("stop", "length") else {"finish_reason": "length", "cut": cut}
