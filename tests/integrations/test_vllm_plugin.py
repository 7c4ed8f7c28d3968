"""The vLLM plugin where vLLM itself is not installed: failures at registration, checkpoints that were altered."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from crelle import quantize
from crelle.errors import FormatError
from crelle.formats.storage import checkpoint as checkpoints
from crelle.formats.storage.io import sha256
from crelle.integrations.vllm.verification import verify_once

# Modules of vLLM that hold nothing but empty classes: enough to import the plugin's config.
_STAND_IN = """
import importlib.abc, importlib.machinery, sys

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        ours = name == "vllm" or name.startswith("vllm.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None
    def exec_module(self, module):
        module.__version__ = "0.32.1"
        module.register_quantization_config = lambda name: lambda cls: cls
        made = {}
        def attribute(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return made.setdefault(name, type(name, (), {}))
        module.__getattr__ = attribute

sys.meta_path.insert(0, Finder())
"""
_CHECK = """
import sys
from crelle.errors import FormatError
from crelle.integrations.vllm.config import CrelleConfig
for directory in sys.argv[1:]:
    try:
        CrelleConfig({}).maybe_update_config(directory)
        print("served")
    except FormatError as e:
        print(e)
"""


def python(code: str, *args: str, path: Path | None = None) -> "subprocess.CompletedProcess[str]":
    env = dict(os.environ) | ({} if path is None else {"PYTHONPATH": str(path)})
    return subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture
def made(tiny_model: Path, tmp_path: Path) -> Path:
    return quantize(tiny_model, tmp_path / "q", "rtn:bits=4,group=16").out


def altered(made: Path, to: Path) -> Path:
    """Copy a checkpoint and flip one bit of the last weight of a layer."""
    shutil.copytree(made, to)
    shard = sorted(to.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    return to


def test_a_flipped_bit_is_refused(made: Path, tmp_path: Path) -> None:
    broken = altered(made, tmp_path / "broken")
    done = python(_STAND_IN + _CHECK, str(made), str(broken))
    served, refused = done.stdout.splitlines() or [done.stderr, ""]
    assert served == "served"
    assert "was altered: its SHA-256 is not the one in config.json; copy it again" in refused


def test_files_are_read_once_and_again_when_they_change(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of vLLM may make its config more than once."""
    read: list[Path] = []

    def reading(path: Path) -> str:
        read.append(path)
        return sha256(path)

    monkeypatch.setattr(checkpoints, "sha256", reading)
    for _ in range(3):
        verify_once(made)
    assert sorted(read) == sorted(made.glob("*.safetensors"))
    shard = sorted(made.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 128
    shard.write_bytes(data)
    for _ in range(2):
        with pytest.raises(FormatError, match=f"{shard.name} was altered"):
            verify_once(made)


_BROKEN = [
    "raise ImportError('no module of that name')",
    "raise RuntimeError('libcudart.so.12: cannot open\\nmore lines')",
    "raise AttributeError('torch has no attribute x')",
    "import torch; raise OSError(2, 'no such file')",
    "assert False",
]
_REGISTER = """
import logging, os, sys
import torch  # once: the forks have it
logging.basicConfig()
for folder in sys.argv[1:]:
    if os.fork() == 0:
        sys.path.insert(0, folder)
        from crelle.integrations.vllm import register
        register()
        sys.stderr.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_whatever_fails_at_registration_leaves_vllm_alone(tmp_path: Path) -> None:
    for i, body in enumerate(_BROKEN):
        (tmp_path / f"{i}" / "vllm").mkdir(parents=True)
        (tmp_path / f"{i}" / "vllm" / "__init__.py").write_text(body)
    done = python(_REGISTER, *(str(tmp_path / f"{i}") for i in range(len(_BROKEN))))
    assert done.stdout.split() == ["0"] * len(_BROKEN), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(_BROKEN)
    for line in lines:
        assert line.startswith("WARNING:vllm.crelle:")
        assert "Crelle checkpoints cannot be served: " in line


def test_the_plugin_registers_without_a_word() -> None:
    done = python(_STAND_IN + "from crelle.integrations.vllm import register; register(); register()")
    assert (done.returncode, done.stderr) == (0, "")
