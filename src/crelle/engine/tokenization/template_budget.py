"""What the rendering of a chat template may use, and the counting of it; see chat_template.py.

Filters and methods mostly make no more than they are given, and are counted afterwards; `ESTIMATES` says for the others
how much they will make, so that it is counted before.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from itertools import chain
from time import thread_time
from types import GeneratorType
from typing import Any

from jinja2 import TemplateError
from jinja2.utils import Namespace

MAX_STEPS = 2_000_000
MAX_BYTES = 256 << 20
MAX_LIST = 64 << 20  # characters of all that is in a list: what sorting or searching it takes, which cannot be stopped
MAX_SECONDS = 0.5
MAX_WIDTH = 10_000  # of padding, indentation and the like
MAX_BITS = 4096  # bits of an integer
MAX_DEPTH = 64  # of lists in lists


class TemplateLimitError(Exception):
    """A template used up its budget. Not a TemplateError: Jinja must not take it for one of its own."""


class Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self.steps, self.bytes = MAX_STEPS, MAX_BYTES
        self._until = thread_time() + MAX_SECONDS

    def step(self, count: int = 1) -> None:
        self.steps -= count
        if self.steps < 0:
            raise TemplateLimitError(f"takes more than {MAX_STEPS:,} steps")
        if (self.steps & 15 == 0 or count > 15) and thread_time() > self._until:
            raise TemplateLimitError(f"takes more than {MAX_SECONDS:g} s")

    def reserve(self, size: int) -> None:
        self.step()
        self.bytes -= size
        if self.bytes < 0:
            raise TemplateLimitError(f"makes more than {MAX_BYTES >> 20} MB of text")

    def keep(self, value: Any) -> Any:
        """Count a value that was just made, and return it."""
        if isinstance(value, str):
            self.reserve(sys.getsizeof(value))
        elif isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise TemplateLimitError("makes an enormous integer")
        elif isinstance(value, GeneratorType):
            return self._counted(value)
        elif not isinstance(value, float) and self.size(value) > MAX_LIST:
            raise TemplateLimitError(f"makes a list of more than {MAX_LIST >> 20} MB of text")
        return value

    def size(self, value: Any, depth: int = 0) -> int:
        """Return about how many characters a value has when it is printed; each of its parts is a step."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, Namespace):
            value = object.__getattribute__(value, "_Namespace__attrs")
        if isinstance(value, Mapping):
            parts: Iterable[Any] = chain(value.keys(), value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            parts = value
        else:
            return 32
        if depth > MAX_DEPTH:
            raise TemplateLimitError("nests lists too deeply")
        total = 2
        for part in parts:
            self.step()
            total += 4 + (len(part) if isinstance(part, str) else self.size(part, depth + 1))
        return total

    def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.step()
            yield value


current: ContextVar[Budget] = ContextVar("budget")


def tick() -> bool:
    current.get().step()
    return True


def kept(value: Any) -> Any:
    return current.get().keep(value)


def printed(values: Iterable[Any]) -> str:
    """The strings of some values as one, counted before it is made."""
    budget, found = current.get(), []
    for value in values:
        budget.reserve(budget.size(value) * (4 if not isinstance(value, str) or not value.isascii() else 1))
        found.append(str(value))
    return "".join(found)


# What filters and methods will make at most, where that is more than what they are given; see `guarded`.


def _width(value: Any, width: int = 80, *_: Any) -> int:
    _need_small(width)
    return len(str(value)) + int(width)


def _indent(value: Any, width: int | str = 4, *_: Any, **__: Any) -> int:
    if isinstance(width, int):
        _need_small(width)
    text = str(value)
    return len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width))


def _replaced(value: Any, old: Any, new: Any, *_: Any) -> int:
    text = str(value)
    return len(text) + (text.count(str(old)) * len(str(new)))


def joined(values: Any, d: Any = "", *_: Any, **__: Any) -> int:
    """`joined(separator, values)` of the method is put in the filter's order by its caller."""
    budget = current.get()
    return budget.size(values) + (len(str(d)) * len(values) if hasattr(values, "__len__") else 0)


def formatted(pattern: Any, *values: Any, **named: Any) -> int:
    """Widths in a pattern are at most four digits; a pattern may name each value as often as it has signs."""
    text, budget = str(pattern), current.get()
    if re.search(r"\d{5}|%[^a-zA-Z%]*\*|\{[^{}]*\{", text):
        raise TemplateLimitError("formats with an enormous or a computed width")
    signs = text.count("%") + text.count("{")
    return len(text) + signs * (MAX_WIDTH + budget.size(list(values)) + budget.size(named))


def _small(value: Any, number: Any = 0, *_: Any, **__: Any) -> int:
    _need_small(number)
    return 0


def _start_is_number(value: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise TemplateLimitError("sums values that are not numbers")
    return 0


def _need_small(number: Any) -> None:
    if isinstance(number, int) and abs(number) > MAX_WIDTH:
        raise TemplateLimitError(
            f"asks for a width or count of {number if abs(number) < 10**30 else 'astronomic size'}"
        )


def _stringed(value: Any) -> int:
    return current.get().size(value)


ESTIMATES: dict[str, Callable[..., int]] = {
    "batch": _small,
    "center": _width,
    "format": formatted,
    "indent": _indent,
    "join": joined,
    "ljust": _width,
    "replace": _replaced,
    "rjust": _width,
    "round": _small,
    "slice": _small,
    "string": _stringed,
    "sum": _start_is_number,
    "zfill": _width,
}


def guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or test that counts what it does."""
    estimate = ESTIMATES.get(name)
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or environment that it wants first

    def call(*args: Any, **kwargs: Any) -> Any:
        budget = current.get()
        budget.step()
        if name == "join" and len(args) > skip and isinstance(args[skip], Iterator | GeneratorType):
            args = (*args[:skip], list(args[skip]), *args[skip + 1 :])
        if estimate is not None:
            budget.reserve(4 * estimate(*args[skip:], **kwargs))
        return budget.keep(function(*args, **kwargs))

    if skip:
        call.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return call


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers has it: Jinja's own would escape for HTML."""
    if isinstance(indent, int | str):
        _need_small(indent if isinstance(indent, int) else len(indent))
    budget = current.get()
    each = 8 + (int(indent) if isinstance(indent, int) else len(indent or "")) * 8
    each += sum(len(s) for s in separators or ())
    budget.reserve(2 * budget.size(value) * each // 4)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(pattern: str) -> str:
    if len(pattern) > 200:
        raise TemplateLimitError("formats the date with a pattern of more than 200 characters")
    return datetime.now().strftime(pattern)
