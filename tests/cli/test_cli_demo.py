"""The demo, with the tiny model in the place of the one it downloads."""

import json
from pathlib import Path

import pytest
from in_process import Result, run, succeed
from PIL import Image

from crelle import LLM, Sampling
from crelle.cli.demo import PROMPT, SCHEMES
from crelle.errors import CrelleError
from crelle.eval import smollm2
from crelle.eval.report import Row

ALL = ("fp16", *SCHEMES)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("A short story about numbers and tables. " * 10)
    return tmp_path / "text.txt"


@pytest.fixture
def fake_download(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "smollm2", lambda: tiny_model)


def demo(out: Path, text: Path, *more: str) -> Result:
    return succeed("demo", "--out", out, "--text", text, "--tokens", 190, "--context", 96, "--device", "cpu", *more)


@pytest.mark.usefixtures("fake_download")
def test_demo_prints_a_table_and_leaves_picture_figures_and_checkpoints(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    shown = demo(out, text).out
    figures = json.loads((out / "demo.json").read_text())
    assert [row["scheme"] for row in figures["rows"]] == list(ALL)
    for row in figures["rows"]:
        (line,) = [line for line in shown.splitlines() if line.startswith("│") and row["scheme"] in line]
        assert f"{row['bits_per_weight']:.3f}" in line
        assert f"{row['perplexity']:.2f}" in line
        assert row["tokens_per_second"] > 0
    bits = [row["bits_per_weight"] for row in figures["rows"]]
    assert bits[0] == 16
    assert max(bits[1:]) < 6
    assert str(out / "perplexity.png") in shown
    with Image.open(out / "perplexity.png") as image:
        assert image.format == "PNG"
        assert image.size > (600, 400)
    checkpoints = [p for p in sorted(out.iterdir()) if p.is_dir()]
    assert len(checkpoints) == 4
    sampling = Sampling(max_tokens=48)
    samples = {LLM.load(p, device="cpu").generate(PROMPT, sampling).text for p in checkpoints}
    assert samples == {row["sample"] for row in figures["rows"]}


@pytest.mark.usefixtures("fake_download")
def test_demo_runs_again_over_its_own_output_and_prints_json(tmp_path: Path, text: Path) -> None:
    first, second = (demo(tmp_path / "out", text, "--json").json for _ in range(2))
    same = ("scheme", "bits_per_weight", "perplexity", "sample")
    assert [[row[k] for k in same] for row in first["rows"]] == [[row[k] for k in same] for row in second["rows"]]
    assert (first["context"], first["tokens"], first["prompt"]) == (96, 190, PROMPT)
    assert Path(first["picture"]).is_file()


@pytest.mark.usefixtures("fake_download")
def test_sample_that_looks_like_markup_is_shown_as_it_is(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "[/cyan] [bold]x[/nothing]"
    row = Row("fp16", 16.0, 1.0, 2.0, 3.0, 4.0, said)
    monkeypatch.setattr(Row, "of", classmethod(lambda cls, *args: row))
    assert PROMPT + said in demo(tmp_path / "out", text).out


def test_demo_without_a_network_is_a_sentence(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise CrelleError("could not download the demo model")

    monkeypatch.setattr(smollm2, "smollm2", fail)
    result = run("demo", "--out", tmp_path / "out", "--text", text)
    assert result.code == 2
    assert "could not download the demo model" in result.err
    assert not (tmp_path / "out").exists()
