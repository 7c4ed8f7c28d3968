"""Greedy tokens of transformers on our modules against our own engine; compiled or not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import quantized_copy
from hf_models import tokens, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from crelle import LLM, Sampling, quantize

PROMPTS = (
    "Once upon a time",
    "The little dog",
    "One day, a girl named Lily went",
    "Tom and his mother",
    "There was a big, red",
)
LENGTH = 32


@pytest.fixture(scope="module", params=["bcq:bits=3,group=32,rounds=2", "mixed:four=0.25,outliers=0.002,refine=0"])
def stories(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_copy(data / "stories15M", tmp_path_factory.mktemp("stories"), request.param)


def generate(model: Any, tokenizer: Any, prompt: str, **options: Any) -> list[int]:
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=LENGTH, do_sample=False, **options)
    tokens: list[int] = out[0, ids["input_ids"].shape[1] :].tolist()
    return tokens


def test_greedy_tokens_equal_those_of_crelle(stories: Path) -> None:
    """Of the engine that `crelle generate` runs."""
    model = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    ours = LLM.load(stories, device="cpu").generate(list(PROMPTS), Sampling(max_tokens=LENGTH, temperature=0))
    for prompt, completion in zip(PROMPTS, ours, strict=True):
        assert generate(model, tokenizer, prompt) == completion.tokens


def test_compiled(tmp_path: Path) -> None:
    """Without a graph break: a prompt, and steps with a static cache; the head shares a quantized embedding."""
    source = write_model("llama", tmp_path / "m", tie_word_embeddings=True, num_hidden_layers=1)
    quantize(source, tmp_path / "q", "rtn:bits=4,group=32", head="rtn:bits=8,group=32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"cache_implementation": "static", "disable_compile": True}  # by transformers itself: that is inductor
    plain = model.generate(tokens(8), **options)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(model.generate(tokens(8), **options), plain)
