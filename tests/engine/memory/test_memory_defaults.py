"""What an engine takes where its user did not say: of a GPU, of a CPU, of a machine with too little."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import write_tiny_model

from crelle import LLM, Sampling
from crelle.bench.model_shapes import config_of
from crelle.engine.engine import Engine
from crelle.engine.memory import defaults
from crelle.engine.memory.defaults import choose_plan
from crelle.engine.memory.machine import FreeMemory
from crelle.engine.memory.plan import MemoryPlan
from crelle.engine.offline import generate_all
from crelle.errors import CapacityError
from crelle.formats.kv.pages import KVFormat
from crelle.kernels.cuda.step.decode_step import supports
from crelle.models.families.llama import FAMILY as LLAMA
from crelle.models.loader import Model

GB, GIB = 10**9, 1 << 30


def described(shape: str, device: str, weights: int, **changes: Any) -> Model:
    """A model that is not there: sizes alone."""
    one, table = SimpleNamespace(prepared=SimpleNamespace(data=SimpleNamespace(nbytes=weights)), bias=None), object()
    return cast(
        Model,
        SimpleNamespace(
            spec=LLAMA.spec({**config_of(shape), **changes}),
            device=torch.device(device),
            dtype=torch.float16,
            decoder=None,
            linears=lambda: [one],
            modules=list,
            layers=[],
            embedding=SimpleNamespace(weight=table),
            head=SimpleNamespace(weight=table),
        ),
    )


def on_gpu(shape: str, weights: int, free: int, kv: str = "16", **options: Any) -> MemoryPlan:
    changes = {k: options.pop(k) for k in list(options) if k == "max_position_embeddings"}
    model = described(shape, "cuda", weights, **changes)
    return choose_plan([model], KVFormat.parse(kv), free=FreeMemory(free, "on cuda:0"), **options)


def on_cpu(shape: str, weights: int, free: int, kv: str = "16", **options: Any) -> MemoryPlan:
    changes = {k: options.pop(k) for k in list(options) if k == "max_position_embeddings"}
    model = described(shape, "cpu", weights, **changes)
    return choose_plan([model], KVFormat.parse(kv), free=FreeMemory(free, "on this machine"), **options)


def test_a_gpu_gives_90_percent_of_its_free_memory() -> None:
    it = on_gpu("llama2-7b", 4 * GB, 136 * GB)
    assert it.total <= 126 * GB < it.total + it.page_bytes, "weights that are loaded count as free, and as ours"
    assert it.reason == "90% of the 140 GB free on cuda:0 (--memory to change)"
    assert (it.max_batch, it.budget) == (it.tokens // 1024, 2048)
    assert 200 < it.max_batch <= 256
    assert it.working < 0.02 * it.total
    assert on_gpu("llama2-7b", 4 * GB, 136 * GB, kv="4").max_batch == 256


@pytest.mark.parametrize(("free", "batch", "budget"), [(20 * GB, 32, 2048), (7 * GB, 32, 1024), (2 * GB, 32, 512)])
def test_a_small_gpu_has_a_smaller_batch_and_step(free: int, batch: int, budget: int) -> None:
    it = on_gpu("llama2-7b", 4 * GB, free)
    assert (it.max_batch, it.budget) == (batch, budget)
    assert it.total <= 0.9 * (free + 4 * GB)
    assert it.working <= it.total / 4


def test_a_model_of_short_contexts_leaves_the_rest_of_a_gpu_alone() -> None:
    it = on_gpu("smollm2-135m", GB // 10, 136 * GB)
    assert it.max_batch == 256
    assert it.tokens == 256 * (8192 + 16), "256 whole contexts, and the page that each may need next"
    assert it.reason.startswith(
        "enough for 256 whole contexts, less than the limit of 122 GB (90% of the 136 GB free on cuda"
    )


def test_limits_that_are_given_are_kept() -> None:
    it = on_gpu("llama2-7b", 4 * GB, 136 * GB, memory="24GB", max_batch=17, budget=300)
    assert (it.max_batch, it.budget) == (17, 300)
    assert it.total <= 24 * GB < it.total + it.page_bytes
    assert it.reason == "set by --memory"
    assert on_gpu("llama2-7b", 4 * GB, 136 * GB, budget=64).max_batch == 64, "a token of a step for each sequence"
    assert on_gpu("llama2-7b", 4 * GB, 136 * GB, max_batch=4000).budget == 4000
    assert on_gpu("llama2-7b", 4 * GB, 136 * GB, pages=10).pages == 10


def test_more_than_there_is_is_refused() -> None:
    for plan in (on_gpu, on_cpu):
        with pytest.raises(CapacityError, match=r"a memory limit of 24 GB is more than the 20 GB free on .*`memory`"):
            plan("llama2-7b", 4 * GB, 16 * GB, memory="24GB")


def test_weights_that_fill_a_gpu_are_a_sentence() -> None:
    with pytest.raises(CapacityError, match=r"leaves no room for the KV cache: the weights take 13\.5 GB"):
        on_gpu("llama2-7b", 13_500_000_000, GB)


@pytest.mark.parametrize("free", [GIB, 8 * GIB, 30 * GIB, 1000 * GIB])
def test_the_cache_takes_a_quarter_of_a_cpus_free_memory_at_most(free: int) -> None:
    it = on_cpu("llama3-8b", 5 * GB, free, max_position_embeddings=131072)
    assert it.cache <= free / 4, "not even where one whole context takes 16 GiB"
    assert it.cache <= 16 * GIB
    assert it.cache + it.page_bytes > min(free / 4, 16 * GIB)
    assert (it.max_batch, it.budget) == (32, 512)
    assert it.tokens < 131072 or free == 1000 * GIB


def test_the_cache_of_a_cpu_is_no_larger_than_its_batch_needs() -> None:
    assert on_cpu("smollm2-135m", GB // 10, 100 * GIB).cache <= 4 * GIB
    assert on_cpu("smollm2-135m", GB // 10, 100 * GIB, max_batch=2).tokens == 2 * (8192 + 16)


def test_a_cpu_without_room_for_one_step_says_so() -> None:
    with pytest.raises(CapacityError, match="leaves no room for the KV cache"):
        on_cpu("llama3-8b", 5 * GB, 10_000_000)


def test_scarce_memory_has_fewer_sequences_before_it_has_none() -> None:
    batches = [
        on_cpu("llama3-8b", 5 * GB, 2**30, memory=5 * GB + more).max_batch for more in (400 * 10**6, 240 * 10**6)
    ]
    assert batches == [32, 8]


@pytest.mark.parametrize("plan", [on_gpu, on_cpu])
def test_a_context_of_a_billion_tokens_gets_the_pages_that_fit(plan: Any) -> None:
    it = plan("llama2-7b", 4 * GB, 36 * GB, max_position_embeddings=1 << 30)
    assert it.context == 1 << 30
    assert 0 < it.total <= 36 * GB
    assert it.pages * it.page_bytes <= 32 * GB


def test_tables_of_a_billion_positions_are_not_made_on_a_gpu() -> None:
    endless = described("llama2-7b", "cuda", GB, max_position_embeddings=1 << 30).spec
    assert "tables of the angles of up to 4194304 positions, not 1073741824" in (supports(endless, torch.float16) or "")


def test_a_list_of_prompts_gets_the_pages_it_needs() -> None:
    it = on_gpu("llama2-7b", 4 * GB, 136 * GB, lengths=[100, 20, 5000])
    assert (it.max_batch, it.budget) == (3, 2048)
    assert it.pages == 7 + 2 + 256 + 3, "no sequence is longer than the context"
    assert it.reason == "enough for 3 sequences"
    many = on_gpu("llama2-7b", 4 * GB, 136 * GB, lengths=[2048] * 1000)
    assert many.max_batch > 200
    assert many.total <= 126 * GB
    long = on_cpu("llama3-8b", 5 * GB, 20 * GIB, lengths=[60_000], max_position_embeddings=131072)
    assert long.tokens >= 60_000, "more than a quarter, since it is known that it will be needed"
    assert long.cache <= 20 * GIB


def fake_free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(defaults, "free_memory", lambda device: FreeMemory(size, "on this machine"))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = write_tiny_model(tmp_path_factory.mktemp("endless") / "m", max_position_embeddings=1 << 30)
    return LLM.load(path, device="cpu")


def test_the_default_plan_is_what_is_allocated(endless: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_free(monkeypatch, 12_000_000)
    engine = Engine(endless, kv=4)
    assert engine.runner.nbytes == engine.plan.cache <= 3_000_000 < engine.plan.cache + engine.plan.page_bytes
    assert engine.blocks.pages == engine.plan.pages
    assert (engine.scheduler.max_batch, engine.scheduler.budget) == (engine.plan.max_batch, engine.plan.budget)
    assert engine.plan.reason == "a cache of a quarter of the 12 MB free on this machine (--memory to change)"


def test_requests_longer_than_the_cache_are_refused_and_others_served(
    endless: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_free(monkeypatch, 12_000_000)
    engine = Engine(endless)
    handle = engine.add("Hello", Sampling(max_tokens=4))
    engine.run()
    assert handle.outputs[0].error is None
    with pytest.raises(
        CapacityError, match=r"need \d+ pages of 16 tokens, but the whole cache has \d+; shorten the prompt"
    ):
        engine.add([1] * engine.plan.tokens, Sampling(max_tokens=4))
    with pytest.raises(CapacityError, match="the whole cache has"):
        endless.generate([1] * 3_000_000)
    with pytest.raises(CapacityError, match="the whole cache has"):
        endless.generate("Hello", Sampling(max_tokens=1 << 29))
    with pytest.raises(CapacityError, match="the whole cache has"):
        generate_all(endless, ["Hello"], Sampling(max_tokens=1 << 29))


def test_one_prompt_and_a_list_get_the_same_from_an_endless_context(endless: LLM) -> None:
    sampling = Sampling(max_tokens=5)
    assert endless.generate(["Hello", "there"], sampling)[0].tokens == endless.generate("Hello", sampling).tokens


def test_an_engine_that_may_not_grow_enough_is_not_kept_for_longer_prompts(
    endless: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = endless.generate("Hello", Sampling(max_tokens=2)).tokens
    endless._idle.clear()
    with monkeypatch.context() as scarce:
        fake_free(scarce, 100_000)
        assert endless.generate("Hello", Sampling(max_tokens=2)).tokens == one
        with pytest.raises(CapacityError, match="the whole cache has"):
            endless.generate([1] * 400)
    assert len(endless.generate([1] * 400, Sampling(max_tokens=2)).tokens) == 2
