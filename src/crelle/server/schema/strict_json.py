"""JSON as RFC 8259 has it, in both directions. Everything in server/ reads and writes JSON through this file.

Refused in requests: NaN and Infinity, numbers that overflow a float, integers of thousands of digits, a name twice in
one object (two readers of the body could take different values), half of a surrogate pair, nesting without end. Never
written: NaN, Infinity. msgspec writes structs; it does not read bodies, since it takes the last of two equal names and
says nothing.

Python's parser holds the interpreter lock for a whole document, 0.1 s for 2 MB of small integers, and the event loop
waits for that lock whichever thread parses. So large documents are read and written in pieces: the structure in
Python, strings and runs of numbers by the C code, a few thousand values at a time.
"""

import json
import re
from collections.abc import Iterator
from itertools import islice
from json.decoder import scanstring  # type: ignore[attr-defined]
from math import inf, isfinite
from typing import Any

import msgspec

from crelle.server.errors import ApiError

_LARGE = 32 << 10  # characters from which a document is read in pieces
_PIECE = 16 << 10  # characters of numbers that are read at a time
_DEPTH = 16  # of a large document; no request has more than 5
_VALUES = 50_000  # strings, objects and arrays in a large document; a chat of 4096 messages has half of that
_SLICE = 64  # items that are written at a time

_space = re.compile(r"[ \t\n\r]*").match
_numbers = re.compile(rf"[-+0-9.eE, \t\n\r]{{0,{_PIECE}}}").match
_floats = re.compile(r"[.eE]").search
_surrogate = re.compile(r"\\u[dD][89a-fA-F]").search
_encoder = msgspec.json.Encoder()


# Reading --------------------------------------------------------------------------------------------------------------


