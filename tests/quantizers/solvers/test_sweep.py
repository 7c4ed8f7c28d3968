"""Passes over the columns of a weight in C++ against those in torch, on every instruction set of this machine."""

from dataclasses import replace

import pytest
import torch
from problems import correlated, weight
from torch import Tensor

from crelle.kernels import cpu
from crelle.kernels.cpu.check import instruction_set
from crelle.quantizers.schemes.mixed import Assignment, Mixed
from crelle.quantizers.solvers.fast_error import _feedback
from crelle.quantizers.solvers.gptq_solver import factor, inverse_diagonal, mixing
from crelle.quantizers.solvers.mixed_solver import (
    MixedFit,
    SecondOrder,
    descend,
    search_grids,
    second_order,
    tune_scales,
)
from crelle.quantizers.solvers.sweep import LevelTable, sweep_levels

pytestmark = pytest.mark.sample(4)

SIZES = [(1, 16), (16, 64), (37, 50), (100, 203)]
every_isa = pytest.mark.parametrize("isa", cpu.core().isas() if cpu.available() is None else [])


def in_torch(patch: pytest.MonkeyPatch, call: object, *args: object) -> object:
    with patch.context() as here:
        here.setattr(cpu, "available", lambda: "is not asked")
        return call(*args)  # type: ignore[operator]


def problem(N: int, K: int) -> tuple[Tensor, Tensor, LevelTable, list[int]]:
    """Return a target [K, N], a Hessian, levels of two kinds of groups, and the groups of the columns."""
    chance = torch.Generator().manual_seed(N * K)
    values = torch.cat([torch.randn(n, N, generator=chance).sort(0).values for n in (4, 16, 2)])
    codes = torch.cat([torch.rand(n, N, generator=chance).argsort(0) for n in (4, 16, 2)]).to(torch.uint8)
    group = torch.randint(0, 3, (K,), generator=chance).tolist()
    return weight(N, K).T, correlated(K).hessian, LevelTable(values, codes, [0, 4, 20], [4, 16, 2]), group


