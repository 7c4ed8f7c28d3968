"""A small coverage-guided fuzzer: inputs that reach new lines of the loaders are kept and changed further.

An input is bytes or a JSON value. A target takes one and may raise nothing but CrelleError, within a time and a growth
of memory. All is decided by one seed, so a finding can be had again; it is raised with the input that led to it.
"""

import re
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from alarm import at_most

import crelle
from crelle.errors import CrelleError

SOURCE = str(Path(crelle.__file__).parent)
SECONDS, MEGABYTES = 5, 500  # an input may take, all of them may add
NUMBERS = [0, 1, 2, 3, 7, 8, 31, 32, 33, 64, 127, 255, 256, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
NUMBERS += [10**7, 10**9, 10**12, 2**40, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**15]
ODD: list[Any] = [None, True, False, -1, *NUMBERS, -(2**63), 10**400, 0.5, -0.0, 1e-30, 1e308, "", "x", "0", "x" * 999]
ODD += ["\x00", "\ud800", "é" * 50, "../../x", "/dev/zero", "re:(a+)+$", "{{ 9**9 }}", [], {}, [[]], [0], {"a": None}]


class FindingError(AssertionError):
    """An input that a loader could not cope with."""


@dataclass(frozen=True)
class Report:
    """What a run did."""

    inputs: int
    seeds: int
    kept: int
    lines: int
    accepted: int
    seconds: float


def fuzz(
    target: Callable[[Any], object], seeds: list[Any], count: int, seed: int = 0, words: list[Any] = ODD
) -> Report:
    """Run a target on `count` inputs; `words` are values and strings that its formats know."""
    random, corpus, seen = Random(seed), [*seeds], set[tuple[str, int]]()
    accepted, begun, before = 0, time.perf_counter(), _peak()
    for i in range(count):
        value = corpus[i] if i < len(seeds) else _changed(random, corpus, words)
        new = set[tuple[str, int]]()
        try:
            with at_most(SECONDS, TimeoutError(f"took more than {SECONDS} s")), _tracing(new):
                target(value)
            accepted += 1
        except CrelleError as e:
            if not str(e) or len(str(e)) > 3000:
                raise FindingError(f"input {i}: not a sentence: {str(e)[:300]!r} for {value!r:.2000}") from e
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                raise
            raise FindingError(f"input {i}: {type(e).__name__}: {e!s:.500} for {value!r:.4000}") from e
        if not new <= seen:
            seen |= new
            corpus.append(value)
        if i % 500 == 0 and _peak() - before > MEGABYTES:
            raise FindingError(f"input {i}: memory grew by {_peak() - before} MB, last: {value!r:.2000}")
    return Report(count, len(seeds), len(corpus), len(seen), accepted, time.perf_counter() - begun)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


@contextmanager
def _tracing(seen: set[tuple[str, int]]) -> Iterator[None]:
    def line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            seen.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: FrameType, *_: object) -> Any:
        return line if frame.f_code.co_filename.startswith(SOURCE) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


def _changed(random: Random, corpus: list[Any], words: list[Any]) -> Any:
    # Half of the time one of the newest: what was reached last is where the next branch is.
    value = random.choice(corpus[-8:] if random.random() < 0.5 else corpus)
    for _ in range(1 + min(int(random.expovariate(0.7)), 6)):
        if isinstance(value, bytes):
            value = _bytes(random, value, corpus, words)
        else:
            value = _json(random, _copy(value), corpus, words)
    return value


def _bytes(random: Random, data: bytes, corpus: list[Any], words: list[Any]) -> bytes:
    at = random.randrange(len(data) + 1)
    match random.randrange(9):
        case 0:
            return data[:at]
        case 1 | 2 if at < len(data):
            return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
        case 3:
            n = random.choice([1, 4, 8, 8])
            packed = struct.pack("<Q", random.choice(NUMBERS) & (2**64 - 1))[:n]
            return data[:at] + packed + data[at + n :]
        case 4:
            return data[:at] + random.randbytes(random.randrange(1, 9)) + data[at:]
        case 5:
            return data[:at] + data[at + random.randrange(1, 17) :]
        case 6:
            begin = random.randrange(len(data) + 1)
            return data[:at] + data[begin : begin + random.randrange(1, 65)] + data[at:]
        case 7:
            other = random.choice(corpus)
            return data[:at] + other[random.randrange(len(other) + 1) :]
        case _:
            word = random.choice([w for w in words if isinstance(w, str)]).encode("utf-8", "replace")
            return data[:at] + word + data[at + random.choice([0, len(word)]) :]


def _json(random: Random, value: Any, corpus: list[Any], words: list[Any]) -> Any:
    """Change one place in a JSON value."""
    places = _places(value)
    if not places:
        return random.choice(words)
    holder, key = random.choice(places)
    old = holder[key]
    match random.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[random.choice([w for w in words if isinstance(w, str)])] = old
        case 2:
            donor = random.choice(corpus)
            if theirs := _places(donor):
                other, name = random.choice(theirs)
                holder[key] = _copy(other[name])
        case 3 if type(old) is int:
            holder[key] = random.choice(
                [old + 1, old - 1, -old, old * 2, old // 2, old + 0.5 if abs(old) < 2**60 else old]
            )
        case 4 if isinstance(old, str):
            holder[key] = _text(random, old, words)
        case 5 if isinstance(old, list) and old:
            more = random.choice([1, 1, 2, 30])  # growth: a step that doubles something, many times in a row
            old += [_copy(random.choice(old)) for _ in range(more if len(old) < 100 else 1)]
        case 6:
            holder[key] = random.choice([[old], {"a": old}, str(old)[:2000]])
        case _:
            holder[key] = _copy(random.choice(words))
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return where a JSON value holds others, in the order in which it is written."""
    found: list[tuple[Any, Any]] = []

    def look(holder: Any) -> None:
        for key in holder if type(holder) is dict else range(len(holder)):
            found.append((holder, key))
            if type(holder[key]) in (dict, list):
                look(holder[key])

    if type(value) in (dict, list):
        look(value)
    return found


def _copy(value: Any) -> Any:
    """Return a copy of a JSON value; copy.deepcopy takes several times as long."""
    if type(value) is dict:
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if type(value) is list else value


def _text(random: Random, text: str, words: list[Any]) -> str:
    at, end = sorted(random.randrange(len(text) + 1) for _ in range(2))
    match random.randrange(5):
        case 0:
            return text[:at] + text[end:]
        case 3 if numbers := list(re.finditer(r"\d+", text)):
            place = random.choice(numbers)
            return text[: place.start()] + str(random.choice([*NUMBERS, 10**400])) + text[place.end() :]
        case 1:
            return text[:end] + text[at:]
        case 2:
            return text[:at] + chr(random.choice([0, 10, 32, 37, 42, 43, 92, 123, 125, 0x3B1, 0x1F600])) + text[end:]
        case _:
            return text[:at] + random.choice([w for w in words if isinstance(w, str)]) + text[at:]
