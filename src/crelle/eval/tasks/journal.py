"""The results of items on disk, one JSON object a line, so that a run goes on where another one stopped.

    NAME-<16 hex>.partial.jsonl   while items are missing; a first line with all that results depend on, then the items
    NAME-<16 hex>.jsonl           renamed when every item of the task is there

The hex digits are a hash of the first line (the model's files, the task, its data, the cache, the device): another
model has another file. A last line that was cut off when a run was killed is dropped, and its item scored again.
"""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crelle.errors import FormatError
from crelle.formats.storage.io import parse_json, read_bounded, shown, sync_directory, to_json, writing

_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ItemResult:
    """What a model made of one item."""

    line: int  # of the task's data
    correct: bool
    correct_norm: bool | None = None  # by log-likelihood per character; multiple choice only
    loglikelihoods: tuple[float, ...] = ()
    text: str | None = None  # what was generated


class Journal:
    """The results so far, by line; `add` keeps more of them. Without a file they are kept in memory only."""

    def __init__(self) -> None:
        self.results: dict[int, ItemResult] = {}
        self._fd: int | None = None
        self._path = Path()

    @classmethod
    @contextmanager
    def open(cls, folder: Path | None, name: str, header: Mapping[str, Any], items: int) -> Iterator["Journal"]:
        """Take up the results of a task with so many items in all; the file is renamed when it has them."""
        journal = cls()
        if folder is None:
            yield journal
            return
        first = json.dumps(header, sort_keys=True, ensure_ascii=False).encode() + b"\n"
        done = folder / f"{name}-{hashlib.sha256(first).hexdigest()[:16]}.jsonl"
        if done.is_file():
            journal._read(done, read_bounded(done, _MAX_BYTES), first)
            yield journal
            return
        partial = done.with_suffix(".partial.jsonl")
        with writing(partial):
            folder.mkdir(parents=True, exist_ok=True)
            journal._fd, journal._path = _locked(partial), partial
        try:
            journal._take_up(first)
            yield journal
            if len(journal.results) >= items:
                with writing(done):
                    os.replace(partial, done)
                    sync_directory(folder)
        finally:
            os.close(journal._fd)  # gives the lock back
            journal._fd = None

    def _take_up(self, first: bytes) -> None:
        """Read what is there up to its last whole line, and cut the rest off."""
        assert self._fd is not None
        data = read_bounded(self._path, _MAX_BYTES)
        whole = data[: data.rfind(b"\n") + 1]
        with writing(self._path):
            os.ftruncate(self._fd, len(whole))
        if whole:
            self._read(self._path, whole, first)
        else:
            self._write(first)

    def _read(self, path: Path, data: bytes, first: bytes) -> None:
        lines = data.splitlines(keepends=True)
        if not lines or lines[0] != first:
            raise FormatError(f"{path} holds results of something else than its name says; delete it")
        for number, line in enumerate(lines[1:], 2):
            result = _parse(line, f"{path}, line {number},")
            self.results[result.line] = result

    def add(self, results: Sequence[ItemResult]) -> None:
        """Keep the results of some items; they are on the disk when this returns."""
        if self._fd is not None:
            self._write(b"".join(json.dumps(asdict(r)).encode() + b"\n" for r in results))
        self.results |= {result.line: result for result in results}

    def _write(self, data: bytes) -> None:
        assert self._fd is not None
        with writing(self._path):
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)


def fingerprint(model: Path) -> str:
    """Return a hash of the names, sizes and times of a model's files: another one where any of them was changed."""
    files = sorted(f for f in model.iterdir() if f.is_file()) if model.is_dir() else [model]
    found = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(to_json([str(model.resolve()), found])).hexdigest()[:16]


def _locked(path: Path) -> int:
    """Open a file for appending, with a lock that goes with its descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(fd)
        if e.errno in (errno.EAGAIN, errno.EACCES):
            raise FormatError(f"another run is writing {path} right now; wait for it or choose another folder") from e
        raise
    return fd


def _parse(data: bytes, where: str) -> ItemResult:
    """Return the result on one line of a file, or say that the file is damaged."""
    found = parse_json(data, where)
    scores, norm, text = found.get("loglikelihoods"), found.get("correct_norm"), found.get("text")
    fine = type(found.get("line")) is int and type(found.get("correct")) is bool
    fine &= norm is None or type(norm) is bool
    fine &= isinstance(scores, list) and all(type(x) is float for x in scores)
    if not fine or not (text is None or isinstance(text, str)):
        raise FormatError(f"{where} is not the result of an item: {shown(found)}; delete the file")
    return ItemResult(found["line"], found["correct"], norm, tuple(scores or ()), text)
