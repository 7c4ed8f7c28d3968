"""Greedy tokens of transformers on our modules against our own engine; compiled or not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import quantized_copy, write_tokenizer
from greedy import IDS, TEXTS, TOKENS
from hf_models import tokens, write_model
from random_models import write_random
from transformers import AutoModelForCausalLM, AutoTokenizer

from crelle import LLM, CalibrationData, Sampling, quantize
from crelle.formats.exporters.directory import export_directory
from crelle.formats.exporters.gptq import GPTQLayout
from crelle.formats.storage.open import open_weights


def imported_gptq(source: Path, to: Path, text: CalibrationData) -> Path:
    """A GPTQ directory of 3 bits, as other programs write it, opened by Crelle without loss."""
    quantize(source, to / "made", "gptq:bits=3,group=32", text=text)
    export_directory(open_weights(to / "made"), to / "gptq", GPTQLayout())
    quantize(to / "gptq", to / "q", "keep")
    return to / "q"


@pytest.mark.parametrize("scheme", ["bcq:bits=3,group=32,rounds=2", "mixed:four=0.25,outliers=0.002,refine=0", "keep"])
@pytest.mark.sample(3)
def test_greedy_tokens_equal_those_of_crelle(scheme: str, data: Path, tmp_path: Path) -> None:
    """Of the engine that `crelle generate` runs; "keep" is an imported GPTQ model of 3 bits."""
    source = data / "stories15M"
    if scheme == "keep":
        words = (data / "text" / "tinystories-calibration.txt").read_text()
        checkpoint = imported_gptq(source, tmp_path, CalibrationData(text=words, rows=4, length=64))
    else:
        checkpoint = quantized_copy(source, tmp_path / "q", scheme)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    require_same_tokens(checkpoint, [tokenizer(text)["input_ids"] for text in TEXTS], list(TEXTS))


@pytest.mark.parametrize("family", ["Gemma3", "Gemma2"])
def test_random_gemma_equals_crelle(family: str, tmp_path: Path) -> None:
    source = write_random(tmp_path / "m", family)
    write_tokenizer(source)
    quantize(source, tmp_path / "q", "bcq:bits=3,group=32,rounds=2", head="rtn:bits=4,group=32")
    require_same_tokens(tmp_path / "q", IDS, IDS)


TIE = 1e-3  # standard deviations of the logits: what kernels that round x to 16 bits leave


def require_same_tokens(checkpoint: Path, ids: list[list[int]], prompts: list[Any]) -> None:
    """Greedy tokens of transformers behind `ids` must be those of Crelle behind the same prompts, up to a tie."""
    ties = 0
    # eager: transformers' other attention kernels leave out Gemma 2's cap on scores
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    llm = LLM.load(checkpoint, device="cpu")
    for row, prompt in zip(ids, prompts, strict=True):
        given = torch.tensor([row])
        found = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        )[0, len(row) :].tolist()
        assert len(found) == TOKENS  # none ended early
        ours = list(llm.generate(prompt, Sampling(max_tokens=TOKENS, temperature=0)).tokens)
        if found == ours:
            continue
        first = next(i for i, (a, b) in enumerate(zip(found, ours, strict=False)) if a != b)
        with torch.no_grad():
            logits = model(torch.tensor([row + found[:first]])).logits[0, -1]
        assert float(logits[found[first]] - logits[ours[first]]) < TIE * float(logits.std())
        ties += 1
    assert ties <= 1


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
