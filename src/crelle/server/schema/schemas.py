"""What requests look like: msgspec structs. validation.py checks by them, openapi.py publishes them.

Bounds that depend on the model (context, vocabulary, precisions) come from `ModelInfo`: RequestSchemas derives structs
with those bounds in them.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, defstruct

from crelle.engine.engine import MAX_LOGPROBS
from crelle.server.schema.tool_schemas import (
    Calls,
    Choices,
    Object,
    ResponseFormat,
    Role,
    Short,
    Strict,
    StructuredOutputs,
    ToolChoice,
    Tools,
)
from crelle.server.schema.validation import Only, Schema, check_integers, checked_by, show, wrong

_SEED = 2**63 - 1
_STOPS, _STOP_LENGTH = 16, 256
_MESSAGES = 4096
_BIASES, _BIAS = 1024, 100  # entries of logit_bias, and how far they reach

Stop = Annotated[str, Meta(min_length=1, max_length=_STOP_LENGTH)]
Logprobs = Annotated[
    int, Meta(ge=0, le=MAX_LOGPROBS, description="number of most likely tokens to return with log-probabilities")
]
Empty = Annotated[list[Any], Meta(max_length=0)]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the schemas need to know of the model and the settings."""

    name: str
    context: int
    vocabulary: int
    precisions: tuple[int, ...]
    max_prompt: int  # characters
    max_tokens: int
    max_n: int
    max_prompts: int


def not_done(*neutral: Any, says: str) -> Meta:
    """A parameter of OpenAI's API that is not supported: only its neutral values are accepted."""
    return checked_by(Only(neutral), f"not supported: {says}")


class StreamOptions(Strict):
    include_usage: Annotated[bool, Meta(description="end the stream with a chunk of token counts")] | None = False
    include_obfuscation: Annotated[bool, Meta(description="no effect: chunks are not padded")] | None = False


class Generate(Strict):
    """What completions and chats have in common. Fields of type Any are given their checkers by `_bounded`."""

    model: Any = None
    temperature: (
        Annotated[float, Meta(ge=0, le=2, description="sampling temperature; 0: always the most likely token")] | None
    ) = 1.0
    top_p: (
        Annotated[float, Meta(gt=0, le=1, description="keep the most likely tokens whose probabilities add up to this")]
        | None
    ) = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1, description="keep the k most likely tokens; 0: all")] | None = 0
    min_p: (
        Annotated[float, Meta(ge=0, le=1, description="drop tokens below this fraction of the largest probability")]
        | None
    ) = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100, description="above 1: discourage repetition")] | None = (
        1.0
    )
    seed: Annotated[int, Meta(ge=0, le=_SEED, description="random seed; the same seed gives the same text")] | None = (
        None
    )
    n: int | None = 1
    precision: Any = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=_STOPS)] | None = None
    ignore_eos: Annotated[bool, Meta(description="continue after end tokens; for benchmarks")] | None = False
    stream: Annotated[bool, Meta(description="stream the completion as server-sent events")] | None = False
    stream_options: StreamOptions | None = None
    frequency_penalty: (
        Annotated[float, Meta(ge=-2, le=2, description="subtracted for each time a token was sampled")] | None
    ) = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2, description="subtracted once a token was sampled")] | None = (
        0.0
    )
    logit_bias: Any = None
    min_tokens: (
        Annotated[
            int, Meta(ge=0, le=2**31 - 1, description="end tokens and stop strings count only after these tokens")
        ]
        | None
    ) = 0
    prompt_logprobs: (
        Annotated[
            int, Meta(ge=0, le=MAX_LOGPROBS, description="number of most likely tokens for each token of the prompt")
        ]
        | None
    ) = None
    user: Annotated[str, Meta(max_length=512, description="not used and not logged")] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Object | Short | None = None
    guided_regex: Short | None = None
    guided_choice: Choices | None = None
    guided_grammar: Short | None = None


