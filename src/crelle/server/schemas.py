"""What requests and answers look like, as JSON Schema. validation.py checks requests by it, openapi.py publishes it.

Bounds that depend on the model (context, vocabulary, precisions) come from `ModelInfo`.
"""

from dataclasses import dataclass
from typing import Any

from crelle.engine.engine import MAX_LOGPROBS
from crelle.server.validation import Schema

_SEED = 2**63 - 1
_STOPS, _STOP_LENGTH = 16, 256
_MESSAGES = 4096


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


def _text(longest: int | None = None, least: int = 0, **more: Any) -> Schema:
    bounds = {"minLength": least} if least else {}
    return {"type": "string", **bounds, **({} if longest is None else {"maxLength": longest}), **more}


def _number(low: float, high: float, default: float, says: str) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high, "default": default, "description": says}


def _integer(low: int, high: int, says: str, **more: Any) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high, "description": says, **more}


def _flag(says: str) -> Schema:
    return {"type": ["boolean", "null"], "default": False, "description": says}


def _array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _object(properties: dict[str, Schema], required: tuple[str, ...] = (), **more: Any) -> Schema:
    needed = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, **needed, "additionalProperties": False, **more}


def _only(*values: Any, says: str) -> Schema:
    """Something of OpenAI's that is not done here: its neutral values are let through."""
    return {"enum": [*values, None], "description": f"not done here: {says}"}


# Requests -------------------------------------------------------------------------------------------------------------


def _common(f: ModelInfo) -> dict[str, Schema]:
    stop = _text(_STOP_LENGTH, 1, title="a string that is not empty")
    fields = {
        "model": {"type": ["string", "null"], "enum": [f.name, None], "description": "the model that is served"},
        "temperature": _number(0, 2, 1.0, "0: always the most likely token"),
        "top_p": {**_number(0, 1, 1.0, "keep the likeliest tokens of this total probability"), "exclusiveMinimum": 0},
        "top_k": _integer(0, 2**31 - 1, "keep the k likeliest tokens; 0: all", default=0),
        "min_p": _number(0, 1, 0.0, "drop tokens less likely than this share of the best one"),
        "repetition_penalty": _number(0.01, 100, 1.0, "above 1: repeat less"),
        "seed": _integer(0, _SEED, "same seed, same text"),
        "n": _integer(1, f.max_n, "completions to sample for each prompt", default=1),
        "stop": {
            "anyOf": [
                stop,
                _array(stop, maxItems=_STOPS, title="an array of such strings"),
                {"type": "null"},
            ],
            "description": "strings that end the text; they are not part of it",
        },
        "ignore_eos": _flag("go on behind the model's end tokens, up to max_tokens; for measurements"),
        "stream": _flag("send the text as server-sent events while it is sampled"),
        "stream_options": {
            **_object(
                {
                    "include_usage": _flag("end the stream with a chunk of counts"),
                    "include_obfuscation": _flag("nothing is padded here"),
                }
            ),
            "type": ["object", "null"],
        },
        "frequency_penalty": _only(0, says="repetition_penalty is"),
        "presence_penalty": _only(0, says="repetition_penalty is"),
        "logit_bias": {**_object({}), "type": ["object", "null"], "description": "not done here: must be empty"},
        "user": {**_text(512), "type": ["string", "null"], "description": "not used and not logged"},
    }
    if f.precisions:
        offered: dict[str, Any] = {"type": ["integer", "null"], "enum": [*f.precisions, None]}
        fields["precision"] = {**offered, "description": "bits of this nested checkpoint to answer with"}
    return fields


def _tokens(f: ModelInfo, says: str) -> Schema:
    return _integer(1, f.max_tokens, says)


def _prompt(f: ModelInfo) -> Schema:
    text = _text(f.max_prompt, 1, title="a string")
    ids = _array(
        {"type": "integer", "minimum": 0, "maximum": f.vocabulary - 1},
        minItems=1,
        maxItems=f.context - 1,
        title="an array of token ids",
    )
    many = {"minItems": 1, "maxItems": f.max_prompts}
    several = [_array(text, **many, title="an array of strings"), _array(ids, **many, title="an array of such arrays")]
    return {"anyOf": [text, ids, *several], "description": "the text to continue, or several"}


def completion(f: ModelInfo) -> Schema:
    """Return what POST /v1/completions takes."""
    fields = _common(f) | {
        "prompt": _prompt(f),
        "max_tokens": {**_tokens(f, "of the answer at most"), "default": min(16, f.max_tokens)},
        "logprobs": _integer(0, MAX_LOGPROBS, "tell how likely each token was, and as many others"),
        "best_of": _only(1, says="n samples several"),
        "echo": _only(False, says="the prompt is not repeated"),
        "suffix": _only("", says="text is only continued"),
    }
    return _object(fields, ("prompt",))


