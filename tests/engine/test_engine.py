"""The engine: whatever the batch, the pages and the faults, a request gets what it would get alone."""

import gc
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import quantized_copy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_single import GREEDY, TEXTS, WARM, alone, assert_all_as_alone, assert_empty, tokens
from sampled_cases import share_of

from crelle import LLM, Sampling
from crelle.engine.async_engine import AsyncEngine
from crelle.engine.engine import Engine, Handle
from crelle.engine.offline import generate_all
from crelle.engine.requests.output import Event, QueueFullError
from crelle.engine.scheduler import Step
from crelle.errors import CapacityError, CrelleError, SchemeError, UnsupportedError


@pytest.fixture(scope="module")
def llm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """4 bits, with a tokenizer of bytes and a context of 96."""
    to = tmp_path_factory.mktemp("quantized") / "q"
    quantized_copy(tiny_model, to, "rtn:bits=4,group=24")
    return LLM.load(to, device="cpu")


@pytest.fixture(scope="module")
def nested(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    to = tmp_path_factory.mktemp("nested") / "q"
    quantized_copy(tiny_model, to, "bcq-nested:bits=4,group=24,data=false")
    return LLM.load(to, device="cpu")


def reasons(handle: Handle) -> list[str]:
    return [output.completion.finish_reason for output in handle.outputs]


# Equality -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["16", "8", "4:page=5"])
def test_a_request_gets_the_same_tokens_alone_and_in_a_batch(llm: LLM, kv: str) -> None:
    engine = Engine(llm, kv=kv, pages=100, budget=40)
    samplings = [GREEDY, WARM]
    handles = [(t, s, engine.add(t, s)) for s in samplings for t in TEXTS]
    engine.run()
    for text, sampling, handle in handles:
        assert tokens(handle) == alone(llm, text, sampling, kv=kv)
    assert_empty(engine)


def test_greedy_tokens_are_those_of_generate(llm: LLM) -> None:
    found = generate_all(llm, TEXTS, GREEDY)
    for text, completion in zip(TEXTS, found, strict=True):
        one = llm.generate(text, GREEDY)
        said = (completion.text, completion.tokens, completion.finish_reason, completion.prompt_tokens)
        assert said == (one.text, one.tokens, one.finish_reason, one.prompt_tokens)


@patch("crelle.engine.faults.FAILED_STEPS", 10**9)  # faults in a row are part of it
@settings(deadline=None, max_examples=share_of(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_traffic_gives_everyone_the_tokens_of_one_alone(llm: LLM, nested: LLM, data: st.DataObject) -> None:
    """Few pages, small budgets, arrivals at any step, cancellations, faults, n texts, three precisions."""
    kv = data.draw(st.sampled_from(["16:page=4", "4:page=4"]), label="kv")
    pages, max_batch = data.draw(st.integers(14, 30), label="pages"), data.draw(st.integers(3, 6), label="batch")
    budget = data.draw(st.integers(max_batch, 24), label="budget")
    engine = Engine(
        nested, kv=kv, pages=pages, max_batch=max_batch, budget=budget, watermark=data.draw(st.integers(0, 1))
    )
    compute, failing = engine.runner.run, False

    def run(step: Step) -> torch.Tensor:
        if failing:
            raise RuntimeError("the device has fallen off the bus")
        return compute(step)

    engine.runner.run = run  # type: ignore[method-assign]
    asked: list[tuple[Any, Handle]] = []
    for _ in range(data.draw(st.integers(1, 25), label="rounds")):
        what = data.draw(st.sampled_from(["add", "add", "step", "step", "step", "cancel", "fail"]))
        if what == "add":
            sampling = replace(data.draw(st.sampled_from([GREEDY, WARM])), max_tokens=data.draw(st.integers(1, 16)))
            n, bits = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([None, 2, 3, 4]))
            key = data.draw(st.sampled_from(TEXTS)), sampling, n, bits
            asked.append((key, engine.add(*key[:2], n=n, bits=bits)))
        elif what == "cancel" and asked:
            data.draw(st.sampled_from(asked))[1].cancel()
        else:
            failing = what == "fail"
            engine.step()
    failing = False
    engine.run()
    assert_all_as_alone(engine, asked)


def test_preempted_texts_are_the_same(llm: LLM) -> None:
    engine = Engine(llm, kv="16:page=4", pages=20, max_batch=6, budget=12, watermark=0, sharing=False)
    sampling = replace(WARM, max_tokens=30)
    handles = {text: engine.add(text, sampling) for text in TEXTS}
    engine.run()
    assert sum(handle.outputs[0].preemptions for handle in handles.values()) > 0
    for text, handle in handles.items():
        assert tokens(handle) == alone(llm, text, sampling, kv="16:page=4")
    assert_empty(engine)


def test_shared_prefixes_are_computed_once_and_change_nothing(llm: LLM) -> None:
    engine = Engine(llm, kv="4:page=4", pages=60)
    first, second = engine.add(TEXTS[1], GREEDY), engine.add(TEXTS[3], GREEDY)
    engine.run()
    assert second.outputs[0].reused >= 28  # "Once upon a time there was a " and the start token
    ids = llm.tokenizer.encode(TEXTS[1]) + tokens(first)[0]  # what was sampled as a prompt: the next turn of a chat
    third = engine.add(ids, GREEDY)
    engine.run()
    sampled = 0 if engine.runner.prefill_differs(None) else 8  # a prompt's tokens may have other bits than sampled ones
    assert third.outputs[0].reused >= len(TEXTS[1]) + sampled
    assert tokens(third) == alone(llm, ids, kv="4:page=4")
    assert tokens(second) == alone(llm, TEXTS[3], kv="4:page=4")
    assert engine.stats.tokens_reused == second.outputs[0].reused + third.outputs[0].reused


# What a request may ask for -------------------------------------------------------------------------------------------


def test_n_texts_differ_and_come_again_with_their_seed(llm: LLM) -> None:
    first, again = (alone(llm, "Hello", WARM, n=4) for _ in range(2))
    assert first == again
    assert len({tuple(t) for t in first}) == 4
    assert first[0] == alone(llm, "Hello", WARM)[0] == llm.generate("Hello", WARM).tokens
    greedy = alone(llm, "Hello", n=3)
    assert greedy[0] == greedy[1] == greedy[2]


def test_without_a_seed_texts_differ(llm: LLM) -> None:
    free = replace(WARM, seed=None, max_tokens=20)
    assert alone(llm, "Hello", free) != alone(llm, "Hello", free)


def test_each_request_has_its_precision(nested: LLM) -> None:
    engine = Engine(nested, kv=4, pages=60)
    handles = {bits: engine.add("Hello", GREEDY, bits=bits) for bits in (None, 2, 3, 4)}
    engine.run()
    found = {bits: tokens(handle) for bits, handle in handles.items()}
    assert found[None] == found[4]
    assert found == {bits: alone(nested, "Hello", kv=4, bits=bits) for bits in found}
    assert len({str(t) for t in found.values()}) == 3
    with pytest.raises(UnsupportedError, match="serves 2, 3, 4 bits, not 5"):
        engine.add("Hello", bits=5)
    assert handles[4].request.precision is None, "the model as loaded takes one turn, not two"


def test_stop_strings_end_a_text(llm: LLM) -> None:
    whole = llm.generate("Hello", Sampling(max_tokens=30)).text
    stop = Sampling(max_tokens=30, stop=(whole[6:8],))
    want = llm.generate("Hello", stop)
    engine = Engine(llm, pages=64)
    handle = engine.add("Hello", stop)
    events = list(handle)
    got = handle.outputs[0].completion
    assert (got.text, got.tokens, got.finish_reason) == (want.text, want.tokens, "stop")
    assert "".join(event.text for event in events) == want.text
    assert len(events) == len(got.tokens) + 1
    assert list(handle) == [], "events come once"
    assert_empty(engine)


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    handle = Engine(llm, pages=64).add("Hello", WARM, logprobs=3)
    events = list(handle)
    found = handle.outputs[0].logprobs
    assert found is not None
    assert [event.logprob for event in events[: len(found)]] == list(found)
    ids, new = llm.tokenizer.encode("Hello"), tokens(handle)[0]
    logits = llm.model(torch.tensor([ids + new]), llm.model.new_cache())[0, len(ids) - 1 : -1]
    want = logits.log_softmax(-1)
    for row, token, it in zip(want, new, found, strict=True):
        assert it.token == token
        assert it.logprob == pytest.approx(float(row[token]), abs=0.01)
        best = row.topk(3)
        assert [value for _, value in it.top] == pytest.approx(best.values.tolist(), abs=0.01)
    assert Engine(llm, pages=64).add("a", logprobs=0).request.n == 1
    assert alone(llm, "Hello", WARM, logprobs=3) == alone(llm, "Hello", WARM)


def test_events_come_to_the_callback_and_a_callback_that_fails_ends_its_request_only(llm: LLM) -> None:
    engine, seen = Engine(llm, pages=64), list[Event]()

    def broken(event: Event) -> None:
        raise OSError("the reader has gone")

    good, bad = engine.add("Hello", on_event=seen.append), engine.add("a", on_event=broken)
    engine.run()
    assert [event.token for event in seen[:-1]] == tokens(good)[0] == alone(llm, "Hello", Sampling())[0]
    assert seen[-1].output is good.outputs[0]
    assert isinstance(bad.failure, OSError)
    assert reasons(bad) == ["cancelled"]
    assert_empty(engine)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"prompt": []}, SchemeError, "the prompt is empty"),
        ({"prompt": [300]}, SchemeError, "token id 300 is outside the vocabulary of 259"),
        ({"prompt": [1] * 96}, CapacityError, "the prompt has 96 tokens"),
        ({"n": 0}, SchemeError, "n must be at least 1"),
        ({"n": 33}, CapacityError, "n is 33, but at most 32"),
        ({"logprobs": 21}, SchemeError, "logprobs must be between 0 and 20"),
        ({"bits": 2}, UnsupportedError, "has one precision only"),
        ({"prompt": [1] * 80}, CapacityError, "need 6 pages of 16 tokens, but the whole cache has 5"),
    ],
)
def test_what_can_never_be_served_is_refused_with_a_sentence(
    llm: LLM, options: dict[str, Any], error: type[CrelleError], says: str
) -> None:
    engine = Engine(llm, pages=5)
    with pytest.raises(error, match=says):
        engine.add(**{"prompt": "Hello", "sampling": Sampling(max_tokens=16), **options})
    assert_empty(engine)


