"""Broken and senseless input through the real command line: one sentence, exit code 2, and nothing is lost.

Only what must be shown end to end; the tests of each layer have many more ways to be wrong, and
tests/cli/messages/test_cli_process.py shows the same sentence and exit code of a true process.
"""

import errno
import json
import os
import pickle
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run
from tiny_gguf import write_tiny_gguf

from crelle.quantizers.pipeline import quantize

SCHEME = "rtn:bits=4,group=32"
Done = subprocess.CompletedProcess[str]


def refused(done: Done, *words: object) -> str:
    """Check that a run ended with exit code 2 and one sentence, which holds the given words.

    `quantize` prints its plan and stages before; every other command prints nothing else.
    """
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 or "effort" in lines[0], done.stderr
    assert [line.startswith("crelle: ") for line in lines].index(True) == len(lines) - 1, done.stderr
    sentence = lines[-1].removeprefix("crelle: ")
    for word in words:
        assert str(word) in sentence, sentence
    return sentence


@pytest.fixture(scope="session")
def good_checkpoint(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(tiny_model, tmp_path_factory.mktemp("faults") / "q", SCHEME).out


@pytest.fixture
def checkpoint(good_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint to be broken."""
    return shutil.copytree(good_checkpoint, tmp_path / "q")


@pytest.fixture
def source(tiny_model: Path, tmp_path: Path) -> Path:
    """A Hugging Face directory to be broken."""
    return shutil.copytree(tiny_model, tmp_path / "source")


def contents(directory: Path) -> dict[str, bytes]:
    """All files; the command notes its effort in the index's metadata, the Python function in the tests does not."""
    found = {f.name: f.read_bytes() for f in sorted(directory.iterdir()) if f.is_file()}
    for name in [n for n in found if n.endswith(".index.json")]:
        found[name] = json.dumps(json.loads(found[name])["weight_map"]).encode()
    return found


def a_shard(checkpoint: Path) -> Path:
    return sorted(checkpoint.glob("*.safetensors"))[2]


def truncate(path: Path) -> None:
    with open(path, "r+b") as f:
        f.truncate(path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def change_config(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    change(config["quantization_config"])
    (checkpoint / "config.json").write_text(json.dumps(config))


# What is read


def test_missing_directory(crelle: Run, tmp_path: Path) -> None:
    refused(crelle("eval", tmp_path / "nowhere"), tmp_path / "nowhere", "does not exist")


def test_truncated_shard_of_a_checkpoint(crelle: Run, checkpoint: Path) -> None:
    truncate(a_shard(checkpoint))
    refused(crelle("generate", checkpoint, "--prompt", "hi"), a_shard(checkpoint), "truncated")


def test_truncated_shard_of_a_source(crelle: Run, source: Path, tmp_path: Path) -> None:
    truncate(source / "model.safetensors")
    done = crelle("quantize", source, tmp_path / "out", "--scheme", SCHEME)
    refused(done, source / "model.safetensors", "truncated")
    assert not list(tmp_path.glob("out*"))


def test_truncated_gguf(crelle: Run, tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "m.gguf")
    truncate(file)
    refused(crelle("quantize", file, tmp_path / "out", "--scheme", SCHEME), file, "truncated")


def test_flipped_bit_in_a_shard(crelle: Run, checkpoint: Path) -> None:
    flip_a_bit(a_shard(checkpoint))
    refused(crelle("eval", checkpoint), a_shard(checkpoint), "altered", "SHA-256")


def test_unknown_version(crelle: Run, checkpoint: Path) -> None:
    change_config(checkpoint, lambda q: q.update(format_version=99))
    refused(crelle("inspect", checkpoint), checkpoint / "config.json", "format version 99")


def test_a_pickle_as_the_model(crelle: Run, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save({"w": torch.zeros(3)}, file)
    refused(crelle("generate", file, "--prompt", "hi"), file, "pickle", "safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickle_in_the_directory(crelle: Run, source: Path, tmp_path: Path, name: str) -> None:
    (source / "model.safetensors").unlink()
    trace = tmp_path / "it-ran"
    (source / name).write_bytes(pickle.dumps(_Trap(trace)))
    refused(crelle("quantize", source, tmp_path / "out", "--scheme", SCHEME), source / name, "pickle")
    assert not trace.exists()


class _Trap:
    """An object whose unpickling would leave a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


# What is asked for


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("rtn:bits=4,colour=red", ("no setting 'colour'", "bits, group")),
        ("rtn:bits=4,group=0", ("group must be at least 1", "got 0")),
        ("bcq:bits=9,group=32", ("bits must be 1 to 8", "got 9")),
    ],
)
def test_bad_scheme(crelle: Run, tiny_model: Path, tmp_path: Path, scheme: str, words: tuple[str, ...]) -> None:
    refused(crelle("quantize", tiny_model, tmp_path / "out", "--scheme", scheme), *words)
    assert not list(tmp_path.glob("out*"))


def test_prompt_longer_than_the_context(crelle: Run, good_checkpoint: Path) -> None:
    done = crelle("generate", good_checkpoint, "--prompt", "x" * 200, "--json")
    sentence = refused(done, "the prompt has 201 tokens", "context of 96")
    assert json.loads(done.stdout) == {"error": sentence}


def test_with_json_the_sentence_comes_as_json_too(crelle: Run, good_checkpoint: Path, tmp_path: Path) -> None:
    done = crelle("quantize", good_checkpoint, tmp_path / "out", "--scheme", SCHEME, "--json")
    sentence = refused(done, good_checkpoint, "already quantized")
    assert json.loads(done.stdout) == {"error": sentence}


# What is written


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 48 kB, as with `ulimit -f 48`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (48 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_the_size_of_files(crelle: Run, tiny_model: Path, tmp_path: Path, small_files: None) -> None:
    done = crelle("quantize", tiny_model, tmp_path / "out", "--scheme", SCHEME, "--head", "none")
    refused(done, "cannot write", tmp_path / "out.partial", "File too large")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_says_it_is_full(crelle: Run, tiny_model: Path, tmp_path: Path) -> None:
    """Works everywhere; below is the same with a disk that is full in earnest."""
    out, left, fsync = tmp_path / "out", [5], os.fsync

    def full(fd: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(os, "fsync", full)
        done = crelle("quantize", tiny_model, out, "--scheme", SCHEME, "--head", "none")
    refused(done, "no space left while writing", tmp_path / "out.partial", "free some space", "--resume")
    assert not out.exists()
    quantize(tiny_model, out, SCHEME, resume=True)
    quantize(tiny_model, tmp_path / "undisturbed", SCHEME)
    assert contents(out) == contents(tmp_path / "undisturbed")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 200 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk]
    if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
        pytest.skip(f"this user may not mount a small disk ({done.stderr.strip()}); the test above stands in for it")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_loses_nothing_and_resumes_to_the_same_bytes(
    crelle: Run, small_disk: Path, tiny_model: Path, tmp_path: Path
) -> None:
    out = small_disk / "out"
    command = ("quantize", tiny_model, out, "--scheme", SCHEME, "--head", "none")
    refused(crelle(*command), "no space left while writing", small_disk / "out.partial", "free some space", "--resume")
    assert not out.exists()
    assert list(small_disk.glob("out.partial/*.safetensors")), "what was finished before must be kept"
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    done = crelle(*command, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["resumed_units"] > 0
    quantize(tiny_model, tmp_path / "undisturbed", SCHEME)
    assert contents(out) == contents(tmp_path / "undisturbed")
