"""Faults at every call of the engine's own code, under traffic: nobody waits for ever, nobody gets a wrong token.

Each case raises once, at the k-th call (or line) of anything in crelle.engine, the played runner and the readers; k is
swept. By default a sample of places, with `slow` all of them.
"""

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event as Flag
from typing import Any

import pytest
from fault_injection import AHEAD, REQUESTS, WAVES, Asked, Fault, Panic, ask, assert_sound, played_engine, tokens
from reference_single import assert_empty
from sampled_cases import share_of

from crelle import LLM, Sampling
from crelle.engine.async_engine import AsyncEngine
from crelle.engine.engine import Engine
from crelle.engine.requests.output import Event
from crelle.engine.scheduler import Step
from crelle.errors import CapacityError

ERRORS = [ValueError, MemoryError, Panic, SystemExit, KeyboardInterrupt, GeneratorExit]
OUTERMOST = ("engine:step", "engine:_guarded")  # nothing of the engine's is around them
PLACES = share_of(100)  # of a sweep
# A fault in a generator that is being closed is Python's to ignore.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM.load(tiny_model, device="cpu")


def stepped(llm: LLM, fault: Fault, ahead: bool) -> tuple[Engine, list[Asked]]:
    """All requests, in waves, on an engine that is stepped here; then once more the first, which must be served."""
    engine, requests = played_engine(llm, ahead=ahead), AHEAD if ahead else REQUESTS
    everyone, fault.engine = [Asked(name) for wave in WAVES for name in wave], engine
    by_name = {asked.name: asked for asked in everyone}

    def step() -> bool:
        try:
            return engine.step()
        except BaseException as e:
            if e is fault.raised and (isinstance(e, KeyboardInterrupt | SystemExit) or fault.where[0] in OUTERMOST):
                return True
            raise

    with fault.armed():
        for wave in WAVES:
            for name in wave:
                ask(engine.add, by_name[name], requests, fault)
            for _ in range(2):
                step()
        if (handle := by_name["cancelled"].handle) is not None:
            with suppress(*ERRORS):
                handle.cancel()
        for _ in range(500):
            if not step():
                break
        else:
            raise AssertionError(f"it does not come to an end after a fault at {fault.where}")
    again = Asked(WAVES[0][0])
    ask(engine.add, again, requests, Fault(0, ValueError))
    engine.run()
    return engine, [*everyone, again]


def sweep(total: int, every: bool) -> Iterator[tuple[int, type[BaseException]]]:
    places = range(1, total + 1) if every else sorted(random.Random(0).sample(range(1, total + 1), PLACES))
    for i, at in enumerate(places):
        yield at, ERRORS[i % len(ERRORS)]


def want_whole(llm: LLM, ahead: bool) -> list[list[int]]:
    """What the request that the traffic cancels would have got."""
    engine, whole = played_engine(llm, ahead=ahead, pages=60), Asked("cancelled")
    ask(engine.add, whole, AHEAD if ahead else REQUESTS, Fault(0, ValueError))
    engine.run()
    return tokens(whole)


def run_sweep(llm: LLM, *, ahead: bool, lines: bool, every: bool) -> None:
    count = Fault(0, ValueError, lines)
    engine, clean = stepped(llm, count, ahead)
    want = {asked.name: tokens(asked) for asked in clean} | {"cancelled": want_whole(llm, ahead)}
    assert engine.stats.preemptions > 0, "the traffic should run out of pages"
    for at, error in sweep(count.count, every):
        fault = Fault(at, error, lines)
        found = stepped(llm, fault, ahead)
        if fault.raised is not None:  # else the last places were not reached this time: garbage is collected elsewhere
            assert_sound(*found, want, fault)


@pytest.mark.parametrize("lines", [False, True], ids=["calls", "lines"])
@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "ahead"])
def test_a_fault_anywhere_leaves_a_sound_engine(llm: LLM, ahead: bool, lines: bool) -> None:
    run_sweep(llm, ahead=ahead, lines=lines, every=False)


@pytest.mark.slow
@pytest.mark.parametrize("lines", [False, True], ids=["calls", "lines"])
@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "ahead"])
def test_a_fault_everywhere_leaves_a_sound_engine(llm: LLM, ahead: bool, lines: bool) -> None:
    run_sweep(llm, ahead=ahead, lines=lines, every=True)


# A service ------------------------------------------------------------------------------------------------------------


def served(llm: LLM, fault: Fault, ahead: bool) -> tuple[Engine, list[Asked]]:
    """The same traffic on a service, in whose thread the fault strikes; then one more request."""
    engine, requests = played_engine(llm, ahead=ahead), AHEAD if ahead else REQUESTS
    everyone, fault.engine = [Asked(name) for wave in WAVES for name in wave], engine
    with fault.armed_in_new_threads():
        service = AsyncEngine(engine)
    for asked in everyone:
        ask(service.submit, asked, requests, fault)
        if asked.name == "cancelled" and asked.handle is not None:
            asked.handle.cancel()
    again = Asked(WAVES[0][0])
    handle = service.submit(**requests[again.name])
    again.handle, again.events = handle, list(handle)
    assert service._thread.is_alive(), f"the service died of {fault.error} at {fault.where}"
    service.close()
    return engine, [*everyone, again]


