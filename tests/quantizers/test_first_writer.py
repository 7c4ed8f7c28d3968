"""Shards are written in a thread: in order, a few at most wait, errors are raised, and nothing looks finished early."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from crelle.errors import CapacityError, FormatError
from crelle.formats.dense import DenseTensor
from crelle.formats.storage.checkpoint_writer import CheckpointWriter
from crelle.quantizers.first_writer import _WAITING, Encoded, FirstWriter

SHARDS = [f"crelle-{i:05d}-of-00008.safetensors" for i in range(1, 9)]


def encoded(i: int) -> Encoded:
    return {f"m{i}": DenseTensor(torch.full((2, 4), float(i)))}, {}, [f"warning {i}"]


def writer_at(out: Path, resume: bool = False) -> FirstWriter:
    return FirstWriter(out, {"what": "a test"}, SHARDS, resume=resume, overwrite=False)


class Gate:
    """Lets the thread that writes go on, shard by shard."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[str] = []
        self.written: list[str] = []
        self._open, add = threading.Semaphore(0), CheckpointWriter.add

        def waiting(writer: CheckpointWriter, shard: str, *parts: Any) -> None:
            self.began.append(shard)
            assert self._open.acquire(timeout=20)
            add(writer, shard, *parts)
            self.written.append(shard)

        monkeypatch.setattr(CheckpointWriter, "add", waiting)

    def let(self, shards: int) -> None:
        self._open.release(shards)


@contextmanager
def started(work: Any) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=work)
    thread.start()
    yield thread
    thread.join(20)
    assert not thread.is_alive()


def test_adding_does_not_wait_until_too_many_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with writer_at(tmp_path / "out") as writer:
        for i in range(_WAITING):
            writer.add(SHARDS[i], lambda i=i: encoded(i))
        assert gate.written == []
        with started(lambda: writer.add(SHARDS[_WAITING], lambda: encoded(_WAITING))) as one_more:
            one_more.join(0.2)
            assert one_more.is_alive()
            gate.let(1)
        assert gate.written[:1] == SHARDS[:1]
        gate.let(len(SHARDS))
        told = writer.finish(lambda to: to.finish({}, "fp16", {}))
    assert gate.written == SHARDS[: _WAITING + 1]
    assert told == tuple(f"warning {i}" for i in range(_WAITING + 1))
    assert (tmp_path / "out" / SHARDS[_WAITING]).is_file()


def test_what_waits_is_written_when_a_run_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    def interrupted() -> None:
        with writer_at(tmp_path / "out") as writer:
            for i in range(3):
                writer.add(SHARDS[i], lambda i=i: encoded(i))
            gate.let(3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with writer_at(tmp_path / "out", resume=True) as writer:
        assert [writer.has(s) for s in SHARDS] == [True] * 3 + [False] * 5


@pytest.mark.parametrize("more", [0, 2], ids=["at the end", "with the next shard"])
def test_an_error_of_writing_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """And nothing is written behind it."""
    add = CheckpointWriter.add

    def full(writer: CheckpointWriter, shard: str, *parts: Any) -> None:
        if shard == SHARDS[1]:
            raise CapacityError("No room.")
        add(writer, shard, *parts)

    monkeypatch.setattr(CheckpointWriter, "add", full)

    def run() -> None:
        with writer_at(tmp_path / "out") as writer:
            for i in range(2 + more * _WAITING):
                writer.add(SHARDS[min(i, 7)], lambda i=i: encoded(i))
            writer.finish(lambda to: to.finish({}, "fp16", {}))

    with pytest.raises(CapacityError, match=r"No room\. Finished shards are kept in .*`resume=True`"):
        run()
    assert not (tmp_path / "out").exists()
    assert [p.name for p in (tmp_path / "out.partial").glob("*.safetensors")] == SHARDS[:1]


def test_values_that_cannot_be_stored_are_refused(tmp_path: Path) -> None:
    def run() -> None:
        with writer_at(tmp_path / "out") as writer:
            writer.add(SHARDS[0], lambda: ({"m": DenseTensor(torch.tensor([[float("nan")]]))}, {}, []))
            writer.finish(lambda to: to.finish({}, "fp16", {}))

    with pytest.raises(FormatError, match="would contain NaN"):
        run()
    assert not (tmp_path / "out").exists()
