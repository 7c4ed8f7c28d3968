"""What --json prints is JSON, whatever the figures are."""

import json
import math
from dataclasses import dataclass

import pytest

from crelle.cli.common import console


@dataclass
class Figures:
    good: float
    bad: float
    rows: tuple[dict[str, float], ...]


def refuse(token: str) -> None:
    raise AssertionError(f"{token} is not JSON")


def test_figures_that_are_not_finite_are_null_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json(Figures(1.5, math.nan, ({"a": math.inf}, {"a": -math.inf, "b": 2.0})))
    said = capsys.readouterr()
    found = json.loads(said.out, parse_constant=refuse)
    assert found == {"good": 1.5, "bad": None, "rows": [{"a": None}, {"a": None, "b": 2.0}]}
    assert "bad = nan, rows[0].a = inf, rows[1].a = -inf" in said.err


def test_finite_figures_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"x": [1, 2.5, "é", None, True]})
    said = capsys.readouterr()
    assert said.out == '{"x": [1, 2.5, "é", null, true]}\n'
    assert said.err == ""


def test_progress_shows_the_title_once(capsys: pytest.CaptureFixture[str]) -> None:
    with console.tracking() as track:
        track(1, 1, "training, loss 1.5")
    assert capsys.readouterr().err.startswith("training, loss 1.5 ")
    with console.tracking("exporting") as track:
        track(1, 1, "layer 3")
    assert capsys.readouterr().err.startswith("exporting layer 3 ")
