"""crelle report: the page, the pictures and the sentences of its command."""

import runpy
import shlex
import sys
from pathlib import Path

import pytest
import typer
from in_process import run, succeed

from crelle.cli.main import app

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


def test_page_and_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, pictures = tmp_path / "new" / "r.html", tmp_path / "png"
    files = [RESULTS / "h200-decode-llama2-7b.json", RESULTS / "cpu-startup.json"]
    result = succeed("report", *files, "-o", page, "--png", pictures, "--cost", "price=30000", "--json")
    assert result.json["page"] == str(page)
    assert [left_out["file"] for left_out in result.json["left_out"]] == ["cpu-startup.json"]
    assert "skipped: cpu-startup.json is of a kind" in result.err
    assert sorted(p.stem for p in pictures.iterdir()) == sorted(result.json["figures"])
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "Cost of a million tokens" in text
    assert "USD per million tokens" in text
    assert "30000 USD over 5 years" in text
    again = tmp_path / "again.html"
    succeed("report", *files, "-o", again, "--cost", "price=30000")
    assert again.read_bytes() == page.read_bytes()


def test_many_files_left_out_are_one_warning(tmp_path: Path) -> None:
    result = succeed("report", RESULTS, "-o", tmp_path / "r.html", "--json")
    count = len(result.json["left_out"])
    assert count > 3
    (line,) = result.err.strip().splitlines()
    assert line == (f"warning: skipped {count} files or rows; the page ('Left out') and --json list the reasons")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["nowhere"], "nowhere does not exist"),
        ([RESULTS / "cpu-startup.json"], "none of the 1 files contains a result that the report can show"),
        ([RESULTS / "h200-gemv.json", "--cost", "cheap"], "--cost should read"),
        ([RESULTS / "h200-gemv.json", "-o", "/dev/null/x/r.html"], "cannot write /dev/null/x/r.html"),
        ([RESULTS / "h200-gemv.json", "--png", "/dev/null/x"], "cannot write /dev/null/x"),
    ],
)
def test_wrong_inputs_are_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[object], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("report", *args)
    assert result.code == 2
    assert sentence in result.err
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_measurements_are_commands_that_exist(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["measure.py", device, str(tmp_path), "--dry-run"])
    runpy.run_path(str(ROOT / "bench" / "measure.py"), run_name="__main__")
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    ours = [line[3:] for line in lines if line[1:3] == ["-m", "crelle.cli.main"]]
    assert len(ours) >= 4
    for words in ours:
        command = typer.main.get_command(app)
        while inner := getattr(command, "commands", None):
            command = inner[words.pop(0)]
        command.make_context("crelle", words)  # raises for an option that does not exist
