"""Penalties, biases, min_tokens and the log-probabilities of prompts, in batches and through preemptions."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import write_tiny_model

from crelle import LLM, Sampling
from crelle.engine.engine import Engine
from crelle.engine.requests.output import Output
from crelle.errors import SchemeError
from crelle.eval.perplexity import window_logits
from crelle.kernels.threads import set_threads

PROMPTS = ["Hello, hello", "a b a b a b a", "The end of the end"]
OPTIONS: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0, "temperature": 0.9, "seed": 4},
    "bias": {"logit_bias": ((40, 3.0), (41, -100.0))},
    "all": {"frequency_penalty": 0.4, "repetition_penalty": 1.2, "min_tokens": 9, "temperature": 1.1, "seed": 8},
    "plain": {},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    set_threads(1)
    yield
    set_threads(None)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    at = tmp_path_factory.mktemp("processors") / "m"
    return LLM.load(write_tiny_model(at, max_position_embeddings=2048), device="cpu")


def outputs(llm: LLM, asked: list[tuple[str, dict[str, Any], dict[str, Any]]], **engine: Any) -> list[list[Output]]:
    e = Engine(llm, **{"pages": 200, "max_batch": 16, **engine})
    handles = [e.add(p, Sampling(max_tokens=24, **sampling), **more) for p, sampling, more in asked]
    e.run()
    assert e.stats.pages_used == 0
    assert not any(o.error for h in handles for o in h.outputs)
    return [h.outputs for h in handles]


def test_in_a_batch_they_are_what_they_are_alone(llm: LLM) -> None:
    asked = [(p, o, {"n": 2}) for p in PROMPTS for o in OPTIONS.values()]
    alone = [outputs(llm, [a])[0] for a in asked]
    for pages in (200, 9):  # with 9, sequences are preempted
        together = outputs(llm, asked, pages=pages, max_batch=8, watermark=0)
        assert [[o.completion.tokens for o in each] for each in together] == [
            [o.completion.tokens for o in each] for each in alone
        ]
    assert any(o.preemptions for each in together for o in each), "the second run was tight"


def test_penalties_count_tokens_of_the_answer(llm: LLM) -> None:
    """A bias large enough repeats a token; the frequency penalty then grows until another one wins."""
    (found,) = outputs(llm, [("Hello", {"logit_bias": ((40, 50.0),), "frequency_penalty": 10.0}, {})])
    new = found[0].completion.tokens
    assert new[:4] == [40] * 4
    assert new.count(40) < 10
    (once,) = outputs(llm, [("Hello", {"logit_bias": ((40, 50.0),), "presence_penalty": 100.0}, {})])
    assert once[0].completion.tokens.count(40) == 1


def test_min_tokens_holds_back_end_tokens_and_stop_strings(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = llm.generate("Hello", Sampling(max_tokens=12))
    monkeypatch.setattr(llm, "end_ids", frozenset(plain.tokens))
    (found,) = outputs(llm, [("Hello", {"min_tokens": 5}, {})])
    assert len(found[0].completion.tokens) >= 5
    assert not set(found[0].completion.tokens[:5]) & set(plain.tokens)
    monkeypatch.setattr(llm, "end_ids", frozenset())
    letter = llm.generate("Hello", Sampling(max_tokens=1, logit_bias=((65, 200.0),))).text
    (held,) = outputs(llm, [("Hello", {"min_tokens": 6, "stop": (letter,), "logit_bias": ((65, 200.0),)}, {})])
    assert held[0].completion.text == 6 * letter
    assert held[0].completion.finish_reason == "stop"


def test_when_every_token_is_forbidden_the_request_fails_in_a_sentence(llm: LLM) -> None:
    engine = Engine(llm, pages=50)
    vocabulary = llm.model.spec.vocabulary
    llm.end_ids, ends = frozenset(range(vocabulary)), llm.end_ids
    try:
        bad = engine.add("Hello", Sampling(min_tokens=3, max_tokens=5))
    finally:
        llm.end_ids = ends
    good = engine.add("Hello", Sampling(max_tokens=5))
    engine.run()
    assert isinstance(bad.outputs[0].error, SchemeError)
    assert "no token is allowed" in str(bad.outputs[0].error)
    assert good.outputs[0].error is None


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"min_tokens": 25}, "min_tokens is 25, above max_tokens, 24"),
        ({"logit_bias": ((10**6, 1.0),)}, "token id 1000000, outside the vocabulary"),
    ],
)
def test_what_no_engine_can_do_is_refused(llm: LLM, sampling: dict[str, Any], says: str) -> None:
    with pytest.raises(SchemeError, match=says):
        outputs(llm, [("Hello", sampling, {})])


# Prompts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [{}, {"budget": 16}, {"pages": 30, "max_batch": 4}], ids=str)
def test_prompt_logprobs_are_those_of_the_model(llm: LLM, engine: dict[str, Any]) -> None:
    texts = [50 * p for p in PROMPTS]  # several chunks, and more than the rows of a step
    before = outputs(llm, [(t, {}, {}) for t in texts], pages=600)
    asked = [(t, {}, {"prompt_logprobs": k, "n": 1 + k % 2}) for t, k in zip(texts, (0, 3, 5), strict=True)]
    found = outputs(llm, [*asked, *asked, ("Hello", {}, {})], **{"pages": 600, **({} if "pages" in engine else engine)})
    for t, each, (_, _, more), plain in zip(texts, found, asked, before, strict=False):
        ids = llm.tokenizer.encode(t)
        logs = window_logits(llm, torch.tensor([ids]), llm.kv, 4096)[0].double().log_softmax(-1)
        for output in each:
            assert output.completion.tokens == plain[0].completion.tokens, "the answer is the same"
            scores = output.prompt_logprobs
            assert scores is not None
            assert len(scores) == len(ids)
            assert scores[0] is None
            for i, score in enumerate(scores[1:], 1):
                assert score is not None
                assert score.token == ids[i]
                assert math.isclose(score.logprob, logs[i - 1, ids[i]].item(), abs_tol=2e-2)
                better = [v for _, v in score.top if v > score.logprob]
                assert score.rank is not None
                assert score.rank > len(better) if len(better) == len(score.top) else score.rank == 1 + len(better)
                assert len(score.top) == more["prompt_logprobs"]
                assert [v for _, v in score.top] == sorted((v for _, v in score.top), reverse=True)
        assert each[0].reused == 0, "what is scored is computed"
    assert found[-1][0].prompt_logprobs is None


def test_a_chunking_does_not_change_prompt_logprobs(llm: LLM) -> None:
    asked = [(40 * PROMPTS[0], {}, {"prompt_logprobs": 1})]
    runs = [outputs(llm, asked, pages=600, budget=b)[0][0].prompt_logprobs for b in (512, 40, 17)]
    assert runs[0] == runs[1] == runs[2]
