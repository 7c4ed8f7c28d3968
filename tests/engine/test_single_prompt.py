"""A single prompt is a batch of one: it runs through the engine, on a cache that is as large as it needs."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
from conftest import write_tiny_model

from crelle import LLM, Sampling
from crelle.engine.engine import Engine
from crelle.engine.model_runner import ModelRunner
from crelle.engine.scheduler import Step

LONG = Sampling(max_tokens=1500)
WARM = Sampling(max_tokens=40, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model with a context of 128k tokens and no end token."""
    to = write_tiny_model(tmp_path_factory.mktemp("long") / "m", max_position_embeddings=131072)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    return LLM.load(to, device="cpu", threads=1)


def idle(llm: LLM) -> Engine:
    """The engine that waits for the next call, with nothing in its pages."""
    (engine,) = llm._idle
    engine.blocks.assert_consistent([])
    assert engine.blocks.used == 0
    assert not engine.scheduler.unfinished
    return engine


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=20), WARM], ids=["greedy", "seeded"])
def test_a_prompt_alone_has_the_tokens_of_a_batch(llm: LLM, sampling: Sampling) -> None:
    want = llm.generate(["Hello", "another"], sampling)[0]
    got = llm.generate("Hello", sampling)
    assert (got.tokens, got.text, got.finish_reason, got.prompt_tokens) == (
        *(want.tokens, want.text, want.finish_reason),
        want.prompt_tokens,
    )


def test_one_engine_serves_one_call_after_the_other(llm: LLM) -> None:
    llm.generate("Hello", Sampling(max_tokens=2))
    engine = idle(llm)
    assert "".join(piece.text for piece in llm.stream("a", WARM)) == llm.generate("a", WARM).text
    list(llm.chat([{"role": "user", "content": "Hi"}], Sampling(max_tokens=2)))
    assert idle(llm) is engine


def test_the_cache_is_as_large_as_the_sequence_needs(tmp_path: Path) -> None:
    llm = LLM.load(write_tiny_model(tmp_path, max_position_embeddings=131072), device="cpu", threads=1)
    llm.generate("Hello", Sampling(max_tokens=5))
    page = llm.kv.page
    assert idle(llm).blocks.pages == idle(llm).runner.layers[0].count <= -(-16 // page)
    stream = llm.stream("Hello", Sampling(max_tokens=100_000))
    next(stream)
    stream.close()
    assert idle(llm).blocks.pages * page < 512
    llm.generate([65] * 3000, Sampling(max_tokens=1))
    assert 3000 <= idle(llm).blocks.pages * page < 4000


def test_a_cache_that_grows_keeps_what_it_holds(llm: LLM) -> None:
    want = Engine(llm, pages=200).add("Hello", LONG)
    for _ in want:
        pass
    assert llm.generate("Hello", LONG).tokens == want.outputs[0].completion.tokens
    assert idle(llm).blocks.pages * llm.kv.page >= 1500


def test_a_stream_that_is_closed_or_dropped_frees_its_sequence(llm: LLM) -> None:
    want = llm.generate("Hello", WARM).tokens
    for end in ("close", "drop"):
        stream: Any = llm.stream("Hello", WARM)
        next(stream)
        assert not llm._idle
        if end == "close":
            stream.close()
        del stream
        gc.collect()
        assert idle(llm).stats.running == idle(llm).stats.waiting == 0
    assert llm.generate("Hello", WARM).tokens == want


def test_streams_side_by_side_have_an_engine_each_and_one_is_kept(llm: LLM) -> None:
    streams = [llm.stream("Hello", WARM) for _ in range(3)]
    begun = [next(stream).text for stream in streams]
    assert not llm._idle
    texts = {first + "".join(piece.text for piece in stream) for first, stream in zip(begun, streams, strict=True)}
    assert texts == {llm.generate("Hello", WARM).text}
    idle(llm)


@pytest.mark.parametrize("error", [RuntimeError("the device has fallen off the bus"), KeyboardInterrupt()], ids=repr)
def test_what_a_step_raises_reaches_the_caller_and_the_next_call_works(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    want, run = llm.generate("Hello", WARM).tokens, ModelRunner.run

    def broken(self: ModelRunner, step: Step) -> Any:
        if step.chunks[0].start > 10:
            raise error
        return run(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "run", broken)
        with pytest.raises(type(error)):
            llm.generate("Hello", WARM)
    assert llm.generate("Hello", WARM).tokens == want
    idle(llm)


def test_a_model_leaves_memory_with_its_last_reference(tmp_path: Path) -> None:
    llm = LLM.load(write_tiny_model(tmp_path), device="cpu", threads=1)
    llm.generate("Hello", Sampling(max_tokens=2))
    gone = weakref.ref(llm)
    gc.disable()
    try:
        del llm
        assert gone() is None
    finally:
        gc.enable()
