"""The demo, with the tiny model in the place of the one it downloads."""

import json
import re
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from in_process import Result, run, succeed
from PIL import Image
from rich.console import Console
from rich.table import Table

import crelle.cli.commands.demo
from crelle import LLM, Sampling
from crelle.bench import decode_cuda
from crelle.bench.model_shapes import SHAPES, RandomWeights
from crelle.cli.commands.demo import _LABELS, PLAIN, PROMPT, SCHEMES
from crelle.cli.views.demo_shape import decode_rows, shape_table
from crelle.errors import CapacityError, CrelleError
from crelle.eval import smollm2
from crelle.eval.report import Row

ALL = ("fp16", *SCHEMES)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("A short story about numbers and tables. " * 10)
    return file


@pytest.fixture
def fake_download(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "smollm2", lambda: tiny_model)


def demo(out: Path, text: Path, *more: str) -> Result:
    return succeed("demo", "--out", out, "--text", text, "--tokens", 190, "--context", 96, "--device", "cpu", *more)


@dataclass
class Demo:
    """A demo that has run: where, what it printed, and the figures that it left."""

    out: Path
    shown: str
    figures: dict[str, Any]


@pytest.fixture(scope="module")
def first(tiny_model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    out = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smollm2, "smollm2", lambda: tiny_model)
        shown = demo(out, text).out
    return Demo(out, shown, json.loads((out / "demo.json").read_text()))


def test_demo_prints_a_table_and_leaves_picture_figures_and_checkpoints(first: Demo) -> None:
    out, shown, figures = first.out, first.shown, first.figures
    assert [row["scheme"] for row in figures["rows"]] == list(ALL)
    for row in figures["rows"]:
        label = _LABELS.get(row["scheme"], row["scheme"])
        (line,) = [line for line in shown.splitlines() if line.startswith(f"│ {label} ")]
        assert f"{row['bits_per_weight']:.3f}" in line
        assert f"{row['perplexity']:.2f}" in line
        assert row["tokens_per_second"] > 0
    bits = [row["bits_per_weight"] for row in figures["rows"]]
    assert bits[0] == 16
    assert max(bits[1:]) < 6
    assert str(out / "perplexity.png") in shown
    assert [point["scheme"] for point in figures["compared"]] == list(PLAIN)
    assert f"crelle chat {out / 'gptq-bits=4-group=64-refine=0'}" in shown.replace("\n", "")
    with Image.open(out / "perplexity.png") as image:
        assert image.format == "PNG"
        assert image.size > (600, 400)
    checkpoints = [p for p in sorted(out.iterdir()) if p.is_dir()]
    assert len(checkpoints) == 4
    sampling = Sampling(max_tokens=48)
    samples = {LLM.load(p, device="cpu").generate(PROMPT, sampling).text for p in checkpoints}
    assert samples == {row["sample"] for row in figures["rows"]}


@pytest.mark.usefixtures("fake_download")
def test_demo_runs_again_over_its_own_output_and_prints_json(first: Demo, text: Path) -> None:
    second = demo(first.out, text, "--json").json
    same = ("scheme", "bits_per_weight", "perplexity", "sample")
    rows = first.figures["rows"]
    assert [[row[k] for k in same] for row in rows] == [[row[k] for k in same] for row in second["rows"]]
    assert (second["context"], second["tokens"], second["prompt"]) == (96, 190, PROMPT)
    assert Path(second["picture"]).is_file()


@pytest.mark.usefixtures("fake_download")
def test_sample_that_looks_like_markup_is_shown_as_it_is(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "[/cyan] [bold]x[/nothing]"
    row = Row("fp16", 16.0, 1.0, 2.0, 3.0, 4.0, said)
    monkeypatch.setattr(Row, "of", classmethod(lambda cls, *args: row))
    monkeypatch.setattr(crelle.cli.commands.demo, "SCHEMES", ())  # the other rows would say the same
    assert PROMPT + said in demo(tmp_path / "out", text).out


def test_a_shape_is_timed_beside_fp16_and_what_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 192, "head_dim": 32, "intermediate_size": 512}
    monkeypatch.setitem(SHAPES, "small", {**TINY, **small})  # type: ignore[arg-type]
    schemes, device = ("fp16", *SCHEMES), torch.device("cpu")
    rows = decode_rows(schemes, device, "small", layers=1)
    assert [r.scheme for r in rows] == list(schemes)
    assert [r.note for r in rows] == [None] * 4
    sizes = [r.gigabytes or 0 for r in rows]
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3] > 0
    shown = printed(shape_table(rows, _LABELS, "small"))
    assert re.search(r"fp16 .* 1\.00 ", shown)
    assert all(label in shown for label in _LABELS.values())

    def refuse(weights: RandomWeights, *_: object, **__: object) -> None:
        raise CapacityError("too large")

    monkeypatch.setattr(decode_cuda, "measure", refuse)
    rows = decode_rows(schemes[:1], device, "small", layers=1)
    assert rows[0].note == "too large"
    assert "does not fit" in printed(shape_table(rows, _LABELS))


def printed(table: Table) -> str:
    console = Console(width=120, record=True, file=StringIO())
    console.print(table)
    return console.export_text()


def test_demo_without_a_network_is_a_sentence(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise CrelleError("could not download the demo model")

    monkeypatch.setattr(smollm2, "smollm2", fail)
    result = run("demo", "--out", tmp_path / "out", "--text", text)
    assert result.code == 2
    assert "could not download the demo model" in result.err
    assert not (tmp_path / "out").exists()
