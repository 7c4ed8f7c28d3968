"""Perplexity with quantized caches: through the function, the command line and explain, all saying what runs."""

from pathlib import Path

import pytest
from in_process import run, succeed

from crelle import LLM
from crelle.engine.sampler import Sampling
from crelle.errors import SchemeError
from crelle.eval.perplexity import perplexity

TEXT = "The quick brown fox jumps over the lazy dog; naïve café 漢字. " * 6


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def measured(path: Path, kv: str | int, stepwise: bool = False) -> float:
    return perplexity(LLM.load(path, device="cpu", kv=kv), TEXT, context=64, stepwise=stepwise).perplexity


def test_fewer_bits_are_further_from_the_exact_perplexity(tiny_model: Path) -> None:
    exact = measured(tiny_model, 16)
    assert 0 < abs(measured(tiny_model, 8) / exact - 1) < 1e-3
    assert 0 < abs(measured(tiny_model, 4) / exact - 1) < 0.02


def test_token_by_token_is_the_perplexity_of_one_pass(tiny_model: Path) -> None:
    assert measured(tiny_model, 4, stepwise=True) == pytest.approx(measured(tiny_model, 4), rel=1e-3)


def test_the_command_measures_what_the_function_does(tiny_model: Path, text: Path) -> None:
    options = ("--text", text, "--context", 64, "--device", "cpu")
    for kv in ("16", "8", "4", "kv4:center=false"):
        result = succeed("eval", tiny_model, *options, "--kv", kv, "--json")
        assert result.json["perplexity"] == pytest.approx(measured(tiny_model, kv), rel=1e-6)
        assert result.json["kv"] == f"kv{kv.removeprefix('kv')}"
        assert "layer by layer" not in result.err  # on a CPU
    assert "cache kv4" in succeed("eval", tiny_model, *options, "--kv", "4").out
    refused = run("eval", tiny_model, *options, "--kv", "3")
    assert (refused.code, "16, 8 or 4" in refused.err) == (2, True)


def test_explain_tells_how_coded_pages_run(tiny_model: Path) -> None:
    seen = succeed("explain", tiny_model, "--device", "cpu", "--kv", "4", "--json").json
    plain = succeed("explain", tiny_model, "--device", "cpu", "--json").json
    assert (seen["kv"], seen["fused"]) == ("kv4", plain["fused"])


def test_generation_uses_the_cache_that_was_asked_for(tiny_model: Path) -> None:
    llm = LLM.load(tiny_model, device="cpu", kv="kv4:page=8")
    assert str(llm.kv) == "kv4:page=8"
    said = llm.generate("The quick brown fox", Sampling(max_tokens=20, temperature=0))
    assert llm.generate("The quick brown fox", Sampling(max_tokens=20, temperature=0)).tokens == said.tokens
    with pytest.raises(SchemeError, match="one of 16, 8, 4, 3, 2"):
        LLM.load(tiny_model, kv="2")


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "most"), [("8", 1.005), ("4", 1.05)])
def test_smollm2_loses_little(smollm2_file: Path, data: Path, kv: str, most: float) -> None:
    """The first three of the ten windows of bench/results/kv-quality-smollm2.json."""
    wikitext = (data / "text" / "wikitext2-test.txt").read_text(encoding="utf-8")
    exact, coded = (
        perplexity(LLM.load(smollm2_file, device="cpu", kv=b), wikitext, context=1024, tokens=3072).perplexity
        for b in ("16", kv)
    )
    assert coded / exact <= most
