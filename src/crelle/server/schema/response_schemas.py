"""What answers look like: msgspec structs, which responses.py fills, strict_json.py writes and openapi.py publishes.

A field that is UNSET is not written. Floats in them must be finite: msgspec would write null for others.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Count = Annotated[int, Meta(ge=0)]
Byte = Annotated[int, Meta(ge=0, le=255)]
Log = Annotated[float, Meta(le=0.001)]
Finish = Literal["stop", "length", "tool_calls"]
Cut = Annotated[
    Literal["shutdown"], Meta(description="only if the server shut down before the completion was finished")
]


class Closed(Struct, forbid_unknown_fields=True):
    """An object that has no other names than its fields."""


class Problem(Closed):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Closed):
    """Every answer that is not a success."""

    error: Problem


class CachedTokens(Closed):
    cached_tokens: Count


class CompletionDetails(Closed):
    reasoning_tokens: Count
    accepted_prediction_tokens: Count  # of the tokens that speculation guessed
    rejected_prediction_tokens: Count


class Usage(Closed):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails


class PromptLogprob(Closed):
    logprob: Log
    rank: Count | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; the first token has none


# Completions ----------------------------------------------------------------------------------------------------------


class TextLogprobs(Closed):
    tokens: list[str]
    token_logprobs: list[Log | None]
    top_logprobs: list[dict[str, Log] | None] | None
    text_offset: list[Count]


class TextChoice(Closed, kw_only=True):
    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish
    cut: Cut | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextChunkChoice(TextChoice, kw_only=True):
    finish_reason: Finish | None = None  # type: ignore[assignment]


class Head(Closed, kw_only=True):
    """What an answer begins with; the kind of answer is the structs' tag."""

    id: str
    created: Count
    model: str
    system_fingerprint: str


class TextCompletion(Head, kw_only=True, tag_field="object", tag="text_completion"):
    choices: list[TextChoice]
    usage: Usage


class TextChunk(Head, kw_only=True, tag_field="object", tag="text_completion"):
    choices: list[TextChunkChoice]
    usage: Usage | UnsetType | None = UNSET


# Chat -----------------------------------------------------------------------------------------------------------------


class TopLogprob(Closed):
    token: str
    logprob: Log
    bytes: list[Byte]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Closed):
    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(Closed):
    name: str
    arguments: str  # JSON


class ToolCall(Closed, tag_field="type", tag="function"):
    id: str
    function: FunctionCall


class FunctionDelta(Closed, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Closed, kw_only=True):
    index: Count
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Answer(Closed, tag_field="role", tag="assistant"):
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # what stands in <think>, where the model's template has it


class ChatChoice(Closed, kw_only=True):
    index: Count
    message: Answer
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    cut: Cut | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Delta(Closed, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChatChunkChoice(Closed, kw_only=True):
    index: Count
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None = None
    cut: Cut | UnsetType = UNSET


class ChatCompletion(Head, kw_only=True, tag_field="object", tag="chat.completion"):
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(Head, kw_only=True, tag_field="object", tag="chat.completion.chunk"):
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


# Other pages ----------------------------------------------------------------------------------------------------------


class Model(Closed, kw_only=True, tag_field="object", tag="model"):
    id: str
    created: Count
    owned_by: str
    context: Count
    precisions: list[Count]


class Models(Closed, tag_field="object", tag="list"):
    data: list[Model]


class TokenIds(Closed):
    tokens: list[Count]
    count: Count
    context: Count


class Text(Closed):
    prompt: str


class EmbeddingUsage(Closed):
    prompt_tokens: Count
    total_tokens: Count


class EmbeddingVector(Closed, kw_only=True, tag_field="object", tag="embedding"):
    index: Count
    embedding: list[float] | str  # base64: little-endian f32


class Embeddings(Closed, kw_only=True, tag_field="object", tag="list"):
    data: list[EmbeddingVector]
    model: str
    usage: EmbeddingUsage


class Status(Closed, kw_only=True):
    model: str
    precisions: list[Count]
    kv: str
    pages: Count
    pages_used: Count
    page_tokens: Count
    chat: bool
    running: Count
    waiting: Count
    tokens_per_second: Annotated[float, Meta(ge=0)]


class Alive(Closed):
    status: str
