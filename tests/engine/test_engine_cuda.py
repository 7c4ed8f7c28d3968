"""The engine on a GPU: graphs, steps that are started ahead, few pages; everybody gets what one alone gets."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch

from crelle import LLM, Sampling
from crelle.bench.load.model_sources import random_llm
from crelle.engine.async_engine import AsyncEngine
from crelle.engine.engine import Engine
from crelle.engine.speculation.draft_model import Draft
from crelle.formats.kv.pages import KVFormat
from crelle.kernels import cuda

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))]
WORDS = 49152


@cache
def llm(scheme: str) -> LLM:
    return random_llm("smollm2-135m", scheme, torch.device("cuda"), layers=3)


def prompts(n: int) -> list[list[int]]:
    torch.manual_seed(7)
    return [torch.randint(WORDS, (int(size),)).tolist() for size in torch.randint(1, 60, (n,))]


def alone(model: LLM, prompt: list[int], tokens: int, **options: Any) -> list[int]:
    engine = Engine(model, pages=32, batch_invariant=True, speculate="off", **options)
    handle = engine.add(prompt, Sampling(max_tokens=tokens), ignore_end=True)
    assert sum(event.token is not None for event in handle) == tokens
    return handle.outputs[0].completion.tokens


@pytest.mark.parametrize("speculate", ["off", "ngram:adaptive=false"])
@pytest.mark.parametrize("kv", ["16", "8", "4"])
@pytest.mark.parametrize("scheme", ["rtn:bits=4,group=64", "fp16"])
def test_greedy_texts_are_the_same_alone_and_in_any_batch(scheme: str, kv: str, speculate: str) -> None:
    model = llm(scheme)
    sizes: dict[str, Any] = {"pages": 100, "watermark": 0, "max_batch": 20, "budget": 48}  # some must make way
    engine = Engine(model, kv=kv, batch_invariant=True, speculate=speculate, **sizes)
    started, start = 0, engine.runner.start

    def counted(step: Any) -> Any:
        nonlocal started
        started += 1
        return start(step)

    engine.runner.start = counted  # type: ignore[method-assign]
    asked, handles = prompts(20), []
    for i, prompt in enumerate(asked):
        handles.append(engine.add(prompt, Sampling(max_tokens=64 + i % 3), ignore_end=True))
        for _ in range(i % 3):
            engine.step()
    engine.run()
    assert started == engine.stats.steps
    assert (engine.stats.tokens_drafted > 0) == (speculate != "off")
    assert sum(handle.outputs[0].preemptions for handle in handles) > 0
    for i, (prompt, handle) in enumerate(zip(asked, handles, strict=True)):
        assert handle.outputs[0].completion.tokens == alone(model, prompt, 64 + i % 3, kv=kv)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_draft_model_that_is_the_model_is_mostly_right(batch: int) -> None:
    """Its guesses stay on the device, four a step; answers are those without, and nearly all guesses are them."""
    model = random_llm("smollm2-135m", "rtn:bits=4,group=64", torch.device("cuda"), layers=3)
    model.draft = Draft(model.model, "itself")
    engine = Engine(model, pages=64, max_batch=4, batch_invariant=True, speculate="draft:tokens=4,adaptive=false")
    asked = prompts(batch)
    handles = [engine.add(prompt, Sampling(max_tokens=40 + 9 * i), ignore_end=True) for i, prompt in enumerate(asked)]
    engine.run()
    for i, (prompt, handle) in enumerate(zip(asked, handles, strict=True)):
        assert handle.outputs[0].completion.tokens == alone(model, prompt, 40 + 9 * i)
    assert engine.stats.tokens_accepted > 0.6 * engine.stats.tokens_drafted > 0


def test_graphs_that_verify_are_captured_and_timed_before_the_first_request() -> None:
    model = llm("rtn:bits=4,group=64")
    engine = Engine(model, pages=64, max_batch=4, batch_invariant=True, speculate="ngram:adaptive=false")
    engine.warm_up()
    executor = engine.runner.cuda_executor(None)
    assert executor is not None
    assert set(executor.prepare_verification(16)) == {0, 2, 4, 8, 16}
    assert all(0 < seconds < 0.01 for seconds in executor.prepare_verification(16).values())
    captures = executor.captures
    engine.add([1, 2, 3] * 9, Sampling(max_tokens=40), ignore_end=True)
    engine.run()
    assert engine.stats.tokens_accepted > 0
    assert executor.captures == captures


def test_who_samples_is_waited_for_and_changes_nobody_else() -> None:
    model = llm("rtn:bits=4,group=64")
    engine = Engine(model, kv="4", pages=200, batch_invariant=True)
    asked = prompts(6)
    plain = [engine.add(prompt, Sampling(max_tokens=16), ignore_end=True) for prompt in asked]
    warm = engine.add(asked[0], Sampling(max_tokens=5, temperature=1.0, seed=3), logprobs=2, ignore_end=True)
    engine.run()
    assert len(warm.outputs[0].logprobs or ()) == 5
    for prompt, handle in zip(asked, plain, strict=True):
        assert handle.outputs[0].completion.tokens == alone(model, prompt, 16, kv="4")


def test_memory_stays_within_the_budget() -> None:
    model = llm("rtn:bits=4,group=64")
    alone(model, prompts(1)[0], 2, kv="4")  # makes the dequantized copies of small matrices, which the plan counts
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # the weights among it
    engine = Engine(model, kv="4", memory="400MB", max_batch=64, budget=256)
    for prompt in prompts(70):
        engine.add(prompt, Sampling(max_tokens=20), ignore_end=True)
    engine.run()
    assert engine.stats.failed == 0
    assert engine.plan.total <= 400_000_000
    assert engine.plan.weights + torch.cuda.max_memory_allocated() - before <= 400_000_000


@pytest.mark.parametrize("kv", ["16", "4"])
def test_threads_on_one_model_get_what_one_alone_gets(kv: str) -> None:
    """Single prompts, whose caches share graphs, beside a service over the same model."""
    model = llm("rtn:bits=4,group=64")
    model.kv = KVFormat.parse(kv)
    sampling, asked = Sampling(max_tokens=24), prompts(12)
    wanted = [model.generate(prompt, sampling).tokens for prompt in asked]
    served = [alone(model, prompt, 24, kv=kv) for prompt in asked[:4]]

    def ask(i: int) -> list[int]:
        return model.generate(asked[i % 12], sampling).tokens

    with AsyncEngine(Engine(model, kv=kv, pages=200, batch_invariant=True)) as service, ThreadPoolExecutor(4) as pool:
        handles = [service.submit(prompt, sampling, ignore_end=True) for prompt in asked[:4] * 3]
        found = list(pool.map(ask, range(48)))
        tokens = [[event.token for event in handle if event.token is not None] for handle in handles]
    assert found == wanted * 4
    assert tokens == served * 3
