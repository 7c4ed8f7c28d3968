"""The report's rows and its picture."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from crelle import LLM, Sampling
from crelle.errors import UnsupportedError
from crelle.eval.report import Row, alternating_speeds, plot_perplexity

ROWS = [
    Row("fp16", 16.0, 270.0, 11.0, 20.0, 3.0, "a"),
    Row("rtn:bits=4,group=64", 4.31, 90.0, 12.0, 20.0, 3.0, "b"),
    Row("bcq:bits=3,group=64", 4.0, 80.0, 15.0, 20.0, 30.0, "c"),
    Row("bcq:bits=2,group=64", 2.75, 60.0, 90.0, 20.0, 20.0, "d"),
]


def draw(rows: list[Row], path: Path) -> np.ndarray:
    plot_perplexity(rows, path, "a title")
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def test_picture_is_a_png_that_shows_the_rows(tmp_path: Path) -> None:
    picture = draw(ROWS, tmp_path / "a.png")
    assert picture.shape[0] > 400
    assert picture.shape[1] > 600
    curve = (picture == (0x1F, 0x5F, 0xA8)).all(-1)
    assert curve.any(0).sum() > picture.shape[1] / 3  # the curve goes a good way from left to right


def test_picture_changes_with_every_row(tmp_path: Path) -> None:
    whole = draw(ROWS, tmp_path / "a.png")
    assert np.array_equal(draw(ROWS, tmp_path / "again.png"), whole)
    for i, row in enumerate(ROWS):
        other = [*ROWS[:i], replace(row, perplexity=row.perplexity * 1.5), *ROWS[i + 1 :]]
        assert not np.array_equal(draw(other, tmp_path / "b.png"), whole)


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS[1:2], ROWS[1:]], ids=["plain only", "one", "no plain"])
def test_picture_of_few_rows(rows: list[Row], tmp_path: Path) -> None:
    assert draw(rows, tmp_path / "a.png").std() > 0


def test_order_of_the_rows_does_not_matter(tmp_path: Path) -> None:
    assert np.array_equal(draw(ROWS, tmp_path / "a.png"), draw(ROWS[::-1], tmp_path / "b.png"))


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'crelle\[plots\]'"):
        plot_perplexity(ROWS, tmp_path / "a.png", "a title")


def test_row_takes_sample_size_and_speed_of_the_model_itself(tiny_model: Path) -> None:
    llm = LLM.load(tiny_model, device="cpu")
    row = Row.of(llm, "fp32", 32.0, 250.0, 1.5, "Hello")
    assert row.sample == llm.generate("Hello", Sampling(max_tokens=48)).text
    assert row.megabytes == pytest.approx(sum(f.stat().st_size for f in tiny_model.iterdir()) / 1e6)
    assert row.tokens_per_second > 1
    assert (row.scheme, row.bits_per_weight, row.perplexity, row.quantize_seconds) == ("fp32", 32.0, 250.0, 1.5)


def test_speeds_alternate_after_a_warm_up_and_are_medians() -> None:
    calls = []

    class Model:
        def __init__(self, name: str, speeds: list[float]) -> None:
            self.name, self.speeds = name, iter(speeds)

        def generate(self, prompt: str, sampling: Sampling) -> SimpleNamespace:
            calls.append((self.name, sampling.max_tokens))
            return SimpleNamespace(tokens_per_second=next(self.speeds))

    models: list[Any] = [Model("a", [1, 10, 30, 20]), Model("b", [1, 5, 5, 90])]
    assert alternating_speeds(models, "Hello", tokens=7) == [20, 5]
    assert calls == [("a", 4), ("b", 4), *[("a", 7), ("b", 7)] * 3]
