"""Binary coding: alternating is never worse than greedy, a plane never hurts, and the optimum is near."""

from functools import cache
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crelle.errors import FormatError, SchemeError
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import expand_groups
from crelle.quantizers.schemes.bcq import BCQ
from crelle.quantizers.schemes.rtn import RTN
from crelle.quantizers.solvers import alternating_ls, grouping

quick = settings(deadline=None, max_examples=25)
PLANES = range(1, 9)
biased = pytest.mark.parametrize("bias", [True, False], ids=["z", "no-z"])


def gauss(N: int = 8, K: int = 96, seed: int = 0) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.02


def matrices() -> dict[str, Tensor]:
    """Weights of many characters; most models' are somewhere between the first three."""
    w, other = gauss(), gauss(seed=1)
    rare = gauss(seed=2) > 0.05  # about 1 in 200
    return {
        "gauss": w,
        "laplace": 50 * (w * w.abs() - other * other.abs()),
        "outliers": torch.where(rare, 20 * other, w),
        "wild outliers": torch.where(rare, 1000 * other, w),
        "flat": torch.rand(8, 96, generator=torch.Generator().manual_seed(0)),
        "one-sided": w.abs(),
        "shifted": w + 1,
        "integers": (w * 200).round() / 100,
        "sparse": torch.where(rare, w, 0.0),
        "constant": torch.full((8, 96), 0.3),
        "zeros": torch.zeros(8, 96),
    }


every_matrix = pytest.mark.parametrize("name", matrices())


def error(q: QuantTensor, w: Tensor) -> float:
    """Squared error of the numbers that are stored."""
    return float((q.dequantize(torch.float64) - w.double()).square().sum())


def at_most(a: float, b: float, w: Tensor) -> bool:
    """Tell whether a <= b but for the last bits of f32 arithmetic on these weights."""
    return a <= b * (1 + 1e-5) + 1e-12 * float(w.double().square().sum())


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, int | str, bool]:
    """A matrix of one of the characters above, cut to any shape; a group; with or without z."""
    w = matrices()[draw(st.sampled_from(sorted(matrices())))]
    w = w[: draw(st.integers(1, 8)), : draw(st.integers(1, 96))]
    group = draw(st.one_of(st.just("row"), st.integers(1, 100)))
    return w.contiguous(), group, draw(st.booleans())


@cache
def row_errors(P: int, bias: bool, rounds: int) -> Tensor:
    """Squared error of every row of all matrices, fitted as one: groups do not see each other."""
    w = torch.cat(list(matrices().values()))
    q = BCQ(bits=P, group=32, bias=bias, rounds=rounds).fit(w)
    return (q.dequantize(torch.float64) - w.double()).square().sum(1)


def errors(name: str, bias: bool, rounds: int) -> list[float]:
    """Squared error of a matrix with 1, 2, … 8 planes."""
    first = 8 * list(matrices()).index(name)
    return [float(row_errors(P, bias, rounds)[first : first + 8].sum()) for P in PLANES]


@biased
@every_matrix
def test_alternating_is_never_worse_than_greedy(name: str, bias: bool) -> None:
    for alternating, greedy in zip(errors(name, bias, 20), errors(name, bias, 0), strict=True):
        assert at_most(alternating, greedy, matrices()[name])


@biased
@every_matrix
@pytest.mark.parametrize("rounds", [0, 20])
def test_error_never_rises_with_a_plane(name: str, bias: bool, rounds: int) -> None:
    for fewer, more in pairwise(errors(name, bias, rounds)):
        assert at_most(more, fewer, matrices()[name])


@quick
@given(cases(), st.integers(1, 6))
def test_both_hold_for_any_shape_and_group(case: tuple[Tensor, int | str, bool], P: int) -> None:
    w, group, bias = case
    found = error(BCQ(bits=P, group=group, bias=bias).fit(w), w)
    assert at_most(found, error(BCQ(bits=P, group=group, bias=bias, rounds=0).fit(w), w), w)
    assert at_most(error(BCQ(bits=P + 1, group=group, bias=bias).fit(w), w), found, w)


@biased
@pytest.mark.parametrize("P", range(2, 9))
def test_on_gaussian_weights_both_are_strict(P: int, bias: bool) -> None:
    w = gauss(16, 256)
    found = error(BCQ(bits=P, group=64, bias=bias).fit(w), w)
    assert found < 0.9 * error(BCQ(bits=P, group=64, bias=bias, rounds=0).fit(w), w)
    assert found < 0.4 * error(BCQ(bits=P - 1, group=64, bias=bias).fit(w), w)


