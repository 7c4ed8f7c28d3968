"""The sampler draws from exactly the distribution that its settings describe."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampled_cases import share_of
from sampled_token import sample
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from crelle.engine.sampling.logits_processors import LogitsProcessor, apply_updates
from crelle.engine.sampling.random_tokens import random_tokens, truncate
from crelle.engine.sampling.sampler import Sampler, Sampling
from crelle.errors import SchemeError

END = frozenset({7, 60})
quick = settings(deadline=None, max_examples=share_of(60))
logit_lists = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=30)


def random_logits(n: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(n, generator=torch.Generator().manual_seed(seed))


def draws(n: int, logits: torch.Tensor, **options: Any) -> list[int]:
    sampler = Sampler(Sampling(**options))
    return [sample(sampler, logits, [0]) for _ in range(n)]


def truncated(logits: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return what is left of logits [V], between rows of other settings."""
    others = Sampling(top_k=2), Sampling(), Sampling(top_p=0.3, min_p=0.9)
    rows = (logits - logits.max()).repeat(4, 1)
    truncate(rows, [others[0], Sampling(**options), *others[1:]])
    assert torch.equal(rows[2], logits - logits.max()), "another row is left alone"
    return rows[1]


def kept(logits: torch.Tensor, **options: Any) -> set[int]:
    return set(torch.isfinite(truncated(logits, **options)).nonzero().flatten().tolist())


def probabilities(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-40, 1e-300])
def test_greedy_takes_the_most_likely_token(temperature: float) -> None:
    for seed in range(20):
        logits = random_logits(50, seed)
        assert draws(1, logits, temperature=temperature) == [int(logits.argmax())]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_frequencies_follow_the_softmax_at_a_temperature(temperature: float) -> None:
    logits, n = torch.tensor([2.0, 1.0, 0.0, -0.5, 1.5, 0.7]), 6000
    found = torch.bincount(torch.tensor(draws(n, logits, temperature=temperature, seed=1)), minlength=6)
    expected = n * (logits / temperature).softmax(0)
    chi_square = ((found - expected) ** 2 / expected).sum()
    assert chi_square < 25.7  # 5 degrees of freedom: one run in 10,000 exceeds it, and the seed is fixed


def test_frequencies_follow_the_softmax_of_what_is_kept() -> None:
    logits, n = torch.tensor([2.0, 1.0, 0.0, -0.5, 1.5, 0.7]), 6000
    found = torch.bincount(torch.tensor(draws(n, logits, temperature=1.0, top_k=3, seed=1)), minlength=6)
    expected = n * torch.tensor([2.0, 1.0, -torch.inf, -torch.inf, 1.5, -torch.inf]).softmax(0)
    assert (found[expected == 0] == 0).all()
    some = expected > 0
    assert ((found - expected)[some] ** 2 / expected[some]).sum() < 18.5  # 2 degrees of freedom, as above


@quick
@given(logits=logit_lists, k=st.integers(1, 40))
def test_top_k_keeps_the_k_most_likely(logits: list[float], k: int) -> None:
    assume(len(set(logits)) == len(logits))
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    assert kept(torch.tensor(logits), top_k=k) == set(order[:k])


@quick
@given(logits=logit_lists, p=st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_tokens_that_reach_p(logits: list[float], p: float) -> None:
    assume(len(set(logits)) == len(logits))
    chance = probabilities(logits)
    expected, mass = set[int](), 0.0
    for i in sorted(range(len(logits)), key=lambda i: -logits[i]):
        assume(abs(mass - p) > 1e-4)  # on the edge, rounding decides
        if mass >= p:
            break
        expected.add(i)
        mass += chance[i]
    assert kept(torch.tensor(logits), top_p=p) == expected


@quick
@given(logits=logit_lists, m=st.floats(0.001, 1.0))
def test_min_p_keeps_what_is_at_least_that_share_of_the_best(logits: list[float], m: float) -> None:
    chance = probabilities(logits)
    assume(all(c == max(chance) or abs(c / max(chance) - m) > 1e-4 for c in chance))
    assert kept(torch.tensor(logits), min_p=m) == {i for i, c in enumerate(chance) if c >= m * max(chance)}


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_most_likely_token_always_stays(options: dict[str, Any]) -> None:
    logits = random_logits(40)
    assert kept(logits, **options) == {int(logits.argmax())}


def test_nothing_is_dropped_by_default() -> None:
    assert kept(random_logits(40)) == set(range(40))
    assert kept(random_logits(40), top_k=40) == set(range(40))


@quick
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    k=st.sampled_from([0, 1, 7, 40, 200]),
    p=st.sampled_from([0.2, 0.55, 0.9, 1.0]),
    m=st.sampled_from([0.0, 0.03, 0.3]),
)
def test_probabilities_equal_those_of_transformers(seed: int, temperature: float, k: int, p: float, m: float) -> None:
    logits = random_logits(100, seed)
    theirs = TemperatureLogitsWarper(temperature)(None, logits[None])
    if k:
        theirs = TopKLogitsWarper(k)(None, theirs)
    if p < 1:
        theirs = TopPLogitsWarper(p)(None, theirs)
    if m:
        theirs = MinPLogitsWarper(m)(None, theirs)
    ours = truncated(logits / temperature, top_k=k, top_p=p, min_p=m)
    assert torch.allclose(ours.softmax(-1), theirs[0].softmax(-1), rtol=1e-5, atol=1e-7)


