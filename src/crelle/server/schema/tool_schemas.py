"""What requests say of tools and of the form of an answer: msgspec structs for schemas.py."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from crelle.server.schema.validation import Schema, show, wrong

_TOOLS, _TEXT = 128, 64 << 10
_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"

Name = Annotated[str, Meta(pattern=_NAME)]
Short = Annotated[str, Meta(max_length=_TEXT)]
Object = dict[str, Any]


class Strict(Struct, kw_only=True, forbid_unknown_fields=True):
    """An object that has no other names than its fields; null is a field's default."""


# The form of an answer ------------------------------------------------------------------------------------------------


class TextFormat(Strict, tag_field="type", tag="text"):
    """Any text."""


class JsonFormat(Strict, tag_field="type", tag="json_object"):
    """A JSON object."""


class JsonSchema(Strict):
    name: Name
    schema: Object | None = None
    description: Short | None = None
    strict: bool | None = None  # no effect: an answer always matches its schema


class JsonSchemaFormat(Strict, tag_field="type", tag="json_schema"):
    """JSON that matches a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonFormat | JsonSchemaFormat
Choices = Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=1024)]


class StructuredOutputs(Strict):
    """vLLM's newer spelling of guided_json and so on."""

    json: Object | Short | None = None
    regex: Short | None = None
    choice: Choices | None = None
    grammar: Short | None = None
    json_object: bool | None = None


# Tools ----------------------------------------------------------------------------------------------------------------


class Function(Strict):
    name: Name
    description: Short | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(Strict, tag_field="type", tag="function"):
    function: Function


Tools = Annotated[list[Tool], Meta(max_length=_TOOLS)]


class FunctionName(Strict):
    name: Name


class NamedTool(Strict, tag_field="type", tag="function"):
    function: FunctionName


class ToolChoice:
    """none, auto, required or the name of a function."""

    words = ("none", "auto", "required")

    def __init__(self) -> None:
        self._named = Schema(NamedTool)
        named = msgspec.json.schema(NamedTool)
        inner = named["$defs"]["NamedTool"]
        inner["properties"]["function"] = named["$defs"]["FunctionName"]
        self.json_schema = {"anyOf": [{"enum": [*self.words, None]}, inner]}

    def check(self, value: Any, at: str) -> Any:
        if value is None or value in self.words:
            return value
        if isinstance(value, dict):
            return self._named.check(value, at).function.name, "named"
        raise wrong(at, f'must be "none", "auto", "required" or an object that names a function, not {show(value)}')


class CalledFunction(Strict):
    name: Name
    arguments: Short


class Call(Strict, tag_field="type", tag="function"):
    """A call that an answer made before."""

    id: Annotated[str, Meta(max_length=128)]
    function: CalledFunction
    index: int | None = None


Calls = Annotated[list[Call], Meta(max_length=_TOOLS)]
Role = Literal["system", "developer", "user", "assistant", "tool"]
