"""The estimate before a run: it measures little, and scales to what the run has."""

from pathlib import Path

import pytest
import torch

from crelle.formats.storage.open import open_weights
from crelle.quantize_job import estimate as quantize_estimate
from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.effort import Effort
from crelle.quantize_job.estimate import estimate
from crelle.quantize_job.first_layers import layer_count
from crelle.quantize_job.run import estimate_for
from crelle.quantizers.stage_times import FULL, SOLVE

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
    assert set(parts(small_model, "gptq:bits=3,group=24,guidance=0.5")) == {"writing", "guidance", "layers"}
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


def take_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a layer take 3 s, and 1 ms a token besides, of which 1 s is in the stages of tokens; the first pass 9 s."""
    calibrate = quantize_estimate._calibrate
    passes: list[torch.Tensor] = []

    def timed(model: object, config: object, tokens: torch.Tensor, *rest: object) -> tuple[object, object, object]:
        layer, fitted, _ = calibrate(model, config, tokens, *rest)
        passes.append(tokens)
        first = 9.0 if len(passes) == 1 else 0.0
        solved = 0.0 if str(config) == "fp16" else 2.0
        return layer, fitted, {FULL: first + 1 + 1e-3 * tokens.numel(), SOLVE: solved}

    monkeypatch.setattr(quantize_estimate, "_calibrate", timed)


def test_a_token_takes_what_more_tokens_take_more(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done once a layer, or once in all, is not counted for each token."""
    take_by_tokens(monkeypatch)
    layers = layer_count(open_weights(small_model))
    found = parts(small_model, "gptq:bits=3,group=24", rows=50)["layers"]
    assert found == pytest.approx(layers * (3 + 50 * 32 * 1e-3))


def test_parts_grow_with_rows_steps_and_sequences(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(scheme: str, rows: int, own: int) -> dict[str, float]:
        clock = Steps()
        monkeypatch.setattr(quantize_estimate, "perf_counter", clock)
        monkeypatch.setattr("crelle.quantizers.stage_times.perf_counter", clock)
        take_by_tokens(monkeypatch)
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


def test_a_small_layer_is_measured_again_and_without_recorded_stages(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose waits at the ends of stages a run does not have: the least of all measurements counts."""
    waits, taken = list[object](), [5.0, 2.0, 3.0]
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    whole = parts(small_model, "auto:bits=3.35,steps=2")
    monkeypatch.setattr(quantize_estimate, "_again", lambda each, device: 2)
    again = parts(small_model, "auto:bits=3.35,steps=2")
    assert set(again) == set(whole)
    assert len(waits) == 6
    assert all(found > 0 for found in again.values())

    take_by_tokens(monkeypatch)
    unrecorded = quantize_estimate._unrecorded

    def timed(*args: object) -> float:
        assert unrecorded(*args) > 0  # type: ignore[arg-type]
        return taken[len(waits) // 2 % 3]

    monkeypatch.setattr(quantize_estimate, "_unrecorded", timed)
    before = parts(small_model, "gptq:bits=3,group=24")["layers"]
    monkeypatch.setattr(quantize_estimate, "_again", lambda each, device: 0)
    assert before < parts(small_model, "gptq:bits=3,group=24")["layers"]


@pytest.mark.parametrize(("each", "kind", "tokens", "again"), [(10**6, "cuda", 16384, 2), (10**8, "cuda", 4096, 0)])
def test_a_large_layer_is_measured_once(each: int, kind: str, tokens: int, again: int) -> None:
    """Else an estimate for billions of weights would take as long as some layers of the run."""
    device = torch.device(kind)
    assert (quantize_estimate._tokens_for(each, device), quantize_estimate._again(each, device)) == (tokens, again)
    assert quantize_estimate._tokens_for(each, CPU) <= 2048
    assert quantize_estimate._again(each, CPU) == 0
