"""Perplexity against the plain formula, the arithmetic of its windows, and the figure that is known for stories15M."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from crelle import LLM
from crelle.errors import CapacityError, SchemeError
from crelle.eval.perplexity import perplexity

BOS = 256
TEXT = "The quick brown fox jumps over the lazy dog; naïve café 漢字. " * 6  # a token a byte


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM.load(tiny_model, device="cpu")


@pytest.fixture(scope="module")
def peer(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def without_bos(tiny_model: Path, to: Path) -> LLM:
    shutil.copytree(tiny_model, to, dirs_exist_ok=True)
    config = json.loads((to / "tokenizer_config.json").read_text())
    (to / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": False}))
    return LLM.load(to, device="cpu")


def plain_perplexity(peer: Any, windows: list[list[int]]) -> float:
    """Exp of the mean of -log p(token | those before it in its window), with transformers' model, in f64."""
    losses = []
    at_once = max(1, 512 // len(windows[0]))
    for i in range(0, len(windows), at_once):
        ids = torch.tensor(windows[i : i + at_once])
        with torch.inference_mode():
            log_p = peer(ids).logits.double().log_softmax(-1)
        losses += [-float(p[t - 1, w[t]]) for p, w in zip(log_p, ids, strict=True) for t in range(1, len(w))]
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("context", [2, 17, 64, 96])
def test_equals_the_plain_formula_with_bos(llm: LLM, peer: Any, context: int) -> None:
    ids, body = llm.tokenizer.encode(TEXT, bos=False), context - 1
    windows = [[BOS, *ids[i : i + body]] for i in range(0, len(ids) - body + 1, body)]
    result = perplexity(llm, TEXT, context=context)
    assert result.perplexity == pytest.approx(plain_perplexity(peer, windows), rel=1e-5)
    assert (result.tokens, result.windows) == (len(windows) * body, len(windows))
    assert (result.context, result.bos) == (context, True)


@pytest.mark.parametrize("context", [2, 17, 96])
def test_equals_the_plain_formula_without_bos(llm: LLM, peer: Any, context: int) -> None:
    ids = llm.tokenizer.encode(TEXT, bos=False)
    windows = [ids[i : i + context] for i in range(0, len(ids) - context + 1, context)]
    result = perplexity(llm, TEXT, context=context, bos=False)
    assert result.perplexity == pytest.approx(plain_perplexity(peer, windows), rel=1e-5)
    assert (result.tokens, result.windows, result.bos) == (len(windows) * context, len(windows), False)


def test_tokenizer_without_bos_decides(llm: LLM, tiny_model: Path, tmp_path: Path) -> None:
    assert perplexity(without_bos(tiny_model, tmp_path), TEXT, context=32) == perplexity(
        llm, TEXT, context=32, bos=False
    )


@pytest.mark.parametrize(
    ("limit", "bos", "expected"),
    [(62, True, 62), (92, True, 62), (93, True, 93), (63, False, 32), (64, False, 64), (10**9, False, 384)],
)
def test_only_full_windows_of_the_first_tokens_count(llm: LLM, limit: int, bos: bool, expected: int) -> None:
    """With a context of 32 a window holds 31 tokens of the text behind BOS, or 32 without."""
    assert len(llm.tokenizer.encode(TEXT, bos=False)) == 396
    assert perplexity(llm, TEXT, context=32, tokens=limit, bos=bos).tokens == expected


def test_token_limit_equals_a_shorter_text(llm: LLM) -> None:
    limited, short = perplexity(llm, TEXT, context=32, tokens=100), perplexity(llm, TEXT[:100], context=32)
    assert (limited.perplexity, limited.tokens, limited.windows) == (short.perplexity, short.tokens, short.windows)
    assert limited.text_tokens == len(TEXT.encode())


def test_progress_counts_windows_and_ends_with_the_result(llm: LLM) -> None:
    calls: list[tuple[int, int, str]] = []
    result = perplexity(llm, TEXT, context=64, progress=lambda *seen: calls.append(seen))
    assert [c[:2] for c in calls] == [(i, 6) for i in range(7)]
    assert calls[0][2] == f"over the first {result.tokens} of {result.text_tokens} tokens"
    assert calls[-1][2] == f"{result.perplexity:.2f}"


def test_broken_model_has_a_finite_perplexity(tiny_model: Path) -> None:
    broken = LLM.load(tiny_model, device="cpu")
    broken.model.forward = lambda tokens, cache, last=False: torch.eye(259)[(tokens + 1) % 259] * 1e6
    assert 1e300 < perplexity(broken, TEXT, context=32).perplexity < math.inf


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"context": 97}, CapacityError, "a window of 97 tokens does not fit the model's context of 96"),
        ({"context": 2048}, CapacityError, "does not fit the model's context of 96"),
        ({"context": 1}, SchemeError, "context must be at least 2, got 1"),
        ({"context": 1, "bos": False}, SchemeError, "context must be at least 2, got 1"),
        ({"context": 0}, SchemeError, "context must be at least 2, got 0"),
        ({"context": -5}, SchemeError, "context must be at least 2, got -5"),
        ({"context": 64, "tokens": 62}, SchemeError, "the text has 62 tokens, too few for one window of 63"),
        ({"context": 64, "tokens": 0}, SchemeError, "tokens must be at least 1, got 0"),
        ({"context": 64, "tokens": -3}, SchemeError, "tokens must be at least 1, got -3"),
    ],
)
def test_windows_that_cannot_be_are_refused(
    llm: LLM, options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        perplexity(llm, TEXT, **options)


@pytest.fixture(scope="module")
def stories_text(data: Path) -> str:
    return (data / "text" / "tinystories-test.txt").read_text()


def test_stories15m_equals_the_plain_formula(data: Path, stories_text: str) -> None:
    """The first windows of the text below, against transformers' model.

    The tolerance is for torch's f32 cross entropy, 2e-5 too low over 32000 tokens; logits are those of transformers.
    """
    stories = LLM.load(data / "stories15M", device="cpu")
    ids = stories.tokenizer.encode(stories_text, bos=False)
    windows = [[stories.tokenizer.bos_id, *ids[i : i + 255]] for i in range(0, 3 * 255, 255)]
    assert {len(window) for window in windows} == {256}
    peer = AutoModelForCausalLM.from_pretrained(data / "stories15M", dtype=torch.float32)
    result = perplexity(stories, stories_text, context=256, tokens=3 * 255)
    assert result.perplexity == pytest.approx(plain_perplexity(peer, windows), rel=3e-5)
    assert (result.tokens, result.windows, result.bos) == (3 * 255, 3, True)


@pytest.mark.slow
def test_stories15m_on_tinystories(data: Path, stories_text: str) -> None:
    """The figure of shared/data/README.md: f32, windows of BOS + 255."""
    stories = LLM.load(data / "stories15M", device="cpu")
    result = perplexity(stories, stories_text, context=256)
    assert result.perplexity == pytest.approx(10.77, abs=0.01)
    assert result.bos
    assert result.tokens == result.windows * 255