def parse(body: bytes) -> Any:
    """Read a JSON document strictly; what is wrong with it is an ApiError 400."""
    try:
        text = body.decode("utf-8")
        value = _decoder.decode(text) if len(text) < _LARGE else _Pieces(text).document()
        if _surrogate(text):
            _check_unicode(value, "")
        return value
    except UnicodeDecodeError as e:
        raise ApiError(400, f"the body is not UTF-8: {e.reason} at byte {e.start}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except json.JSONDecodeError as e:
        raise ApiError(400, f"the body is not JSON: {e.msg} at character {e.pos}", code="invalid_json") from None
    except ValueError as e:  # NaN, a name twice, or an integer of thousands of digits
        raise ApiError(400, f"the body is not JSON: {str(e).split(';')[0]}", code="invalid_json") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not isfinite(value):
        raise ValueError(f"{_shortened(digits)} is too large for a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(_said_twice(twice))
    return found


def _said_twice(name: str) -> str:
    return f"{json.dumps(_shortened(name))} occurs twice in one object"


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else text[:36] + "…"


def _check_unicode(value: Any, at: str) -> None:
    """Find halves of surrogate pairs, which only an escape can write: they have no bytes in UTF-8."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            why = f"{at or 'the body'} is not valid Unicode: it contains a lone surrogate"
            raise ApiError(400, why, param=at or None, code="invalid_value") from None
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_unicode(name, at)
            _check_unicode(item, f"{at}.{name}" if at else name)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if isinstance(item, str | dict | list):
                _check_unicode(item, f"{at}[{i}]")


_decoder = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique)
_plain = json.JSONDecoder(parse_constant=_no_constant)  # of numbers only: whether they are finite is looked at after
_scan = _decoder.scan_once  # type: ignore[attr-defined]


class _Pieces:
    """Reads one large document. No call into C takes more than about a millisecond, but for one long string."""

    def __init__(self, text: str) -> None:
        self._text, self._values = text, 0

    def document(self) -> Any:
        value, end = self._value(self._skip(0), 0)
        if (end := self._skip(end)) < len(self._text):
            raise json.JSONDecodeError("Extra data", self._text, end)
        return value

    def _skip(self, at: int) -> int:
        found = _space(self._text, at)
        assert found is not None, "nothing matches too"
        return found.end()

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        self._values += 1
        if self._values > _VALUES:
            raise ValueError(f"it has more than {_VALUES} values that are not numbers")
        match self._text[at : at + 1]:
            case '"':
                found: tuple[str, int] = scanstring(self._text, at + 1, True)
                return found
            case "[" | "{" if depth == _DEPTH:
                raise RecursionError
            case "[":
                return self._array(at + 1, depth + 1)
            case "{":
                return self._object(at + 1, depth + 1)
        try:
            value, end = _scan(self._text, at)
        except StopIteration:
            raise json.JSONDecodeError("Expecting value", self._text, at) from None
        return value, end

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = self._skip(at)
        if self._text[at : at + 1] == "}":
            return found, at + 1
        while True:
            if self._text[at : at + 1] != '"':
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", self._text, at)
            name, at = scanstring(self._text, at + 1, True)
            at = self._skip(at)
            if self._text[at : at + 1] != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", self._text, at)
            if name in found:
                raise ValueError(_said_twice(name))
            found[name], at = self._value(self._skip(at + 1), depth)
            at, more = self._after(at, "}")
            if not more:
                return found, at

    def _array(self, at: int, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        if self._text[(end := self._skip(at)) : end + 1] == "]":
            return found, end + 1
        while True:
            values, at = self._run(at)
            if values is not None:
                found += values
            else:
                value, at = self._value(self._skip(at), depth)
                found.append(value)
            at, more = self._after(at, "]")
            if not more:
                return found, at

    def _run(self, at: int) -> tuple[list[Any] | None, int]:
        """Return the numbers that stand next and where the last one ends; None: something else comes first."""
        match = _numbers(self._text, at)
        assert match is not None, "nothing matches too"
        end = match.end()
        if self._text[end : end + 1] != "]":  # the last number may go on, or be the beginning of something else
            end = self._text.rfind(",", at, end)
        if end <= at:
            return None, at
        piece = self._text[at:end]
        try:
            values: list[Any] = _plain.decode(f"[{piece}]")
        except json.JSONDecodeError as e:
            raise json.JSONDecodeError(e.msg, self._text, at + e.pos - 1) from None
        if _floats(piece) and (inf in values or -inf in values):
            raise ValueError("a number is too large")
        return values, end

    def _after(self, at: int, close: str) -> tuple[int, bool]:
        """Return where to go on behind a value, and whether there is another one."""
        at = self._skip(at)
        match self._text[at : at + 1]:
            case ",":
                return self._skip(at + 1), True
            case found if found == close:
                return at + 1, False
        raise json.JSONDecodeError("Expecting ',' delimiter", self._text, at)


# Writing --------------------------------------------------------------------------------------------------------------


def dumps(value: Any) -> str:
    """Write a value as ASCII; NaN and infinities raise ValueError."""
    return json.dumps(value, allow_nan=False)


def encode(value: Any) -> bytes:
    """Write a value as UTF-8 without spaces; NaN and infinities raise ValueError, but see response_schemas.py."""
    try:
        if isinstance(value, msgspec.Struct):
            return _encoder.encode(value)
        # A slice of prompt_logprobs is a list of None and of dictionaries, in which there are structs.
        plain = msgspec.to_builtins
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plain).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as in a file name that is not UTF-8: escaped it can be sent
        return json.dumps(msgspec.to_builtins(value), allow_nan=False, separators=(",", ":")).encode()


def encode_large(value: Any) -> bytes:
    """Return what `encode` does; takes a few times as long, but lets other threads run meanwhile."""
    return b"".join(_written(value))


def _written(value: Any) -> Iterator[bytes]:
    if isinstance(value, msgspec.Struct):
        value = {name: item for name, item in _fields(value) if item is not msgspec.UNSET}
    if isinstance(value, dict):
        yield b"{"
        for i, (name, item) in enumerate(value.items()):
            yield (b"," if i else b"") + encode(name) + b":"
            yield from _written(item)
        yield b"}"
    elif isinstance(value, list) and len(value) > _SLICE:
        rest = iter(value)
        before = b"["
        while part := list(islice(rest, _SLICE)):
            yield before + (_encoder.encode(part) if isinstance(part[0], msgspec.Struct) else encode(part))[1:-1]
            before = b","
        yield b"]"
    elif isinstance(value, list):
        yield b"["
        for i, item in enumerate(value):
            if i:
                yield b","
            yield from _written(item)
        yield b"]"
    else:
        yield encode(value)


def _fields(struct: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    config = struct.__struct_config__
    if config.tag_field is not None:
        yield config.tag_field, config.tag
    for name in struct.__struct_fields__:
        yield name, getattr(struct, name)


def dumps_log(value: dict[str, Any]) -> str:
    """Write a line of the log: one that cannot be written as it is must not be lost."""
    try:
        return json.dumps(value, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_words(value), default=str, allow_nan=False)


def _words(value: Any) -> Any:
    """Replace what JSON has no numbers for."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _words(item) for name, item in value.items()}
    return [_words(item) for item in value] if isinstance(value, list | tuple) else value
