"""What POST /v1/responses takes, for stateless use: msgspec structs, and how they are said as a chat."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from crelle.server.schema.tool_schemas import Name, Object, Short, Strict
from crelle.server.schema.validation import Only, Schema, checked_by, show, wrong

_ITEMS = 4096
_Text = Annotated[str, Meta(max_length=1 << 20)]


class InputText(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: _Text
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Meta(max_length=0)] | None = None


class InputMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: _Text | Annotated[list[InputText], Meta(max_length=_ITEMS)]
    type: Literal["message"] | None = None
    id: Short | None = None
    status: Short | None = None


class InputCall(Strict):
    type: Literal["function_call"]
    call_id: Annotated[str, Meta(max_length=128)]
    name: Name
    arguments: Short
    id: Short | None = None
    status: Short | None = None


class InputResult(Strict):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Meta(max_length=128)]
    output: _Text
    id: Short | None = None
    status: Short | None = None


_KINDS: dict[str, type[Strict]] = {"function_call": InputCall, "function_call_output": InputResult}


class Input:
    """A text, or a list of messages, calls and their results."""

    def __init__(self) -> None:
        kinds = (InputMessage, InputCall, InputResult)
        self._schemas: dict[type, Schema[Any]] = {kind: Schema(kind) for kind in kinds}
        _, named = msgspec.json.schema_components((*kinds, InputText))
        content = {
            "anyOf": [msgspec.json.schema(_Text), {"type": "array", "maxItems": _ITEMS, "items": named["InputText"]}]
        }
        named["InputMessage"]["properties"]["content"] = content
        items = {"anyOf": [named[kind.__name__] for kind in kinds]}
        many = {"type": "array", "items": items, "minItems": 1, "maxItems": _ITEMS}
        self.json_schema = {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 1 << 20}, many]}

    def check(self, value: Any, at: str) -> str | list[Strict]:
        if isinstance(value, str) and 0 < len(value) <= 1 << 20:
            return value
        if not isinstance(value, list) or not 0 < len(value) <= _ITEMS:
            raise wrong(at, f"must be a text or an array of 1 to {_ITEMS} items, not {show(value)}")
        return [self._item(item, f"{at}[{i}]") for i, item in enumerate(value)]

    def _item(self, item: Any, at: str) -> Strict:
        kind = item.get("type") if isinstance(item, dict) else None
        found: Strict = self._schemas[_KINDS.get(kind, InputMessage) if isinstance(kind, str) else InputMessage].check(
            item, at
        )
        return found


class FlatTool(Strict, tag_field="type", tag="function"):
    """A function, as this API writes it."""

    name: Name
    description: Short | None = None
    parameters: Object | None = None
    strict: bool | None = None


class FlatChoice(Strict, tag_field="type", tag="function"):
    name: Name


class PlainText(Strict, tag_field="type", tag="text"):
    """Any text."""


class AnyObject(Strict, tag_field="type", tag="json_object"):
    """A JSON object."""


class FlatSchema(Strict, tag_field="type", tag="json_schema"):
    """JSON that matches a schema."""

    name: Name
    schema: Object
    description: Short | None = None
    strict: bool | None = None


class TextOptions(Strict):
    format: PlainText | AnyObject | FlatSchema | None = None


def not_kept(*neutral: Any) -> Any:
    return checked_by(Only(neutral), "nothing is stored")


class Respond(Strict, kw_only=True):
    """The body of POST /v1/responses."""

    model: Any = None
    input: Annotated[Any, checked_by(Input(), "a text, or a conversation with calls and their results")]
    instructions: _Text | None = None
    max_output_tokens: int | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = 1.0
    stream: bool | None = False
    tools: Annotated[list[FlatTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = True
    text: TextOptions | None = None
    store: Annotated[bool, Meta(description="no effect: nothing is stored")] | None = False
    previous_response_id: Annotated[Any, not_kept()] = None
    background: Annotated[Any, not_kept(False)] = None
    truncation: Literal["disabled"] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None


def as_chat(asked: Respond) -> dict[str, Any]:
    """Return the body of the same request as a chat."""
    items = [InputMessage(role="user", content=asked.input)] if isinstance(asked.input, str) else asked.input
    messages: list[dict[str, Any]] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    for item in items:
        if isinstance(item, InputResult):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        elif isinstance(item, InputCall):
            call = {"id": item.call_id, "type": "function"}
            call["function"] = {"name": item.name, "arguments": item.arguments}  # type: ignore[assignment]
            if messages and messages[-1].get("tool_calls"):  # calls of one answer
                messages[-1]["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        else:
            content = item.content if isinstance(item.content, str) else "".join(part.text for part in item.content)
            messages.append({"role": item.role, "content": content})
    body: dict[str, Any] = {"messages": messages, "max_completion_tokens": asked.max_output_tokens}
    body |= {name: getattr(asked, name) for name in ("temperature", "top_p", "stream", "parallel_tool_calls")}
    if asked.tools:
        body["tools"] = [{"type": "function", "function": _named(tool)} for tool in asked.tools]
    choice = asked.tool_choice
    named = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, FlatChoice) else choice
    form = asked.text.format if asked.text else None
    if isinstance(form, FlatSchema):
        body["response_format"] = {"type": "json_schema", "json_schema": _named(form)}
    elif isinstance(form, AnyObject):
        body["response_format"] = {"type": "json_object"}
    return body | {"tool_choice": named}


def _named(value: Strict) -> dict[str, Any]:
    """Return an object's fields without its type."""
    found: dict[str, Any] = msgspec.to_builtins(value)
    return {name: item for name, item in found.items() if name != "type" and item is not None}
