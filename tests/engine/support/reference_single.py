"""What one request gets that has an engine for itself, and that everybody else gets the same."""

from collections.abc import Iterable
from typing import Any

from crelle import LLM, Sampling
from crelle.engine.engine import Engine, Handle

GREEDY = Sampling(max_tokens=12)
WARM = Sampling(max_tokens=12, temperature=1.5, seed=7)
TEXTS = ["Hello", "Once upon a time there was a fox", "a", "Once upon a time there was a hen", "The quick brown"]


def alone(llm: LLM, prompt: Any, sampling: Sampling = GREEDY, *, kv: Any = 16, **options: Any) -> list[list[int]]:
    """The tokens of a request that has an engine, with plenty of pages, for itself."""
    handle = Engine(llm, kv=kv, pages=64, speculate="off").add(prompt, sampling, **options)
    assert all(event.index < handle.request.n for event in handle)
    return tokens(handle)


def tokens(handle: Handle) -> list[list[int]]:
    return [output.completion.tokens for output in handle.outputs]


def assert_as_alone(handle: Handle, want: list[list[int]]) -> None:
    """Whole answers are those of one alone, others begin like them; who failed says why."""
    assert handle.finished
    for output, whole in zip(handle.outputs, want, strict=True):
        got, why = output.completion.tokens, output.completion.finish_reason
        assert got == whole if why in ("stop", "length") else got == whole[: len(got)]
        assert (why == "error") == (output.error is not None)


def assert_all_as_alone(engine: Engine, asked: Iterable[tuple[Any, Handle]]) -> None:
    """The same of all requests, which are keyed by (prompt, sampling, n, bits); and nothing is left in the engine."""
    known = dict[Any, list[list[int]]]()
    for key, handle in asked:
        prompt, sampling, n, bits = key
        if key not in known:
            known[key] = alone(engine.llm, prompt, sampling, kv=engine.kv, n=n, bits=bits)
        assert_as_alone(handle, known[key])
    assert_empty(engine)


def assert_empty(engine: Engine) -> None:
    """Nothing runs, and every page is free or kept for others."""
    engine.blocks.assert_consistent([])
    assert engine.blocks.used == 0
    assert not engine._active
    assert not engine._doomed
    assert not engine._done
    assert not engine.scheduler.unfinished
