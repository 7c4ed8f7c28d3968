"""crelle bench quantize and --dry-run: the real pipeline on a few layers, its stages add up, nothing is left behind."""

import json
from pathlib import Path

import pytest
import torch
from conftest import TINY
from in_process import run, succeed

from crelle.bench.model_shapes import SHAPES
from crelle.bench.quantize import SyntheticWeights, bench_quantize, synthetic_tokens
from crelle.errors import SchemeError
from crelle.quantizers.stage_times import (
    COMMUNICATION,
    FACTOR,
    FULL,
    HESSIAN,
    OTHER,
    QUANTIZED,
    READ,
    SOLVE,
    TRAIN,
    WRITE,
    recording,
)
from crelle.quantizers.stage_times import timed as stage

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)  # type: ignore[arg-type]


def test_every_stage_is_timed_and_the_model_extrapolated() -> None:
    cost = bench_quantize("tiny", "gptq:bits=3,group=24", device="cpu", layers=2, rows=4, length=32)
    assert len(cost.layer_seconds) == 2
    assert {READ, FULL, QUANTIZED, HESSIAN, FACTOR, SOLVE, WRITE} <= set(cost.layer_seconds[1])
    assert cost.layers == TINY["num_hidden_layers"] == 3
    expected = sum(cost.once_seconds.values()) + 3 * sum(cost.layer_seconds[-1].values())
    assert cost.extrapolated_seconds == pytest.approx(expected)
    assert cost.bits_per_weight == pytest.approx(3.8, abs=0.3)
    assert cost.device_peak_bytes is None
    assert cost.host_peak_bytes > 10**7


@pytest.mark.parametrize("scheme", ["auto:bits=3.9,steps=1,search=false", "auto:bits=3.9,steps=1,tune=full"])
def test_recipes_that_train_and_search_go_through_the_same(scheme: str) -> None:
    cost = bench_quantize("tiny", scheme, device="cpu", rows=4, length=16)
    assert TRAIN in cost.layer_seconds[0]
    assert ("search" in cost.once_seconds) == ("search=false" not in scheme)
    assert (cost.training is not None) == ("tune=full" in scheme)


@pytest.mark.parametrize("train", ["all", "scales"])
def test_end_to_end_training_is_measured_and_is_part_of_the_whole(train: str) -> None:
    scheme = f"auto:bits=3.9,steps=1,search=false,tune=full,end=50,own=9,train={train}"
    cost = bench_quantize("tiny", scheme, device="cpu", rows=4, length=16)
    assert len(cost.layer_seconds) == 2  # though one was asked for
    t = cost.training
    assert t is not None
    assert (t.what, t.steps, t.batch, t.length, t.own, t.sampling_batch) == (train, 50, 8, 32, 9, 9)
    assert (t.measured, t.low_memory, t.peak_bytes) == (2, False, None)
    assert t.seconds == pytest.approx(50 * t.step_seconds + t.sampling_seconds + t.teacher_seconds)
    assert min(t.step_seconds, t.sampling_seconds, t.teacher_seconds) > 0
    before = sum(cost.once_seconds.values()) + 3 * sum(cost.layer_seconds[-1].values())
    assert cost.extrapolated_seconds == pytest.approx(before + t.seconds)


@pytest.mark.parametrize("end", [0, 1])
def test_a_training_shorter_than_what_is_measured(end: int) -> None:
    scheme = f"auto:bits=3.9,steps=1,search=false,tune=full,end={end},own=0"
    shown = succeed("bench", "quantize", "--shape", "tiny", "--scheme", scheme, "--rows", "4", "--length", "16").out
    assert f"{end} steps of 8 sequences" in shown
    assert "the model writes" not in shown


def test_what_training_takes_is_shown_and_measured_by_several_processes() -> None:
    scheme = "auto:bits=3.9,steps=1,search=false,tune=full,end=50,own=9"
    options = ("--scheme", scheme, "--rows", "4", "--length", "16", "--devices", "cpu,cpu")
    shown = succeed("bench", "quantize", "--shape", "tiny", *options).out
    assert "50 steps of 8 sequences of 32 tokens" in shown
    assert "9 sequences that the model writes" in shown
    assert "s end to end)" in shown


def test_a_model_of_one_layer_tells_nothing_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "flat", {**TINY, "num_hidden_layers": 1})  # type: ignore[arg-type]
    cost = bench_quantize("flat", "auto:bits=3.9,steps=1,search=false,tune=full", device="cpu", rows=4, length=16)
    assert cost.training is None
    assert any("end-to-end" in sentence for sentence in cost.left_out)


