"""From a checked body to what the engine is asked."""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import msgspec

from crelle.engine.embedding import Pooling
from crelle.engine.sampling.grammar import GrammarSpec
from crelle.engine.sampling.sampler import Sampling
from crelle.engine.tokenization.tokenizer import Message, Tokenizer
from crelle.server.answers.chat_answer import thinks
from crelle.server.answers.structured import Form, form_of
from crelle.server.answers.tool_formats import ToolUse, format_of, tool_grammar, with_tools
from crelle.server.errors import ApiError
from crelle.server.schema.response_api import Respond, as_chat
from crelle.server.schema.schemas import Chat, ChatMessage, Generate, ModelInfo, RequestSchemas, TokenizeChat
from crelle.server.schema.strict_json import parse
from crelle.server.schema.tool_schemas import Call

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
_LEAST = 1e-6  # of top_p: keeps the likeliest token alone, as anything smaller would, which f32 takes for 0

Prompts = list[str] | list[list[int]] | list[Message]  # prompts, prompts as ids, or one conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One HTTP request for completions. Its prompts are not tokenized yet: that can take a while."""

    chat: bool
    prompts: Prompts
    sampling: Sampling  # with max_tokens as asked; `most` is what there is room for
    max_tokens: int | None
    n: int
    bits: int | None
    logprobs: int | None  # likely tokens to tell of; None: no logprobs
    ignore_end: bool
    stream: bool
    usage: bool  # at the end of a stream
    echo: bool = False
    prompt_logprobs: int | None = None
    form: Form | None = None  # that the answer must have
    tools: ToolUse | None = None
    responds: Respond | None = None  # what POST /v1/responses was asked
    template: dict[str, Any] = field(default_factory=dict)  # options of the chat template

    def grammar(self, tokenizer: Tokenizer, prompt: list[int]) -> GrammarSpec | None:
        """Return what the answer to a prompt must match."""
        mark = thinks(tokenizer, prompt) if self.chat else None
        if self.tools is not None and (self.tools.forced or self.form is None):
            return tool_grammar(self.tools, format_of(tokenizer), mark)
        return None if self.form is None else self.form.grammar(mark)

    @property
    def scores(self) -> int | None:
        """Likely tokens to tell of with each one of the prompt; None: the prompt is not scored."""
        wanted = [n for n in (self.prompt_logprobs, self.logprobs if self.echo else None) if n is not None]
        return max(wanted, default=None)

    def ids(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Tokenize; a conversation becomes one prompt."""
        if self.chat:
            tools = self.tools.tools if self.tools else ()
            messages = with_tools(self.prompts, tools, tokenizer)  # type: ignore[arg-type]
            return [tokenizer.encode_chat(messages, tools, **self.template)]
        return [tokenizer.encode(t) if isinstance(t, str) else t for t in self.prompts]  # type: ignore[misc]

    @property
    def characters(self) -> int:
        return _characters(self.prompts)


@dataclass(frozen=True, slots=True)
class Tokenize:
    """One HTTP request for token ids."""

    chat: bool
    prompts: Prompts  # a prompt or a conversation
    bos: bool = True  # whether the prompt starts with BOS where the tokenizer has one

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        if self.chat:
            return tokenizer.encode_chat(self.prompts)  # type: ignore[arg-type]
        return tokenizer.encode(self.prompts[0], self.bos)  # type: ignore[arg-type]

    @property
    def characters(self) -> int:
        return _characters(self.prompts)


@dataclass(frozen=True, slots=True)
class Detokenized:
    """One HTTP request for the text of token ids."""

    tokens: list[int]
    chat: bool = False

    def text(self, tokenizer: Tokenizer) -> str:
        return tokenizer.decode(self.tokens)

    @property
    def characters(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed:
    """One HTTP request for embeddings."""

    prompts: Prompts
    pooling: Pooling = "mean"
    normalize: bool = True
    base64: bool = False
    chat: bool = False

    def ids(self, tokenizer: Tokenizer) -> list[list[int]]:
        return [tokenizer.encode(t) if isinstance(t, str) else t for t in self.prompts]  # type: ignore[misc]

    @property
    def characters(self) -> int:
        return _characters(self.prompts)


class _Schema(Protocol[T_co]):
    def check(self, value: Any) -> T_co: ...


class RequestParser:
    """Reads the bodies of requests to one model."""

    def __init__(self, info: ModelInfo) -> None:
        self.info, self.schemas = info, RequestSchemas(info)

    def completion(self, body: Any) -> GenerationRequest:
        asked = self._check(body, self.schemas.completion)
        several = isinstance(asked.prompt, list) and isinstance(asked.prompt[0], str | list)
        prompts = asked.prompt if several else [asked.prompt]
        most = _or(asked.max_tokens, min(16, self.info.max_tokens))
        return self._parsed(asked, False, prompts, most, asked.logprobs, echo=bool(asked.echo))

    def respond(self, body: Any) -> GenerationRequest:
        """Read a request of the Responses API as a chat."""
        asked = self._check(body, self.schemas.respond)
        try:
            return replace(self.chat(as_chat(asked)), responds=asked)
        except ApiError as e:
            param = {"messages": "input", "response_format": "text.format"}.get(e.param or "", e.param)
            raise ApiError(e.status, e.message, param=param, code=e.code) from None

    def chat(self, body: Any) -> GenerationRequest:
        asked = self._check(body, self.schemas.chat)
        limits = (asked.max_tokens, asked.max_completion_tokens)
        most = min((n for n in limits if n is not None), default=None)
        told = asked.top_logprobs or (0 if asked.logprobs else None)
        more = {"tools": self._tools(asked), "template": asked.chat_template_kwargs or {}}
        return self._parsed(asked, True, self._conversation(asked.messages), most, told, **more)

    def _tools(self, asked: Chat) -> ToolUse | None:
        """Return the tools that may be called; None: there are none."""
        choice = asked.tool_choice
        if not asked.tools:
            if choice in (None, "none", "auto"):
                return None
            raise ApiError(400, "tool_choice asks for a call, but there are no tools", param="tool_choice")
        names = [tool.function.name for tool in asked.tools]
        if repeated := next((name for i, name in enumerate(names) if name in names[:i]), None):
            why = f"tools has two functions of the name '{repeated}'; rename one"
            raise ApiError(400, why, param="tools", code="invalid_value")
        named = choice[0] if isinstance(choice, tuple) else None
        if named is not None and named not in names:
            why = f"tool_choice names '{named}', which is none of the tools: {', '.join(names[:8])}"
            raise ApiError(400, why, param="tool_choice", code="invalid_value")
        if choice == "none":
            return None
        tools = tuple(msgspec.to_builtins(tool) for tool in asked.tools)
        for tool in tools:
            tool["function"] = {name: value for name, value in tool["function"].items() if value is not None}
        wanted = "required" if choice == "required" else "auto"
        return ToolUse(tools, wanted, named, asked.parallel_tool_calls is not False)

    def tokenize(self, body: Any) -> Tokenize:
        asked = self._check(body, self.schemas.tokenize)
        if isinstance(asked, TokenizeChat):
            return Tokenize(True, self._conversation(asked.messages))
        return Tokenize(False, [asked.prompt], _or(asked.add_special_tokens, True))

    def _check(self, body: Any, schema: _Schema[T]) -> T:
        if isinstance(body, dict):
            name = body.get("model")
            if isinstance(name, str) and name != self.info.name:
                raise not_served(name, self.info)
            if body.get("precision") is not None and not self.info.precisions:
                why = "this model has only one precision; checkpoints of the scheme bcq-nested have several"
                raise ApiError(400, why, param="precision", code="invalid_value")
        return schema.check(body)

    def _conversation(self, messages: list[ChatMessage]) -> list[Message]:
        """Join the parts of messages; a developer speaks as the system, which is the name that templates know."""
        found: list[Message] = []
        for m in messages:
            parts = m.content if isinstance(m.content, list) else ()
            text = m.content if isinstance(m.content, str) else "".join(part.text for part in parts)
            message: Message = {"role": "system" if m.role == "developer" else m.role, "content": text}
            if m.tool_calls:
                message["tool_calls"] = [_call(call) for call in m.tool_calls]
            if m.role == "tool":
                message |= {"tool_call_id": m.tool_call_id or "", "name": m.name or ""}
            found.append(message)
        if (n := sum(len(m["content"]) for m in found)) > self.info.max_prompt:
            why = f"the messages have {n} characters in total, but at most {self.info.max_prompt} are allowed"
            raise ApiError(400, why, param="messages", code="context_length_exceeded")
        return found

    def detokenize(self, body: Any) -> Detokenized:
        return Detokenized(self._check(body, self.schemas.detokenize).tokens)

    def embedding(self, body: Any) -> Embed:
        asked = self._check(body, self.schemas.embedding)
        several = isinstance(asked.input, list) and isinstance(asked.input[0], str | list)
        return Embed(
            prompts=asked.input if several else [asked.input],
            pooling=asked.pooling or "mean",
            normalize=_or(asked.normalize, True),
            base64=asked.encoding_format == "base64",
        )

    def _parsed(
        self, asked: Generate, chat: bool, prompts: Prompts, most: int | None, logprobs: int | None, **more: Any
    ) -> GenerationRequest:
        limit = self.info.max_tokens if most is None else max(1, most)
        sampling = Sampling(
            max_tokens=limit,
            frequency_penalty=_or(asked.frequency_penalty, 0.0),
            presence_penalty=_or(asked.presence_penalty, 0.0),
            logit_bias=tuple((int(token), bias) for token, bias in (asked.logit_bias or {}).items()),
            min_tokens=min(_or(asked.min_tokens, 0), limit),
            temperature=_or(asked.temperature, 1.0),
            top_k=_or(asked.top_k, 0),
            top_p=max(_or(asked.top_p, 1.0), _LEAST),
            min_p=_or(asked.min_p, 0.0),
            repetition_penalty=_or(asked.repetition_penalty, 1.0),
            seed=asked.seed,
            stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
        )
        return GenerationRequest(
            chat=chat,
            prompts=prompts,
            sampling=sampling,
            max_tokens=most,
            n=_or(asked.n, 1),
            bits=None if asked.precision is None else int(asked.precision),
            logprobs=logprobs,
            ignore_end=bool(asked.ignore_eos),
            stream=bool(asked.stream),
            usage=bool(asked.stream_options and asked.stream_options.include_usage),
            prompt_logprobs=asked.prompt_logprobs,
            form=form_of(asked),
            **more,
        )


def _call(call: Call) -> dict[str, Any]:
    """Return a call as templates read it: its arguments as an object."""
    try:
        arguments = parse(call.function.arguments.encode("utf-8", "replace"))
    except ApiError:  # what a model wrote that was cut off
        arguments = call.function.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def not_served(name: str, info: ModelInfo) -> ApiError:
    shown = name if len(name) <= 100 else name[:100] + "…"
    why = f"the model '{shown}' does not exist; this server has '{info.name}'"
    return ApiError(404, why, param="model", code="model_not_found")


def _characters(prompts: Prompts) -> int:
    """Count what is to be tokenized."""
    return sum(len(t if isinstance(t, str) else t["content"]) for t in prompts if isinstance(t, str | dict))


def _or(value: T | None, default: T) -> T:
    """Return a parameter, where null means the default."""
    return default if value is None else value