@every_matrix
def test_not_worse_than_rounding_to_nearest(name: str) -> None:
    w = matrices()[name]
    # Both round their scales to f16, a step of 2^-11 in which either may be the luckier.
    noise = 2.0**-22 * float(w.double().square().sum())
    for P, found in zip(PLANES, errors(name, True, 20), strict=True):
        assert found <= error(RTN(bits=P, group=32).fit(w), w) + noise, P


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_better_than_rounding_to_nearest_on_gaussian_weights(bits: int) -> None:
    w = gauss(16, 256)
    assert error(BCQ(bits=bits, group=64).fit(w), w) < 0.85 * error(RTN(bits=bits, group=64).fit(w), w)


def optimum(w: Tensor, P: int, bias: bool) -> float:
    """The least squared error of one group, by trying every assignment of signs to every weight."""
    G = len(w)
    signs = torch.tensor(list(product([-1.0, 1.0], repeat=G)), dtype=torch.float64)  # [2^G, G]
    planes = torch.cartesian_prod(*[torch.arange(len(signs))] * P).reshape(-1, P)
    planes = planes[(planes.diff(dim=1) > 0).all(1)]  # the order of planes does not matter, a plane twice is useless
    B = signs[planes].transpose(1, 2)  # [choices, G, P]
    if bias:
        B = torch.cat([B, torch.ones(len(B), G, 1, dtype=torch.float64)], 2)
    Q = torch.linalg.svd(B, full_matrices=False)
    basis = Q.U * (Q.S > 1e-9)[:, None]
    projected = (basis @ (basis.transpose(1, 2) @ w.double()[:, None])).squeeze(2)
    return float((projected - w.double()).square().sum(1).min())


@biased
@pytest.mark.parametrize(("P", "G", "mean", "worst"), [(1, 10, 1.2, 3.0), (2, 6, 1.2, 3.0)])
def test_the_optimum_of_tiny_groups_is_reached_or_near(P: int, G: int, mean: float, worst: float, bias: bool) -> None:
    w = gauss(24, G, seed=P)
    q = BCQ(bits=P, group=G, bias=bias).fit(w)
    found = (q.dequantize(torch.float64) - w.double()).square().sum(1)
    best = torch.tensor([optimum(row, P, bias) for row in w], dtype=torch.float64)
    slack = 1e-6 * w.double().square().sum(1)  # f16 scales
    assert (found >= best - slack).all()
    assert (found <= worst * best + slack).all()
    assert found.sum() <= mean * best.sum()


def test_one_plane_without_z_has_its_closed_form() -> None:
    w = gauss()
    q = BCQ(bits=1, group=32, bias=False).fit(w)
    assert torch.equal(q.codes().bool(), w > 0)
    wanted = w.reshape(8, 3, 32).abs().mean(-1)
    torch.testing.assert_close(q.alpha[0].float(), wanted, rtol=2.0**-11, atol=0)


@pytest.mark.parametrize("bits", PLANES)
def test_weights_that_are_binary_coded_come_back(bits: int) -> None:
    alpha = torch.tensor([2.0 ** -(p + 1) for p in range(bits)])
    codes = torch.randint(0, 2, (8, 2**bits * 4, bits), generator=torch.Generator().manual_seed(0)) * 2 - 1
    w = (codes * alpha).sum(-1) + 0.25
    assert torch.equal(BCQ(bits=bits, group="row").fit(w).dequantize(), w)


@biased
@quick
@given(case=cases(), P=st.integers(1, 4))
def test_every_weight_has_the_nearest_level(bias: bool, case: tuple[Tensor, int | str, bool], P: int) -> None:
    w, group, _ = case
    for rounds in (0, 20):
        q = BCQ(bits=P, group=group, bias=bias, rounds=rounds).fit(w)
        z = torch.zeros(1, q.alpha.shape[2]) if q.z is None else q.z.double()
        levels = [
            expand_groups((torch.tensor(s)[:, None, None] * q.alpha.double()).sum(0) + z, q.group, q.K)
            for s in product([-1.0, 1.0], repeat=P)
        ]
        nearest = (torch.stack(levels) - w.double()).abs().amin(0)
        got = (q.dequantize(torch.float64) - w.double()).abs()
        torch.testing.assert_close(got, nearest, rtol=1e-5, atol=1e-6 * float(w.abs().max()) + 1e-9)


@pytest.mark.parametrize("bits", PLANES)
def test_alphas_are_positive_and_descending(bits: int) -> None:
    for bias in (True, False):
        alpha = BCQ(bits=bits, group=8, bias=bias).fit(torch.cat(list(matrices().values()))).alpha
        assert (alpha >= 0).all()
        assert (alpha.diff(dim=0) <= 0).all()


# Invariances: the same weights seen in another way have the same error.


@biased
@pytest.mark.parametrize("bits", [1, 2, 3, 5])
@pytest.mark.parametrize("rounds", [0, 20])
def test_negated_weights_have_the_same_error(bits: int, rounds: int, bias: bool) -> None:
    w, config = gauss(), BCQ(bits=bits, group=32, rounds=rounds, bias=bias)
    assert error(config.fit(-w), -w) == pytest.approx(error(config.fit(w), w), rel=1e-3)


