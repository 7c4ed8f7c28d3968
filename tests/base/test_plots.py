"""Plots: a picture is written, and no label is lost on the way."""

from pathlib import Path

import pytest

from crelle.plots import plot_runs


def test_runs_are_drawn_with_a_row_for_each_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "close", lambda figure: None)  # so that it can be looked at
    plot_runs(tmp_path / "runs.png", {"one": [1.0, 1.2], "two": [3.0]}, "title", "unit")
    axes = plt.gcf().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"]
    assert [list(line.get_xdata()) for line in axes.lines] == [[1.0, 1.2], [1.1, 1.1], [3.0], [3.0, 3.0]]
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.undo()
    plt.close("all")