@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "ahead"])
def test_a_service_survives_a_fault_anywhere(llm: LLM, ahead: bool) -> None:
    count = Fault(0, ValueError)
    want = {asked.name: tokens(asked) for asked in served(llm, count, ahead)[1]}
    want |= {"cancelled": want_whole(llm, ahead)}
    for at, error in sweep(count.count, every=False):
        fault = Fault(at, error)
        found = served(llm, fault, ahead)
        if fault.raised is not None:
            assert_sound(*found, want, fault)


def test_a_broken_scheduler_ends_the_engine_and_everybody_hears_of_it(llm: LLM) -> None:
    for error in ERRORS:
        engine = played_engine(llm)
        service, asked = AsyncEngine(engine), [Asked(name) for name in ("greedy", "several", "long")]

        def broken(error: type[BaseException] = error) -> Step:
            raise error("a mistake of ours")

        engine.scheduler.schedule = broken  # type: ignore[method-assign]
        refused = 0
        for one in asked:
            try:
                one.handle = service.submit(**REQUESTS[one.name], on_event=one.hear)
            except CapacityError:
                refused += 1
        service._thread.join(20)
        assert isinstance(service.error, error)
        for one in asked[: len(asked) - refused]:
            assert one.handle is not None
            assert [e.output.error for e in one.events if e.output] == [service.error] * one.handle.request.n
        with pytest.raises(CapacityError, match="the engine has stopped: a mistake of ours"):
            service.submit("Hello")
        service.close()
        assert_empty(engine)


# Single places --------------------------------------------------------------------------------------------------------


def test_a_request_whose_detokenizer_cannot_be_made_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence was queued first once, and the next step raised a KeyError for everybody."""
    engine = played_engine(llm)
    other = engine.add(**REQUESTS["greedy"])
    for error in ERRORS:

        def broken(*args: Any, error: type[BaseException] = error) -> None:
            raise error("no detokenizer")

        with monkeypatch.context() as patch:
            patch.setattr("crelle.engine.engine.Detokenizer", broken)
            with pytest.raises(error, match="no detokenizer"):
                engine.add(**REQUESTS["text"])
    assert len(engine.scheduler.waiting) == len(engine._active) == 1
    engine.run()
    assert other.outputs[0].completion.finish_reason == "length"
    assert_empty(engine)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_a_callback_that_raises_anything_ends_its_request_only(
    llm: LLM, error: type[BaseException], last: bool
) -> None:
    engine, heard = played_engine(llm, pages=60), list[Event]()

    def broken(event: Event) -> None:
        heard.append(event)
        if (event.output is not None) == last:
            raise error("the reader has gone")

    with AsyncEngine(engine) as service:
        bad = service.submit([1, 2, 3], Sampling(max_tokens=30), on_event=broken)
        good = service.submit(**REQUESTS["greedy"])
        assert [event.output is not None for event in good][-1]
        for _ in range(200):
            if bad.finished:
                break
            Flag().wait(0.01)
        assert bad.outputs[0].completion.finish_reason == ("length" if last else "cancelled")
        assert isinstance(bad.failure, error)
        assert [event.output for event in heard if event.output] == bad.outputs
    assert service.error is None
    assert_empty(engine)


def test_a_detokenizer_that_panics_at_the_end_still_gives_a_last_event(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> str:
        raise Panic("index out of range")

    engine = played_engine(llm)
    handle = engine.add(**REQUESTS["greedy"])
    monkeypatch.setattr("crelle.engine.sampling.stop_filter.StopFilter.finish", broken)
    *events, last = list(handle)
    assert last.output is not None
    assert (last.output.completion.finish_reason, last.text) == ("error", "")
    assert isinstance(last.output.error, Panic)
    assert last.output.completion.tokens == [event.token for event in events]
    assert_empty(engine)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_the_user_is_told_to_stop_once_the_step_is_over(llm: LLM, error: type[BaseException]) -> None:
    engine, calls = played_engine(llm), list[Event]()

    def leave(event: Event) -> None:
        calls.append(event)
        if len(calls) == 1:
            raise error

    bad, good = engine.add([1, 2, 3], Sampling(max_tokens=5), on_event=leave), engine.add(**REQUESTS["greedy"])
    with pytest.raises(error):
        engine.run()
    engine.run()
    assert bad.outputs[0].completion.finish_reason == "cancelled"
    assert calls[-1].output is bad.outputs[0]
    assert good.outputs[0].completion.finish_reason == "length"
    assert_empty(engine)


def test_nobody_waits_on_an_engine_that_has_ended(llm: LLM) -> None:
    engine = played_engine(llm)
    service = AsyncEngine(engine)
    service.close()
    late = engine.add(**REQUESTS["greedy"])  # not through the service: whoever wants its events steps
    assert list(late)[-1].output is not None
    handle = engine.add(**REQUESTS["greedy"])
    engine.stop(RuntimeError("the end"))
    (event,) = list(handle)
    assert event.output is not None
    assert "the end" in str(event.output.error)
    handle._left = 1
    handle.outputs = []
    with pytest.raises(CapacityError, match="stopped before the request was finished: the end"):
        next(iter(handle))
    assert_empty(engine)


def test_a_request_that_is_added_beside_the_service_wakes_it(llm: LLM) -> None:
    with AsyncEngine(played_engine(llm)) as service:
        Flag().wait(0.05)  # it sleeps
        assert list(service.engine.add(**REQUESTS["greedy"]))[-1].output is not None
