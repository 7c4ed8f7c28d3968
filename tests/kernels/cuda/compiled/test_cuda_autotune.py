"""Tile configs that are measured on the machine: what is kept and read, and what measuring a model changes."""

from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from plane_weights import random_weight

from crelle.bench.model_shapes import RandomWeights
from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.executor import CudaExecutor
from crelle.kernels.cuda.planes import bmma_gemv
from crelle.kernels.cuda.planes.bmma_gemv import GemvTileConfig
from crelle.kernels.cuda.planes.weight_layout import CudaWeight, ScaleKind, lay_out
from crelle.kernels.cuda.runtime import autotune, measured_configs
from crelle.kernels.cuda.runtime.measured_configs import Problem, trying
from crelle.kernels.cuda.step import fused_linear
from crelle.models.loader import build

CONFIG = GemvTileConfig(2, 8, 1, 4, 1, 32, 3, 2)


@pytest.fixture
def weight() -> CudaWeight:
    return lay_out(random_weight(ScaleKind.BCQ, 3, 48, 512, 128))


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and nothing read before."""
    monkeypatch.setenv("CRELLE_CACHE", str(tmp_path))
    for cached in (measured_configs._read, measured_configs._path):
        cached.cache_clear()
    yield tmp_path / "kernels"
    for cached in (measured_configs._read, measured_configs._path):
        cached.cache_clear()


@pytest.fixture
def on_a_gpu(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As on a GPU, as far as reading and writing go."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: "NVIDIA H200")
    monkeypatch.setattr(jit, "architecture", lambda: "sm_90a")
    return fresh


def test_without_a_gpu_nothing_is_known(weight: CudaWeight, fresh: Path) -> None:
    assert measured_configs.known() == {} or torch.cuda.is_available()
    assert measured_configs.lookup(weight, 1, "NORM_ENCODE") is None


def test_what_is_kept_is_read_by_the_next_process(weight: CudaWeight, on_a_gpu: Path) -> None:
    problem = Problem.of(weight, 1, "NORM_ENCODE")
    measured_configs.keep({problem: astuple(CONFIG)})
    measured_configs._read.cache_clear()
    assert measured_configs.lookup(weight, 1, "NORM_ENCODE") == astuple(CONFIG)
    assert measured_configs.lookup(weight, 1, "STORE") is None
    assert measured_configs.lookup(weight, 2, "NORM_ENCODE") is None
    other = lay_out(random_weight(ScaleKind.BCQ, 3, 48, 512, 64))
    assert measured_configs.lookup(other, 1, "NORM_ENCODE") is None


def test_two_processes_keep_what_both_measured(weight: CudaWeight, on_a_gpu: Path) -> None:
    first, second = Problem.of(weight, 1, "STORE"), Problem.of(weight, 4, "STORE")
    measured_configs.keep({first: astuple(CONFIG)})
    measured_configs._read.cache_clear()
    measured_configs.known().clear()  # a process that read the file before it was written
    measured_configs.keep({second: astuple(CONFIG)})
    measured_configs._read.cache_clear()
    assert set(measured_configs.known()) == {first, second}


@pytest.mark.parametrize("text", ["", "[[", "{}", '[[["BCQ"], [1, 2, 3, 4, 5, 6, 7, 8]]]', "[[1, 2]]", "[3]", "null"])
def test_a_damaged_file_means_that_nothing_was_measured(weight: CudaWeight, on_a_gpu: Path, text: str) -> None:
    measured_configs.keep({Problem.of(weight, 1, "STORE"): astuple(CONFIG)})
    (file,) = on_a_gpu.glob("tile-configs-*.json")
    file.write_text(text)
    measured_configs._read.cache_clear()
    assert measured_configs.lookup(weight, 1, "STORE") is None


def test_another_gpu_or_other_sources_have_a_file_of_their_own(
    weight: CudaWeight, on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_configs.keep({Problem.of(weight, 1, "STORE"): astuple(CONFIG)})
    for name, value in (("get_device_name", lambda device=0: "NVIDIA L4"), ("toolchain", lambda: "other sources")):
        monkeypatch.setattr(torch.cuda if name == "get_device_name" else jit, name, value)
        measured_configs._read.cache_clear()
        measured_configs._path.cache_clear()
        assert measured_configs.lookup(weight, 1, "STORE") is None


def test_a_config_that_was_measured_is_chosen_in_a_graph_only(weight: CudaWeight, on_a_gpu: Path) -> None:
    measured_configs.keep({Problem.of(weight, 1, "STORE"): astuple(CONFIG)})
    assert bmma_gemv.choose(weight, 1, in_graph=True) == CONFIG
    assert bmma_gemv.choose(weight, 1, processors=132, in_graph=True) != CONFIG  # for a device that is not here


def test_a_trial_counts_in_its_block_and_notes_the_weights(weight: CudaWeight) -> None:
    problem = Problem.of(weight, 1, "STORE")
    with trying({problem: astuple(CONFIG)}) as asked:
        assert bmma_gemv.choose(weight, 1, in_graph=True) == CONFIG
        assert asked == {problem: [weight]}
    assert measured_configs.lookup(weight, 1, "STORE") is None


def test_configs_that_are_tried_fit_the_weight() -> None:
    configs = bmma_gemv.decode_configs()
    assert len(configs) == len(set(configs)) > 8
    wide = lay_out(random_weight(ScaleKind.UNIFORM, 8, 32, 512, 10**6))
    for config in configs:
        fit = bmma_gemv.fitted(config, wide, "SILU_MUL_ENCODE", 132)
        assert fit.tiles % 2 == 0
        assert fit.warps * bmma_gemv._pipeline_bytes(wide, fit) <= 96 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["bcq:bits=3,group=128", "rtn:bits=4,group=32"])
def test_tuning_keeps_the_answers_and_is_done_once(scheme: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_linear, "SMALL", 0)
    config = {
        "model_type": "llama",
        "hidden_size": 1280,
        "intermediate_size": 3328,
        "num_hidden_layers": 3,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    device = torch.device("cuda")
    model = build(RandomWeights(config, scheme, device, seed=3), device)
    kv, c = KVFormat.parse("kv16"), model.spec
    pages = [KVPages.new(kv, 4, c.kv_heads, c.head_size, model.dtype, device) for _ in c.layers]
    executor = CudaExecutor(model, pages, [None] * 3, step=model.cuda_step)
    with torch.inference_mode():
        before = executor.first_step(1)().clone()
        found = autotune.tune(executor, [1, 3], seconds=120)
        assert {problem.M for problem in found} == {1, 4}
        assert len(found) >= 6
        after = executor.first_step(1)()
        assert (after - before).norm() < 0.02 * before.norm()
        assert autotune.tune(executor, [1, 3]) == {}
    measured_configs._read.cache_clear()
    assert measured_configs.known() == found
