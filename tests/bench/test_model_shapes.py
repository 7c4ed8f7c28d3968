"""Models of real shapes with random weights: sizes, bits per weight, finite logits, the same for the same seed."""

from typing import Any

import pytest
import torch
from conftest import TINY

from crelle.bench.kernels.random_matrices import random_generator, random_matrix
from crelle.bench.model_shapes import SHAPES, RandomWeights
from crelle.errors import FormatError, SchemeError, UnsupportedError
from crelle.formats.base import bits_per_weight, nbytes
from crelle.models.loader import build, read_spec
from crelle.quantizers.scheme import parse

CPU = torch.device("cpu")
TINY_OPT = {
    "model_type": "opt",
    "hidden_size": 72,
    "ffn_dim": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "vocab_size": 259,
    "max_position_embeddings": 96,
}
SMALL: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "tied llama": {**TINY, "tie_word_embeddings": True},
    "opt": TINY_OPT,
    "opt as 350M": {**TINY_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 40},
    "opt with a head": {**TINY_OPT, "tie_word_embeddings": False, "enable_bias": False},
}
SCHEMES = {  # scheme: bits per weight at K = 1024
    "fp16": 16,
    "bcq:bits=3,group=128": 3 + 16 * 4 / 128,
    "bcq:bits=2,group=64,bias=false": 2 + 16 * 2 / 64,
    "hbcq:bits=2,group=32": 2 + 16 * 3 / 32,
    "rtn:bits=4,group=128": 4 + 20 / 128,
    "rtn:bits=3,group=row,symmetric=true": 3 + 16 / 1024,
    "gptq:bits=3,group=128": 3 + 19 / 128,
    "gptq:bits=2,group=64,free=true": 2 + 32 / 64,
    "awq:bits=4,group=64": 4 + 20 / 64,
    "auto:bits=3.35": 3 + 32 * 11 / 1024,
    "bcq-nested:bits=4,group=128": 4 + 32 * 3 / 128,
}
PARAMETERS = {  # as the papers say, in billions
    "smollm2-135m": 0.1345,
    "llama-160m": 0.1624,
    "llama2-7b": 6.74,
    "llama2-13b": 13.0,
    "llama-30b": 32.5,
    "llama-65b": 65.3,
    "llama2-70b": 69.0,
    "llama3-8b": 8.03,
    "opt-125m": 0.125,
    "llama3.2-1b": 1.236,
    "opt-350m": 0.331,
    "opt-1.3b": 1.316,
    "opt-2.7b": 2.65,
    "opt-6.7b": 6.66,
    "opt-13b": 12.85,
    "opt-30b": 29.97,
    "opt-66b": 65.7,
    "opt-175b": 174.6,
    "gpt2-xl": 1.558,
    "gemma3-1b": 1.0,
    "gemma3-4b": 3.88,
    "gemma3-12b": 11.77,
    "gemma3-27b": 27.01,
}


def logits(weights: RandomWeights, tokens: int = 20) -> torch.Tensor:
    model = build(weights, CPU)
    ids = torch.randint(model.spec.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1))
    return model(ids, model.new_cache())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_as_many_weights_as_published(name: str) -> None:
    weights = RandomWeights(name, "bcq:bits=3,group=128")
    assert weights.weights() / 1e9 == pytest.approx(PARAMETERS[name], rel=0.01)
    config = SHAPES[name]
    assert len(read_spec(weights).layers) == config.get("num_hidden_layers", config.get("n_layer"))


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("scheme", ["fp16", "bcq:bits=3,group=32", "rtn:bits=4,group=24", "bcq-nested:bits=4,group=32"])
def test_a_model_is_built_and_its_logits_are_finite(kind: str, scheme: str) -> None:
    found = logits(RandomWeights(SMALL[kind], scheme))
    assert torch.isfinite(found).all()
    assert 0.2 < found.std() < 5  # neither faded nor grown


