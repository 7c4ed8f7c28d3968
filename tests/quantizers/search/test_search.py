"""The search: the knapsack is exact, sizes are the tensors' own, sensitivities are what autograd says."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from problems import correlated, weight
from torch import Tensor

from crelle.errors import FormatError, SchemeError
from crelle.formats.base import bits_per_weight, nbytes
from crelle.formats.storage.open import open_weights
from crelle.models.calibration_model import CalibrationModel
from crelle.quantizers.base import BitConfig
from crelle.quantizers.calibration.layer_api import TrainableLinear
from crelle.quantizers.scheme import parse
from crelle.quantizers.schemes.bcq import BCQ
from crelle.quantizers.schemes.gptq import GPTQ
from crelle.quantizers.schemes.hbcq import HBCQ
from crelle.quantizers.schemes.rtn import RTN
from crelle.quantizers.search.bit_allocation import (
    RECIPE,
    ParetoFront,
    Plan,
    choose,
    sizes_of,
    stored_bits,
    uniform,
)
from crelle.quantizers.search.gradient_stats import backward_stats, sample_tokens
from crelle.quantizers.search.plan_file import read_plan, write_plan
from crelle.quantizers.search.search_memory import SearchMemory
from crelle.quantizers.search.sensitivity import Sensitivity, candidates, sensitivities
from crelle.quantizers.solvers.fast_error import fast_errors
from crelle.quantizers.solvers.gptq_solver import factor

SETTINGS = (BitConfig(1, 32), BitConfig(2, 32), BitConfig(3, 64), BitConfig(4, "row"))


@pytest.fixture(scope="module")
def opened(tiny_model: Path) -> CalibrationModel:
    return CalibrationModel(open_weights(tiny_model))


@pytest.fixture(scope="module")
def measured(opened: CalibrationModel) -> list[Sensitivity]:
    return sensitivities(opened, text(4, 40), SETTINGS, half=False)


def text(rows: int, length: int) -> Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(1))


# The knapsack


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Sensitivity], dict[str, dict[BitConfig, int]]]:
    count, options = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    found, sizes = [], {}
    for i in range(count):
        settings = [BitConfig(bits, 32) for bits in range(1, options + 1)]
        losses = draw(st.lists(st.floats(0, 100), min_size=options, max_size=options))
        found.append(Sensitivity(f"m.{i}", (1, 100), dict(zip(settings, losses, strict=True))))
        bits = draw(st.lists(st.integers(1, 1000), min_size=options, max_size=options))
        sizes[f"m.{i}"] = dict(zip(settings, bits, strict=True))
    return found, sizes


@given(problems(), st.floats(0, 10))
def test_no_choice_within_the_size_is_better(problem: tuple, target: float) -> None:
    found, sizes = problem
    room = math.floor(target * 100 * len(found) + 1e-6)
    fitting = [
        sum(one.losses[s] for one, s in zip(found, picks, strict=True))
        for picks in itertools.product(*(one.losses for one in found))
        if sum(sizes[one.module][s] for one, s in zip(found, picks, strict=True)) <= room
    ]
    if not fitting:
        with pytest.raises(SchemeError, match="smallest plan"):
            choose(found, sizes, target)
        return
    plan = choose(found, sizes, target)
    assert plan.loss == pytest.approx(min(fitting), abs=1e-9)
    assert plan.loss == pytest.approx(sum(one.losses[plan.choices[one.module]] for one in found))
    assert sum(sizes[m][s] for m, s in plan.choices.items()) <= room
    assert plan.bits_per_weight <= target + 1e-6


@given(problems(), st.integers(1, 30))
def test_coarse_units_never_exceed_the_target(problem: tuple, units: int) -> None:
    found, sizes = problem
    front = ParetoFront(found, sizes, units=units)
    for target in (front.least_bits, front.least_bits + 1, 10.0):
        plan = front.at(target)
        assert sum(sizes[m][s] for m, s in plan.choices.items()) <= target * 100 * len(found) + 1e-6


@given(problems())
def test_the_front_falls(problem: tuple) -> None:
    plans = ParetoFront(*problem).plans(20)
    for small, large in itertools.pairwise(plans):
        assert small.bits_per_weight < large.bits_per_weight
        assert small.loss > large.loss


def test_one_setting_per_kind() -> None:
    losses = {BitConfig(2, 32): 1.0, BitConfig(3, 32): 0.1}
    names = [f"model.layers.{i}.mlp.{kind}" for i in range(3) for kind in ("up", "down")]
    found = [Sensitivity(n, (8, 64), {s: v * (1 + ("down" in n)) for s, v in losses.items()}) for n in names]
    plan = choose(found, None, 3.6, per="kind")
    assert {plan.choices[n] for n in names if "down" in n} == {BitConfig(3, 32)}
    assert {plan.choices[n] for n in names if "up" in n} == {BitConfig(2, 32)}
    assert list(plan.choices) != []
    assert choose(found, None, 3.7).loss < plan.loss  # a matrix for itself can use what a kind leaves


def test_a_loss_that_is_no_number_is_a_sentence() -> None:
    with pytest.raises(SchemeError, match="are not finite"):
        choose([Sensitivity("a", (1, 8), {BitConfig(2, 8): math.nan})], None, 9.0)
    with pytest.raises(SchemeError, match="no matrix"):
        choose([], None, 3.0)


# Sizes


@pytest.mark.parametrize("recipe", [GPTQ(free=True), GPTQ(), GPTQ(symmetric=True), RTN(), BCQ(), HBCQ(bias=False)])
@pytest.mark.parametrize("setting", [BitConfig(2, 32), BitConfig(3, 48), BitConfig(4, "row"), BitConfig(3, 500)])
def test_sizes_are_those_of_the_tensors(recipe: RTN, setting: BitConfig) -> None:
    N, K = 6, 100
    config = parse(Plan({"m": setting}, 0.0, 0.0, recipe).overrides["m"])
    fitted = config.fit(weight(N, K), correlated(K))
    assert stored_bits(recipe, setting, (N, K)) == 8 * nbytes(fitted)
    assert stored_bits(recipe, setting, (N, K)) / (N * K) == pytest.approx(bits_per_weight(fitted))


def test_a_plan_s_size_is_that_of_the_model_it_leads_to(opened: CalibrationModel, measured: list[Sensitivity]) -> None:
    plan = choose(measured, None, 3.3)
    linears = {n: m.weight for i in range(opened.layers) for n, m in opened.block(i).linears().items()}
    assert set(plan.overrides) == set(linears)
    fitted = [parse(s).fit(linears[m], correlated(linears[m].shape[1])) for m, s in plan.overrides.items()]
    true = 8 * sum(nbytes(w) for w in fitted) / sum(math.prod(w.shape) for w in fitted)
    assert plan.bits_per_weight == pytest.approx(true)
    assert true <= 3.3


# Sensitivities


def test_tokens_are_sampled_by_their_chances() -> None:
    chances = torch.tensor([0.5, 0.0, 0.2, 0.3, 0.0])
    at = torch.rand(20000, 1, generator=torch.Generator().manual_seed(0))
    found = sample_tokens(chances.expand(20000, 5), at).bincount(minlength=5) / 20000
    torch.testing.assert_close(found, chances, rtol=0, atol=0.02)
    assert not found[chances == 0].any()


def test_what_is_heard_is_what_autograd_says(opened: CalibrationModel) -> None:
    """Against plain autograd through the whole model at once, with the same tokens drawn."""
    tokens = text(3, 17)
    memory = SearchMemory(batch=2)
    passes = backward_stats(opened, tokens, memory=memory, seed=5, half=False)
    got = {n: (h.importance(), h.take_weighted()) for _, _, heard in passes for n, h in heard.items()}
    blocks = [opened.block(i) for i in range(opened.layers)]
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def listen(linear: TrainableLinear, given: tuple[Tensor], out: Tensor) -> None:
        inputs[linear.name], outputs[linear.name] = given[0].detach(), out

    x = opened.embed(tokens).requires_grad_()
    for block in blocks:
        for linear in block.linears().values():
            linear.register_forward_hook(listen)
        x = block(x)
    logits = opened.logits(opened.finish(x)).flatten(0, 1)
    at = torch.rand(len(logits), 1, generator=torch.Generator().manual_seed(5))
    drawn = sample_tokens(logits.detach().softmax(-1), at)
    gradients = torch.autograd.grad(F.cross_entropy(logits, drawn, reduction="sum"), list(outputs.values()))
    assert set(got) == set(outputs)
    for name, g in zip(outputs, gradients, strict=True):
        squares = g.flatten(0, 1).square()
        torch.testing.assert_close(got[name][0], squares.mean(0), rtol=1e-3, atol=1e-9)
        seen = inputs[name].flatten(0, 1)
        hessian = (seen * squares.sum(1, keepdim=True)).T @ seen / squares.sum()
        torch.testing.assert_close(got[name][1], hessian, rtol=1e-3, atol=1e-4)


def test_quick_changes_are_those_of_a_quantizer() -> None:
    w, stats = weight(24, 100), correlated(100)
    by = factor(stats.hessian, 0.01, act_order=True)
    settings = [BitConfig(2, 32), BitConfig(2, 100), BitConfig(4, 48), BitConfig(8, 32)]
    changes = fast_errors(w, by, settings)
    assert changes.shape == (4, 24, 100)
    for setting, change in zip(settings, changes, strict=True):
        quantizer = GPTQ(bits=setting.bits, group=setting.group, free=True, refine=0, damp=0.01)
        true = stats.output_error(w - quantizer.fit(w, stats).dequantize())
        assert stats.output_error(change) == pytest.approx(true, rel=0.2)


def test_more_bits_lose_less(measured: list[Sensitivity]) -> None:
    assert len(measured) == 21
    for one in measured:
        assert one.losses[BitConfig(1, 32)] > one.losses[BitConfig(2, 32)] > one.losses[BitConfig(3, 64)] > 0


@pytest.mark.parametrize("measure", ["fisher", "residual"])
def test_rows_of_a_matrix_stand_for_all(opened: CalibrationModel, measure: str) -> None:
    every = sensitivities(opened, text(4, 40), SETTINGS[1:2], measure=measure, half=False)
    some = sensitivities(opened, text(4, 40), SETTINGS[1:2], measure=measure, half=False, weight_rows=48)
    for a, b in zip(every, some, strict=True):
        assert b.losses[SETTINGS[1]] == pytest.approx(a.losses[SETTINGS[1]], rel=0.35)


def test_measuring_again_gives_the_same(opened: CalibrationModel) -> None:
    first, second = (sensitivities(opened, text(2, 20), SETTINGS[:2], weight_rows=16) for _ in range(2))
    assert first == second


def test_the_predicted_increase_is_that_of_the_divergence(opened: CalibrationModel) -> None:
    """At 8 bits the expansion holds: the sum over matrices is the KL divergence that rounding one of them causes."""
    tokens, setting = text(6, 60), BitConfig(5, 32)
    module = "model.layers.1.mlp.down_proj"
    found = sensitivities(opened, tokens, [setting], half=False)
    predicted = next(one.losses[setting] for one in found if one.module == module)

    def log_p(changed: bool) -> Tensor:
        x = opened.embed(tokens)
        for i in range(opened.layers):
            block = opened.block(i)
            if changed and module in block.linears():
                linear = block.linears()[module]
                seen: list[Tensor] = []
                linear.watch = seen.append
                block(x)
                inputs = seen[0].flatten(0, 1)
                linear.watch = None
                stats = correlated(100)
                stats = type(stats)(inputs.T @ inputs / len(inputs), stats.absmean, len(inputs))
                linear.weight = GPTQ(bits=5, group=32, free=True, refine=0).fit(linear.weight, stats).dequantize()
            x = block(x)
        return opened.logits(opened.finish(x)).log_softmax(-1)

    with torch.no_grad():
        before, now = log_p(False), log_p(True)
    divergence = float((before.exp() * (before - now)).sum(-1).mean())
    assert predicted == pytest.approx(divergence, rel=0.5)


@pytest.mark.parametrize("target", [1.2, 2.0, 2.35, 3.35, 4.5, 6.0, 8.5])
def test_candidates_reach_their_target(target: float) -> None:
    settings = candidates(target)
    assert all(1 <= s.bits <= 8 for s in settings)
    least = choose([Sensitivity("m", (8, 576), dict.fromkeys(settings, 1.0))], None, 99.0).bits_per_weight
    assert least <= target


def test_no_text_is_a_sentence(opened: CalibrationModel) -> None:
    with pytest.raises(SchemeError, match="at least one calibration sequence"):
        sensitivities(opened, text(0, 8), SETTINGS)


# Plans


def test_planned_is_predicted_better_than_uniform(measured: list[Sensitivity]) -> None:
    for setting in SETTINGS:
        same = uniform(measured, setting)
        assert choose(measured, sizes_of(measured), same.bits_per_weight).loss <= same.loss * (1 + 1e-9)
    middle = uniform(measured, SETTINGS[1])
    assert choose(measured, None, middle.bits_per_weight).loss < 0.98 * middle.loss


def test_a_plan_comes_back_from_its_file(tmp_path: Path, measured: list[Sensitivity]) -> None:
    plan = choose(measured, None, 3.0)
    plan.notes["rows"] = 4
    write_plan(tmp_path / "plan.json", plan)
    again = read_plan(tmp_path / "plan.json")
    assert again == plan
    assert again.overrides == plan.overrides
    assert set(plan.overrides.values()) >= {plan.scheme}
    assert str(RECIPE).startswith("gptq")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipe": "gptq:bits=3,group=1" + "0" * 400}, "group must be an integer"),
        ({"overrides": {"m": "gptq:bits=3,group=1" + "0" * 400}}, "group must be an integer"),
        ({"bits_per_weight": 10**400}, "not a complete plan"),
        ({"plan_version": 99}, "not a plan of version"),
        ({"overrides": {}}, "names no matrix"),
        ({"overrides": {"a": "nonsense"}}, "not a complete plan"),
        ({"overrides": {"a": "fp16"}}, "bits and group"),
        ({"overrides": {"a": "rtn:bits=2,group=32"}}, "other bits and group"),
        ({"overrides": 3}, "not a complete plan"),
        ({"bits_per_weight": "many"}, "not a complete plan"),
    ],
)
def test_broken_plans_are_sentences(
    tmp_path: Path, measured: list[Sensitivity], change: dict[str, object], words: str
) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, choose(measured, None, 3.0))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FormatError, match=words):
        read_plan(path)