def processed(logits: torch.Tensor, so_far: list[int], prompt: int = 0, **options: Any) -> torch.Tensor:
    """Return what is left of logits [V], token by token as a sequence grows."""
    processor, rows = LogitsProcessor(Sampling(**options), prompt, END), logits.repeat(2, 1)
    for n in range(prompt, len(so_far) + 1):
        update = processor.update(so_far[:n])
    apply_updates(rows, [(1, update)])
    assert torch.equal(rows[0], logits), "another row is left alone"
    return rows[1]


@quick
@given(
    prompt=st.lists(st.integers(0, 19), min_size=1, max_size=30),
    new=st.lists(st.integers(0, 19), max_size=150),
    frequency=st.sampled_from([0.0, 0.3, -1.5]),
    presence=st.sampled_from([0.0, 0.7, -2.0]),
    repetition=st.sampled_from([1.0, 1.3]),
    bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=5),
    least=st.sampled_from([0, 3, 100]),
)
def test_penalties_and_biases_are_those_of_their_definitions(
    prompt: list[int],
    new: list[int],
    frequency: float,
    presence: float,
    repetition: float,
    bias: dict[int, float],
    least: int,
) -> None:
    logits = random_logits(100)
    want = logits.double()
    for token in range(100):
        if token in prompt + new:
            want[token] = want[token] / repetition if want[token] > 0 else want[token] * repetition
        want[token] += bias.get(token, 0.0) - frequency * new.count(token) - presence * (token in new)
        if token in END and len(new) < least:
            want[token] = -math.inf
    found = processed(
        logits,
        prompt + new,
        len(prompt),
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        logit_bias=tuple(bias.items()),
        min_tokens=least,
    )
    assert torch.allclose(found.double(), want, rtol=1e-5, atol=1e-4)


@quick
@given(seen=st.lists(st.integers(0, 49), min_size=1, max_size=80), penalty=st.sampled_from([0.5, 1.1, 1.3, 5.0]))
def test_repetition_penalty_equals_that_of_transformers(seen: list[int], penalty: float) -> None:
    logits = random_logits(50)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), logits[None].clone())
    assert torch.equal(processed(logits, seen, repetition_penalty=penalty), theirs[0])


def test_repetition_penalty_counts_before_the_greedy_choice_and_spares_the_logits() -> None:
    logits = torch.tensor([1.0, 5.0, 4.0])
    sampler = Sampler(Sampling(repetition_penalty=2.0))
    assert [sample(sampler, logits, seen) for seen in ([0], [1], [1, 2])] == [1, 2, 1]
    assert logits.tolist() == [1.0, 5.0, 4.0]


def test_same_seed_draws_the_same_and_another_seed_others() -> None:
    logits = random_logits(100)
    a, b, c = (draws(50, logits, temperature=1.5, seed=s) for s in (5, 5, 6))
    assert a == b != c


def test_without_a_seed_draws_differ() -> None:
    logits = random_logits(100)
    assert draws(50, logits, temperature=1.5) != draws(50, logits, temperature=1.5)


def test_a_seed_does_not_touch_the_random_numbers_of_others() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    draws(5, random_logits(10), temperature=1.0, seed=9)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("frequency_penalty", math.inf),
        ("presence_penalty", -2000.0),
        ("min_tokens", -1),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(SchemeError, match=f"{name} must be .*, got {value}"):
        Sampling(**{name: value})


@pytest.mark.parametrize("stop", ["end", ("",), ("a", "")])
def test_stop_that_is_no_tuple_of_strings_is_refused(stop: Any) -> None:
    with pytest.raises(SchemeError, match="stop must be a tuple of non-empty strings"):
        Sampling(stop=stop)


@pytest.mark.parametrize("top_p", [5e-324, 1e-300, 1e-46, 1e-30])
def test_a_tiny_top_p_keeps_the_most_likely_token(top_p: float) -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.9])
    sampler = Sampler(Sampling(temperature=1.0, top_p=top_p, seed=1))
    assert [sample(sampler, logits, []) for _ in range(20)] == [1] * 20


def test_a_row_has_the_tokens_that_it_has_alone() -> None:
    settings = [
        Sampling(
            temperature=0.2 + 0.1 * i, top_k=5 * (i % 3), top_p=(1.0, 0.8)[i % 2], min_p=0.05 * (i % 5 == 4), seed=i
        )
        for i in range(12)
    ]
    logits = torch.stack([random_logits(1001, i) for i in range(12)])
    alone, together, some = ([Sampler(s) for s in settings] for _ in range(3))
    for _ in range(20):
        found = random_tokens(logits, together)
        each = torch.cat([random_tokens(logits[i : i + 1], alone[i : i + 1]) for i in range(12)])
        assert torch.equal(found, each)
        assert torch.equal(found[5:], random_tokens(logits[5:], some[5:]))


def test_rows_that_are_not_finite_have_no_token_and_do_not_disturb_others() -> None:
    logits = torch.stack([random_logits(50, i) for i in range(5)])
    broken = logits.clone()
    broken[1], broken[2, 7], broken[4, 3] = -torch.inf, torch.nan, torch.inf
    settings = [Sampling(temperature=0.9, top_p=0.9, seed=i) for i in range(5)]
    found, fine = (random_tokens(x, [Sampler(s) for s in settings]) for x in (broken, logits))
    assert found.tolist() == [int(fine[0]), -1, -1, int(fine[3]), -1]
