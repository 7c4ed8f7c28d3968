"""A small coverage-guided fuzzer: inputs that reach new lines of the loaders are kept and changed further.

An input is bytes or a JSON value (mutate.py changes it). A target takes one and may raise nothing but CrelleError,
within SECONDS of CPU time, since others may use the machine, and MEGABYTES. The memory is measured for each input
alone, and an allocation that would go far beyond is refused by the system, so a finding names the input that made it.
All is decided by one seed: a finding can be reproduced.
"""

import ctypes
import gc
import marshal
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

from alarm import at_most
from mutate import ODD, changed

import crelle
from crelle.errors import CrelleError

SOURCE = str(Path(crelle.__file__).parent)
SECONDS, MEGABYTES = 5, 1000  # an input may take
_WALL = 5 * SECONDS  # seconds by the clock, after which it is interrupted
KEPT_MEGABYTES = 500  # all inputs together may leave behind
MAX_FINDINGS = 20  # of one run; more of the same say nothing new
_KEPT_BYTES = 1 << 15  # of an input that is changed further; what only a large one reaches, growth reaches again
_FRESH, _TRACED = (
    2000,
    4,
)  # without a new line for so many inputs, only every fourth is traced: that takes half the time
_HEADROOM = 1 << 30  # bytes of address space beyond MEGABYTES: room for what allocators reserve
_PAGE = resource.getpagesize()


class FindingError(AssertionError):
    """An input that a loader could not cope with."""


@dataclass
class Report:
    """What a run did."""

    inputs: int = 0
    seeds: int = 0
    kept: int = 0
    accepted: int = 0
    seconds: float = 0.0
    worst_seconds: float = 0.0
    worst_megabytes: int = 0
    slowest: str = ""
    largest: str = ""
    lines: set[tuple[str, int]] = field(default_factory=set)
    findings: list[str] = field(default_factory=list)


def fuzz(
    target: Callable[[Any], object],
    seeds: list[Any],
    count: int,
    seed: int = 0,
    words: list[Any] = ODD,
    *,
    stop: bool = True,
    before: Callable[[int, Any], None] | None = None,
) -> Report:
    """Run a target on `count` inputs; `words` are values and strings that its formats know.

    stop: raise the first finding; else all are in the report. before: is called with each input before it runs.
    """
    random, corpus, report, lines = Random(seed), [*seeds], Report(seeds=len(seeds)), _Lines()
    begun, memory, known, latest = time.perf_counter(), _Memory(), set[str](), 0
    with memory.limited():
        for i in range(count):
            value = corpus[i] if i < len(seeds) else changed(random, corpus, words)
            if before:
                before(i, value)
            memory.begin()
            took = time.process_time()
            fault = _fault(target, value, lines, traced=i < latest + _FRESH or i % _TRACED == 0)
            took, grown = time.process_time() - took, memory.grown()
            report.accepted += fault is None
            if not fault and (took > SECONDS or grown > MEGABYTES):
                fault = f"took {took:.1f} s and {grown} MB"
            if took > report.worst_seconds:
                report.worst_seconds, report.slowest = took, show(value, 300)
            if grown > report.worst_megabytes:
                report.worst_megabytes, report.largest = grown, show(value, 300)
            if (
                fault and (kind := re.sub(r": .*(?= \()", "", fault[:1000])) not in known
            ):  # what and where, not which value
                known.add(kind)
                report.findings.append(f"input {i}: {fault} for {show(value)}")
                if stop:
                    raise FindingError(report.findings[-1])
            if lines.fresh:
                latest = i
                if len(marshal.dumps(value)) <= _KEPT_BYTES:
                    corpus.append(value)
            lines.fresh = False
            if i % 500 == 0 and memory.kept() > KEPT_MEGABYTES:
                raise FindingError(f"input {i}: {memory.kept()} MB of memory were not given back")
            report.inputs = i + 1
            if len(report.findings) >= MAX_FINDINGS:
                break
    report.kept, report.lines, report.seconds = len(corpus), lines.seen, time.perf_counter() - begun
    return report


