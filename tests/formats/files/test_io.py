"""Files: nothing half written, nothing unpickled, every broken file a sentence."""

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from crelle.errors import CapacityError, CrelleError, FormatError
from crelle.formats.storage.io import (
    ShardReader,
    looks_pickled,
    read_json,
    sha256,
    shown,
    to_json,
    write_whole,
    writing,
)


class _Trap:
    """An object whose unpickling would leave a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_are_known_by_their_first_bytes(tmp_path: Path, protocol: int) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(pickle.dumps({"w": [1.0]}, protocol=protocol))
    assert looks_pickled(file)


def test_torch_archives_are_known_by_their_first_bytes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    torch.save({"w": torch.zeros(2)}, file)
    assert looks_pickled(file)


def test_safetensors_are_not_taken_for_pickles(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(2)}, file)
    assert not looks_pickled(file)


def test_a_renamed_pickle_is_refused_and_never_run(tmp_path: Path) -> None:
    file, trace = tmp_path / "model.safetensors", tmp_path / "it-ran"
    file.write_bytes(pickle.dumps(_Trap(trace)))
    with pytest.raises(FormatError, match="is a pickle") as refused:
        ShardReader(file)
    assert str(file) in str(refused.value)
    assert not trace.exists()


def test_every_truncation_of_a_shard_is_refused(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    safetensors.torch.save_file({"a": torch.randn(3, 5), "b": torch.randn(7)}, whole)
    data = whole.read_bytes()
    for length in range(len(data)):
        cut.write_bytes(data[:length])
        with pytest.raises(FormatError, match="truncated") as refused:
            ShardReader(cut)
        assert str(cut) in str(refused.value)


def test_a_tensor_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"a": torch.randn(3, 5)}, file)
    shard = ShardReader(file)
    assert shard.names() == ["a"]
    assert shard.shape("a") == (3, 5)
    with pytest.raises(FormatError, match="does not contain the tensor 'b'"):
        shard.read("b")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"{", "is not valid JSON"), (b"[1]", "should contain a JSON object"), (b"\xff\xfe\x00", "is not valid JSON")],
)
def test_broken_json_is_a_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(FormatError, match=sentence) as refused:
        read_json(file)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize("name", ["absent.json", "."])
def test_unreadable_json_is_a_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError, match=r"does not exist|cannot read"):
        read_json(tmp_path / name)


def test_json_round_trips_and_always_gives_the_same_bytes(tmp_path: Path) -> None:
    value = {"ü": [1, 2.5, None, True], "a": {"b": "▁"}}
    (tmp_path / "v.json").write_bytes(to_json(value))
    assert read_json(tmp_path / "v.json") == value
    assert to_json(value) == to_json(dict(value))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_no_reader_takes_is_not_written(value: float) -> None:
    with pytest.raises(FormatError, match="NaN or infinite, which JSON does not support"):
        to_json({"a": [1.0, value]})


def test_write_whole_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    file = tmp_path / "f"
    write_whole(file, b"old")
    write_whole(file, b"new")
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]
    assert sha256(file) == "11507a0e2f5e69d5dfa40a62a1bd7b6ee57e6bcd85c67c9b8431b36fff21c437"


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    write_whole(file, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError, match="no space left"):
        write_whole(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, CapacityError), (errno.EDQUOT, CapacityError), (errno.EACCES, FormatError)],
)
def test_write_errors_name_the_path_and_the_remedy(tmp_path: Path, code: int, kind: type[CrelleError]) -> None:
    file = tmp_path / "f"
    with pytest.raises(kind, match="Do this") as refused, writing(file, "Do this"):
        raise OSError(code, os.strerror(code))
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
        ('{"a": NaN}', "the value NaN"),
        ('{"a": -Infinity}', "the value -Infinity"),
        ('{"a": 1e999}', "1e999' is too large"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
def test_json_that_would_be_a_traceback_is_a_sentence(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(FormatError, match=words):
        read_json(tmp_path / "x.json")


def test_json_of_absurd_size_is_refused_unread(tmp_path: Path) -> None:
    with open(tmp_path / "x.json", "wb") as f:
        f.truncate(1 << 40)  # a sparse file: a terabyte of zeros that takes no room
    with pytest.raises(FormatError, match=r"1,099,511,627,776 bytes; at most 33,554,432 are allowed"):
        read_json(tmp_path / "x.json")


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(FormatError, match="a pipe, socket or device, not a file"):
        read_json(tmp_path / "x.json")
    with pytest.raises(FormatError, match="a pipe, socket or device, not a file"):
        ShardReader(tmp_path / "x.json")


def test_long_values_are_shortened_in_messages() -> None:
    assert shown("x" * 10**7) == f"'{'x' * 40}'... (10,000,000 characters)"
    assert shown(list(range(1000))) == "a list of 1,000 entries"
    assert len(shown(dict.fromkeys(range(50), "x" * 1000))) < 200
    assert shown(10**5000) == "a int"
    assert shown("plain") == "'plain'"
