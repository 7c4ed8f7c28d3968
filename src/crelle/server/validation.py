"""Checks JSON values by msgspec types, with sentences for people where they are wrong.

msgspec.convert does the checking. What it does not do is done here:

    integers   JSON Schema, which /openapi.json is written in, counts 3.0 as one
    Only       one of some values: typing.Literal, which msgspec takes, is for names that stand in the source
    long lists a million token ids would hold the interpreter lock for 20 ms: they are checked a slice at a time
    sentences  "n must be at least 1, not 0" and the parameter's name, for "Expected `int` >= 1 - at `$.n`"
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import msgspec
from msgspec import Meta

from crelle.server.errors import ApiError
from crelle.server.strict_json import dumps

T = TypeVar("T")
_SLICE = 16 << 10  # integers that are looked at in one call: the interpreter lock is held for less than 1 ms
_NAMES = {
    "object": "an object",
    "array": "an array",
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
}
_UNITS = {"str": "characters", "array": "items", "object": "names"}
_BOUNDS = {">=": "at least", ">": "above", "<=": "at most"}
_AT = re.compile(r"(.*?)(?: - at `\$((?:\.\w+|\[\d+\])*)`)?", re.DOTALL)
_BOUND = re.compile(r"Expected `(?:int|float)` (>=|>|<=) (.+)")
_LENGTH = re.compile(r"Expected `(str|array|object)` of length (>=|<=) (\d+)")
_KIND = re.compile(r"Expected `([a-z |]+)`, got `[a-z]+`")
_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)


class Checker(Protocol):
    """Checks a field that msgspec leaves alone, being declared as Annotated[Any, checked_by(…)]."""

    @property
    def json_schema(self) -> dict[str, Any]: ...

    def check(self, value: Any, at: str) -> Any: ...


def checked_by(checker: Checker, says: str) -> Meta:
    return Meta(description=says, extra_json_schema=checker.json_schema, extra={"checker": checker})


@dataclass(frozen=True, slots=True)
class Only:
    """One of some values, or null."""

    values: tuple[Any, ...]

    @property
    def json_schema(self) -> dict[str, Any]:
        return {"enum": [*self.values, None]}

    def check(self, value: Any, at: str) -> Any:
        if value is not None and not any(_same(value, v) for v in self.values):
            raise wrong(at, f"must be one of {', '.join(map(dumps, (*self.values, None)))}, not {show(value)}")
        return value


class Schema(Generic[T]):
    """What a value must be: a msgspec type, a struct's fields of type Any included where they have a checker."""

    def __init__(self, kind: type[T]) -> None:
        self.kind, self.kinds = kind, (kind,)
        self._checkers = _checkers(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else {}

    def check(self, value: Any, at: str = "") -> T:
        """Return the value as the type; raise ApiError 400 that names the parameter, where it is not one."""
        found = _convert(value, self.kind, at)
        for name, checker in self._checkers.items():
            setattr(found, name, checker.check(getattr(found, name), f"{at}.{name}" if at else name))
        return found


def check_integers(values: list[Any], kind: Any, at: str) -> list[int]:
    """Check a long list of integers; it is not copied: the garbage collector would have to walk through both."""
    for start in range(0, len(values), _SLICE):
        part = values[start : start + _SLICE]
        try:
            msgspec.convert(part, list[kind])
        except msgspec.ValidationError:  # a wrong one is here, or 3.0 for 3
            for i, item in enumerate(part, start):
                values[i] = _convert(item, kind, f"{at}[{i}]")
    return values


def wrong(at: str, what: str) -> ApiError:
    return ApiError(400, f"{at or 'the body'} {what}", param=at or None, code="invalid_value")


def show(value: Any) -> str:
    """Name a value in a few characters: a message is no place for a whole prompt."""
    if isinstance(value, dict | list):
        return _NAMES["object" if isinstance(value, dict) else "array"]
    if isinstance(value, str):
        value = value[:100]  # enough: a long one is not worth writing out
    shown = dumps(value)
    return shown if len(shown) <= 40 else shown[:36] + "…" + shown[-1]


def _checkers(struct: type[msgspec.Struct]) -> dict[str, Checker]:
    """Return the checkers of a struct's fields. What is published and checked by nobody is a mistake of ours."""
    info, found = msgspec.inspect.type_info(struct), dict[str, Checker]()
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        if isinstance(field.type, msgspec.inspect.Metadata):
            more, published = field.type.extra or {}, field.type.extra_json_schema or {}
            assert "checker" in more or published.keys() <= {"description"}, f"not checked: {published}"
            found |= {field.name: more["checker"]} if "checker" in more else {}
    return found


def _convert(value: Any, kind: type[T], at: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        if "got `float`" not in str(e):
            _raise(e, value, kind, at)
    value = _integers(value)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        _raise(e, value, kind, at)


def _integers(value: Any) -> Any:
    """Write 3.0 as 3 wherever it stands; a number that may have a fraction can be an integer too."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _integers(item) for name, item in value.items()}
    return [_integers(item) for item in value] if isinstance(value, list) else value


def _same(a: Any, b: Any) -> bool:
    return bool(isinstance(a, bool) == isinstance(b, bool) and a == b)  # to Python, True is 1


# Sentences ------------------------------------------------------------------------------------------------------------


def _raise(error: msgspec.ValidationError, value: Any, kind: Any, at: str) -> NoReturn:
    """Put an error of msgspec's into words; what it does not know is said in its own."""
    match = _AT.fullmatch(str(error))
    assert match is not None, "anything matches"
    said, path = match[1], match[2] or ""
    at = (at + path).removeprefix(".")
    steps = [int(index) if index else name for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path)]
    with suppress(LookupError, TypeError):  # a name that a client made up may look like a path
        for step in steps:
            value = value[step]
    if found := _FIELD.fullmatch(said):
        name = found[2]
        if found[1] == "missing required":
            raise wrong(f"{at}.{name}" if at else name, "is missing") from None
        raise wrong(at, f"has an unknown parameter {show(name)}; nothing is ignored silently") from None
    if found := _KIND.fullmatch(said):
        names = " or ".join(_NAMES[name] for name in found[1].split(" | "))
        raise wrong(at, f"must be {names}, not {show(value)}") from None
    if found := _BOUND.fullmatch(said):
        raise wrong(at, f"must be {_BOUNDS[found[1]]} {found[2].removesuffix('.0')}, not {show(value)}") from None
    if found := _LENGTH.fullmatch(said):
        what, bound, n = f"has {len(value)} {_UNITS[found[1]]}", found[2], int(found[3])
        if n == 0:
            raise wrong(at, f"{what}, but must be empty") from None
        raise wrong(
            at, f"{what}, but {f'needs at least {n}' if bound == '>=' else f'at most {n} are allowed'}"
        ) from None
    if said.startswith("Invalid enum value"):
        raise wrong(at, f"must be one of {', '.join(_literals(kind, steps))}, not {show(value)}") from None
    raise wrong(at, f"is not what it should be: {said[:200]}") from None


def _literals(kind: Any, steps: list[str | int]) -> list[str]:
    """Return the values that a Literal allows, which stands in a type at the end of a path."""
    (schema,), named = msgspec.json.schema_components([kind], ref_template="{name}")
    options = [schema]
    for step in [*steps, None]:
        flat: list[dict[str, Any]] = []
        for option in options:
            option = named[option["$ref"]] if "$ref" in option else option
            flat += option.get("anyOf", [option])
        flat = [named[option["$ref"]] if "$ref" in option else option for option in flat]
        if step is None:
            return [dumps(value) for option in flat for value in option.get("enum", ())]
        options = [
            option["items"] if isinstance(step, int) else option["properties"][step]
            for option in flat
            if ("items" if isinstance(step, int) else "properties") in option
        ]
    return []
