"""The decode bench of whole steps, on a CPU: figures fit each other, wrong decoding is noticed, limits are told."""

from dataclasses import replace

import pytest
import torch
from conftest import TINY

from crelle.bench import decode_cuda
from crelle.bench.decode_cuda import check, does_not_fit, measure, step_bytes, with_baseline
from crelle.bench.engine_decode import EngineDecoder, Generation
from crelle.bench.kernels.cuda_timer import Ceiling
from crelle.bench.load.no_tokenizer import NoTokenizer
from crelle.bench.model_shapes import RandomWeights
from crelle.engine.llm import LLM
from crelle.errors import CapacityError, SchemeError, UnsupportedError
from crelle.formats.base import nbytes
from crelle.models.loader import Model, build

CPU = torch.device("cpu")
SCHEME = "bcq:bits=3,group=24"
SHORT = {"tokens": 6, "context": 5, "rounds": 2}


def tiny(scheme: str = SCHEME) -> RandomWeights:
    return RandomWeights(TINY, scheme)


def prompt(model: Model, batch: int = 1) -> torch.Tensor:
    return torch.randint(model.spec.vocabulary, (batch, 5), generator=torch.Generator().manual_seed(2))


def test_figures_fit_each_other() -> None:
    r = measure(tiny(), SCHEME, CPU, batch=2, ceiling=Ceiling(50.0, "a guess"), **SHORT)
    assert (r.scheme, r.batch, r.layers, r.tokens, r.context) == (SCHEME, 2, 3, 6, 5)
    assert r.milliseconds_per_token > 0
    assert r.tokens_per_second == pytest.approx(2e3 / r.milliseconds_per_token)
    assert r.gb_per_s == pytest.approx(r.weight_bytes / r.milliseconds_per_token / 1e6)
    assert r.share_of_ceiling == pytest.approx(r.gb_per_s / 50)
    assert sum(r.kernels.values()) == 3 * 7 + 1
    assert not r.graph
    assert "cpu" in str(r.graph_note)
    assert r.joules_per_token is None
    assert "GPU" in str(r.energy_note)
    assert r.disagreement <= decode_cuda.TOLERANCE


def test_a_step_reads_all_matrices_but_the_embedding() -> None:
    weights = tiny()
    model = build(weights, CPU, kernel="reference")
    modules = [n.removesuffix(".weight") for n in weights.names() if len(weights.shape(n)) == 2]
    stored = sum(nbytes(weights.matrix(m)) for m in modules if ".layers." in m)
    assert step_bytes(model) == stored + 2 * 259 * 72  # the head is f16


def test_the_ratio_is_that_of_the_same_run() -> None:
    plain, coded = measure(tiny("fp16"), "fp16", CPU, **SHORT), measure(tiny(), SCHEME, CPU, **SHORT)
    row = with_baseline(coded, plain)
    assert row.speedup == pytest.approx(plain.milliseconds_per_token / coded.milliseconds_per_token)
    assert row.baseline == "our own fp16"
    assert with_baseline(coded, None) == coded


def decoder(model: Model, batch: int = 1) -> EngineDecoder:
    return EngineDecoder(LLM(model, NoTokenizer(), tiny()), batch, 40)  # type: ignore[arg-type]


class Faulty:
    """Decodes with a fault."""

    def __init__(self, model: Model, fault: str) -> None:
        self.right, self.fault, self.calls = decoder(model), fault, 0

    def generate(self, ids: torch.Tensor, tokens: int) -> Generation:
        self.calls += 1
        if self.fault == "forgets the prompt":
            return self.right.generate(ids[:, -1:], tokens)
        made = self.right.generate(ids, tokens)
        return replace(made, tokens=torch.full_like(made.tokens, self.calls))


def test_right_decoding_agrees_with_one_pass() -> None:
    model = build(tiny(), CPU, kernel="reference")
    assert check(model, decoder(model, 2), prompt(model, 2), 8) < 1e-3


def test_every_token_has_its_time() -> None:
    model = build(tiny(), CPU)
    made = decoder(model, 3).generate(prompt(model, 3), 8)
    assert made.tokens.shape == (3, 8)
    assert len(made.steps) == 7
    assert made.first > 0
    assert min(made.steps) > 0


@pytest.mark.parametrize(("fault", "words"), [("runs differ", "two runs"), ("forgets the prompt", "decoding is wrong")])
def test_wrong_decoding_is_not_timed(fault: str, words: str) -> None:
    model = build(tiny(), CPU)
    with pytest.raises(UnsupportedError, match=words):
        check(model, Faulty(model, fault), prompt(model), 8)


def test_a_context_that_is_too_long_is_a_sentence() -> None:
    with pytest.raises(CapacityError, match="90 \\+ 10 tokens"):
        measure(tiny(), SCHEME, CPU, tokens=10, context=90)


@pytest.mark.parametrize("wrong", [{"tokens": 2}, {"batch": 0}, {"context": 0}, {"rounds": 0}])
def test_sizes_that_make_no_sense_are_a_sentence(wrong: dict[str, int]) -> None:
    with pytest.raises(SchemeError, match="at least"):
        measure(tiny(), SCHEME, CPU, **wrong)


def test_a_model_that_does_not_fit_is_told_before_it_is_built() -> None:
    assert does_not_fit(tiny("fp16"), CPU) is None
    large = RandomWeights("opt-175b", "rtn:bits=8,group=128")
    assert "opt-175b at rtn:bits=8,group=128 takes" in str(does_not_fit(large, CPU))
    with pytest.raises(CapacityError, match="opt-175b"):
        measure(large, "rtn:bits=8,group=128", CPU, **SHORT)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["smollm2-135m", "opt-125m"])
@pytest.mark.parametrize("scheme", ["bcq:bits=3,group=128", "rtn:bits=4,group=128", "fp16"])
def test_a_real_shape_decodes_by_graph(name: str, scheme: str) -> None:
    device = torch.device("cuda")
    r = measure(RandomWeights(name, scheme, device, layers=4), scheme, device, tokens=16, context=16, rounds=1)
    assert r.graph, r.graph_note
    assert r.peak_memory_bytes is not None
    assert r.peak_memory_bytes > r.weight_bytes
