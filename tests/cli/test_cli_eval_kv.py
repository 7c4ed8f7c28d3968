"""Perplexity with quantized caches: through the function, the command line and explain, all saying what runs."""

from pathlib import Path

import pytest
from in_process import run, succeed

from crelle import LLM
from crelle.engine.sampling.sampler import Sampling
from crelle.errors import SchemeError
from crelle.eval.kv_divergence import kv_divergence
from crelle.eval.perplexity import Windows, perplexity

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
    refused = run("eval", tiny_model, *options, "--kv", "5")
    assert (refused.code, "one of 16, 8, 4, 3, 2" in refused.err) == (2, True)


def test_windows_are_as_long_as_the_model_reads(tiny_model: Path, text: Path) -> None:
    result = succeed("eval", tiny_model, "--text", text, "--device", "cpu", "--json")
    assert result.json["context"] == 96


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
        LLM.load(tiny_model, kv="5")


@pytest.mark.parametrize("kv", ["k4v2", "3", "4,layers.1=k8v16"])
def test_generation_with_keys_and_values_apart(tiny_model: Path, kv: str) -> None:
    llm = LLM.load(tiny_model, device="cpu", kv=kv)
    prompts, sampling = ["The quick brown fox", "naïve"], Sampling(max_tokens=20, temperature=0)
    together = [said.tokens for said in llm.generate(prompts, sampling)]
    assert together == [llm.generate(prompt, sampling).tokens for prompt in prompts]


def test_fewer_bits_diverge_more(tiny_model: Path) -> None:
    found = []
    for kv in ("16", "8", "4", "3", "2"):
        llm = LLM.load(tiny_model, device="cpu", kv=kv)
        found.append(kv_divergence(llm, TEXT, context=64))
        again = kv_divergence(llm, TEXT, context=64, stepwise=True)
        assert again.kl_mean == pytest.approx(found[-1].kl_mean, rel=0.2, abs=1e-9)
        assert found[-1].perplexity == pytest.approx(measured(tiny_model, kv), rel=1e-5)
    means = [f.kl_mean for f in found]
    assert means[0] < 1e-9 < means[1] < means[2] < means[3] < means[4]
    for f in found:
        assert f.kl_mean <= f.kl_p99 * 100
        assert f.kl_p99 <= f.kl_max
        assert f.perplexity_16 == pytest.approx(measured(tiny_model, 16), rel=1e-5)
    mixed = [
        kv_divergence(LLM.load(tiny_model, device="cpu", kv=kv), TEXT, context=64) for kv in ("k4v2", "2,layers.0=8")
    ]
    assert means[2] < mixed[0].kl_mean < means[4]
    assert mixed[1].kl_mean < means[4]


def test_divergence_is_that_of_the_two_distributions(tiny_model: Path) -> None:
    llm = LLM.load(tiny_model, device="cpu", kv=2)
    found = kv_divergence(llm, TEXT, context=64, tokens=64)
    (window,) = Windows.of(llm, TEXT, context=64, tokens=64, bos=True)
    p, q = (llm.model(window, llm.model.new_cache(kv=kv))[0, :-1].double().softmax(-1) for kv in (16, 2))
    kl = (p * (p / q).log()).sum(-1)
    assert found.kl_mean == pytest.approx(kl.mean().item(), rel=1e-6)
    assert found.kl_p99 == pytest.approx(kl.quantile(0.99).item(), rel=1e-6)
    assert found.predicted == len(kl)


def test_the_command_gates_a_cache_by_its_divergence(tiny_model: Path, text: Path) -> None:
    options = ("--text", text, "--context", 64, "--device", "cpu")
    seen = succeed("eval", tiny_model, *options, "--kv", "k4v2", "--kl", "--json").json
    assert (seen["kv"], seen["kl_limit"], 0 < seen["kl_mean"] < seen["kl_p99"]) == ("k4v2", None, True)
    assert "k4v2" in succeed("eval", tiny_model, *options, "--kv", "k4v2", "--kl", "--kl-limit", 10).out
    refused = run("eval", tiny_model, *options, "--kv", "k4v2", "--kl-limit", seen["kl_mean"] / 2, "--json")
    assert refused.code == 1
    assert refused.json["kl_mean"] == pytest.approx(seen["kl_mean"])
    assert "above the limit of" in refused.err
    negative = run("eval", tiny_model, *options, "--kl-limit", -1)
    assert (negative.code, "at least 0 nats, got -1" in negative.err) == (2, True)


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