@pytest.mark.parametrize("name", ["smollm2-135m", "opt-125m", "gpt2-xl"])
def test_a_real_shape_cut_to_two_layers_runs(name: str) -> None:
    found = logits(RandomWeights(name, "bcq:bits=2,group=128", layers=2), tokens=4)
    assert torch.isfinite(found).all()
    assert found.shape[-1] == SHAPES[name]["vocab_size"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_matrix_costs_what_its_scheme_costs(scheme: str) -> None:
    w = random_matrix(parse(scheme), 64, 1024, random_generator(0, "cpu"))
    assert w.shape == (64, 1024)
    assert bits_per_weight(w) == pytest.approx(SCHEMES[scheme])


@pytest.mark.parametrize("scheme", ["fp16", "bcq:bits=3,group=24", "rtn:bits=4,group=32"])
@pytest.mark.parametrize("kind", SMALL)
def test_the_size_of_a_model_is_known_before_it_is_made(kind: str, scheme: str) -> None:
    weights = RandomWeights(SMALL[kind], scheme)
    names = {n: len(weights.shape(n)) == 2 for n in weights.names()}
    made = sum(nbytes(weights.matrix(n.removesuffix(".weight"))) for n, is_matrix in names.items() if is_matrix)
    assert weights.nbytes() == made + sum(2 * weights.shape(n)[0] for n, is_matrix in names.items() if not is_matrix)


def test_opt_175b_at_3_bits_fits_one_gpu() -> None:
    assert 70e9 < RandomWeights("opt-175b", "bcq:bits=3,group=128").nbytes() < 80e9


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_have_the_deviation_that_keeps_activations_alive(scheme: str) -> None:
    w = random_matrix(parse(scheme), 512, 300, random_generator(0, "cpu")).dequantize()
    assert w.std() == pytest.approx(300**-0.5, rel=0.12)


@pytest.mark.parametrize("scheme", ["bcq:bits=3,group=32", "rtn:bits=4,group=32", "gptq:bits=2,group=32,free=true"])
def test_a_matrix_is_what_its_format_would_read_back(scheme: str) -> None:
    w = random_matrix(parse(scheme), 16, 83, random_generator(0, "cpu"))  # 83: padding bits, a short last group
    again = type(w).from_parts(w.spec(), w.tensors())  # type: ignore[attr-defined]
    assert torch.equal(again.dequantize(), w.dequantize())
    assert not (w.tensors()["planes"][..., -1] >> 3).any()


def test_the_same_seed_gives_the_same_weights_and_another_one_others() -> None:
    first, again, other = (RandomWeights(TINY, "bcq:bits=3,group=32", seed=seed) for seed in (0, 0, 1))
    module = "model.layers.1.mlp.up_proj"
    planes = [w.matrix(module).tensors()["planes"] for w in (first, again, other)]
    assert torch.equal(planes[0], planes[1])
    assert not torch.equal(planes[0], planes[2])
    assert not torch.equal(planes[0], first.matrix("model.layers.1.mlp.gate_proj").tensors()["planes"])
    assert torch.equal(first.matrix(module).tensors()["planes"], planes[0])  # asked twice
    assert torch.equal(logits(first), logits(again))


def test_only_matrices_inside_the_layers_follow_the_scheme() -> None:
    weights = RandomWeights({**TINY_OPT, "word_embed_proj_dim": 40}, "rtn:bits=4,group=24")
    matrices = [n.removesuffix(".weight") for n in weights.names() if len(weights.shape(n)) == 2]
    formats = {m: weights.matrix(m).format for m in matrices}
    assert {m for m, f in formats.items() if f == "uniform"} == {m for m in matrices if ".layers." in m}
    assert set(formats.values()) == {"uniform", "dense"}


def test_norms_are_one_and_biases_small() -> None:
    weights = RandomWeights(TINY_OPT, "fp16")
    assert (weights.read("model.decoder.layers.0.final_layer_norm.weight") == 1).all()
    assert 0 < weights.read("model.decoder.layers.0.fc1.bias").abs().max() < 0.2


def test_an_unknown_shape_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SchemeError, match=r"'llama9-1b'.*llama2-7b.*opt-175b"):
        RandomWeights("llama9-1b")


@pytest.mark.parametrize("layers", [0, 97])
def test_a_number_of_layers_that_a_shape_has_not_is_a_sentence(layers: int) -> None:
    with pytest.raises(SchemeError, match="1 to 96"):
        RandomWeights("opt-175b", layers=layers)


@pytest.mark.parametrize("scheme", ["keep", "no-such-scheme"])
def test_a_scheme_that_needs_a_source_is_a_sentence(scheme: str) -> None:
    with pytest.raises(SchemeError, match=scheme):
        RandomWeights(TINY, scheme).matrix("model.layers.0.mlp.up_proj")


def test_what_is_not_there_is_a_sentence() -> None:
    weights = RandomWeights(TINY)
    with pytest.raises(FormatError, match=r"model\.layers\.7"):
        weights.matrix("model.layers.7.mlp.up_proj")
    with pytest.raises(UnsupportedError, match="mamba"):
        RandomWeights({**TINY, "model_type": "mamba"})
