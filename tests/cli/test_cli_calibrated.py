"""Quantizing and training from the command line: with a text, and with none."""

import json
from pathlib import Path

import pytest
from in_process import run, succeed

from crelle.formats.storage.ownership import INDEX

SMALL = ("--rows", "4", "--length", "32")


def test_without_a_text_the_model_writes_its_own(small_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "q"
    report = json.loads(succeed("quantize", small_model, out, "--scheme", "gptq:bits=3,group=24", *SMALL, "--json").out)
    assert report["scheme"] == "gptq:bits=3,group=24"
    again = tmp_path / "again"
    succeed("quantize", small_model, again, "--scheme", "gptq:bits=3,group=24", *SMALL)
    assert {f.name: f.read_bytes() for f in out.iterdir()} == {f.name: f.read_bytes() for f in again.iterdir()}


def test_a_group_that_does_not_divide_the_inputs_leaves_a_short_one(small_model: Path, tmp_path: Path) -> None:
    options = ("--scheme", "gptq:bits=3,group=20", "--rows", "80", "--length", "16")  # 40 sequences are the model's own
    succeed("quantize", small_model, tmp_path / "q", *options)
    specs = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["tensors"]
    of_layers = [s for name, s in specs.items() if ".layers." in name]
    assert {(s["shape"][1], s["group"]) for s in of_layers} == {(36, 20), (50, 20)}
    succeed("eval", tmp_path / "q", "--context", "32", "--tokens", "64")


def test_without_a_scheme_it_is_the_recommended_one(small_model: Path, tmp_path: Path) -> None:
    cost = json.loads(succeed("quantize", small_model, tmp_path / "q", *SMALL, "--dry-run", "--json").out)
    assert cost["scheme"].startswith("auto:bits=4.35")


def test_an_effort_chooses_what_the_scheme_leaves_open_and_is_kept(small_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "q"
    options = ("--scheme", "auto:bits=3.35,steps=1", "--effort", "fast", "--rows", "6", "--length", "16")
    done = succeed("quantize", small_model, out, *options, "--json")
    report = json.loads(done.out)
    assert report["scheme"].startswith("auto:bits=3.35")
    assert "steps=1" in report["scheme"]
    assert (report["effort"], report["calibration_rows"], report["own_sequences"]) == ("fast", 3, 3)
    kept = json.loads((out / INDEX).read_text())["metadata"]
    assert (kept["effort"], kept["calibration_rows"], kept["own_sequences"]) == ("fast", "3", "3")
    assert report["estimated_seconds"] == pytest.approx(sum(report["estimated_stages"].values()))
    assert report["estimated_seconds"] > 0
    assert {"sampling", "layers", "writing"} <= set(report["stage_seconds"])
    assert report["seconds"] > 0
    lines = done.err.splitlines()
    estimate = next(i for i, line in enumerate(lines) if "time         about" in line)
    stages = [
        next(i for i, line in enumerate(lines) if line.startswith(s)) for s in ("sampling calibration", "layer 1 of")
    ]
    assert estimate < min(stages)  # it is there before work starts
    for said in ("effort fast", "auto:bits=3.35", "3 sequences of 16 tokens of Python's documentation", "quality"):
        assert said in done.err


def test_it_ends_with_what_to_do_next(small_model: Path, tmp_path: Path) -> None:
    said = succeed("quantize", small_model, tmp_path / "q", "--scheme", "rtn:bits=4,group=24").err
    assert f"crelle chat {tmp_path / 'q'}" in said
    assert f"crelle eval {tmp_path / 'q'} --text" in said


def test_a_checkpoint_is_trained_and_its_curve_drawn(small_model: Path, tmp_path: Path) -> None:
    succeed("quantize", small_model, tmp_path / "q", "--scheme", "auto:bits=2.9,tune=none", *SMALL)
    options = ("--teacher", small_model, "--steps", "3", "--batch", "2", "--length", "32", "--device", "cpu")
    report = json.loads(succeed("tune", tmp_path / "q", tmp_path / "t", *options, "--json").out)
    assert len(report["losses"]) == 3
    assert json.loads((tmp_path / "t" / "training.json").read_text())["losses"] == report["losses"]
    assert (tmp_path / "t" / "training.png").stat().st_size > 1000
    succeed("eval", tmp_path / "t", "--context", "32", "--tokens", "64")


@pytest.mark.parametrize("tune", ["short", "full"])
@pytest.mark.sample(2)
def test_quantizing_with_training_leaves_its_losses_and_a_plot(small_model: Path, tmp_path: Path, tune: str) -> None:
    out, scheme = tmp_path / "q", f"mixed:four=0.25,tune={tune},steps=3,end=4,own=2"
    report = json.loads(succeed("quantize", small_model, out, "--scheme", scheme, *SMALL, "--json").out)
    found = json.loads((out / "training.json").read_text())
    assert found["losses"] == report["losses"]
    assert len(found["losses"]) == (4 if tune == "full" else 0)
    assert found["blocks"] == report["block_losses"]
    assert {len(losses) for losses in found["blocks"].values()} == {3}
    assert (out / "training.png").stat().st_size > 1000
    succeed("eval", out, "--context", "32", "--tokens", "64")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("quantize", "MODEL", "OUT", "--scheme", "auto:bits=0.5"), "1.1 to 8.5"),
        (("quantize", "MODEL", "OUT", "--scheme", "gptq:bits=3", "--calib", "nowhere.txt"), "nowhere.txt"),
        (("quantize", "MODEL", "OUT", "--scheme", "gptq:bits=3", "--rows", "0"), "--rows"),
        (("quantize", "MODEL", "OUT", "--scheme", "gptq:bits=3", "--own", "-1"), "--own"),
        (("quantize", "MODEL", "OUT", "--effort", "most"), "fast, balanced or best"),
        (("tune", "MODEL", "OUT"), "not a Crelle checkpoint"),
        (("tune", "MODEL", "OUT", "--train", "everything"), "everything"),
        (("tune", "MODEL", "OUT", "--steps", "0"), "--steps"),
    ],
)
def test_mistakes_get_a_sentence(tiny_model: Path, tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    places = {"MODEL": tiny_model, "OUT": tmp_path / "out"}
    result = run(*(places.get(a, a) for a in arguments))
    assert result.code == 2
    assert sentence in result.err
    assert not list(tmp_path.iterdir())
