"""Checks JSON against JSON Schema: the part of it that schemas.py uses, with sentences for people.

Type, enum, const, bounds of numbers and lengths, items, properties (no others are allowed), required, anyOf.
A keyword that is not known here is a mistake of ours and raises.
"""

from math import inf
from typing import Any

from crelle.server.errors import ApiError
from crelle.server.strict_json import dumps

Schema = dict[str, Any]
_KNOWN = {
    *("type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "minItems"),
    *("maxItems", "items", "properties", "required", "additionalProperties", "anyOf"),
    *("title", "description", "default", "examples"),  # for readers
}
_BOUNDED = {"type", "minimum", "maximum"}
_SLICE = 16 << 10  # integers that are looked at in one call: the interpreter lock is held for about 1 ms
_NAMES = {
    "object": "an object",
    "array": "an array",
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}


def check(value: Any, schema: Schema, at: str = "") -> None:
    """Raise ApiError 400 that names the parameter, where the value is not what the schema says."""
    assert schema.keys() <= _KNOWN, f"not understood: {schema.keys() - _KNOWN}"
    if "anyOf" in schema:
        _any_of(value, schema, at)
        return
    kinds = _kinds(schema)
    if kinds and not any(_is(value, kind) for kind in kinds):
        raise _wrong(at, f"must be {' or '.join(_NAMES[k] for k in kinds)}, not {_show(value)}")
    if "const" in schema and not _same(value, schema["const"]):
        raise _wrong(at, f"must be {dumps(schema['const'])}, not {_show(value)}")
    if "enum" in schema and not any(_same(value, e) for e in schema["enum"]):
        raise _wrong(at, f"must be one of {', '.join(map(dumps, schema['enum']))}, not {_show(value)}")
    if isinstance(value, str):
        _string(value, schema, at)
    elif isinstance(value, list):
        _length(len(value), schema, at, "Items", "items")
        _items(value, schema.get("items", {}), at)
    elif isinstance(value, dict):
        _object(value, schema, at)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _number(value, schema, at)


def _items(values: list[Any], schema: Schema, at: str) -> None:
    """Check every item; token ids, of which there can be a million, a slice at a time in C."""
    if schema.get("type") != "integer" or not schema.keys() <= _BOUNDED:
        for i, item in enumerate(values):
            check(item, schema, f"{at}[{i}]")
        return
    low, high = schema.get("minimum", -inf), schema.get("maximum", inf)
    for start in range(0, len(values), _SLICE):
        part = values[start : start + _SLICE]
        if set(map(type, part)) == {int} and low <= min(part) and max(part) <= high:
            continue
        for i, item in enumerate(part, start):  # a wrong one is here, or 3.0 for 3
            if type(item) is not int or not low <= item <= high:
                check(item, schema, f"{at}[{i}]")


def _any_of(value: Any, schema: Schema, at: str) -> None:
    """Let one alternative suffice; raise the error of the one that was meant, if that can be told."""
    meant: list[ApiError] = []
    for option in schema["anyOf"]:
        try:
            check(value, option, at)
            return
        except ApiError as e:
            if _looks_like(value, option):
                meant.append(e)
    if len(meant) == 1:
        raise meant[0]
    options = " or ".join(option.get("title") or _said(option) for option in schema["anyOf"])
    raise _wrong(at, f"must be {options}, not {_show(value)}")


def _said(schema: Schema) -> str:
    return " or ".join(_NAMES[k] for k in _kinds(schema)) or dumps(schema.get("const"))


def _looks_like(value: Any, schema: Schema) -> bool:
    """Whether the value is of the alternative's type, and its first item too; an object has its required names."""
    kinds = _kinds(schema)
    if kinds and not any(_is(value, kind) for kind in kinds):
        return False
    if isinstance(value, list) and value and "items" in schema:
        return _looks_like(value[0], schema["items"])
    return not isinstance(value, dict) or set(schema.get("required", ())) <= value.keys()


def _kinds(schema: Schema) -> list[str]:
    kinds = schema.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "integer":  # JSON Schema counts 3.0 as one
            return (isinstance(value, int) and not isinstance(value, bool)) or (
                isinstance(value, float) and value.is_integer()
            )
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return isinstance(value, types[kind])


def _same(a: Any, b: Any) -> bool:
    return bool(isinstance(a, bool) == isinstance(b, bool) and a == b)  # to Python, True is 1


def _string(value: str, schema: Schema, at: str) -> None:
    _length(len(value), schema, at, "Length", "characters")
    if value.isascii():
        return
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _wrong(at, "is not valid Unicode: it has half of a surrogate pair") from None


def _length(n: int, schema: Schema, at: str, what: str, unit: str) -> None:
    if n < schema.get(f"min{what}", 0):
        raise _wrong(at, f"has {n} {unit}, but needs at least {schema[f'min{what}']}")
    if n > schema.get(f"max{what}", n):
        raise _wrong(at, f"has {n} {unit}, but at most {schema[f'max{what}']} are allowed")


def _number(value: float, schema: Schema, at: str) -> None:
    wrong = {
        "minimum": ("at least", value < schema.get("minimum", value)),
        "exclusiveMinimum": ("above", "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]),
        "maximum": ("at most", value > schema.get("maximum", value)),
    }
    for keyword, (words, so) in wrong.items():
        if so:
            raise _wrong(at, f"must be {words} {schema[keyword]}, not {_show(value)}")


def _object(value: dict[str, Any], schema: Schema, at: str) -> None:
    properties: dict[str, Schema] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            raise _wrong(f"{at}.{name}" if at else name, "is missing")
    for name, item in value.items():
        if name in properties:
            check(item, properties[name], f"{at}.{name}" if at else name)
        elif schema.get("additionalProperties", True) is False:
            raise _wrong(at, f"has an unknown parameter {_show(name)}; nothing is ignored silently")


def _wrong(at: str, what: str) -> ApiError:
    return ApiError(400, f"{at or 'the body'} {what}", param=at or None, code="invalid_value")


def _show(value: Any) -> str:
    """Name a value in a few characters: a message is no place for a whole prompt."""
    if isinstance(value, dict | list):
        return _NAMES["object" if isinstance(value, dict) else "array"]
    if isinstance(value, str):
        value = value[:100]  # enough: a long one is not worth writing out
    shown = dumps(value)
    return shown if len(shown) <= 40 else shown[:36] + "…" + shown[-1]
