"""The divergence of one model from another: the plain formula, the same model, models that cannot be compared."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import quantized_copy, write_tiny_model

from crelle import LLM
from crelle.errors import SchemeError
from crelle.eval.divergence import model_divergence
from crelle.eval.perplexity import Windows, perplexity

TEXT = "The quick brown fox jumps over the lazy dog; naïve café 漢字. " * 6


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM.load(tiny_model, device="cpu")


def test_equals_the_plain_formula(llm: LLM, tiny_model: Path, tmp_path: Path) -> None:
    coded = LLM.load(quantized_copy(tiny_model, tmp_path / "q", "rtn:bits=2,group=24"), device="cpu")
    own, found = model_divergence(coded, llm, TEXT, context=64)
    kl, same = [], []
    for window in Windows.of(llm, TEXT, context=64, tokens=None, bos=True):
        p, q = (m.model(window, m.model.new_cache())[0, :-1].double().softmax(-1) for m in (llm, coded))
        kl.append((p * (p / q).log()).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    values = torch.cat(kl)
    assert found.kl_mean == pytest.approx(values.mean().item(), rel=1e-6)
    assert found.kl_p99 == pytest.approx(values.quantile(0.99).item(), rel=1e-6)
    assert found.top1_agreement == pytest.approx(torch.cat(same).double().mean().item())
    assert 0 < found.top1_agreement < 1
    assert found.predicted == len(values)
    assert own.perplexity == pytest.approx(perplexity(coded, TEXT, context=64).perplexity, rel=1e-5)
    assert found.perplexity == pytest.approx(perplexity(llm, TEXT, context=64).perplexity, rel=1e-5)
    assert found.ratio == pytest.approx(own.perplexity / found.perplexity)


def test_same_model_does_not_diverge(llm: LLM) -> None:
    _, found = model_divergence(llm, llm, TEXT, context=64, tokens=128)
    assert (found.kl_max, found.top1_agreement, found.ratio) == (0, 1, 1)


def test_models_with_other_tokens_are_refused(llm: LLM, tiny_model: Path, tmp_path: Path) -> None:
    wider = LLM.load(write_tiny_model(tmp_path / "wider", vocab_size=300), device="cpu")
    with pytest.raises(SchemeError, match=r"do not share a tokenizer \(vocabularies of 259 and 300\)"):
        model_divergence(llm, wider, TEXT, context=64)
    shutil.copytree(tiny_model, tmp_path / "bare")
    config = tmp_path / "bare" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"add_bos_token": False}))
    with pytest.raises(SchemeError, match="do not share a tokenizer"):
        model_divergence(llm, LLM.load(tmp_path / "bare", device="cpu"), TEXT, context=64)
