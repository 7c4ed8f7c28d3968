"""The estimate before a run: it measures little, and scales to what the run has."""

from pathlib import Path

import pytest
import torch

from crelle.formats.storage.open import open_weights
from crelle.quantize_job import estimate as quantize_estimate
from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.effort import Effort
from crelle.quantize_job.estimate import estimate
from crelle.quantize_job.run import estimate_for

CPU = torch.device("cpu")
TEXT = "It was a small text to calibrate on, and to train on as well. " * 200


class Steps:
    """A clock that ticks with every call, so that every measured stretch takes the same time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def parts(model: Path, scheme: str, rows: int = 8, own: int = 0) -> dict[str, float]:
    data = CalibrationData(text=TEXT, rows=rows, own=own, length=32)
    return estimate(open_weights(model), scheme, data, CPU, head="rtn:bits=8,group=64").parts


def test_an_estimate_has_the_parts_that_a_run_has(small_model: Path) -> None:
    assert set(parts(small_model, "gptq:bits=3,group=24")) == {"writing", "layers"}
    assert set(parts(small_model, "rtn:bits=3,group=24")) == {"writing", "layers"}
    assert set(parts(small_model, "auto:bits=3.35,steps=2", own=4)) == {
        "writing",
        "sampling",
        "search",
        "layers",
        "training",
    }
    full = parts(small_model, "auto:bits=3.35,steps=2,search=false,tune=full,end=5,own=3")
    assert set(full) == {"writing", "layers", "training", "end to end", "teacher", "sampling for training"}
    for found in full.values():
        assert found >= 0


def test_parts_grow_with_rows_steps_and_sequences(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(scheme: str, rows: int, own: int) -> dict[str, float]:
        clock = Steps()
        monkeypatch.setattr(quantize_estimate, "perf_counter", clock)
        monkeypatch.setattr("crelle.quantizers.stage_times.perf_counter", clock)
        return parts(small_model, scheme, rows, own)

    few, many = of("auto:bits=3.35,steps=2", 8, 4), of("auto:bits=3.35,steps=20", 8, 4)
    assert many["training"] == pytest.approx(10 * few["training"])
    more = of("auto:bits=3.35,steps=2", 16, 8)
    assert few["layers"] < more["layers"] < 2 * few["layers"]
    assert more["sampling"] == pytest.approx(few["sampling"])  # as many steps, of more sequences each
    assert more["writing"] == few["writing"]


def test_an_estimate_changes_nothing_that_a_run_depends_on(small_model: Path) -> None:
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    data = CalibrationData(text=TEXT, length=32)
    found = estimate_for(small_model, Effort("fast", "auto:bits=3.35,steps=2", 4, 2), text=data, device="cpu")
    assert found.seconds > 0
    assert torch.equal(torch.get_rng_state(), expected)
