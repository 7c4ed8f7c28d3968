"""Request traces: arrival times with prompt and answer lengths, and random prompts of a given length.

    requests = read_trace(Path("AzureLLMInferenceTrace_conv.csv"), context=4096, rate=2.0, seconds=60)
    requests = multi_round(requests, rounds=4, context=4096)

A trace is a CSV file with a heading and three columns: arrival (a date with time, or seconds), tokens of the prompt,
tokens of the answer. The traces that Azure published of its language model service have this form. They tell lengths
and no text: prompts are random tokens, all different, so that no two share a prefix by chance.
"""

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import isfinite
from pathlib import Path

from crelle.errors import FormatError, SchemeError
from crelle.formats.storage.io import shown, write_whole, writing


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace: its arrival in seconds from the start, and the tokens of its prompt and answer."""

    at: float
    prompt: int
    tokens: int


def read_trace(
    path: Path, *, context: int, rate: float | None = None, seconds: float | None = None, requests: int | None = None
) -> list[TraceRequest]:
    """Return a trace's requests by arrival, the first at 0, truncated to a model's context.

    rate: requests per second on average, over the whole trace; None: as it was recorded; 0: all of them at once.
    seconds, requests: only those due before; only the first so many.
    """
    if rate is not None and not rate >= 0:
        raise SchemeError(f"a rate is 0 (all at once) or more requests per second, got {rate}")
    found = sorted((_clamp(r, context) for r in _rows(path)), key=lambda r: r.at)
    begin, length = found[0].at, found[-1].at - found[0].at
    stretch = 1.0 if rate is None else 0.0 if rate == 0 or length == 0 else (len(found) - 1) / length / rate
    found = [replace(r, at=(r.at - begin) * stretch) for r in found]
    if seconds is not None:
        found = [r for r in found if r.at < seconds]
    return found[:requests]


def multi_round(requests: Sequence[TraceRequest], rounds: int, context: int) -> list[TraceRequest]:
    """Return requests as conversations of that many rounds: a prompt has the prompts and answers before it in front.

    Consecutive requests make a conversation; one that would leave the context ends, and the request begins the next.
    """
    if rounds < 1:
        raise SchemeError(f"a conversation has at least 1 round, got {rounds}")
    found, said, left = list[TraceRequest](), 0, 0
    for r in requests:
        if not left or said + r.prompt + r.tokens > context:
            said, left = 0, rounds
        found.append(replace(r, prompt=said + r.prompt))
        said, left = said + r.prompt + r.tokens, left - 1
    return found


def write_trace(path: Path, requests: Sequence[TraceRequest]) -> None:
    """Write requests as a trace that `read_trace` returns as they are."""
    lines = ["seconds,prompt,tokens", *(f"{r.at!r},{r.prompt},{r.tokens}" for r in requests)]
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "\n".join([*lines, ""]).encode())


def _rows(path: Path) -> list[TraceRequest]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as e:  # csv.Error: a field of more than 131,072 characters
        raise FormatError(f"{path} cannot be read as a trace: {e}") from e
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(TraceRequest(_seconds(line[0]), int(line[1]), int(line[2])))
        except (ValueError, IndexError, OverflowError) as e:
            if number > 1 and line:  # the first is the heading
                raise FormatError(
                    f"{path}, line {number}: expected arrival, tokens of the prompt, tokens of the answer; "
                    f"got {shown(','.join(line))}"
                ) from e
    if not found:
        raise FormatError(f"{path} holds no requests: a trace has a heading and then one request a line")
    return found


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        day, _, fraction = text.strip().partition(".")  # Azure tells ten millionths, datetime knows millionths
        return datetime.fromisoformat(day).timestamp() + float(f"0.{fraction or 0}")
    if not isfinite(seconds):
        raise ValueError("an arrival is a finite number")
    return seconds


def _clamp(r: TraceRequest, context: int) -> TraceRequest:
    """Fit a request into a context: an answer gets at most half of it, the prompt what is left."""
    tokens = max(1, min(r.tokens, context // 2))
    return replace(r, prompt=max(1, min(r.prompt, context - tokens)), tokens=tokens)


class Prompts:
    """Random prompts: the n-th of a seed is always the same, and no two begin alike."""

    def __init__(self, vocabulary: int, avoid: Sequence[int] = (), seed: int = 0) -> None:
        self._vocabulary, self._avoid, self._random = vocabulary, frozenset(avoid), random.Random(seed)

    def next(self, tokens: int) -> list[int]:
        """Return a prompt of so many tokens."""
        ids = list[int]()
        while len(ids) < tokens:
            ids += [i for i in self._random.choices(range(self._vocabulary), k=tokens) if i not in self._avoid]
        return ids[:tokens]


_WORDS = "time year people way day man thing woman life child world school state family student group country hand part"


def random_words(count: int, seed: int = 0) -> str:
    """Return so many common English words, which most tokenizers know as one token each."""
    return " ".join(random.Random(seed).choices(_WORDS.split(), k=count))