def test_budget_and_pages_together_are_refused(llm: LLM) -> None:
    with pytest.raises(SchemeError, match="not both"):
        Engine(llm, memory="1GB", pages=4)


def test_a_full_queue_is_said_at_once(llm: LLM) -> None:
    engine = Engine(llm, pages=64, queue_limit=2)
    for _ in range(2):
        engine.add("Hello")
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        engine.add("Hello")
    engine.step()
    engine.add("Hello")
    engine.run()
    assert_empty(engine)


# Ends -----------------------------------------------------------------------------------------------------------------


def test_cancelled_requests_keep_what_they_have_and_free_their_pages(llm: LLM) -> None:
    engine = Engine(llm, pages=64, sharing=False)
    first, second = engine.add("Hello", GREEDY, n=2), engine.add("a", GREEDY)
    for _ in range(4):
        engine.step()
    first.cancel()
    engine.run()
    assert reasons(first) == ["cancelled"] * 2
    assert tokens(first)[0] == alone(llm, "Hello")[0][: len(tokens(first)[0])]
    assert len(tokens(first)[0]) == 4
    assert tokens(second) == alone(llm, "a")
    assert_empty(engine)


def test_a_fault_fails_exactly_the_sequences_of_its_step(nested: LLM) -> None:
    engine = Engine(nested, pages=64)
    two, four = engine.add("Hello", GREEDY, bits=2, n=2), engine.add("a", GREEDY, bits=4)
    compute = engine.runner.run

    def run(step: Step) -> torch.Tensor:
        if step.precision == 2 and any(s.new for run in step.chunks for s in run.samples):
            raise RuntimeError("the device has fallen off the bus")
        return compute(step)

    engine.runner.run = run  # type: ignore[method-assign]
    engine.run()
    assert reasons(two) == ["error"] * 2
    assert all(len(t) == 1 for t in tokens(two))
    assert "fallen off" in str(two.outputs[0].error)
    assert tokens(four) == alone(nested, "a", bits=4)
    assert engine.stats.failed == 2
    assert_empty(engine)