def test_schemes_without_data_are_measured_too() -> None:
    cost = bench_quantize("tiny", "rtn:bits=4,group=24", device="cpu", rows=4, length=16)
    assert cost.memory_plan is None
    assert WRITE in cost.layer_seconds[0]


def test_several_processes_are_measured_together() -> None:
    options = ("--scheme", "gptq:bits=3,group=24", "--layers", "2", "--rows", "4", "--length", "16")
    done = succeed("bench", "quantize", "--shape", "tiny", *options, "--devices", "cpu,cpu", "--json")
    shown = json.loads(done.out)
    assert shown["devices"] == 2
    assert len(shown["layer_seconds"]) == 2
    assert COMMUNICATION in shown["layer_seconds"][1]


def test_the_command_writes_a_result_that_says_what_is_extrapolated(tmp_path: Path) -> None:
    options = ("--scheme", "gptq:bits=3,group=24", "--rows", "4", "--length", "16", "--device", "cpu")
    done = succeed("bench", "quantize", "--shape", "tiny", *options, "--out", tmp_path / "cost", "--json")
    shown, written = json.loads(done.out), json.loads((tmp_path / "cost.json").read_text())
    assert shown["extrapolated"]["layers"] == 3
    assert written["extrapolated"] == shown["extrapolated"]
    assert written["memory_plan"]["states"] == "float32"
    assert "extrapolated" in succeed("bench", "quantize", "--shape", "tiny", *options).out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--shape", "abacus"), "abacus"),
        (("--shape", "tiny", "--layers", "4"), "1 to 3"),
        (("--shape", "tiny", "--layers", "0"), "1 to 3"),
        (("--shape", "tiny", "--rows", "0"), "--rows"),
        (("--shape", "tiny", "--memory", "much"), "much"),
        (("--shape", "tiny", "--memory", "1kB"), "--memory"),
        (("--shape", "tiny", "--devices", "cpu,cpu"), "both say where to run"),
    ],
)
def test_mistakes_get_a_sentence(options: tuple[str, ...], words: str) -> None:
    result = run("bench", "quantize", "--device", "cpu", "--length", "16", *options)
    assert result.code == 2
    assert words in result.err
    assert "Traceback" not in result.err


def test_synthetic_weights_are_reproducible_and_their_inputs_uneven() -> None:
    weights = SyntheticWeights(TINY)
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"):
        assert torch.equal(weights.read(name), SyntheticWeights(TINY).read(name))
    norm = weights.read("model.layers.0.input_layernorm.weight")
    assert norm.max() > 2 * norm.min() > 0
    tokens = synthetic_tokens(259, 50, 40)
    assert 0 <= tokens.min() < 10 < tokens.max() < 259
    assert (tokens < 16).float().mean() == pytest.approx(0.5, abs=0.05)


def test_a_dry_run_measures_the_model_and_writes_nothing(small_model: Path, tmp_path: Path) -> None:
    options = ("--scheme", "gptq:bits=3,group=24", "--rows", "4", "--length", "32", "--dry-run")
    cost = json.loads(succeed("quantize", small_model, tmp_path / "q", *options, "--json").out)
    assert len(cost["layer_seconds"]) == 1
    assert cost["extrapolated"]["layers"] > 1
    assert any("sampling" in sentence for sentence in cost["left_out"])  # no text was given
    overrides = ("--override", "*.layers.0.*=rtn:bits=4,group=24", "--override", "*.layers.1.*=fp16")
    assert "extrapolated" in succeed("quantize", small_model, tmp_path / "q", *options, *overrides).out
    assert not list(tmp_path.iterdir())


def test_a_stage_within_a_stage_counts_for_itself() -> None:
    with recording(CPU) as times:
        with stage(SOLVE), stage(FACTOR):
            sum(range(10**5))
        taken = times.take()
    assert set(taken) == {OTHER, SOLVE, FACTOR}
    assert taken[FACTOR] > taken[SOLVE]
    with stage(SOLVE):  # without a recording
        pass


@pytest.mark.gpu
def test_a_gpu_is_measured_within_a_limit() -> None:
    with pytest.raises(SchemeError):
        bench_quantize("tiny", "gptq", device="cuda", layers=9)
    cost = bench_quantize("tiny", "gptq:bits=3,group=24", device="cuda", layers=2, rows=16, length=64, memory=2 * 10**9)
    assert cost.device_reserved_bytes is not None
    assert 0 < cost.device_reserved_bytes <= 2 * 10**9
    assert cost.memory_plan is not None
    assert cost.memory_plan.states == torch.bfloat16
