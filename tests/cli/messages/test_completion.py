"""Shell completion: the scripts that --show-completion prints, and the answers that they ask `crelle` for."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import run, succeed

from crelle.cli.common.completion import SCHEMES, models
from crelle.formats.storage.nearby import models_in
from crelle.quantizers.base import Cast
from crelle.quantizers.scheme import CONFIGS, parse


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], list[str]]:
    """Return what a shell is told for a line that ends in the word to complete."""

    def of(shell: str, line: str) -> list[str]:
        monkeypatch.setenv("_CRELLE_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        return run().out.splitlines()

    return of


def test_commands_options_and_schemes_are_proposed(answer: Callable[[str, str], list[str]]) -> None:
    assert answer("bash", "crelle qua") == ["quantize"]
    assert answer("bash", "crelle bench ge") == ["gemv", "gemm"]
    assert answer("bash", "crelle generate m --max") == ["--max-tokens"]
    assert answer("bash", "crelle quantize m out --scheme gp") == ["gptq:bits=3,group=128"]
    assert answer("bash", "crelle generate m --device c") == ["cpu", "cuda"]
    assert answer("fish", "crelle quantize m out --scheme gp")[0].startswith("gptq:bits=3,group=128\terror feedback")
    assert '"gptq\\\\:bits=3,group=128":"error feedback on' in answer("zsh", "crelle quantize m out --scheme gp")[0]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--install-completion" in succeed("--help").out
    monkeypatch.setenv("_CRELLE_COMPLETE", f"source_{shell}")
    assert f"_CRELLE_COMPLETE=complete_{shell}" in run().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_proposes_what_its_script_asks_for(tmp_path: Path) -> None:
    command = tmp_path / "crelle"
    command.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m crelle \"$@\"\n")
    command.chmod(0o755)
    lines = [
        'eval "$(crelle --show-completion)"',
        "COMP_WORDS=(crelle quantize m out --scheme au) COMP_CWORD=5",
        "_crelle_completion crelle; printf '%s\\n' \"${COMPREPLY[@]}\"",
    ]
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, env=env, timeout=60)
    assert (done.stdout, done.stderr) == ("auto:bits=4\n", "")


def test_every_scheme_is_proposed_and_every_proposal_is_a_scheme() -> None:
    assert {s.partition(":")[0] for s in SCHEMES} == {*CONFIGS, *Cast.DTYPES, "keep"}
    for scheme in SCHEMES:
        parse(scheme)


def test_models_beside_and_one_directory_below_are_proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("out/three/config.json", "out/four/config.json", "other.gguf", "own/text.txt", ".hidden/config.json"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.chdir(tmp_path)
    assert models("o") == ["other.gguf", "out/four", "out/three", "own/"]
    assert models("out/t") == ["out/three"]
    assert models(f"{tmp_path}/ot") == [f"{tmp_path}/other.gguf"]
    assert models(".h") == [".hidden"]
    assert models("own") == []  # the shell knows directories better
    assert models("missing/x") == []
    assert [str(p) for p in models_in(Path("out"))] == models("out/")