def test_logits_that_cannot_be_drawn_from_fail_their_own_sequence_only(llm: LLM) -> None:
    engine = Engine(llm, pages=64)
    bad, good = engine.add("Hello", WARM), engine.add("a", WARM)
    compute = engine.runner.run

    def run(step: Step) -> torch.Tensor:
        logits = compute(step).clone()
        for row, s in zip(logits, step.samples, strict=True):
            if s.request is bad.request and len(s.new) == 3:
                row.fill_(torch.nan)
        return logits

    engine.runner.run = run  # type: ignore[method-assign]
    engine.run()
    assert reasons(bad) == ["error"]
    assert tokens(bad)[0] == alone(llm, "Hello", WARM)[0][:3]
    assert bad.outputs[0].error is not None
    assert tokens(good) == alone(llm, "a", WARM)
    assert_empty(engine)


def test_an_interrupt_passes_through_and_leaves_a_sound_engine(llm: LLM) -> None:
    engine = Engine(llm, pages=64)
    handle, compute = engine.add("Hello", GREEDY), engine.runner.run

    def run(step: Step) -> torch.Tensor:
        raise KeyboardInterrupt

    engine.runner.run = run  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.runner.run = compute  # type: ignore[method-assign]
    after = engine.add("a", GREEDY)
    engine.run()
    assert reasons(handle) == ["error"]
    assert tokens(after) == alone(llm, "a")
    assert_empty(engine)


