"""Which kernels a batch launches, found without a GPU and without launching any: what is compiled ahead of a run."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded_gpu import pretend

from crelle.bench.compile_ahead import compile_ahead
from crelle.bench.model_shapes import RandomWeights
from crelle.engine import compile_ahead as ahead
from crelle.engine.compile_ahead import prompt_sizes
from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels.cuda import executor, jit, launch
from crelle.kernels.cuda.executor import CudaExecutor
from crelle.kernels.cuda.step.graph_inputs import BUCKETS
from crelle.models.loader import Model, build

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
ATOM = "atom:w=4,a=4,group=128,outliers=128"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


def make(kv: str = "kv4", layers: int = 2) -> tuple[Model, CudaExecutor]:
    model = build(RandomWeights({**LLAMA, "num_hidden_layers": layers}, ATOM, CPU), CPU, dtype=torch.float16)
    c, fmt = model.spec, KVFormat.parse(kv)
    pages = [KVPages.new(own, 4, c.kv_heads, c.head_size, model.dtype, CPU) for own in fmt.layers(layers)]
    return model, CudaExecutor(model, pages, [None] * layers)


def names(kernels: set[tuple[str, str]]) -> set[str]:
    return {expression.removeprefix("crelle::").partition("<")[0] for _, expression in kernels}


def test_kernels_are_found_without_a_gpu() -> None:
    _, batch = make()
    found = batch.kernels([128], [40])
    assert {"integer_encode", "integer_gemm_sm90", "paged_append_8lane", "paged_attend", "greedy", "embed"} <= names(
        found
    )
    assert batch.kernels([128], []) < found  # prompts have GEMMs of their own size
    assert batch.kernels([1], []) != batch.kernels([128], [])


def test_all_buckets_and_prompts_need_few_kernels() -> None:
    _, batch = make()
    assert len(batch.kernels(BUCKETS, range(2, 400))) < 120


def test_a_layer_of_an_integer_model_is_ten_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode and GEMM four times, append and attention: nothing between them, and each may overlap the one before."""
    found = list[tuple[str, dict[str, Any]]]()
    monkeypatch.setattr(launch._SkippedKernel, "__call__", lambda self, *_, **options: found.append(options))
    each = []
    for layers in (1, 3):
        found.clear()
        _, batch = make(layers=layers)
        graph = executor._Graph(batch, 128, batch._inputs, verifies=False)
        with launch.recording(), torch.inference_mode():
            graph.run_eagerly()
        each.append(len(found))
        assert all(options.get("pdl") for options in found)
    assert (each[1] - each[0]) / 2 == 10


def test_what_an_engine_launches_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the prompts that it is checked with, and the pass that it is compared with."""
    compiled = list[tuple[str, str]]()
    monkeypatch.setattr(jit, "compile_all", lambda kernels, progress: compiled.extend(kernels))
    monkeypatch.setattr(ahead, "on_gpu", lambda model: True)
    model, batch = make("k4v2")
    runner = SimpleNamespace(cuda_executor=lambda bits: batch)
    speculator = SimpleNamespace(settings=SimpleNamespace(method="off"), draft=None)
    engine: Any = SimpleNamespace(
        runner=runner, llm=SimpleNamespace(model=model), kv=KVFormat.parse("k4v2"), speculator=speculator
    )
    count, seconds = compile_ahead(engine, [128], 64)
    assert count == len(set(compiled)) == len(compiled)
    assert seconds > 0
    assert set(compiled) > batch.kernels([1, 2, 128], prompt_sizes(64))
    assert "key_centers" not in vars(model)  # found by a pass that computes nothing they would be kept wrong
    assert not getattr(launch._recorded, "kernels", None)
