"""The benchmark of speculation: prompts that answers repeat, rounds that count, and an acceptance by lot."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, write_tiny_model
from emulated_cuda import emulate
from in_process import run, succeed

from crelle import LLM
from crelle.bench import model_shapes
from crelle.bench.load.model_sources import random_llm
from crelle.bench.load.simulated_acceptance import simulate_acceptance
from crelle.bench.load.speculation import measure, prompts
from crelle.engine.engine import Engine
from crelle.engine.speculation.draft_model import Draft
from crelle.errors import CapacityError, SchemeError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = write_tiny_model(tmp_path_factory.mktemp("bench") / "m", max_position_embeddings=1024)
    return LLM.load(path, device="cpu", threads=1)


@pytest.fixture
def random_pair(monkeypatch: pytest.MonkeyPatch) -> LLM:
    """A model of random weights whose tokens mean nothing, and a smaller one that guesses them."""
    config = {**TINY, "max_position_embeddings": 512}
    shapes = {"one": config, "other": {**config, "num_hidden_layers": 1}}
    monkeypatch.setattr(model_shapes, "SHAPES", shapes)
    llm, cpu = random_llm("one", "fp16", torch.device("cpu")), torch.device("cpu")
    llm.draft = Draft(random_llm("other", "fp16", cpu).model, "other")
    return llm


def test_prompts_have_their_beginning_once_more_at_their_end(tiny: LLM) -> None:
    marks = {"summary": "says:\n\n", "edit": "first line:\n\n"}
    for kind, mark in marks.items():
        found = prompts(tiny, kind, 8, 300)  # type: ignore[arg-type]
        assert len({tuple(ids) for ids in found}) == 7  # files there are, then again the first
        assert {len(ids) for ids in found} <= set(range(280, 301))
        text, again = tiny.tokenizer.decode(found[0]).split(mark)
        assert text[:8] == again[:8]
        assert text.startswith(again) == (kind == "summary")


def test_the_first_round_does_not_count(tiny: LLM) -> None:
    result = measure(tiny, "fp16", "ngram:tokens=3,adaptive=false", "edit", 2, 2, 240, 12)
    assert result.equal_answers == 1.0
    assert result.simulated_acceptance is None
    assert result.tokens == 2 * 2 * (12 - 1)
    assert result.plain_steps == 2 * 12
    assert 0 < result.slowest_round <= result.speedup
    with pytest.raises(CapacityError, match="prompts must have more than"):
        measure(tiny, "fp16", "ngram", "edit", 1, 1, 40, 12)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("probability", [0.0, 0.7, 1.0])
def test_as_many_guesses_are_right_as_the_lot_says(
    random_pair: LLM, where: str, probability: float, monkeypatch: Any
) -> None:
    if where == "cuda":
        emulate(monkeypatch)
    how = "draft:tokens=3,adaptive=false"
    result = measure(random_pair, "fp16", how, "random", 1, 2, 200, 60, acceptance=probability)
    assert result.equal_answers is None
    assert result.simulated_acceptance == probability
    assert result.tokens == 2 * 59
    assert result.drafted > 0
    per_step = result.accepted / (result.steps - 2)
    want = sum(probability**i for i in (1, 2, 3))
    assert abs(per_step - want) <= (0.1 if probability in (0, 1) else 0.6)  # answers end within a draft


def test_what_is_no_probability_is_refused(random_pair: LLM) -> None:
    engine = Engine(random_pair, pages=8)
    for value in (-0.1, 1.5):
        with pytest.raises(SchemeError, match="an acceptance is a probability"):
            simulate_acceptance(engine, value)


def test_the_command_reports_what_was_simulated(random_pair: LLM, tmp_path: Path) -> None:
    shapes = ("--shape", "one", "--draft-shape", "other", "--acceptance", 0.7, "--device", "cpu")
    sizes = ("--rounds", 1, "--prompt", 200, "--tokens", 20, "--speculate", "draft:adaptive=false")
    succeed("bench", "speculate", *shapes, *sizes, "--out", tmp_path / "r")
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert row["simulated_acceptance"] == 0.7
    assert row["equal_answers"] is None
    assert row["speculate"].endswith("(other fp16)")
    assert "either a MODEL or --shape" in run("bench", "speculate").err
    assert "--prompts must be" in run("bench", "speculate", "--shape", "one", "--prompts", "prose").err