class Completion(Generate, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: Any
    max_tokens: int | None = 16
    logprobs: Logprobs | None = None
    best_of: Annotated[Any, not_done(1, says="use n for several completions")] = None
    echo: Annotated[bool, Meta(description="repeat the prompt before the completion, with its logprobs")] | None = False
    suffix: Annotated[Any, not_done("", says="prompts are only continued")] = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One message. An answer can be sent back as it came, with what it does not have."""

    role: Role
    content: str | list[TextPart] | None = None
    name: Annotated[str, Meta(max_length=512, description="not used")] | None = None
    refusal: Empty | None = None
    tool_calls: Calls | None = None
    tool_call_id: Annotated[str, Meta(max_length=128, description="of the call whose result this is")] | None = None
    function_call: Empty | None = None
    audio: Empty | None = None
    annotations: Empty | None = None
    reasoning_content: str | None = None  # not used: templates leave out what was thought before


class Chat(Generate, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: Annotated[bool, Meta(description="return the log-probability of each token")] | None = False
    top_logprobs: Logprobs | None = None
    tools: Tools | None = None
    tool_choice: Annotated[Any, checked_by(ToolChoice(), "which function must be called")] = None
    parallel_tool_calls: Annotated[bool, Meta(description="whether an answer may have several calls")] | None = True
    chat_template_kwargs: (
        Annotated[dict[str, bool | int | float | str | None], Meta(max_length=32, description="for the chat template")]
        | None
    ) = None
    store: Annotated[Any, not_done(False, says="nothing is stored")] = None


class TokenizeText(Strict, kw_only=True):
    """The body of POST /tokenize: a text."""

    model: Any = None
    prompt: str
    add_special_tokens: bool | None = True


class TokenizeChat(Strict, kw_only=True):
    """The body of POST /tokenize: a conversation."""

    model: Any = None
    messages: list[ChatMessage]


class Detokenize(Strict, kw_only=True):
    """The body of POST /detokenize."""

    model: Any = None
    tokens: list[int]


class Embedding(Strict, kw_only=True):
    """The body of POST /v1/embeddings."""

    model: Any = None
    input: Any
    encoding_format: Literal["float", "base64"] | None = "float"
    pooling: Literal["mean", "last"] | None = "mean"  # of the tokens' hidden states
    normalize: Annotated[bool, Meta(description="scale embeddings to length 1")] | None = True
    dimensions: Annotated[Any, not_done(says="embeddings have the model's width")] = None
    user: Annotated[str, Meta(max_length=512, description="not used and not logged")] | None = None


# Bounds of a model ----------------------------------------------------------------------------------------------------


class Prompt:
    """A text or token ids, or several of either: a union of msgspec's may hold one kind of array only."""

    def __init__(self, info: ModelInfo) -> None:
        text = Annotated[str, Meta(min_length=1, max_length=info.max_prompt)]
        self._id: Any = Annotated[int, Meta(ge=0, le=info.vocabulary - 1)]
        ids = Annotated[list[self._id], Meta(min_length=1, max_length=info.context - 1)]  # type: ignore[name-defined]
        many = Meta(min_length=1, max_length=info.max_prompts)
        kinds: dict[str, Any] = {
            "a string": text,
            "an array of token ids": ids,
            "an array of strings": Annotated[list[text], many],
            "an array of arrays of token ids": Annotated[list[ids], many],
        }
        self.json_schema = {"anyOf": [{**msgspec.json.schema(kind), "title": title} for title, kind in kinds.items()]}
        self._names, self._most = " or ".join(kinds), info.context - 1
        self._text, self._ids, self._texts, _ = (Schema[Any](kind) for kind in kinds.values())
        several: Any = Annotated[list[Any], many]
        self._several = Schema[list[Any]](several)

    def check(self, value: Any, at: str) -> Any:
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(value, str):
            return self._text.check(value, at)
        if isinstance(first, str):
            return self._texts.check(value, at)
        if isinstance(first, list):
            return [self._check_ids(ids, f"{at}[{i}]") for i, ids in enumerate(self._several.check(value, at))]
        if isinstance(first, int | float) and not isinstance(first, bool):
            return self._check_ids(value, at)
        raise wrong(at, f"must be {self._names}, not {show(value)}")

    def _check_ids(self, value: Any, at: str) -> list[int]:
        if isinstance(value, list) and 0 < len(value) <= self._most:
            return check_integers(value, self._id, at)
        ids: list[int] = self._ids.check(value, at)
        return ids


def _bounded(base: type[Any], info: ModelInfo, **fields: tuple[Any, Any]) -> Any:
    """Return a struct with some fields declared anew: name = (type, default); a default of ... is none."""
    model = Annotated[Any, checked_by(Only((info.name,)), "the served model")]
    every = {"model": (model, None), **fields}
    if issubclass(base, Generate):
        bits = Only(info.precisions)
        every["precision"] = (Annotated[Any, checked_by(bits, "bits to run a nested checkpoint at")], None)
        every["logit_bias"] = (
            Annotated[Any, checked_by(LogitBias(info), "added to the logits of tokens, by id")],
            None,
        )
        every["n"] = (
            Annotated[int, Meta(ge=1, le=info.max_n, description="number of completions per prompt")] | None,
            1,
        )
    told = [(name, kind) if default is ... else (name, kind, default) for name, (kind, default) in every.items()]
    return defstruct(f"{base.__name__}Request", told, bases=(base,), kw_only=True, forbid_unknown_fields=True)


def _messages(info: ModelInfo) -> Any:
    text, many = Annotated[str, Meta(max_length=info.max_prompt)], Meta(min_length=1, max_length=_MESSAGES)
    part = defstruct("ContentPart", [("text", text)], bases=(TextPart,), kw_only=True)
    content: Any = text | Annotated[list[part], many] | None  # type: ignore[valid-type]
    message = defstruct("Message", [("content", content, None)], bases=(ChatMessage,), kw_only=True)
    return Annotated[list[message], many]  # type: ignore[valid-type]


class LogitBias:
    """Token ids as names, and what is added to their logits."""

    def __init__(self, info: ModelInfo) -> None:
        self.json_schema = {
            "type": ["object", "null"],
            "propertyNames": {"pattern": f"^({_below(info.vocabulary)})$"},
            "additionalProperties": {"type": "number", "minimum": -_BIAS, "maximum": _BIAS},
            "maxProperties": _BIASES,
        }
        kind: Any = Annotated[dict[str, Annotated[float, Meta(ge=-_BIAS, le=_BIAS)]], Meta(max_length=_BIASES)]
        self._kind, self._vocabulary = Schema[dict[str, float]](kind), info.vocabulary

    def check(self, value: Any, at: str) -> dict[str, float] | None:
        if value is None:
            return None
        for name in self._kind.check(value, at):
            token = int(name) if re.fullmatch("[0-9]{1,18}", name) else -1
            if not (0 <= token < self._vocabulary and str(token) == name):
                raise wrong(at, f"must have token ids below {self._vocabulary} as names, not {show(name)}")
        return {name: float(bias) for name, bias in value.items()}


def _below(n: int) -> str:
    """Return a regular expression of the decimal numbers below n."""
    last = str(n - 1)
    found = ["[0-9]", f"[1-9][0-9]{{1,{len(last) - 2}}}"] if len(last) > 2 else ["[0-9]"] if len(last) > 1 else []
    for i, digit in enumerate(last):
        low = 1 if i == 0 and len(last) > 1 else 0
        if int(digit) > low:
            found.append(f"{last[:i]}[{low}-{int(digit) - 1}]" + f"[0-9]{{{len(last) - i - 1}}}")
    return "|".join([*found, last])


class TokenizeSchema:
    """A text or a conversation: a union of msgspec's takes structs only where a field tells them apart."""

    def __init__(self, info: ModelInfo, messages: Any) -> None:
        text = Annotated[str, Meta(max_length=info.max_prompt)]
        self._text = Schema[TokenizeText](_bounded(TokenizeText, info, prompt=(text, ...)))
        self._chat = Schema[TokenizeChat](_bounded(TokenizeChat, info, messages=(messages, ...)))
        self.kinds = (self._text.kind, self._chat.kind)

    def check(self, value: Any) -> TokenizeText | TokenizeChat:
        if isinstance(value, dict) and "prompt" in value:
            return self._text.check(value)
        if isinstance(value, dict) and "messages" in value:
            return self._chat.check(value)
        raise wrong("", f"must be an object with prompt or an object with messages, not {show(value)}")


class RequestSchemas:
    """What a model's server takes, with the model's bounds."""

    def __init__(self, info: ModelInfo) -> None:
        most = (
            Annotated[int, Meta(ge=1, le=info.max_tokens, description="maximum number of tokens per completion")] | None
        )
        prompt = Annotated[Any, checked_by(Prompt(info), "the prompt to continue, or several")]
        messages = _messages(info)
        none = (
            Annotated[int, Meta(ge=0, le=info.max_tokens, description="maximum number of tokens; 0: only the prompt")]
            | None
        )
        limit, no_limit = (none, min(16, info.max_tokens)), (most, None)
        limits = {"max_tokens": no_limit, "max_completion_tokens": no_limit}  # two names; the smaller one holds
        self.completion = Schema[Completion](_bounded(Completion, info, prompt=(prompt, ...), max_tokens=limit))
        self.chat = Schema[Chat](_bounded(Chat, info, messages=(messages, ...), **limits))
        self.tokenize = TokenizeSchema(info, messages)
        ids = Annotated[list[Annotated[int, Meta(ge=0, le=info.vocabulary - 1)]], Meta(max_length=info.context)]
        self.detokenize = Schema[Detokenize](_bounded(Detokenize, info, tokens=(ids, ...)))
        self.embedding = Schema[Embedding](_bounded(Embedding, info, input=(prompt, ...)))
