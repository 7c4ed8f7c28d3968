"""A nested checkpoint: three models in one file, chosen at load or with each call."""

import json
from pathlib import Path

import pytest
import torch
from conftest import Run, quantized_copy, write_tiny_model
from torch import Tensor

from crelle import LLM, Sampling, quantize
from crelle.cli.commands.explain import decisions
from crelle.cli.commands.inspect import describe
from crelle.errors import UnsupportedError
from crelle.formats.dense import DenseTensor
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.open import open_weights
from crelle.models.loader import build, load
from crelle.models.nested import offered

SCHEME = "bcq-nested:bits=4,group=24,data=false"
IDS = torch.randint(259, (1, 30), generator=torch.Generator().manual_seed(5))


def logits(model: torch.nn.Module) -> Tensor:
    return model(IDS, model.new_cache())  # type: ignore[no-any-return, operator]


@pytest.fixture(scope="module")
def nested(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("nested") / "q"
    quantized_copy(tiny_model, to, SCHEME)
    return to


@pytest.fixture(scope="module")
def plain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("plain") / "q"
    quantized_copy(tiny_model, to, "rtn:bits=4,group=24")
    return to


class At(Checkpoint):
    """The checkpoint as if it held one precision only, whose matrices are plain numbers."""

    bits = 4

    def matrix(self, module: str) -> DenseTensor:  # type: ignore[override]
        w = super().matrix(module)
        return DenseTensor((w.at(self.bits) if w.format == "nested" else w).dequantize())  # type: ignore[attr-defined]


@pytest.mark.parametrize("kernel", [None, "dequantized"])
def test_three_precisions_are_the_three_models_of_their_planes(nested: Path, kernel: str | None) -> None:
    llm = LLM.load(nested, device="cpu", kernel=kernel)
    assert llm.precisions == (2, 3, 4)
    found = {bits: logits(llm.at(bits)) for bits in (2, 3, 4)}
    for bits, got in found.items():
        alone = At(nested)
        alone.bits = bits
        expected = logits(build(alone, torch.device("cpu")))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(logits(load(nested, "cpu", kernel, bits)[0]), got, rtol=0, atol=0)
    assert all((found[a] - found[b]).abs().max() > 0.05 for a, b in [(2, 3), (3, 4), (2, 4)])
    assert torch.equal(logits(llm.model), found[4])


def test_calls_choose_their_precision(nested: Path) -> None:
    llm, sampling = LLM.load(nested, device="cpu"), Sampling(max_tokens=20)
    tokens = {bits: llm.generate("Hello", sampling, bits=bits).tokens for bits in (2, 3, 4)}
    for bits, got in tokens.items():
        alone = LLM.load(nested, device="cpu", bits=bits)
        assert alone.generate("Hello", sampling).tokens == got
        assert llm.generate(["Hello", "a"], sampling, bits=bits)[0].tokens == got
        streamed = [p.completion for p in llm.stream("Hello", sampling, bits=bits)][-1]
        assert streamed is not None
        assert streamed.tokens == got
        assert alone.at(bits) is alone.model
    assert llm.generate("Hello", sampling).tokens == tokens[4]
    assert len({tuple(t) for t in tokens.values()}) == 3
    talk = [{"role": "user", "content": "Hi"}]
    pieces = ["".join(p.text for p in llm.chat(talk, sampling, bits=bits)) for bits in (2, 4)]  # type: ignore[arg-type]
    assert pieces[0] != pieces[1]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [None, "rtn:bits=8,group=24"])
def test_what_has_one_precision_is_shared(tied: bool, head: str | None, tmp_path: Path) -> None:
    quantize(write_tiny_model(tmp_path / "m", tie_word_embeddings=tied), tmp_path / "q", SCHEME, head=head)
    llm = LLM.load(tmp_path / "q", device="cpu")
    two, four = llm.at(2), llm.at(4)
    assert llm.at(2) is two
    assert two is not four
    assert two.embedding.weight is four.embedding.weight
    assert two.head is four.head
    assert two.output.norm.weight is four.output.norm.weight
    for a, b in zip(two.layers, four.layers, strict=True):
        assert a.norm_mlp.weight is b.norm_mlp.weight
        assert a.mlp.up is not b.mlp.up
        assert (a.mlp.up.weight.bits, b.mlp.up.weight.bits) == (2, 4)
    assert (logits(two) - logits(four)).abs().max() > 0.05