def _fault(target: Callable[[Any], object], value: Any, lines: "_Lines", *, traced: bool) -> str | None:
    """Run one input: None if it was accepted, "" if it was refused with a sentence, or what was wrong."""
    try:
        with at_most(_WALL, TimeoutError(f"took more than {_WALL} s")), lines.traced() if traced else nullcontext():
            target(value)
        return None
    except CrelleError as e:
        if not str(e) or len(str(e)) > 3000:
            return f"not a sentence: {str(e)[:300]!r}"
        return _hidden(e)
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        at = e.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = f" ({Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno})" if at else ""
        return f"{type(e).__name__}: {' '.join(f'{e!s:.500}'.split())}{where}"


def _hidden(error: BaseException) -> str:
    """Return what a sentence was made of, if that was an allocation that failed or the time limit; else ""."""
    cause: BaseException | None = error
    while (cause := cause.__cause__ or cause.__context__) is not None:
        if isinstance(cause, MemoryError | TimeoutError) or "allocate" in str(cause):
            return f"{type(cause).__name__} under a sentence: {cause!s:.200}"
    return ""


def show(value: Any, limit: int = 4000) -> str:
    """Return an input in at most about `limit` characters: both ends of a long one."""
    try:
        text = repr(value)
    except (RecursionError, ValueError) as e:
        text = f"a {type(value).__name__} that cannot be shown ({e})"
    return text if len(text) <= limit else f"{text[: limit - 200]} … {text[-200:]} ({len(text):,} characters)"


class _Memory:
    """How much memory one input takes: the peak since `begin`, where the system can forget a peak (Linux)."""

    def __init__(self) -> None:
        gc.collect()
        self._clear = None
        with suppress(OSError):
            self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY)
        self._statm = os.open("/proc/self/statm", os.O_RDONLY) if Path("/proc/self/statm").exists() else None
        self._start = self._first = self._now()
        self._peak = _peak()

    def begin(self) -> None:
        if self._clear is not None:
            try:
                os.write(self._clear, b"5")
            except OSError:
                self._clear = None
        self._start, self._peak = self._now(), _peak()

    def grown(self) -> int:
        """Return megabytes; 0 where the peak is that of an input before and could not be forgotten."""
        peak = _peak()
        if peak - self._start > MEGABYTES << 18:  # the next input should not begin with what this one left
            gc.collect()
            with suppress(AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
        return (peak - self._start) >> 20 if self._clear is not None or peak > self._peak else 0

    def kept(self) -> int:
        return (self._now() - self._first) >> 20

    def _now(self) -> int:
        """Return the bytes of memory in use."""
        return _peak() if self._statm is None else int(os.pread(self._statm, 200, 0).split()[1]) * _PAGE

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Refuse allocations far beyond MEGABYTES: as an error in the input that asks for them."""
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if self._statm is not None:
            size = int(os.pread(self._statm, 200, 0).split()[0]) * _PAGE + (MEGABYTES << 20) + _HEADROOM
            limit = size if soft == resource.RLIM_INFINITY else min(size, soft)
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
            for fd in (self._clear, self._statm):
                if fd is not None:
                    os.close(fd)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class _Lines:
    """The lines of our source that were reached. A function all of whose lines are known is not traced again."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int]] = set()
        self.fresh = False
        self._missing: dict[CodeType, set[int] | None] = {}

    @contextmanager
    def traced(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, *_: object) -> Any:
        code = frame.f_code
        if code not in self._missing:
            ours = code.co_filename.startswith(SOURCE)
            self._missing[code] = {n for _, _, n in code.co_lines() if n} if ours else None
        return self._line if self._missing[code] else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        missing = self._missing[frame.f_code]
        if event == "line" and missing and (number := frame.f_lineno) in missing:
            missing.remove(number)
            self.seen.add((frame.f_code.co_filename[len(SOURCE) + 1 :], number))
            self.fresh = True
        return self._line
