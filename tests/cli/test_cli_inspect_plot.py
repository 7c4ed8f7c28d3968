"""crelle inspect of mixed 2/4-bit matrices: shares in the table and in JSON, and the heat map."""

import json
from pathlib import Path

import pytest
import torch
from conftest import Run

from crelle import CalibrationData, quantize
from crelle.cli.views.inspect_plot import GroupRanges, by_layer, group_ranges, picture
from crelle.formats.dense import DenseTensor
from crelle.formats.mixed import MixedTensor

SCHEME = "mixed:group=8,four=0.25,outliers=0.01,refine=0"


@pytest.fixture(scope="module")
def mixed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = CalibrationData(text="a b c d e f g h " * 200, rows=4, length=32)
    out = tmp_path_factory.mktemp("q") / "m"
    quantize(tiny_model, out, SCHEME, text=text)
    return out


def test_shares_of_the_groups(crelle: Run, mixed: Path) -> None:
    layers = json.loads(crelle("inspect", mixed, "--json").stdout)["layers"]
    inside = [x for x in layers if x["format"] == "mixed"]
    assert inside
    for x in inside:
        C = -(-x["shape"][1] // 8)
        assert x["shares"]["4"] == pytest.approx(round(0.25 * C) / C)
        assert x["shares"]["2"] + x["shares"]["4"] == pytest.approx(1)
        assert x["outliers"] == round(0.01 * x["shape"][0] * x["shape"][1])
    shown = crelle("inspect", mixed).stdout
    assert "outliers" in shown
    assert "1.0" in shown or "0.9" in shown


def test_the_plot_is_a_picture(crelle: Run, mixed: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    done = crelle("inspect", mixed, "--plot", tmp_path / "map.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_said(crelle: Run, mixed: Path, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    assert "must name a .png file" in crelle("inspect", mixed, "--plot", tmp_path / "map.pdf").stderr
    assert "does not exist" in crelle("inspect", mixed, "--plot", tmp_path / "nowhere" / "map.png").stderr
    assert "no quantized matrix" in crelle("inspect", tiny_model, "--plot", tmp_path / "map.png").stderr
    assert not list(tmp_path.iterdir())


def test_ranges_and_marks_stand_where_the_groups_do() -> None:
    w = torch.zeros(4, 20)
    w[:, 8:16] = torch.linspace(-1, 1, 8)
    ranges = group_ranges("m", _Grouped(w)).ranges
    assert ranges.tolist() == pytest.approx([0, 2, 0])  # the last group has 4 inputs
    row = GroupRanges("m", torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 4, 2], dtype=torch.uint8))
    image = picture([row], lambda level: torch.tensor(level)[:, None].expand(-1, 4).numpy())
    assert image.shape == (3, 9, 3)
    assert image[1, 4].tolist() == pytest.approx([0.9, 0.1, 0.1])
    assert image[:, 0, 0].tolist() == [0, 0, 0]
    assert image[:, 8, 0].tolist() == [1, 1, 1]


def test_bits_of_groups() -> None:
    spec = {
        "format": "mixed",
        "shape": [5, 40],
        "group": 8,
        "packing": "general",
        "block": 16,
        "four": 2,
        "outliers": 3,
    }
    w = MixedTensor.random(spec, torch.Generator().manual_seed(0))
    bits = group_ranges("m", w).bits
    assert bits is not None
    assert sorted(bits.tolist()) == [2, 2, 2, 4, 4]


def test_layers_are_in_the_order_of_their_numbers() -> None:
    assert by_layer(["l.10.q", "l.9.q", "l.9.k"]) == ["l.9.k", "l.9.q", "l.10.q"]


class _Grouped(DenseTensor):
    """A plain matrix that says it has groups of 8."""

    group = 8  # type: ignore[assignment]
