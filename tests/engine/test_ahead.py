"""Steps that are started before the last one's tokens are known: everybody still gets what one alone gets.

On a GPU the runner keeps tokens to itself (`ModelRunner.start`). Here a runner on the CPU does, by the same interface.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import quantized_copy, write_tiny_model
from emulated_cuda import emulate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_single import GREEDY, TEXTS, WARM, alone, assert_all_as_alone, tokens
from sampled_cases import share_of

from crelle import LLM
from crelle.engine.engine import Engine, Handle
from crelle.engine.model_runner import ModelRunner
from crelle.engine.requests.sequence import Sequence as Text
from crelle.engine.scheduler import UNKNOWN, Step


@pytest.fixture(scope="module")
def nested(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Three precisions; tokens that come often end a text."""
    to = tmp_path_factory.mktemp("nested") / "q"
    quantized_copy(tiny_model, to, "bcq-nested:bits=4,group=24,data=false")
    llm = LLM.load(to, device="cpu")
    often = [alone(llm, text, replace(GREEDY, max_tokens=20))[0] for text in TEXTS[:3]]
    llm.end_ids = frozenset({*llm.end_ids, *(ids[-1] for ids in often)})
    return llm


@dataclass
class Told:
    """Tokens that are there when one asks for them, unless the device failed."""

    found: Sequence[int]
    error: Exception | None = None

    def tokens(self) -> list[int]:
        if self.error:
            raise self.error
        return list(self.found)


class Late(ModelRunner):
    """Computes at once, but tells tokens only when asked; knows those that the engine does not."""

    drawn: dict[Text, int]
    failing = ""
    started = 0

    def starts(self, step: Step) -> bool:
        return True

    def start(self, step: Step) -> Any:
        if self.failing == "start":
            raise RuntimeError("the device has fallen off the bus")
        unknown = [run.sequence for run in step.chunks if run.sequence.ids[-1] == UNKNOWN]
        for s in unknown:
            s.ids[-1] = self.drawn[s]
        logits = self.run(step)
        for s in unknown:
            s.ids[-1] = UNKNOWN
        tokens = logits.argmax(-1).tolist()
        self.drawn = {} if step.drafted else dict(zip(step.samples, tokens, strict=True))
        self.started += 1
        return Told(tokens, RuntimeError("the device is lost") if self.failing == "tokens" else None)


def late(llm: LLM, **options: Any) -> Engine:
    engine = Engine(llm, **options)
    engine.runner.__class__ = Late
    engine.runner.drawn = {}  # type: ignore[attr-defined]
    return engine


def heard(handle: Handle, events: list[Any]) -> list[list[int]]:
    """The tokens of all events of a request, by text."""
    return [[e.token for e in events if e.index == i and e.token is not None] for i in range(handle.request.n)]


