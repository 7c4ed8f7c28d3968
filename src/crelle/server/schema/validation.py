"""Checks JSON values by msgspec types, with sentences for people where they are wrong.

msgspec.convert does the checking. What it does not do is done here:

    integers   JSON Schema, which /openapi.json is written in, counts 3.0 as one
    Only       one of some values: typing.Literal, which msgspec takes, is for names that stand in the source
    long lists a million token ids would hold the interpreter lock for 20 ms: they are checked a slice at a time
    sentences  "n must be at least 1, not 0" and the parameter's name, for "Expected `int` >= 1 - at `$.n`"
"""

import re
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import msgspec
from msgspec import Meta

from crelle.server.errors import ApiError
from crelle.server.schema.strict_json import dumps

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
_BOUND = re.compile(r"Expected `(?:int|float)` (>=|>|<=) (.+)")
_LENGTH = re.compile(r"Expected `(str|array|object)` of length (>=|<=) (\d+)")
_KIND = re.compile(r"Expected `([a-z |]+)`, got `[a-z]+`")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


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
    """Return the checkers of a struct's fields. What is published but not checked is a mistake of ours."""
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
    try:
        return msgspec.convert(_integers(value), kind)
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
    """Put an error of msgspec's into words, and its path into our form."""
    said, name = str(error), ""
    fields = getattr(kind, "__struct_fields__", None)
    unknown = [name for name in value if name not in fields] if fields and isinstance(value, dict) else []
    if unknown:  # looked up, since a name that a client made up may look like a path
        said = f"Object contains unknown field `{unknown[0]}`"
    elif " - at `$" in said:
        said, _, path = said.rpartition(" - at `$")
        at = (at + path[:-1]).removeprefix(".")
        for name, index in _STEP.findall(path):
            value = value[name or int(index)]
    if missing := _MISSING.fullmatch(said):
        raise wrong(f"{at}.{missing[1]}".removeprefix("."), "is missing") from None
    raise wrong(at, _words(said, value, kind, name)) from None


def _words(said: str, value: Any, kind: Any, name: str) -> str:
    if found := _UNKNOWN.fullmatch(said):
        return f"has an unknown parameter {show(found[1])}"
    if found := _KIND.fullmatch(said):
        return f"must be {' or '.join(_NAMES[n] for n in found[1].split(' | '))}, not {show(value)}"
    if found := _BOUND.fullmatch(said):
        return f"must be {_BOUNDS[found[1]]} {found[2].removesuffix('.0')}, not {show(value)}"
    if found := _LENGTH.fullmatch(said):
        bound = f"needs at least {found[3]}" if found[2] == ">=" else f"at most {found[3]} are allowed"
        return f"has {len(value)} {_UNITS[found[1]]}, but {'must be empty' if found[3] == '0' else bound}"
    if said.startswith("Invalid enum value"):
        return f"must be one of {', '.join(_literals(kind, name))}, not {show(value)}"
    return f"is invalid: {said[:200]}"


def _literals(kind: Any, name: str) -> list[str]:
    """Return the values that a field may have, which is a Literal in some struct of a type."""
    _, structs = msgspec.json.schema_components([kind])
    fields = [struct["properties"].get(name, {}) for struct in structs.values() if "properties" in struct]
    kinds = [kind for field in fields for kind in field.get("anyOf", [field])]
    return next([dumps(value) for value in kind["enum"]] for kind in kinds if "enum" in kind)