def test_end_tokens_can_be_ignored(llm: LLM) -> None:
    token = alone(llm, "Hello")[0][3]
    end, llm.end_ids = llm.end_ids, frozenset({token})
    try:
        engine = Engine(llm, pages=64)
        stops, goes_on = engine.add("Hello", GREEDY), engine.add("Hello", GREEDY, ignore_end=True)
        engine.run()
        assert reasons(stops) == ["stop"]
        assert (reasons(goes_on), len(tokens(goes_on)[0])) == (["length"], 12)
        assert token in tokens(goes_on)[0]
    finally:
        llm.end_ids = end


# generate_all ---------------------------------------------------------------------------------------------------------


def test_generate_all_takes_a_sampling_for_each_and_says_what_is_wrong(llm: LLM) -> None:
    found = generate_all(llm, ["Hello", "a"], [GREEDY, WARM], max_batch=2, budget=8)
    assert [c.tokens for c in found] == [*alone(llm, "Hello"), *alone(llm, "a", WARM)]
    assert generate_all(llm, []) == []
    with pytest.raises(SchemeError, match="2 prompts, but 1 Samplings"):
        generate_all(llm, ["Hello", "a"], [GREEDY])
    with pytest.raises(CapacityError, match="context of 96"):
        generate_all(llm, ["Hello", "a" * 96], GREEDY)


def test_generate_all_keeps_to_a_budget(llm: LLM) -> None:
    want = [c.tokens for c in generate_all(llm, TEXTS, GREEDY)]
    assert [c.tokens for c in generate_all(llm, TEXTS, GREEDY, memory="2MB", budget=32)] == want


# AsyncEngine ---------------------------------------------------------------------------------------------------------


def test_a_service_serves_many_threads(llm: LLM) -> None:
    want, found = {text: alone(llm, text)[0] for text in TEXTS}, SimpleQueue[tuple[str, list[int | None]]]()
    with AsyncEngine(Engine(llm, pages=40, max_batch=4, budget=16)) as service:

        def client(text: str) -> None:
            for _ in range(3):
                found.put((text, [event.token for event in service.submit(text, GREEDY)][:-1]))

        threads = [Thread(target=client, args=(text,)) for text in TEXTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found.qsize() == 3 * len(TEXTS)
    while not found.empty():
        text, got = found.get()
        assert got == want[text]
    assert_empty(service.engine)


def test_closing_finishes_or_cancels_what_runs(llm: LLM) -> None:
    service = AsyncEngine(Engine(llm, pages=64))
    handle = service.submit("Hello", GREEDY)
    service.close()
    assert tokens(handle) == alone(llm, "Hello")
    with pytest.raises(CapacityError, match="shutting down"):
        service.submit("Hello")

    service = AsyncEngine(Engine(llm, pages=64))
    handles = [service.submit(text, Sampling(max_tokens=60)) for text in TEXTS]
    service.close(finish=False)
    assert all(handle.finished for handle in handles)
    assert "cancelled" in [reason for handle in handles for reason in reasons(handle)]
    assert_empty(service.engine)

    service = AsyncEngine(Engine(llm, pages=64))
    handles = [service.submit(text, Sampling(max_tokens=60)) for text in TEXTS]
    service.close(timeout=0.01)
    assert all(handle.finished for handle in handles)


def test_nobody_waits_for_ever_when_the_engine_itself_breaks(llm: LLM) -> None:
    engine = Engine(llm, pages=64)
    service = AsyncEngine(engine)

    def broken() -> Step:
        raise ZeroDivisionError("a mistake of ours")

    engine.scheduler.schedule = broken  # type: ignore[method-assign]
    handle = service.submit("Hello")
    (event,) = list(handle)
    assert event.output is not None
    assert isinstance(event.output.error, ZeroDivisionError)
    with pytest.raises(CapacityError, match="the engine has stopped: a mistake of ours"):
        service.submit("Hello")
    service.close()


def output_states() -> list[object]:
    gc.collect()
    return [o for o in gc.get_objects() if type(o).__name__ == "OutputState"]


def test_many_requests_leave_nothing_behind(llm: LLM) -> None:
    engine = Engine(llm, pages=40, max_batch=8)
    before = len(output_states())  # of other tests, whose failures keep them
    for _ in range(3):
        for text in TEXTS:
            engine.add(text, Sampling(max_tokens=3))
        engine.run()
    assert len(output_states()) <= before
    assert engine.stats.finished == 15
    assert_empty(engine)