def messages(f: ModelInfo) -> Schema:
    part = _object({"type": {"const": "text"}, "text": _text(f.max_prompt)}, ("type", "text"))
    content: Schema = {
        "anyOf": [
            _text(f.max_prompt, title="a string"),
            _array(part, minItems=1, maxItems=_MESSAGES, title="an array of text parts"),
        ]
    }
    absent = ("refusal", "tool_calls", "function_call", "audio", "annotations", "reasoning_content")
    fields: dict[str, Schema] = {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant"]},
        "content": content,
        "name": {"type": ["string", "null"], "maxLength": 512, "description": "not used"},
        **{name: {"enum": [None, []], "description": "an answer can be sent back as it came"} for name in absent},
    }
    return _array(_object(fields, ("role", "content")), minItems=1, maxItems=_MESSAGES)


def chat(f: ModelInfo) -> Schema:
    """Return what POST /v1/chat/completions takes."""
    fields = _common(f) | {
        "messages": messages(f),
        "max_tokens": _tokens(f, "of the answer at most; default: what the context and the cache hold"),
        "max_completion_tokens": _tokens(f, "another name for max_tokens; the smaller one holds"),
        "logprobs": _flag("tell how likely each token was"),
        "top_logprobs": _integer(0, MAX_LOGPROBS, "and as many others"),
        "tools": {"type": ["array", "null"], "maxItems": 0, "description": "not done here: must be empty"},
        "tool_choice": _only("none", "auto", says="there are no tools"),
        "parallel_tool_calls": {"type": ["boolean", "null"], "description": "there are no tools"},
        "response_format": {
            "anyOf": [_object({"type": {"const": "text"}}, ("type",)), {"type": "null"}],
            "description": "not done here: text only",
        },
        "store": _only(False, says="nothing is stored"),
    }
    return _object(fields, ("messages",))


def tokenize(f: ModelInfo) -> Schema:
    """Return what POST /tokenize takes: a text or a conversation."""
    model = _common(f)["model"]
    text = {"model": model, "prompt": _text(f.max_prompt), "add_special_tokens": _flag("default: true")}
    text["add_special_tokens"]["default"] = True
    return {
        "anyOf": [
            _object(text, ("prompt",), title="an object with prompt"),
            _object({"model": model, "messages": messages(f)}, ("messages",), title="an object with messages"),
        ]
    }


# Answers --------------------------------------------------------------------------------------------------------------

_COUNT: Schema = {"type": "integer", "minimum": 0}
_STRING: Schema = {"type": "string"}
_LOG: Schema = {"type": "number", "maximum": 0.001}


def _all(properties: dict[str, Schema], *but: str) -> Schema:
    return _object(properties, tuple(name for name in properties if name not in but))


_USAGE = _all(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _all({"cached_tokens": _COUNT}),
    }
)
_FINISH = {"enum": ["stop", "length"]}
_CUT = {"enum": ["shutdown"], "description": "only where the server shut down before the text was complete"}
_TOKEN = {"token": _STRING, "logprob": _LOG, "bytes": _array({"type": "integer", "minimum": 0, "maximum": 255})}

ERROR = _all(
    {
        "error": _all(
            {
                "message": _STRING,
                "type": _STRING,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            }
        )
    }
)


def _answer(kind: str, choice: dict[str, Schema]) -> Schema:
    choices = _array(_all({"index": _COUNT, **choice, "finish_reason": _FINISH, "cut": _CUT}, "cut"))
    return _all(
        {
            "id": _STRING,
            "object": {"const": kind},
            "created": _COUNT,
            "model": _STRING,
            "system_fingerprint": _STRING,
            "choices": choices,
            "usage": _USAGE,
        }
    )


COMPLETION = _answer(
    "text_completion",
    {
        "text": _STRING,
        "logprobs": {
            "anyOf": [
                {"type": "null"},
                _all(
                    {
                        "tokens": _array(_STRING),
                        "token_logprobs": _array(_LOG),
                        "top_logprobs": {
                            "anyOf": [
                                {"type": "null"},
                                _array({"type": "object", "additionalProperties": _LOG}),
                            ]
                        },
                        "text_offset": _array(_COUNT),
                    }
                ),
            ]
        },
    },
)
CHAT = _answer(
    "chat.completion",
    {
        "message": _all({"role": {"const": "assistant"}, "content": _STRING, "refusal": {"type": "null"}}),
        "logprobs": {
            "anyOf": [
                {"type": "null"},
                _all(
                    {
                        "content": _array(_all({**_TOKEN, "top_logprobs": _array(_all(_TOKEN))})),
                        "refusal": {"type": "null"},
                    }
                ),
            ]
        },
    },
)
MODEL = _all(
    {
        "id": _STRING,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _STRING,
        "context": _COUNT,
        "precisions": _array(_COUNT),
    }
)
MODELS = _all({"object": {"const": "list"}, "data": _array(MODEL)})
TOKENS = _all({"tokens": _array(_COUNT), "count": _COUNT, "context": _COUNT})
STATUS = _all(
    {
        "model": _STRING,
        "precisions": _array(_COUNT),
        "kv": _STRING,
        "pages": _COUNT,
        "pages_used": _COUNT,
        "running": _COUNT,
        "waiting": _COUNT,
        "tokens_per_second": {"type": "number", "minimum": 0},
    }
)
ALIVE = _all({"status": _STRING})
