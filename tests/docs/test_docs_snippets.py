"""The guide's first steps run as they are written, on a tiny model in place of a real one."""

import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, write_tiny_model
from in_process import succeed

DOCS = ROOT / "docs"
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
ENDLESS = ("serve", "chat")  # these wait for clients and for lines


def fences(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and a text, as the guide supposes."""
    to = tmp_path_factory.mktemp("guide")
    write_tiny_model(to / "model", num_attention_heads=4, num_key_value_heads=2, **SIZES)
    words = ("once", "upon", "a", "time", "there", "was", "model", "of", "few", "bits")
    (to / "text.txt").write_text(" ".join(words[i * i % 10] for i in range(4000)))
    return to


def test_commands_of_the_first_model_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    lines = [line for block in fences("guide/first-model.md", "") for line in block.splitlines()]
    calls = [
        shlex.split(line.replace("$MODEL", "model"), comments=True) for line in lines if line.startswith("crelle ")
    ]
    assert len(calls) >= 7
    for _, command, *arguments in calls:
        if command in ENDLESS:
            continue
        if "auto:bits=3.35" in arguments:  # the same recipe with less work: this is about the words, not the quality
            arguments = [a.replace("auto:bits=3.35", "auto:bits=3.35,steps=1") for a in arguments] + [
                "--rows",
                "4",
                "--length",
                "32",
            ]
        succeed(command, *arguments)
    assert {p.name for p in (folder / "out").iterdir()} >= {"q4", "q3"}


@pytest.mark.parametrize("page", ["guide/first-model.md", "guide/evaluate.md", "reference/python.md"])
def test_python_runs(folder: Path, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    if not (folder / "out" / "q4").exists():
        succeed("quantize", "model", "out/q4", "--scheme", "rtn:bits=4,group=32", "--head", "8")
    examples = [code for code in fences(page, "python") if "lm_eval" not in code]  # that one has a test of its own
    assert examples
    for example in examples:
        small = example.replace("context=1024, tokens=20480", "context=32, tokens=256")
        exec(compile(small, page, "exec"), {})
