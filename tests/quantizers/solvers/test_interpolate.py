"""Fewer settings and rows: what is not measured lies between what is, and samples are unbiased."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import correlated, weight

from crelle.quantizers.base import BitConfig
from crelle.quantizers.calibration.layer_api import TrainableLinear
from crelle.quantizers.schemes.auto import MIXED
from crelle.quantizers.search.interpolate import fill_in, to_measure
from crelle.quantizers.search.sensitivity import GROUPS, _stage, sample_rows
from crelle.quantizers.solvers.fast_error import Setting

GRIDS: list[Setting] = [BitConfig(b, g) for b in (2, 3) for g in GROUPS]


def test_powers_of_two_and_ends_are_measured() -> None:
    assert to_measure(GRIDS[:6]) == [BitConfig(2, g) for g in (32, 64, 128, 384)]
    assert to_measure([BitConfig(3, 96)]) == [BitConfig(3, 96)]
    assert to_measure([BitConfig(3, g) for g in (48, 96, 144)]) == [BitConfig(3, g) for g in (48, 144)]
    far: list[Setting] = [BitConfig(3, g) for g in (128, 192, 384, 576)]  # not over more than a factor of 4
    assert to_measure(far) == [BitConfig(3, g) for g in (128, 192, 576)]
    assert [s.four for s in to_measure(MIXED)] == [0.0, 0.1, 0.35, 0.7]  # type: ignore[union-attr]


@given(st.lists(st.sampled_from([*GRIDS, BitConfig(4, "row"), BitConfig(4, 100), *MIXED]), min_size=1, unique=True),
       st.randoms())  # fmt: skip
def test_every_setting_gets_a_loss_between_its_neighbours(settings: list[Setting], random: object) -> None:
    measured = {s: random.choice([0.0, 1e-9, 0.5, 3.0]) for s in to_measure(settings)}  # type: ignore[attr-defined]
    found = fill_in(measured, settings)
    assert set(found) == set(settings)
    for s, loss in found.items():
        assert loss == measured[s] if s in measured else 0 <= loss <= max(measured.values()) * (1 + 1e-9)


def test_powers_of_the_group_are_met_exactly() -> None:
    losses = {s: s.bits**-2.0 * s.group**0.37 for s in GRIDS}  # type: ignore[operator]
    found = fill_in({s: losses[s] for s in to_measure(GRIDS)}, GRIDS)
    assert found == pytest.approx(losses)
    mixed = {s: math.exp(-3 * s.four) for s in MIXED}
    assert fill_in({s: mixed[s] for s in to_measure(MIXED)}, MIXED) == pytest.approx(mixed)  # type: ignore[index]


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 1000), st.floats(0, 3))
def test_sampled_rows_are_different_and_as_many(N: int, limit: int, seed: int, spread: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    chances = (spread * torch.randn(N, generator=rng, dtype=torch.float64)).exp()
    rows, inclusion = sample_rows(chances, limit, rng)
    assert len(set(rows.tolist())) == len(rows) == min(N, limit)
    assert bool(((inclusion > 0) & (inclusion <= 1)).all())


def test_sampled_rows_stand_for_all_without_bias() -> None:
    rng = torch.Generator().manual_seed(0)
    chances = torch.randn(50, generator=rng, dtype=torch.float64).exp()
    values = chances * (1 + 0.3 * torch.rand(50, generator=rng, dtype=torch.float64))
    sums = []
    for _ in range(2000):
        rows, inclusion = sample_rows(chances, 8, rng)
        sums.append(float((values[rows] / inclusion).sum()))
    mean = sum(sums) / len(sums)
    error = (sum((s - mean) ** 2 for s in sums) / len(sums) ** 2) ** 0.5
    assert abs(mean - float(values.sum())) < 5 * error
    assert error * len(sums) ** 0.5 < 0.1 * mean  # of one sample


class _Stats:
    """What a pass has collected, with the importance of outputs as given."""

    def __init__(self, importance: torch.Tensor, K: int, tokens: int = 4000, seed: int = 0) -> None:
        self._importance, self.tokens = importance, tokens
        self._hessian = correlated(K, tokens=tokens, seed=seed).hessian

    def importance(self) -> torch.Tensor:
        return self._importance

    def take_weighted(self) -> torch.Tensor:
        return self._hessian

    take_calibrated = take_weighted


@pytest.mark.parametrize("uneven", [False, True])
def test_more_rows_are_taken_where_they_differ_much(uneven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows at the corners of their grids lose nothing, which their ranges do not tell."""
    K, N = 64, 400
    w = weight(N, K)
    if uneven:
        w[torch.arange(N) % 8 != 0] = w[torch.arange(N) % 8 != 0].sign() * 0.05
    samples: list[int] = []
    plain = sample_rows

    def counted(chances: torch.Tensor, limit: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        samples.append(limit)
        return plain(chances, limit, rng)

    monkeypatch.setattr("crelle.quantizers.search.sensitivity.sample_rows", counted)
    linear, stats = TrainableLinear("m", w, None), _Stats(torch.ones(N), K)
    setting = BitConfig(2, 64)
    (found,) = _stage([(linear, stats)], [setting], 48, 1 << 28, torch.Generator().manual_seed(0))  # type: ignore[list-item]
    (every,) = _stage([(linear, stats)], [setting], N, 1 << 28, torch.Generator())  # type: ignore[list-item]
    assert len(samples) - 1 == (4 if uneven else 1)
    assert found.losses[setting] == pytest.approx(every.losses[setting], rel=0.4 if uneven else 0.1)


def test_few_tokens_predict_what_many_do() -> None:
    """A fit to few tokens looks better to them than it is: the prediction makes up for that."""
    K, N, setting = 96, 200, BitConfig(3, 32)
    linear = TrainableLinear("m", weight(N, K), None)
    mixture = torch.eye(K) + torch.randn(K, K, generator=torch.Generator().manual_seed(3)) / K**0.5

    def predicted(tokens: int) -> float:
        stats = _Stats(torch.ones(N), K, tokens)
        x = torch.randn(tokens, K, generator=torch.Generator().manual_seed(tokens)) @ mixture
        stats._hessian = x.T @ x / tokens
        (found,) = _stage([(linear, stats)], [setting], N, 1 << 28, torch.Generator())  # type: ignore[list-item]
        return found.losses[setting]

    assert predicted(3 * K) == pytest.approx(predicted(100 * K), rel=0.1)  # without it: 0.86