def test_a_nested_head_follows_the_precision(tiny_model: Path, tmp_path: Path) -> None:
    quantize(tiny_model, tmp_path / "q", "fp32", head=SCHEME)
    llm = LLM.load(tmp_path / "q", device="cpu")
    assert [llm.at(bits).head.weight.bits for bits in (2, 3, 4)] == [2, 3, 4]
    assert llm.at(2).layers[0].mlp.up is llm.at(4).layers[0].mlp.up
    assert (logits(llm.at(2)) - logits(llm.at(4))).abs().max() > 0.05


def test_only_what_all_nested_matrices_have_is_on_offer(tiny_model: Path, tmp_path: Path) -> None:
    finer = SCHEME.replace("bits=4", "bits=5,lowest=3")
    quantize(tiny_model, tmp_path / "q", SCHEME, overrides={"*.down_proj": finer})
    assert offered(open_weights(tmp_path / "q")) == (3, 4)
    llm = LLM.load(tmp_path / "q", device="cpu")  # the finest of each, which no number names
    assert {layer.weight.bits for layer in llm.model.linears()} == {4, 5, 32}
    assert (logits(llm.at(4)) - logits(llm.model)).abs().max() > 1e-4


def test_every_matrix_gets_a_kernel_for_plain_grids(nested: Path) -> None:
    llm = LLM.load(nested, device="cpu")
    for bits in (2, 3, 4):
        assert {layer.problem.format for layer in llm.at(bits).linears()} == {"affine", "dense"}


@pytest.mark.parametrize("bits", [0, 1, 5, -2])
def test_a_precision_that_is_not_there_gets_a_sentence(nested: Path, bits: int) -> None:
    with pytest.raises(UnsupportedError, match=rf"serves 2, 3, 4 bits, not {bits}"):
        LLM.load(nested, device="cpu", bits=bits)
    llm = LLM.load(nested, device="cpu", bits=2)
    with pytest.raises(UnsupportedError, match=rf"serves 2, 3, 4 bits, not {bits}"):
        llm.stream("Hello", bits=bits)
    assert llm.generate("Hello", Sampling(max_tokens=2)).tokens


@pytest.mark.parametrize("bits", [0, 4])
def test_a_checkpoint_of_one_precision_says_so(plain: Path, tiny_model: Path, bits: int) -> None:
    for path in (plain, tiny_model):
        with pytest.raises(UnsupportedError, match=r"has one precision only.*bcq-nested makes checkpoints"):
            LLM.load(path, device="cpu", bits=bits)
        llm = LLM.load(path, device="cpu")
        assert llm.precisions == ()
        with pytest.raises(UnsupportedError, match="has one precision only"):
            llm.generate("Hello", bits=bits)


def test_inspect_and_explain_speak_of_the_precisions(nested: Path, plain: Path) -> None:
    assert (describe(nested)["precisions"], describe(plain)["precisions"]) == ([2, 3, 4], [])
    chosen = {layer.name: layer.kernel for layer in LLM.load(nested, device="cpu").model.linears()}
    assert {row["name"]: row["kernel"] for row in decisions(nested, "cpu")} == chosen


def test_eval_measures_the_precision_asked_for(nested: Path, tmp_path: Path, crelle: Run) -> None:
    (tmp_path / "t.txt").write_text("Once upon a time there was a text. " * 20)
    options = ("--text", tmp_path / "t.txt", "--context", 48, "--json", "--device", "cpu")
    found = {}
    for bits in (2, 4):
        run = crelle("eval", nested, *options, "--bits", bits)
        assert run.returncode == 0, run.stderr
        found[bits] = json.loads(run.stdout)["perplexity"]
    assert found[2] != found[4]
    run = crelle("eval", nested, *options, "--bits", 7)
    assert run.returncode != 0
    assert "serves 2, 3, 4 bits, not 7" in " ".join(run.stderr.split())