@patch("crelle.engine.faults.FAILED_STEPS", 10**9)  # faults in a row are part of it
@settings(max_examples=share_of(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_traffic_gives_everyone_the_tokens_of_one_alone(nested: LLM, data: st.DataObject) -> None:
    """Few pages, arrivals at any step, cancellations, faults, stop strings, end tokens, drafts, some need logits."""
    kv = data.draw(st.sampled_from(["16:page=4", "4:page=4"]), label="kv")
    pages, max_batch = data.draw(st.integers(14, 30), label="pages"), data.draw(st.integers(3, 6), label="batch")
    budget, spare = data.draw(st.integers(max_batch, 24), label="budget"), data.draw(st.integers(0, 1))
    guess = data.draw(st.sampled_from(["off", "ngram:tokens=3,adaptive=false"]), label="speculate")
    options = {"max_batch": max_batch, "budget": budget, "watermark": spare, "speculate": guess}
    engine = late(nested, kv=kv, pages=pages, **options)
    asked: list[tuple[Any, Handle, list[Any]]] = []
    for _ in range(data.draw(st.integers(1, 25), label="rounds")):
        what = data.draw(st.sampled_from(["add", "add", "step", "step", "step", "cancel", "start", "tokens"]))
        if what == "add":
            length, stop = data.draw(st.integers(1, 16)), data.draw(st.sampled_from([(), ("e",), ("t", "zz")]))
            sampling = replace(data.draw(st.sampled_from([GREEDY, GREEDY, WARM])), max_tokens=length, stop=stop)
            n, bits = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([None, 2, 4]))
            key, events = (data.draw(st.sampled_from(TEXTS)), sampling, n, bits), list[Any]()
            asked.append((key, engine.add(*key[:2], n=n, bits=bits, on_event=events.append), events))
        elif what == "cancel" and asked:
            data.draw(st.sampled_from(asked))[1].cancel()
        else:
            engine.runner.failing = what  # type: ignore[attr-defined]
            engine.step()
    engine.runner.failing = ""  # type: ignore[attr-defined]
    engine.run()
    for _, handle, events in asked:
        assert heard(handle, events) == tokens(handle)
    assert_all_as_alone(engine, [(key, handle) for key, handle, _ in asked])


def test_the_next_step_is_started_before_tokens_are_asked_for(nested: LLM) -> None:
    engine = late(nested, kv="16", pages=64, speculate="off")
    handle, events = engine.add("Hello", GREEDY, ignore_end=True), list[str]()
    start = engine.runner.start

    def noted(step: Step) -> Any:
        told = start(step)
        events.append("start")
        ask = told.tokens
        told.tokens = lambda: events.append("ask") or ask()  # type: ignore[attr-defined,func-returns-value]
        return told

    engine.runner.start = noted  # type: ignore[method-assign]
    engine.run()
    assert events == ["start", *["start", "ask"] * (GREEDY.max_tokens - 1), "ask"]
    assert tokens(handle) == alone(nested, "Hello", GREEDY, ignore_end=True)


def test_who_needs_logits_is_drawn_for_with_logits(nested: LLM) -> None:
    engine = late(nested, kv="16", pages=64)
    plain, warm = engine.add("Hello", GREEDY), engine.add("Hello", replace(WARM, max_tokens=4))
    told = engine.add("a", GREEDY, logprobs=2)
    engine.run()
    assert tokens(plain) == alone(nested, "Hello", GREEDY)
    assert tokens(warm) == alone(nested, "Hello", replace(WARM, max_tokens=4))
    assert tokens(told) == alone(nested, "a", GREEDY)
    assert len(told.outputs[0].logprobs or ()) == len(tokens(told)[0])
    assert torch.tensor([p.logprob for p in told.outputs[0].logprobs or ()]).le(0).all()


def test_a_prompt_longer_than_the_budget_runs_without_sampling_in_its_first_steps(
    nested: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps in which nothing samples, and steps that mix chunks of a prompt with sequences that do."""
    prompts = [list(range(2, 60)), [7], list(range(90, 20, -1))]
    wanted = [alone(nested, prompt, GREEDY) for prompt in prompts]
    emulate(monkeypatch)
    for budget in (16, 17, 57, 59):
        engine = Engine(nested, kv="16", pages=64, max_batch=4, budget=budget)
        handles = []
        for prompt in prompts:  # the first step has one prompt alone
            handles.append(engine.add(prompt, GREEDY))
            engine.step()
        engine.run()
        assert [handle.outputs[0].error for handle in handles] == [None] * 3
        assert [tokens(handle) for handle in handles] == wanted


def test_a_cache_grows_while_a_token_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that were sampled last lie in buffers that go away with the old pages."""
    llm = LLM.load(write_tiny_model(tmp_path, max_position_embeddings=512), device="cpu", threads=1)
    llm.end_ids = frozenset()
    long = replace(GREEDY, max_tokens=150)
    want = Engine(llm, pages=32, max_batch=1).add("Hello", long)
    list(want)
    emulate(monkeypatch)
    engine = Engine(llm, pages=1, max_pages=32, max_batch=1)
    handle = engine.add("Hello", long)
    engine.run()
    assert engine.blocks.pages > 8
    assert tokens(handle) == tokens(want)
