"""What a model's files say never acts on the terminal: no control characters, no markup."""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY
from in_process import run, succeed
from rich.table import Table

import crelle
from crelle.cli.common import console
from crelle.cli.main import main
from crelle.errors import FormatError
from crelle.formats.bcq import UniformTensor
from crelle.formats.storage.checkpoint_writer import CheckpointWriter
from crelle.printable import CONTROL, printable

EVIL = "\x1b]52;c;ZXZpbA==\x07\x9b2J\x7f\u202e[/x][red]\r"  # the clipboard, the screen, the direction; markup
NAME = f"model.layers.0.mlp.up{EVIL}_proj"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint whose scheme, overrides and matrix hold what a terminal would obey."""
    spec = {"format": "uniform", "shape": [8, 24], "bits": 4, "group": 12, "symmetric": False}
    w = UniformTensor.random(spec, torch.Generator().manual_seed(0))
    with CheckpointWriter(tmp_path / "q", {"crelle": "0"}) as writer:
        writer.add("crelle-00001-of-00001.safetensors", {NAME: w}, {f"b{EVIL}": torch.ones(2)})
        writer.finish(TINY, f"rtn[/x]{EVIL}", {f"*{EVIL}": "fp16"})
    return tmp_path / "q"


@pytest.mark.parametrize("options", [(), ("--all",)])
def test_inspect_shows_a_scheme_and_names_as_they_are_without_obeying_them(
    options: tuple[str, ...], checkpoint: Path
) -> None:
    done = succeed("inspect", checkpoint, *options)
    assert not CONTROL.search(done.out + done.err)
    assert "rtn[/x]␛]52;c;ZXZpbA==" in done.out


def test_json_is_printable_and_means_the_same(checkpoint: Path) -> None:
    done = succeed("inspect", checkpoint, "--json")
    assert not CONTROL.search(done.out.rstrip("\n"))
    assert done.json["scheme"] == f"rtn[/x]{EVIL}"
    assert [layer["name"] for layer in done.json["layers"]] == [NAME]


@pytest.mark.parametrize("command", ["generate", "explain", "quantize", "eval", "export", "chat"])
def test_sentences_about_such_a_checkpoint_are_printable(command: str, checkpoint: Path, tmp_path: Path) -> None:
    more: dict[str, list[object]] = {
        "generate": ["--prompt", "a"],
        "quantize": [tmp_path / "out", "--scheme", "rtn"],
        "export": [tmp_path / "out", "--to", "gptq"],
    }
    done = run(command, checkpoint, *more.get(command, []))
    assert done.code in (0, 2), done.err
    assert not CONTROL.search(done.out + done.err)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_what_an_encoding_lacks_is_escaped(
    options: tuple[str, ...], encoding: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal or a pipe that is not UTF-8: no traceback, and JSON means the same."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "argv", ["crelle", "inspect", str(checkpoint), *options])
    monkeypatch.setattr(sys, "stdout", out)
    with contextlib.suppress(SystemExit):
        main()
    out.flush()
    said = out.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert not CONTROL.search(said.rstrip("\n"))
    if options:
        assert json.loads(said)["scheme"] == f"rtn[/x]{EVIL}"
    else:
        assert "rtn[/x]\\u241b]52" in said


def test_errors_hold_no_control_characters() -> None:
    assert str(FormatError(f"the tensor '{EVIL}' is missing")) == f"the tensor '{printable(EVIL)}' is missing"


def test_tables_strings_and_progress_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(EVIL, title=EVIL)
    table.add_row(EVIL)
    console.out.print(table)
    console.err.print(EVIL, style="dim")
    console.warn([EVIL])
    with console.tracking(EVIL) as track:
        track(1, 2, EVIL)
    said = capsys.readouterr()
    assert not CONTROL.search(said.out + said.err)
    assert "[/x][red]" in said.out
    assert "[/x][red]" in said.err


class TTY(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_model_s_text_is_printable_at_a_terminal_and_as_it_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, shown in ((TTY(), printable(EVIL)), (io.StringIO(), EVIL)):
        monkeypatch.setattr(sys, "stdout", stream)
        console.print_text(EVIL)
        assert stream.getvalue() == shown


def test_printable_keeps_text_and_its_width() -> None:
    text = "naïve 中文 \t tab\nline é שלום 🙂"
    assert printable(text) == text
    assert len(printable(EVIL)) == len(EVIL)
    assert printable("\ud800") == "\ufffd"


def test_commands_print_through_the_console_that_makes_text_printable() -> None:
    """No other console, and `print` only of constants, of what `printable` returns, or of JSON."""
    for file in sorted((Path(crelle.__file__).parent / "cli").glob("*.py")):
        tree = ast.parse(file.read_text())
        if file.name == "console.py":
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            assert node.func.id != "Console", f"{file.name}:{node.lineno}"
            if node.func.id == "print":
                safe = all("printable(" in ast.unparse(a) or "__version__" in ast.unparse(a) for a in node.args)
                assert safe, f"{file.name}:{node.lineno}"
