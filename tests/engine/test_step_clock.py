"""The time of steps, by kind: prompts and decoding, each second once."""

from time import perf_counter

import pytest

from crelle import LLM, Sampling
from crelle.engine import stats
from crelle.engine.engine import Engine
from crelle.engine.stats import StepClock


def test_a_second_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were started ahead overlap: each counts from the end of the one before."""
    clock, now = StepClock(), iter([3.0, 5.0, 11.0])
    monkeypatch.setattr(stats, "perf_counter", lambda: next(now))
    clock.ended(prefills=True, begun=1.0)
    clock.ended(prefills=False, begun=2.0)  # which was started while the first one ran
    clock.ended(prefills=False, begun=10.0)  # after a pause
    assert (clock.prefill, clock.decode) == (2.0, 2.0 + 1.0)


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