@biased
@pytest.mark.parametrize("bits", [1, 2, 3, 5])
@pytest.mark.parametrize("factor", [0.5, 8.0])
def test_scaled_weights_have_the_same_codes(bits: int, factor: float, bias: bool) -> None:
    w, config = gauss() + 0.5, BCQ(bits=bits, group=32, bias=bias)
    there, scaled = config.fit(w), config.fit(factor * w)
    assert torch.equal(scaled.planes, there.planes)
    torch.testing.assert_close(scaled.dequantize(), factor * there.dequantize(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("rounds", [0, 20])
def test_z_takes_up_an_added_constant(bits: int, rounds: int) -> None:
    w, config = gauss(), BCQ(bits=bits, group=32, rounds=rounds)
    shift = 0.125
    rounding = 96 * 8 * (shift * 2.0**-11) ** 2  # z in f16, off by up to half a unit in the last place
    assert error(config.fit(w + shift), w + shift) == pytest.approx(error(config.fit(w), w), rel=0.02, abs=rounding)


@biased
@pytest.mark.parametrize("K", [1, 7, 50, 96])
def test_row_wise_equals_group_k(K: int, bias: bool) -> None:
    w = gauss(K=K)
    row, k, more = (BCQ(bits=3, group=g, bias=bias).fit(w) for g in ("row", K, K + 1000))
    assert row.group == k.group == more.group == K
    assert torch.equal(row.dequantize(), k.dequantize())
    assert torch.equal(row.dequantize(), more.dequantize())


@biased
@pytest.mark.parametrize("rounds", [0, 20])
def test_a_short_last_group_is_a_group_of_its_own(rounds: int, bias: bool) -> None:
    w = gauss(K=50)
    config = BCQ(bits=3, group=16, rounds=rounds, bias=bias)
    parts = [config.fit(w[:, k : k + 16].contiguous()).dequantize() for k in range(0, 50, 16)]
    torch.testing.assert_close(config.fit(w).dequantize(), torch.cat(parts, 1), rtol=1e-3, atol=1e-5)


def test_groups_do_not_see_each_other() -> None:
    w = gauss()
    changed = w.clone()
    changed[:, 32:64] *= 100
    a, b = (BCQ(bits=3, group=32).fit(x).dequantize() for x in (w, changed))
    assert torch.equal(a[:, :32], b[:, :32])
    assert torch.equal(a[:, 64:], b[:, 64:])


@biased
def test_row_slabs_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    w = gauss(17, 50)
    whole = BCQ(bits=3, group=16, bias=bias).fit(w)
    for slab in (1, 50, 120):
        monkeypatch.setattr(grouping, "_SLAB", slab)
        cut = BCQ(bits=3, group=16, bias=bias).fit(w)
        assert all(torch.equal(t, cut.tensors()[name]) for name, t in whole.tensors().items())


def test_fitting_twice_gives_the_same_bits() -> None:
    a, b = (BCQ(bits=3, group=32).fit(gauss()) for _ in range(2))
    assert all(torch.equal(t, b.tensors()[name]) for name, t in a.tensors().items())


@biased
def test_a_group_of_zeros_is_exact(bias: bool) -> None:
    w = gauss()
    w[:, 32:64] = 0.0
    assert (BCQ(bits=3, group=32, bias=bias).fit(w).dequantize()[:, 32:64] == 0).all()


@biased
def test_z_is_stored_only_where_asked_for(bias: bool) -> None:
    assert ("z" in BCQ(bits=2, group=32, bias=bias).fit(gauss()).tensors()) is bias


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_are_taken_as_their_numbers(dtype: torch.dtype) -> None:
    w = gauss().to(dtype)
    assert torch.equal(BCQ().fit(w).dequantize(), BCQ().fit(w.float()).dequantize())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused(bad: float) -> None:
    w = gauss()
    w[2, 3] = bad
    with pytest.raises(FormatError, match="NaN or infinity"):
        BCQ().fit(w)


def test_a_scale_beyond_f16_is_refused() -> None:
    with pytest.raises(SchemeError, match="outside the range of f16"):
        BCQ(bits=1).fit(torch.tensor([[1e6, -1e6]]))


@biased
@pytest.mark.parametrize("planes", [1, 2, 3, 4])
def test_starts_one_by_one_give_the_bits_of_all_at_once(
    planes: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = [BCQ(bits=planes, group=40, bias=bias).fit(w).tensors() for w in matrices().values()]
    monkeypatch.setattr(alternating_ls, "_SMALL", 0)
    one_by_one = [BCQ(bits=planes, group=40, bias=bias).fit(w).tensors() for w in matrices().values()]
    for a, b in zip(at_once, one_by_one, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[part], b[part]) for part in a)
