"""Responses in OpenAI's format: whole, and as chunks of a stream."""

import secrets
from codecs import getincrementaldecoder
from collections.abc import Sequence
from math import inf
from time import time
from typing import Any

from crelle.engine.output import Event, Output, TokenLogprob
from crelle.server.requests import GenerationRequest
from crelle.server.strict_json import encode
from crelle.server.token_text import TokenTexts
from crelle.version import __version__

DONE = b"data: [DONE]\n\n"
_IMPOSSIBLE = -9999.0
PING = b": working\n\n"  # a comment: clients skip it, proxies see that the connection lives


def sse(value: dict[str, Any]) -> bytes:
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
        kind = "chat.completion" if params.chat else "text_completion"
        self.id = f"{'chatcmpl' if params.chat else 'cmpl'}-{secrets.token_hex(12)}"
        chunked = kind + ".chunk" if params.chat and params.stream else kind
        fingerprint = f"crelle-{__version__}"
        self._head = {"id": self.id, "object": chunked, "created": int(time()), "model": model}
        self._head["system_fingerprint"] = fingerprint
        self._usage_key: dict[str, Any] = {"usage": None} if params.usage else {}
        self._offsets = [TextOffset() for _ in range(choices)]

    def whole(self, outputs: Sequence[Output], cut: str | None = None) -> dict[str, Any]:
        """Return the answer in one piece; outputs: of all prompts, in order; cut: why some are not complete."""
        choices = []
        for index, output in enumerate(outputs):
            done = output.completion
            choice: dict[str, Any] = {"index": index}
            if self.params.chat:
                choice["message"] = {"role": "assistant", "content": done.text, "refusal": None}
            else:
                choice["text"] = done.text
            choice["logprobs"] = None
            if output.logprobs is not None:
                choice["logprobs"] = self._logprobs(output.logprobs, index)
            choices.append(choice | _end(output, cut))
        return {**self._head, "choices": choices, "usage": usage(outputs, self.params.n)}

    def opening(self) -> bytes:
        """Return what a chat's stream begins with."""
        if not self.params.chat:
            return b""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(index, {"delta": delta}, None, {}) for index in range(len(self._offsets)))

    def chunk(self, index: int, event: Event, cut: str | None = None) -> bytes:
        """Return an event as part of a stream; nothing where it holds nothing to tell."""
        logprobs = None
        if event.logprob is not None:
            logprobs = self._logprobs([event.logprob], index)
        if not (event.text or event.output or logprobs):
            return b""
        text = {"delta": {"content": event.text} if event.text else {}} if self.params.chat else {"text": event.text}
        return self._chunk(index, text, logprobs, _end(event.output, cut) if event.output else {})

    def closing(self, outputs: Sequence[Output]) -> bytes:
        """Return what ends a stream."""
        if not self.params.usage:
            return DONE
        return sse({**self._head, "choices": [], "usage": usage(outputs, self.params.n)}) + DONE

    def _chunk(self, index: int, text: dict[str, Any], logprobs: Any, end: dict[str, Any]) -> bytes:
        choice = {"index": index, **text, "logprobs": logprobs, "finish_reason": None, **end}
        return sse({**self._head, "choices": [choice], **self._usage_key})

    def _logprobs(self, found: Sequence[TokenLogprob], index: int) -> dict[str, Any]:
        if self.params.chat:
            content = [{**self._one(t.token, t.logprob), "top_logprobs": [self._one(*p) for p in t.top]} for t in found]
            return {"content": content, "refusal": None}
        text, offset = self._tokens.text, self._offsets[index]
        return {
            "tokens": [text(t.token) for t in found],
            "token_logprobs": [_log(t.logprob) for t in found],
            "top_logprobs": [{text(i): _log(v) for i, v in t.top} for t in found] if self.params.logprobs else None,
            "text_offset": [offset.take(self._tokens.raw(t.token)) for t in found],
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._tokens.text(token), "logprob": _log(logprob), "bytes": list(self._tokens.raw(token))}


def _log(value: float) -> float:
    """Write a log-probability as OpenAI does where the probability is 0: JSON has no infinity. NaN stays, and fails."""
    return _IMPOSSIBLE if value == -inf else value


def usage(outputs: Sequence[Output], n: int) -> dict[str, Any]:
    """Count tokens; a prompt counts once, however many sequences are sampled for it."""
    firsts = outputs[::n]
    prompt = sum(o.completion.prompt_tokens for o in firsts)
    sampled = sum(len(o.completion.tokens) for o in outputs)
    cached = sum(min(o.reused, o.completion.prompt_tokens) for o in firsts)
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


def _end(output: Output, cut: str | None) -> dict[str, Any]:
    """Say why a sequence ended: OpenAI has no reason for a server that shuts down, so `cut` names it."""
    reason = output.completion.finish_reason
    return {"finish_reason": reason} if reason in ("stop", "length") else {"finish_reason": "length", "cut": cut}
