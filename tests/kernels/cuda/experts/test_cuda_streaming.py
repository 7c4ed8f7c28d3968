"""Experts streamed from pinned host memory on a real GPU: the same bits as where all are resident, within a limit."""

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from crelle import LLM, Sampling
from crelle.bench.load.no_tokenizer import NoTokenizer
from crelle.bench.model_shapes import RandomWeights, llama_config
from crelle.engine.engine import Engine
from crelle.engine.memory.experts import expert_offload, offload_of
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.errors import CapacityError
from crelle.formats.kv.pages import KVFormat
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.experts import host_memory, streaming
from crelle.kernels.cuda.experts.host_memory import ExpertOffload
from crelle.models.loader import build

pytestmark = pytest.mark.gpu
CONFIG: dict[str, Any] = {
    **llama_config(512, 3, 4, 1024, kv_heads=2, vocabulary=1000, context=2048),
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "moe_intermediate_size": 256,
}
MIB = 1 << 20


def llm_of(room: int | None) -> LLM:
    """Load; room: bytes on the GPU for weights and slots, None: everything is resident."""
    weights, device = RandomWeights(CONFIG, "rtn:bits=4,group=128", "cuda"), torch.device("cuda")
    offload = None if room is None else ExpertOffload(room, device, fits=0, host_free=lambda: 1 << 40)
    return LLM(build(weights, device, offload=offload), cast(Tokenizer, NoTokenizer()), weights)


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def answers(llm: LLM, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    engine = Engine(llm, pages=600, max_batch=16, budget=1024, batch_invariant=True, **options)
    executor = engine.runner.cuda_executor(None)
    assert executor is not None
    jit.compile_all(sorted(executor.kernels(range(1, 17), [3, 20, 77, 300, 450, 900])))
    found = list[list[int]]()
    for some in (prompts[:1], prompts[1:], prompts):  # alone, in a batch, and from the prefix cache
        handles = [engine.add(p, Sampling(max_tokens=24), ignore_end=True) for p in some]
        engine.run()
        found += [h.outputs[0].completion.tokens for h in handles]
    assert engine.stats.failed == 0
    return found


@pytest.mark.parametrize("speculate", ["off", "ngram"])
@pytest.mark.parametrize("room", [20 * MIB, 26 * MIB])
def test_answers_are_the_same_bits_as_with_resident_experts(
    room: int, speculate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "INTERVAL", 2)
    rng = random.Random(0)
    prompts = [[rng.randrange(1000) for _ in range(n)] * 2 for n in (3, 20, 77, 300, 450)]
    wanted = answers(llm_of(None), prompts, speculate=speculate)
    llm = llm_of(room)
    offload = offload_of(llm.model)
    assert offload is not None
    assert 0.05 < offload.share < 0.7
    assert answers(llm, prompts, speculate=speculate) == wanted
    assert offload.streams.uses > 0
    assert (offload.streams.hits > 0) == (offload.slot_bytes > 0)


def test_experts_change_places_while_steps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is checked between steps: it names the block, or the slot that holds the same bytes."""
    monkeypatch.setattr(streaming, "INTERVAL", 1)
    monkeypatch.setattr("crelle.kernels.cuda.experts.slots.SIGMAS", 0.5)
    llm = llm_of(20 * MIB)
    wanted = llm_of(None).generate([5], Sampling(max_tokens=200)).tokens
    assert llm.generate([5], Sampling(max_tokens=200)).tokens == wanted
    offload = offload_of(llm.model)
    assert offload is not None
    assert offload.streams.swapped > 0
    torch.cuda.synchronize()
    for layer in offload.streams.layers:
        table = layer.e.table.cpu()
        for expert, slot in layer.policy.resident.items():
            assert torch.equal(table[expert], layer.row(expert, slot))
            assert torch.equal(layer.slots[slot].cpu(), layer.blocks[expert])
        for expert in set(range(32)) - set(layer.policy.resident) - set(layer.policy.coming.values()):
            assert torch.equal(table[expert], layer.row(expert, None))


def test_layers_on_disk_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SPILLS", True)
    rng = random.Random(2)
    prompts = [[rng.randrange(1000) for _ in range(n)] for n in (3, 300)]
    wanted, free = answers(llm_of(None), prompts), iter([1 << 40, 0, 0])  # the first layer is in host memory
    weights, device = RandomWeights(CONFIG, "rtn:bits=4,group=128", "cuda"), torch.device("cuda")
    offload = ExpertOffload(20 * MIB, device, fits=0, host_free=lambda: next(free), disk=tmp_path)
    llm = LLM(build(weights, device, offload=offload), cast(Tokenizer, NoTokenizer()), weights)
    assert [layer.on_disk for layer in offload.layers.values()] == [False, True, True]
    assert "2 of 3 layers, which are read from disk" in str(offload)
    assert answers(llm, prompts) == wanted
    assert offload.streams.on_disk


def test_loading_and_serving_stay_within_the_limit() -> None:
    config = {**CONFIG, "hidden_size": 1024, "moe_intermediate_size": 1024, "num_hidden_layers": 8, "num_experts": 64}
    weights, device = RandomWeights(config, "rtn:bits=4,group=128", "cuda"), torch.device("cuda")
    limit, kv = 900 * 10**6, KVFormat.parse("16")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    llm = LLM(
        build(weights, device, offload=expert_offload(weights, device, limit, kv)),
        cast(Tokenizer, NoTokenizer()),
        weights,
    )
    llm.memory = limit
    offload = offload_of(llm.model)
    assert offload is not None
    assert torch.cuda.max_memory_allocated() - before <= limit
    engine = Engine(llm, max_batch=8)
    assert engine.plan.total <= limit
    assert engine.plan.reason == "set by --memory"
    rng = random.Random(1)
    for n in (5, 100, 700, 900):
        engine.add([rng.randrange(1000) for _ in range(n)], Sampling(max_tokens=32), ignore_end=True)
    engine.run()
    assert engine.stats.failed == 0
    assert engine.stats.expert_uses > engine.stats.expert_hits > 0
    assert torch.cuda.max_memory_allocated() - before <= limit


def test_the_model_runs_layer_by_layer_too() -> None:
    ids = torch.randint(1000, (1, 8), device="cuda")
    resident, streamed = llm_of(None).model, llm_of(20 * MIB).model
    assert torch.equal(resident(ids, resident.new_cache()), streamed(ids, streamed.new_cache()))


def test_too_little_memory_is_refused_in_a_sentence() -> None:
    with pytest.raises(CapacityError, match="the weights outside the experts take"):
        llm_of(1 * MIB)
