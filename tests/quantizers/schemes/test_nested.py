"""Nested planes: one set of codes, a good model at every precision, and the format's promise that planes are shared."""

from functools import cache
from itertools import pairwise

import pytest
import torch
from problems import correlated, output_error, stats_of, weight
from torch import Tensor

from crelle.errors import FormatError, SchemeError, UnsupportedError
from crelle.formats.affine import NestedTensor
from crelle.formats.base import bits_per_weight, nbytes
from crelle.kernels import cpu
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.scheme import parse
from crelle.quantizers.schemes.gptq import GPTQ
from crelle.quantizers.schemes.nested import Nested
from crelle.quantizers.schemes.rtn import RTN
from crelle.quantizers.solvers import grouping, nested_sweep


def mildly_correlated(K: int, seed: int = 0) -> Stats:
    """Inputs for which error feedback is worth as much as in real layers: a factor of 2 to 3 against rounding."""
    return stats_of(_mildly_correlated(K, seed).clone())


@cache
def _mildly_correlated(K: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(4000, K, generator=rng)
    x = x @ (torch.eye(K) + 0.4 * torch.randn(K, K, generator=rng) / K**0.5)
    x = x * (0.5 * torch.randn(K, generator=rng)).exp()
    return x.T @ x / 4000


def alone(bits: int, group: int | str, w: Tensor, stats: Stats) -> float:
    """The output error of a grid that is fitted for this precision only."""
    return output_error(GPTQ(bits=bits, group=group, free=True).fit(w, stats), w, stats)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_precision_is_near_one_fitted_alone(group: int, seed: int) -> None:
    w, stats = weight(64, 250, seed), mildly_correlated(250, seed)
    q = Nested(group=group).fit(w, stats)
    ratio = {p: output_error(q.at(p), w, stats) / alone(p, group, w, stats) for p in q.precisions}
    assert max(ratio.values()) < 1.35, ratio


@pytest.mark.parametrize("group", [32, 128])
def test_strong_correlations_cost_more_but_rounding_stays_far_behind(group: int) -> None:
    w, stats = weight(64, 250), correlated(250)
    q = Nested(group=group).fit(w, stats)
    for p in q.precisions:
        error = output_error(q.at(p), w, stats)
        assert error < 1.9 * alone(p, group, w, stats)
        assert error < 0.35 * output_error(RTN(bits=p, group=group).fit(w), w, stats)


def test_without_data_every_precision_is_near_one_fitted_alone() -> None:
    w, plain = weight(64, 250), stats_of(torch.eye(250))
    q = Nested(data=False).fit(w)
    for p in q.precisions:
        assert output_error(q.at(p), w, plain) < 1.15 * alone(p, 128, w, plain)
    assert torch.equal(Nested(data=False).fit(w, correlated(250)).planes, q.planes)  # stats are not looked at


def test_balance_moves_the_error_between_the_precisions() -> None:
    w, stats = weight(32, 160), mildly_correlated(160)
    fits = [Nested(group=32, balance=b).fit(w, stats) for b in (1.0, 2.0, 4.0)]
    coarse, fine = ([output_error(q.at(p), w, stats) for q in fits] for p in (2, 4))
    assert coarse[0] < coarse[1] < coarse[2]
    assert fine[0] > fine[1] > fine[2]


def test_refinement_lowers_the_common_error() -> None:
    w, stats = weight(32, 160), correlated(160)
    errors = []
    for refine in (0, 1, 2, 4):
        q = Nested(group=32, refine=refine).fit(w, stats)
        errors.append(sum(2.0**p * output_error(q.at(p), w, stats) for p in q.precisions))
    assert errors[0] > errors[1] > errors[2] >= errors[3] * 0.999


@pytest.mark.parametrize("config", [Nested(group=16), Nested(group=16, data=False), Nested(bits=5, lowest=1, group=16)])
def test_a_precision_is_literally_the_first_planes(config: Nested) -> None:
    w, stats = weight(6, 50), correlated(50)
    q = config.fit(w, stats)
    assert q.precisions == tuple(range(config.lowest, config.bits + 1))
    for i, p in enumerate(q.precisions):
        at = q.at(p)
        assert torch.equal(at.planes, q.planes[:p])
        assert at.planes.data_ptr() == q.planes.data_ptr()
        assert torch.equal(at.codes(), q.codes() >> (q.bits - p))
        grid = q.scale[i].float().repeat_interleave(16, 1)[:, :50], q.low[i].float().repeat_interleave(16, 1)[:, :50]
        torch.testing.assert_close(at.dequantize(), grid[0] * at.codes() + grid[1])
    assert torch.equal(q.dequantize(), q.at(q.bits).dequantize())


def test_finer_precisions_are_better() -> None:
    w, stats = weight(16, 96), correlated(96)
    for config in (Nested(group=32), Nested(group=32, data=False), Nested(bits=6, lowest=1, group=32)):
        q = config.fit(w, stats)
        errors = [output_error(q.at(p), w, stats) for p in q.precisions]
        assert all(finer < 0.6 * coarser for coarser, finer in pairwise(errors))


def test_the_file_is_at_most_15_percent_larger_than_4_bits_alone() -> None:
    w = weight(64, 512)
    q, four = Nested(data=False).fit(w), GPTQ(bits=4, free=True).fit(w, stats_of(torch.eye(512)))
    assert bits_per_weight(q) == 4 + 96 / 128
    assert nbytes(q) <= 1.15 * nbytes(four)


def test_round_trip_through_parts() -> None:
    q = Nested(group=16).fit(weight(5, 50), correlated(50))
    again = NestedTensor.from_parts(q.spec(), q.tensors())
    assert again.precisions == q.precisions
    assert all(torch.equal(again.at(p).dequantize(), q.at(p).dequantize()) for p in (2, 3, 4))


@pytest.mark.parametrize("data", [True, False])
@pytest.mark.parametrize(
    ("N", "K", "group"), [(1, 1, 1), (1, 1, "row"), (3, 7, 1), (4, 50, 16), (4, 50, "row"), (4, 33, 32), (2, 300, 128)]
)
def test_any_shape_and_group(N: int, K: int, group: int | str, data: bool) -> None:
    w, stats = weight(N, K), correlated(K)
    q = Nested(group=group, data=data).fit(w, stats)
    assert q.shape == (N, K)
    seen = stats if data else stats_of(torch.eye(K))
    for p in q.precisions:
        plain = output_error(RTN(bits=p, group=group).fit(w), w, seen)  # type: ignore[arg-type]
        assert output_error(q.at(p), w, seen) <= plain * 1.01 + 1e-6 * seen.output_error(w)


@pytest.mark.parametrize(
    "hessian", [torch.zeros(48, 48), torch.ones(48, 48), correlated(48, tokens=5).hessian], ids=["zero", "ones", "few"]
)
def test_a_singular_hessian_does_no_harm(hessian: Tensor) -> None:
    w = weight(6, 48)
    q = Nested(group=16).fit(w, stats_of(hessian))
    assert all((q.at(p).dequantize() - w).norm() < w.norm() for p in q.precisions)


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_weights_far_from_zero_are_coded_by_their_differences(offset: float) -> None:
    w = offset + 8 * weight(6, 64)
    plain = Nested(group=32, data=False).fit(w)
    step = (w.amax() - w.amin()) / 15
    assert (plain.dequantize() - w).abs().amax() < 1.5 * step + 2**-11 * offset


def test_a_weight_of_zeros_stays() -> None:
    for config in (Nested(group=16), Nested(group=16, data=False)):
        q = config.fit(torch.zeros(3, 40), correlated(40))
        assert all(q.at(p).dequantize().abs().amax() < 1e-5 for p in q.precisions)


def test_the_same_bits_each_time_and_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    w, stats = weight(17, 50), correlated(50)
    first, second = (Nested(group=16).fit(w, stats).tensors() for _ in range(2))
    assert all(torch.equal(t, second[part]) for part, t in first.items())
    whole = output_error(Nested(group=16).fit(w, stats), w, stats)
    monkeypatch.setattr(grouping, "_SLAB", 450)
    assert output_error(Nested(group=16).fit(w, stats), w, stats) == pytest.approx(whole, rel=0.05)


def test_the_scheme_is_written_back_as_it_was_read() -> None:
    for scheme in ("bcq-nested:bits=4,group=128", "bcq-nested:bits=5,group=64,lowest=3,balance=4.0,data=false"):
        assert str(parse(scheme)) == scheme
    assert parse("bcq-nested").calibrated
    assert not parse("bcq-nested:data=false").calibrated


@pytest.mark.parametrize(
    ("scheme", "sentence"),
    [
        ("bcq-nested:lowest=0", "lowest must be 1 to bits = 4, got 0"),
        ("bcq-nested:bits=3,lowest=4", "lowest must be 1 to bits = 3, got 4"),
        ("bcq-nested:balance=0", "balance must be 0.01 to 100, got 0"),
        ("bcq-nested:refine=-1", "refine must be at least 0"),
    ],
)
def test_bad_settings_get_a_sentence(scheme: str, sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        parse(scheme)


def test_what_cannot_be_fitted_or_served_gets_a_sentence() -> None:
    w = weight(2, 4)
    with pytest.raises(SchemeError, match="'bcq-nested' needs statistics of the layer's inputs"):
        Nested().fit(w)
    with pytest.raises(SchemeError, match="statistics have 5 inputs, but the weight has 4"):
        Nested().fit(w, correlated(5))
    with pytest.raises(UnsupportedError, match="supports 2, 3, 4 bits, not 5"):
        Nested(data=False).fit(w).at(5)
    w[0, 0] = float("nan")
    for config in (Nested(), Nested(data=False)):
        with pytest.raises(FormatError, match="NaN or infinity"):
            config.fit(w, correlated(4))


@pytest.mark.parametrize("costs", [1, 2000, 1 << 30])
def test_columns_at_once_do_not_change_the_codes(costs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w, config = weight(12, 100, 0), Nested(group=24, data=False)
    monkeypatch.setattr(cpu, "available", lambda: "is not asked")  # in torch
    want = config.fit(w).tensors()
    monkeypatch.setattr(nested_sweep, "_COSTS", costs)
    got = config.fit(w).tensors()
    assert all(torch.equal(got[part], want[part]) for part in want)


@pytest.mark.parametrize("levels", [2, 4, 16, 256])
def test_a_code_of_least_cost_is_taken(levels: int) -> None:
    cost = torch.randint(2 * levels, (levels, 300), generator=torch.Generator().manual_seed(0)).float()
    cost[:, 0], cost[levels // 2 :, 1] = torch.inf, -torch.inf
    code = nested_sweep._argmin(cost)
    assert torch.equal(cost.gather(0, code.long()[None])[0], cost.amin(0))
    assert code[0] == 0  # where all are equal