@every_isa
@pytest.mark.parametrize(("N", "K"), SIZES)
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("descent", [False, True])
def test_a_pass_in_cpp_is_that_in_torch(
    isa: str, N: int, K: int, outliers: bool, descent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, hessian, table, group = problem(N, K)
    some = torch.rand(K, N, generator=torch.Generator().manual_seed(1)) < 0.1 if outliers else None
    error, mix = (target * 0.1, mixing(hessian)) if descent else (None, factor(hessian, 0.01, act_order=False).mix)
    with instruction_set(isa):
        codes, kept = sweep_levels(target, error, mix, table, group, some)
    wanted = in_torch(monkeypatch, sweep_levels, target, error, mix, table, group, some)
    assert isinstance(wanted, tuple)
    same = (codes == wanted[0]).all(0)  # a tie that rounding decides otherwise changes the rest of its row
    assert same.float().mean() > 0.95
    if some is None or kept is None:
        assert kept is None
    else:
        assert torch.equal(kept != 0, some & (kept != 0))
        torch.testing.assert_close(kept[:, same], wanted[1][:, same], rtol=2e-3, atol=1e-5)


def mixed_problem(config: Mixed, N: int, K: int) -> tuple[Tensor, Tensor, MixedFit]:
    target, stats = weight(N, K), correlated(K)
    _, _, by = config.wanted(target, stats)
    chosen = config.assign(target, by)
    start = config.start(target, by.cost, chosen)
    codes = torch.randint(0, 4, (N, K), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    return target, by.damped, replace(start, codes=codes, values=target)


def loss(target: Tensor, hessian: Tensor, fit: MixedFit) -> float:
    error = (target - fit.weight()).double()
    return float(((error @ hessian.double()) * error).sum())


@every_isa
@pytest.mark.parametrize(("N", "K"), SIZES)
@pytest.mark.parametrize("group", [8, 16, 64])
@pytest.mark.parametrize("four", [0.0, 0.25, 1.0])
def test_scales_in_cpp_are_those_in_torch(
    isa: str, N: int, K: int, group: int, four: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, hessian, fit = mixed_problem(Mixed(group=group, four=four, outliers=0.01), N, K)
    with instruction_set(isa):
        found = tune_scales(target, hessian, fit)
    wanted = in_torch(monkeypatch, tune_scales, target, hessian, fit)
    assert isinstance(wanted, MixedFit)
    before, here, there = (loss(target, hessian, f) for f in (fit, found, wanted))
    assert here <= before * (1 + 1e-6)
    assert here == pytest.approx(there, rel=0.02)  # a code on the edge moves all groups behind it
    assert torch.equal(found.second.scale, found.second.scale.half().float())
    assert (found.second.codes <= found.second.top).all()
    assert (found.second.scales() > 0).all()
    after = descend(target, hessian, found)
    assert loss(target, hessian, after) <= here * (1 + 1e-6)


@every_isa
@pytest.mark.parametrize(("N", "K", "group"), [(1, 8, 8), (37, 50, 16), (100, 203, 64), (64, 64, 32)])
def test_grids_in_cpp_are_those_in_torch(isa: str, N: int, K: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight(N, K)
    importance = torch.rand(N, K, generator=torch.Generator().manual_seed(3)) * (torch.arange(K) % 5 > 0)
    with instruction_set(isa):
        scale, zero = search_grids(w, importance, group)
    wanted = in_torch(monkeypatch, search_grids, w, importance, group)
    assert isinstance(wanted, tuple)
    agree = (scale / wanted[0] - 1).abs() < 1e-5
    assert agree.float().mean() > 0.98  # others have two grids with the same error
    assert (agree & (zero == wanted[1])).float().mean() > 0.98


@every_isa
@pytest.mark.parametrize(("N", "C2"), [(1, 1), (16, 40), (37, 5), (96, 33)])
def test_second_order_scales_in_cpp_are_those_in_torch(
    isa: str, N: int, C2: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(5)
    scale, importance = (torch.rand(N, C2, generator=random) + 0.01 for _ in range(2))
    widths = torch.randint(1, 5, (C2,), generator=random)
    with instruction_set(isa):
        found = second_order(scale, importance, widths)
    wanted = in_torch(monkeypatch, second_order, scale, importance, widths)
    assert isinstance(wanted, SecondOrder)
    assert torch.equal(found.scale, found.scale.half().float())
    agree = (found.scale == wanted.scale) & (found.zero == wanted.zero)
    assert agree.float().mean() > 0.98  # others have two grids with the same error
    errors = [float((importance * (f.scales() - scale).square()).sum()) for f in (found, wanted)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_levels_beyond_the_table_are_refused() -> None:
    target, hessian, table, group = problem(16, 20)
    mix = factor(hessian, 0.01, act_order=False).mix
    for wrong in ([9] * 20, [-1] * 20, group[:-1]):
        with pytest.raises(ValueError, match="group"):
            sweep_levels(target, None, mix, table, wrong)
    with pytest.raises(ValueError, match="beyond the table"):
        sweep_levels(target, None, mix, replace(table, first=[0, 4, 21]), group)


@pytest.mark.parametrize("act_order", [True, False])
def test_the_diagonal_of_the_inverse(act_order: bool) -> None:
    by = factor(correlated(60).hessian, 0.01, act_order=act_order)
    wanted = torch.linalg.inv(by.damped.double()).diagonal().float()
    torch.testing.assert_close(inverse_diagonal(by), wanted, rtol=1e-3, atol=0)


def test_an_assignment_of_nothing_but_outliers_has_a_grid() -> None:
    config, target = Mixed(group=16, four=0.5), weight(16, 64)
    _, _, by = config.wanted(target, correlated(64))
    four = torch.tensor([True, False, True, False])
    fit = config.fit_rows_of(target, by, Assignment(four, torch.ones(16, 64, dtype=torch.bool)))
    torch.testing.assert_close(fit.weight(), target, rtol=0.05, atol=0.05)
    assert torch.isfinite(fit.dense()).all()


@every_isa
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_a_pass_on_affine_grids_in_cpp_is_that_in_torch(
    isa: str, N: int, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = torch.Generator().manual_seed(N + K)
    target, mix = weight(N, K).T.contiguous(), factor(correlated(K).hessian, 0.01, act_order=False).mix
    scale = torch.rand(K, N, generator=chance) * 0.02 + 0.01
    low = -2 * scale
    top = torch.where(torch.arange(N) % 2 == 0, 3.0, 7.0)
    with instruction_set(isa):
        found = _feedback(target, mix, scale, low, top)
    wanted = in_torch(monkeypatch, _feedback, target, mix, scale, low, top)
    assert isinstance(wanted, Tensor)
    same = torch.isclose(found, wanted, rtol=1e-3, atol=1e-5).all(0)  # but for ties
    assert same.float().mean() > 0.95
