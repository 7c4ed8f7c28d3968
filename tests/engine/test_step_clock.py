"""The time of steps, by kind: prompts and decoding, each second once."""

from time import perf_counter

import pytest

from crelle import LLM, Sampling
from crelle.engine import stats
from crelle.engine.engine import Engine
from crelle.engine.stats import StepClock


def test_a_second_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step counts from the end of the one before, but for the time between two calls."""
    clock, now = StepClock(), iter([1.0, 3.0, 4.0, 10.0, 12.0, 13.0])
    monkeypatch.setattr(stats, "perf_counter", lambda: next(now))
    with clock.running():
        assert clock.ended(prefills=True) == 2.0
    with clock.running():  # after a pause
        assert clock.ended(prefills=False) == (4.0 - 3.0) + (12.0 - 10.0)
    assert (clock.prefill, clock.decode) == (2.0, 3.0)


def test_an_engine_tells_prompts_from_decoding(tiny_model: object) -> None:
    llm = LLM.load(str(tiny_model), device="cpu")
    engine, begun = Engine(llm, pages=20), perf_counter()
    engine.add("Hello, a prompt", Sampling(max_tokens=1), ignore_end=True)
    engine.run()
    first = engine.stats
    assert first.prefill_seconds > 0
    assert first.decode_seconds == 0
    engine.add("Hello again", Sampling(max_tokens=5), ignore_end=True)
    engine.run()
    last = engine.stats
    assert last.prefill_seconds > first.prefill_seconds
    assert last.decode_seconds > 0
    assert last.prefill_seconds + last.decode_seconds < perf_counter() - begun
