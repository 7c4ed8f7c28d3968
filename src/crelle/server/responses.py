"""Responses in OpenAI's format: whole, and as chunks of a stream."""

import secrets
from codecs import getincrementaldecoder
from collections.abc import Sequence
from math import inf, isfinite
from time import time
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from crelle.engine.requests.output import Event, Output, TokenLogprob
from crelle.server.answers.chat_answer import ChatAnswer, Parts, thinks
from crelle.server.answers.tool_formats import format_of
from crelle.server.answers.tool_parser import ToolCallParser
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
    CompletionDetails,
    Delta,
    FunctionCall,
    FunctionDelta,
    PromptLogprob,
    PromptLogprobs,
    TextChoice,
    TextChunk,
    TextChunkChoice,
    TextCompletion,
    TextLogprobs,
    ToolCall,
    ToolCallDelta,
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
        self.characters, self._decoder = 0, getincrementaldecoder("utf-8")("replace")

    def take(self, token: bytes) -> int:
        """Return where a token begins, and go on to its end."""
        begins = self.characters
        self.characters += len(self._decoder.decode(token))
        return begins


class ResponseBuilder:
    """Builds the answers to one request. Sequence i of prompt p is choice p * n + i."""

    def __init__(
        self,
        params: GenerationRequest,
        choices: int,
        model: str,
        tokens: TokenTexts,
        prompts: Sequence[list[int]] = (),
    ) -> None:
        """prompts: token ids of each, for what is repeated of them."""
        self.params, self._tokens = params, tokens
        self.id = f"{'chatcmpl' if params.chat else 'cmpl'}-{secrets.token_hex(12)}"
        fingerprint = f"crelle-{__version__}"
        self._head: dict[str, Any] = {"id": self.id, "created": int(time()), "model": model}
        self._head["system_fingerprint"] = fingerprint
        self._usage: UnsetType | None = None if params.usage else UNSET  # of all chunks but the last
        self._offsets = [TextOffset() for _ in range(choices)]
        self._answers = [self._answer(prompts) for _ in range(choices)] if params.chat else []
        self._echoes = self._prompts(prompts) if params.echo and prompts else []
        self._firsts = [ids[0] for ids in prompts] if self._echoes else []
        self._echoed = set[int]()  # choices of a stream

    def _answer(self, prompts: Sequence[list[int]]) -> ChatAnswer:
        if not prompts:
            return ChatAnswer()
        tokenizer, use = self._tokens.tokenizer, self.params.tools
        mark = thinks(tokenizer, prompts[0])
        parser = None if use is None else ToolCallParser(format_of(tokenizer), {f["name"] for f in use.functions})
        return ChatAnswer(mark, parser)

    def _prompts(self, prompts: Sequence[list[int]]) -> list[str]:
        """Return the prompts as text."""
        given = self.params.prompts
        decode = self._tokens.tokenizer.decode
        return [p if isinstance(p, str) else decode(ids) for p, ids in zip(given, prompts, strict=True)]

    def note(self, index: int, event: Event) -> Parts:
        """Take note of a chat's event, for an answer in one piece; return what is new."""
        if not self.params.chat:
            return Parts()
        final = event.output is not None
        return self._answers[index].push(event.text, token=event.token is not None, final=final)

    def whole(self, outputs: Sequence[Output], cut: str | None = None) -> ChatCompletion | TextCompletion:
        """Return the answer in one piece; outputs: of all prompts, in order; cut: why some are not complete."""
        choices = [self._choice(index, output, self._end(index, output, cut)) for index, output in enumerate(outputs)]
        kind = ChatCompletion if self.params.chat else TextCompletion
        return kind(choices=choices, usage=self.usage(outputs), **self._head)

    def _choice(self, index: int, output: Output, end: dict[str, Any]) -> Any:
        if self.params.prompt_logprobs is not None:
            end |= {"prompt_logprobs": self._prompt_logprobs(output.prompt_logprobs or ())}
        if self.params.chat:
            logprobs = None if output.logprobs is None else self._logprobs(output.logprobs, index)
            return ChatChoice(index=index, message=self._message(self._answers[index]), logprobs=logprobs, **end)
        text, found = self._text(index, output.completion.text, output.logprobs or (), output.prompt_logprobs)
        logprobs = None if output.logprobs is None else self._logprobs(found, index)
        return TextChoice(index=index, text=text, logprobs=logprobs, **end)

    def _message(self, answer: ChatAnswer) -> Answer:
        calls = [ToolCall(c.id or "", FunctionCall(c.name or "", c.arguments)) for c in answer.calls]
        return Answer(answer.content or (None if calls else ""), None, calls or UNSET, answer.reasoning or UNSET)

    def _text(
        self,
        index: int,
        text: str,
        found: Sequence[TokenLogprob],
        prompt: Sequence[TokenLogprob | None] | None,
    ) -> tuple[str, list[TokenLogprob | None]]:
        """Return a completion's text and logprobs with the prompt, where it is repeated."""
        if self.params.max_tokens == 0:
            text, found = "", ()
        if not self._echoes:
            return text, list(found)
        return self._echoes[index // self.params.n] + text, [*(prompt or ()), *found]

    def opening(self) -> bytes:
        """Return what a chat's stream begins with."""
        if not self.params.chat:
            return b""
        delta = Delta(role="assistant", content="", refusal=None)
        choices = (ChatChunkChoice(index=i, delta=delta, logprobs=None) for i in range(len(self._offsets)))
        return b"".join(sse(ChatChunk(choices=[choice], usage=self._usage, **self._head)) for choice in choices)

    def chunk(self, index: int, event: Event, cut: str | None = None) -> bytes:
        """Return an event as part of a stream; nothing where it holds nothing to tell."""
        parts = self.note(index, event)
        if not (event.text or event.output or event.logprob is not None):
            return b""
        end = self._end(index, event.output, cut) if event.output else {}
        if self.params.chat:
            logprobs = None if event.logprob is None else self._logprobs([event.logprob], index)
            if not (parts or end or logprobs):
                return b""
            choice = ChatChunkChoice(index=index, delta=self._delta(parts), logprobs=logprobs, **end)
            return sse(ChatChunk(choices=[choice], usage=self._usage, **self._head))
        return self._text_chunk(index, event, end)

    def _text_chunk(self, index: int, event: Event, end: dict[str, Any]) -> bytes:
        """Return an event of a completion; the first one repeats the prompt, where that is wanted."""
        own = [] if event.logprob is None else [event.logprob]
        if index not in self._echoed:
            self._echoed.add(index)
            text, found = self._text(index, event.text, own, _of_prompt(event))
        else:
            text, found = ("", []) if self.params.max_tokens == 0 else (event.text, [*own])
        logprobs = self._logprobs(found, index) if found and self.params.logprobs is not None else None
        choice = TextChunkChoice(index=index, text=text, logprobs=logprobs, **end)
        return sse(TextChunk(choices=[choice], usage=self._usage, **self._head))

    def _delta(self, parts: Parts) -> Delta:
        calls = [
            ToolCallDelta(
                index=c.index,
                id=c.id or UNSET,
                type="function" if c.id else UNSET,
                function=FunctionDelta(name=c.name or UNSET, arguments=c.arguments),
            )
            for c in parts.calls
        ]
        reasoning = parts.reasoning or UNSET
        return Delta(content=parts.content or UNSET, reasoning_content=reasoning, tool_calls=calls or UNSET)

    def closing(self, outputs: Sequence[Output]) -> bytes:
        """Return what ends a stream."""
        if not self.params.usage:
            return DONE
        kind = ChatChunk if self.params.chat else TextChunk
        return sse(kind(choices=[], usage=self.usage(outputs), **self._head)) + DONE

    def usage(self, outputs: Sequence[Output]) -> Usage:
        """Count tokens."""
        found = usage(outputs, self.params.n, sum(a.reasoning_tokens for a in self._answers))
        if self.params.max_tokens == 0:
            found.completion_tokens, found.total_tokens = 0, found.prompt_tokens
        return found

    def _end(self, index: int, output: Output, cut: str | None) -> dict[str, Any]:
        """Say why a sequence ended: OpenAI has no reason for a server that shuts down, so `cut` names it."""
        reason = output.completion.finish_reason
        if reason == "stop" and self._answers and self._answers[index].calls:
            named = self.params.tools is not None and self.params.tools.named is not None
            return {"finish_reason": "stop" if named else "tool_calls"}  # as OpenAI does
        return {"finish_reason": reason} if reason in ("stop", "length") else {"finish_reason": "length", "cut": cut}

    def _logprobs(self, found: Sequence[TokenLogprob | None], index: int) -> Any:
        if self.params.chat:
            return ChatLogprobs([ChatTokenLogprob(*self._one(t.token, t.logprob), self._top(t)) for t in found if t])
        text, offset, top = self._tokens.text, self._offsets[index], self.params.logprobs
        first = self._firsts[index // self.params.n] if self._firsts else -1  # of the prompt: it has no probability
        return TextLogprobs(
            tokens=[text(t.token if t else first) for t in found],
            token_logprobs=[_log(t.logprob) if t else None for t in found],
            top_logprobs=[{text(i): _log(v) for i, v in t.top[:top]} if t else None for t in found] if top else None,
            text_offset=[offset.take(self._written(index, t.token if t else first, offset)) for t in found],
        )

    def _written(self, index: int, token: int, offset: TextOffset) -> bytes:
        """Return the bytes of a token in a text: of a prompt, BOS and SentencePiece's first space are not part."""
        raw = self._tokens.raw(token)
        if not self._echoes:
            return raw
        if self._tokens.special(token):
            return b""
        begins = offset.characters == 0 and not self._echoes[index // self.params.n].startswith(" ")
        return raw.removeprefix(b" ") if begins else raw

    def _prompt_logprobs(self, found: Sequence[TokenLogprob | None]) -> PromptLogprobs:
        """Return what vLLM calls so: of each token of the prompt the likeliest ones and itself, by id."""
        most, each = self.params.prompt_logprobs or 0, PromptLogprobs()
        for t in found:
            if t is None:
                each.append(None)
                continue
            some = {token: (value, rank) for rank, (token, value) in enumerate(t.top[:most], 1)}
            some[t.token] = (t.logprob, t.rank or 0)
            text = self._tokens.text
            each.append({str(i): PromptLogprob(_log(value), rank, text(i)) for i, (value, rank) in some.items()})
        return each

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


def _of_prompt(event: Event) -> Sequence[TokenLogprob | None] | None:
    return event.output.prompt_logprobs if event.output else event.prompt_logprobs


def usage(outputs: Sequence[Output], n: int, reasoning: int = 0) -> Usage:
    """Count tokens; a prompt counts once, however many sequences are sampled for it."""
    firsts = outputs[::n]
    prompt = sum(o.completion.prompt_tokens for o in firsts)
    sampled = sum(len(o.completion.tokens) for o in outputs)
    cached = sum(min(o.reused, o.completion.prompt_tokens) for o in firsts)
    right = sum(o.completion.accepted for o in outputs)
    wrong = sum(o.completion.drafted for o in outputs) - right
    details = CompletionDetails(reasoning, right, wrong)
    return Usage(prompt, sampled, prompt + sampled, CachedTokens(cached), details)
