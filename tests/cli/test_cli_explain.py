"""crelle explain: on each device its own kernels and executors, also where that device is not there."""

from pathlib import Path

import pytest
import torch
from conftest import write_tiny_model
from in_process import succeed
from random_models import write_random

from crelle import CalibrationData, quantize
from crelle.cli.common import console
from crelle.kernels import cpu

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what is said where there is no GPU")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("explain")
    quantize(write_tiny_model(to / "m", hidden_size=64, head_dim=16), to / "q", "rtn:bits=4,group=32")
    return to / "q"


def test_cuda_is_explained_by_its_own_kernels(quantized: Path) -> None:
    seen = succeed("explain", quantized, "--device", "cuda", "--json").json
    assert seen["device"] == "cuda"
    assert {layer["problem"]["dtype"] for layer in seen["layers"]} == {"float16"}
    coded = [layer for layer in seen["layers"] if layer["problem"]["format"] != "dense"]
    assert {layer["kernel"] for layer in coded} == {"cuda"}
    assert all("runs on the CPU" in layer["others"]["cpu"] for layer in coded)
    assert all(layer["others"]["cuda-lut"] == "supported, but has lower priority" for layer in coded)
    assert (seen["fused"], seen["why_not_fused"]) == (True, None)
    assert {what: found["executor"] for what, found in seen["executors"].items()} == {
        "engine": "cuda-graphs",
        "step": "torch",  # over a contiguous cache
    }
    assert "runs on the CPU, not on cuda" in seen["executors"]["engine"]["others"]["cpu-fused"]


@without_gpu
def test_it_is_said_that_no_gpu_was_seen(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = succeed("explain", quantized, "--device", "cuda", "--json").json
    assert not seen["gpu"]
    assert "no GPU is visible" in seen["note"]
    monkeypatch.setattr(console.out, "width", 200)
    shown = succeed("explain", quantized, "--device", "cuda").out
    assert "no GPU is visible" in shown
    assert "generation and serving: CUDA graphs" in shown
    on_cpu = succeed("explain", quantized, "--device", "cpu", "--json").json
    assert on_cpu["note"] is None


def test_the_cache_decides_which_executor_runs_the_engine_on_cuda(quantized: Path) -> None:
    seen = succeed("explain", quantized, "--device", "cuda", "--kv", "4", "--json").json
    assert seen["executors"]["engine"]["executor"] == "cuda-graphs"
    assert (seen["fused"], seen["why_not_fused"]) == (True, None)
    odd = succeed("explain", quantized, "--device", "cuda", "--kv", "4:page=4", "--json").json
    assert "the paged attention takes pages of" in odd["executors"]["engine"]["others"]["cuda-graphs"]
    assert odd["why_not_fused"] == odd["executors"]["engine"]["others"]["cuda-graphs"]


def test_what_the_step_lacks_is_said_for_each_device(tmp_path: Path) -> None:
    """Heads of 12 channels: no kernel of CUDA attends to them, the C++ step does."""
    path = write_tiny_model(tmp_path / "m")
    on_gpu = succeed("explain", path, "--device", "cuda", "--json").json["executors"]
    on_cpu = succeed("explain", path, "--device", "cpu", "--json").json["executors"]
    assert on_gpu["engine"]["executor"] == on_gpu["step"]["executor"] == "torch"
    assert "heads of" in on_gpu["engine"]["others"]["cuda-graphs"]
    here = "cpu-fused" if cpu.available() is None else "torch"
    assert on_cpu["engine"]["executor"] == on_cpu["step"]["executor"] == here
    assert "need a GPU, not cpu" in on_cpu["engine"]["others"]["cuda-graphs"]


def test_quantized_activations_have_a_kernel_and_the_step_on_cuda(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", hidden_size=64, head_dim=16)
    text = CalibrationData(text="The quick brown fox jumps over the lazy dog. " * 60, rows=4, length=48)
    for scheme, wanted in (("atom:group=32,outliers=32", "cuda-integer"), ("atom:group=24", "integer-reference")):
        quantize(path, tmp_path / "q", scheme, text=text, device="cpu", overwrite=True)
        seen = succeed("explain", tmp_path / "q", "--device", "cuda", "--json").json
        coded = [layer for layer in seen["layers"] if layer["problem"]["format"] != "dense"]
        assert {layer["kernel"] for layer in coded} == {wanted}
        assert seen["fused"] == (wanted == "cuda-integer")
    assert "groups of 32, 64 or a multiple of 128, not of 24" in coded[0]["others"]["cuda-integer"]


def test_experts_that_do_not_fit_a_gpu_are_streamed(quantized: Path, tmp_path: Path) -> None:
    mixture = write_random(tmp_path / "m", "Qwen3Moe")
    said = succeed("explain", mixture, "--device", "cuda", "--json").json["experts"]
    assert f"streamed from host memory; `crelle plan {mixture} --memory SIZE` predicts" in said
    assert "streamed from host memory" in succeed("explain", mixture, "--device", "cuda").out
    assert succeed("explain", mixture, "--device", "cpu", "--json").json["experts"] is None
    assert succeed("explain", quantized, "--device", "cuda", "--json").json["experts"] is None
