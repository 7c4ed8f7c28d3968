"""Logits that are NaN or infinite fail their request with a sentence; nobody gets a token that nobody computed."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_tiny_model
from reference_single import GREEDY, WARM, alone, assert_empty, tokens
from sampled_token import sample
from test_ahead import Late

from crelle import LLM, Sampling
from crelle.engine.engine import Engine
from crelle.engine.requests.output import logprob
from crelle.engine.sampling.sampler import Sampler
from crelle.engine.scheduler import Step
from crelle.errors import NumericsError
from crelle.eval.perplexity import perplexity
from crelle.formats.dense import DenseTensor
from crelle.kernels.threads import set_threads

SAYS = "the model's logits are not finite"
BROKEN = {
    "one nan": lambda row: row.__setitem__(17, torch.nan),
    "all nan": lambda row: row.fill_(torch.nan),
    "inf": lambda row: row.__setitem__(3, torch.inf),
    "inf and -inf": lambda row: (row.__setitem__(3, torch.inf), row.__setitem__(4, -torch.inf)),
    "all -inf": lambda row: row.fill_(-torch.inf),
}
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": WARM,
    "truncated": Sampling(max_tokens=12, temperature=0.7, seed=1, top_k=5, top_p=0.9, min_p=0.01),
    "penalized": Sampling(max_tokens=12, repetition_penalty=1.3),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    set_threads(1)
    yield
    set_threads(None)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM.load(tiny_model, device="cpu")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model with one NaN in its head, put there after loading, which looks for such values."""
    llm = LLM.load(write_tiny_model(tmp_path_factory.mktemp("broken") / "m"), device="cpu")
    head = llm.model.head.weight
    assert isinstance(head, DenseTensor)
    head.weight[40, 3] = torch.nan
    return llm


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("how", BROKEN)
def test_a_sampler_refuses_logits_that_are_not_finite(how: str, sampling: str) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(SAMPLINGS[sampling])
    assert 0 <= sample(sampler, logits, [1, 2]) < 50
    BROKEN[how](logits)
    with pytest.raises(NumericsError, match=rf"{SAYS} \(NaN or infinite\) at token 2: .* kernel"):
        sample(sampler, logits, [1, 2])


def test_finite_logits_are_sampled_from_however_large_and_cold() -> None:
    logits = torch.tensor([1e38, -3e38, -1e38, 0.0])
    assert sample(Sampler(Sampling(temperature=1e-5, seed=0)), logits, []) == 0
    assert sample(Sampler(Sampling(repetition_penalty=1e-30)), logits, [0, 1]) == 0
    masked = torch.tensor([-torch.inf, 1.0, -torch.inf])
    for sampling in SAMPLINGS.values():
        assert sample(Sampler(sampling), masked, [0]) == 1


def test_logprobs_are_finite_where_a_token_is_impossible() -> None:
    found = logprob(torch.tensor([0.0, -torch.inf, 1.0]), 1, 3)
    assert all(map(math.isfinite, [found.logprob, *(value for _, value in found.top)]))
    assert [token for token, _ in found.top] == [2, 0, 1]


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"n": 2}], ids=str)
@pytest.mark.parametrize(
    ("how", "sampling"), [*zip(BROKEN, [*SAMPLINGS, "greedy"], strict=True), ("one nan", "sampled")]
)
def test_a_row_that_is_not_finite_fails_its_own_request(
    llm: LLM, how: str, sampling: str, options: dict[str, Any]
) -> None:
    engine = Engine(llm, pages=64, speculate="off")  # a row for each sequence
    bad, good = engine.add("Hello", SAMPLINGS[sampling], **options), engine.add("a", SAMPLINGS[sampling], **options)
    compute = engine.runner.run

    def run(step: Step) -> torch.Tensor:
        logits = compute(step).clone()
        for row, s in zip(logits, step.samples, strict=True):
            if s.request is bad.request and len(s.new) == 3:
                BROKEN[how](row)
        return logits

    engine.runner.run = run  # type: ignore[method-assign]
    engine.run()
    for output in bad.outputs:
        assert isinstance(output.error, NumericsError)
        assert f"{SAYS} (" in str(output.error)
        assert f"at token {len(llm.tokenizer.encode('Hello')) + 3}" in str(output.error)
    whole = alone(llm, "Hello", SAMPLINGS[sampling], **options)
    assert tokens(bad) == [t[:3] for t in whole]
    assert tokens(good) == alone(llm, "a", SAMPLINGS[sampling], **options)
    assert_empty(engine)


def test_a_negative_token_of_the_device_means_that_logits_are_not_finite(llm: LLM) -> None:
    """The kernel that takes the likeliest token on a GPU gives -1 for such a row."""
    engine = Engine(llm, pages=64)
    engine.runner.__class__ = Late
    engine.runner.drawn = {}  # type: ignore[attr-defined]
    bad, good = engine.add("Hello", GREEDY), engine.add("a", GREEDY)
    start = engine.runner.start

    def lost(step: Step) -> Any:
        told = start(step)
        of = [s.request is bad.request and len(s.new) == 3 for s in step.samples]
        told.found = [-1 if gone else token for gone, token in zip(of, told.found, strict=True)]
        return told

    engine.runner.start = lost  # type: ignore[method-assign]
    engine.run()
    assert isinstance(bad.outputs[0].error, NumericsError)
    assert tokens(bad)[0] == alone(llm, "Hello")[0][:3]
    assert tokens(good) == alone(llm, "a")
    assert_empty(engine)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_broken_model_says_so(broken: LLM, sampling: str) -> None:
    with pytest.raises(NumericsError, match=SAYS):
        broken.generate("Hello", SAMPLINGS[sampling])
    with pytest.raises(NumericsError, match=SAYS):
        list(broken.stream("Hello", SAMPLINGS[sampling]))
    with pytest.raises(NumericsError, match=SAYS):
        broken.generate(["Hello", "a"], SAMPLINGS[sampling])


def test_the_perplexity_of_a_broken_model_is_a_sentence(broken: LLM, llm: LLM) -> None:
    text = "Once upon a time there was a fox. " * 8
    assert math.isfinite(perplexity(llm, text, context=32).perplexity)
    with pytest.raises(NumericsError, match="not finite in window 1 of"):
        perplexity(broken, text, context=32)
