"""A run of two stages keeps what is not of it, and goes on only with a first stage that was made from the same."""

from pathlib import Path
from typing import Any

import pytest
from conftest import write_tiny_model

from crelle.errors import FormatError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.quantize_job import run as quantize_module
from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.run import quantize
from crelle.quantizers import pipeline

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # said once on CPUs without bf16 products
FULL = "auto:bits=4.5,tune=full,steps=2,end=2,own=2"
TEXT = CalibrationData(text="It was a small text to calibrate on, and to train on as well. " * 40, rows=4, length=32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "m", num_hidden_layers=1)


def run(model: Path, out: Path, scheme: str = FULL, **options: Any) -> Any:
    return quantize(model, out, scheme, text=TEXT, device="cpu", **options)


def contents(directory: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in directory.iterdir()}


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}, {"resume": True, "overwrite": True}])
@pytest.mark.parametrize("what", ["a checkpoint", "a folder", "a link"])
def test_a_base_of_the_users_is_kept(
    model: Path, tmp_path: Path, options: dict[str, bool], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "out.base"
    if what == "a checkpoint":
        pipeline.quantize(model, base, "rtn:bits=4,group=32")
    else:
        (base if what == "a folder" else tmp_path / "home").mkdir()
        (base if what == "a folder" else tmp_path / "home").joinpath("thesis.txt").write_text("mine")
    if what == "a link":
        base.symlink_to("home")
    before = contents(base)
    monkeypatch.setattr(quantize_module, "_calibration", None)  # the refusal comes before any work
    with pytest.raises(FormatError, match=r"out\.base exists and is not the first stage"):
        run(model, tmp_path / "out", **options)
    assert contents(base) == before
    assert base.is_symlink() == (what == "a link")


def test_a_source_where_the_first_stage_goes_is_refused(model: Path, tmp_path: Path) -> None:
    source = model.rename(tmp_path / "out.base")
    before = contents(source)
    with pytest.raises(FormatError, match="Choose another OUT"):
        run(source, tmp_path / "out", overwrite=True)
    assert contents(source) == before


class StoppedError(Exception):
    """A run that was killed."""


def test_the_second_stage_goes_on_from_the_same_first_one_only(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise StoppedError

    with monkeypatch.context() as m:
        m.setattr(quantize_module, "tune", killed)
        with pytest.raises(StoppedError):
            run(model, tmp_path / "out")
    first = contents(tmp_path / "out.base")
    with pytest.raises(FormatError, match=r"cannot resume: .* was written for another"):
        run(model, tmp_path / "out", FULL.replace("4.5", "5.5"), resume=True)
    assert contents(tmp_path / "out.base") == first
    seen: list[Path] = []
    tune = quantize_module.tune

    def watched(checkpoint: Checkpoint, *rest: Any, **named: Any) -> Any:
        seen.append(checkpoint.path)
        assert contents(checkpoint.path) == first
        return tune(checkpoint, *rest, **named)

    monkeypatch.setattr(quantize_module, "tune", watched)
    run(model, tmp_path / "out", resume=True)
    assert seen == [tmp_path / "out.base"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]
    assert Checkpoint(tmp_path / "out").scheme == FULL


def test_a_file_in_the_first_stage_is_kept(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = quantize_module.tune

    def and_a_file(*rest: Any, **named: Any) -> Any:
        done = tune(*rest, **named)
        (tmp_path / "out.base" / "thesis.txt").write_text("mine")
        return done

    monkeypatch.setattr(quantize_module, "tune", and_a_file)
    report = run(model, tmp_path / "out")
    assert (tmp_path / "out.base" / "thesis.txt").read_text() == "mine"
    assert "thesis.txt" in report.warnings[-1]


@pytest.mark.parametrize("tune", ["short", "full"])
def test_a_run_that_was_stopped_between_layers_keeps_their_losses(tmp_path: Path, tune: str) -> None:
    model = write_tiny_model(tmp_path / "two", num_hidden_layers=2)
    scheme = f"mixed:four=0.25,tune={tune},steps=3,end=2,own=2"

    def stop(done: int, total: int, what: str) -> None:
        if what.endswith("layers.0"):
            raise StoppedError

    with pytest.raises(StoppedError):
        run(model, tmp_path / "out", scheme, progress=stop)
    resumed = run(model, tmp_path / "out", scheme, resume=True)
    whole = run(model, tmp_path / "whole", scheme)
    assert resumed.block_losses == whole.block_losses
    assert [len(losses) for losses in whole.block_losses.values()] == [3, 3]
    assert resumed.losses == whole.losses
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
