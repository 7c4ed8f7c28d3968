"""The tools of the calibrated quantizers, against brute force and against what linear algebra says."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import correlated, stats_of, weight
from torch import Tensor

from crelle.errors import SchemeError
from crelle.kernels import cpu
from crelle.kernels.cpu import solver as cpu_solver
from crelle.kernels.cpu.check import instruction_set
from crelle.quantizers.schemes.bcq import signs
from crelle.quantizers.solvers import gptq_solver as tools
from crelle.quantizers.solvers import sweep as passes
from crelle.quantizers.solvers.gptq_solver import (
    Fit,
    Levels,
    best_scales,
    descend,
    factor,
    feedback,
    feedback_by_group,
    improve,
    row_errors,
    solve,
    solve_damped,
)

quick = settings(deadline=None, max_examples=25)
KINDS = ["uniform", "affine", "binary"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def levels_of(kind: str, w: Tensor, bits: int, group: int) -> Levels:
    """Plausible levels for a weight; rows and groups differ, so that a mix-up shows."""
    N, K = w.shape
    C = -(-K // group)
    size = 0.04 * (1 + torch.arange(N * C).reshape(N, C) / (N * C))
    q = torch.arange(2.0**bits)[:, None]
    if kind == "uniform":
        zero = (torch.arange(N * C).reshape(N, C, 1) % 2**bits).float()
        return Levels(q, (size / 2**bits).half().float()[..., None], group, zero)
    if kind == "affine":
        return Levels(
            torch.cat([q, torch.ones_like(q)], 1), torch.stack([size / 2**bits, -size / 2], -1).half().float(), group
        )
    book = torch.nn.functional.pad(signs(bits, w.device), (0, 1), value=1.0)
    alpha = [size / 2 ** (p + 1.3) for p in range(bits)]
    return Levels(book, torch.stack([*alpha, 0.1 * size], -1).half().float(), group)


def nearest(w: Tensor, levels: Levels) -> Tensor:
    """The codes of plain rounding, by trying all levels."""
    values = levels.values().repeat_interleave(levels.group, dim=1)[:, : w.shape[1]]  # [N, K, L]
    return (values - w[..., None]).abs().argmin(-1).to(torch.uint8)


@every_kind
def test_codes_levels_and_features_agree(kind: str) -> None:
    w = weight(5, 23)
    levels = levels_of(kind, w, 2, 8)
    codes = torch.randint(0, 4, w.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    scales = levels.scales.repeat_interleave(8, dim=1)[:, :23]  # [N, K, U]
    direct = (levels.features(codes) * scales.movedim(-1, 0)).sum(0)
    torch.testing.assert_close(levels.decode(codes), direct, rtol=1e-6, atol=1e-7)


@every_kind
@pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ core")
@pytest.mark.parametrize(("N", "K", "group"), [(1, 1, 8), (16, 64, 32), (17, 23, 8), (50, 130, 64)])
def test_levels_in_cpp_have_the_bits_of_torch(kind: str, N: int, K: int, group: int) -> None:
    w = weight(N, K)
    levels = levels_of(kind, w, 3, group)
    codes = torch.randint(0, 8, w.shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    assert torch.equal(tools.errors(w, Fit(codes, levels)), (w - levels.decode(codes)).T)
    features = [cpu_solver.level_values(codes, f, group) for f in levels.factors()]
    assert torch.equal(torch.stack(features), levels.features(codes).mT)


@pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ core")
def test_a_code_beyond_its_levels_is_refused() -> None:
    codes, levels = torch.tensor([[0, 3]], dtype=torch.uint8), torch.zeros(1, 1, 3)
    with pytest.raises(ValueError, match="beyond its levels"):
        cpu_solver.level_values(codes, levels, 2)
    with pytest.raises(ValueError, match=r"levels must be \[N, groups, L\]"):
        cpu_solver.level_values(codes, levels, 1)


def test_the_factor_is_one_of_the_damped_hessian() -> None:
    stats = correlated(40)
    by = factor(stats.hessian, 0.01, act_order=True)
    M = by.mix.double() + torch.eye(40)
    assert torch.equal(by.mix.tril(), torch.zeros(40, 40))
    damped = stats.hessian.double() + 0.01 * stats.hessian.double().diagonal().mean() * torch.eye(40)
    product_ = M @ by.cost[by.order].double().diag() @ M.T
    torch.testing.assert_close(product_, damped[by.order][:, by.order], rtol=1e-5, atol=1e-5)
    assert (stats.hessian.diagonal()[by.order].diff() <= 0).all()


def gptq_as_published(w: Tensor, H: Tensor, levels: Levels) -> Tensor:
    """Column by column with the inverse Hessian, f64."""
    w, K = w.double().clone(), len(H)
    root = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)
    codes = torch.empty(w.shape, dtype=torch.uint8)
    for k in range(K):
        values = levels.values()[:, k // levels.group].double()
        rank = (values - w[:, k : k + 1]).abs().argmin(-1, keepdim=True)
        codes[:, k] = rank[:, 0]
        left = (w[:, k : k + 1] - values.gather(1, rank)) / root[k, k]
        w[:, k:] -= left * root[k : k + 1, k:]
    return codes


@every_kind
@pytest.mark.parametrize("block", [1, 7, 128, None])  # None: in C++
def test_feedback_gives_the_codes_of_gptq(kind: str, block: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if block is not None:
        monkeypatch.setattr(passes, "_BLOCK", block)
        monkeypatch.setattr(cpu, "available", lambda: "is not asked")
    w, H = weight(16, 50), correlated(50).hessian
    levels = levels_of(kind, w, 2, 16)
    damped = H.double() + 0.01 * H.double().diagonal().mean() * torch.eye(50)
    wanted = gptq_as_published(w, damped, levels)
    got = feedback(w, factor(H, 0.01, act_order=False), levels).codes
    assert (got == wanted).float().mean() > 0.99  # a tie that f32 decides otherwise changes what comes after it


@every_kind
@pytest.mark.parametrize("act_order", [True, False])
def test_the_error_of_feedback_is_what_rounding_left_weighted_by_the_cost(kind: str, act_order: bool) -> None:
    w, H = weight(8, 40), correlated(40).hessian
    by = factor(H, 0.0, act_order=act_order)
    fit = feedback(w, by, levels_of(kind, w, 2, 16))
    error = (w - fit.levels.decode(fit.codes)).double()[:, by.order]
    left = error @ (by.mix.double() + torch.eye(40))
    torch.testing.assert_close(
        (left.square() * by.cost[by.order].double()).sum(1).float(), row_errors(w, H, fit), rtol=1e-3, atol=1e-9
    )


@every_kind
@pytest.mark.parametrize("act_order", [True, False])
def test_inputs_that_are_independent_are_rounded_to_nearest(kind: str, act_order: bool) -> None:
    w = weight(8, 50)
    levels = levels_of(kind, w, 3, 16)
    for H in (torch.eye(50), torch.diag(torch.rand(50, generator=torch.Generator().manual_seed(0)) + 0.1)):
        fit = feedback(w, factor(H, 0.01, act_order=act_order), levels)
        exact = levels.decode(nearest(w, levels))
        torch.testing.assert_close((w - levels.decode(fit.codes)).abs(), (w - exact).abs(), rtol=1e-4, atol=1e-7)
        again = descend(w, H, fit)
        assert torch.equal(again.codes, fit.codes)


@every_kind
def test_levels_found_on_the_way_are_those_of_the_weights_as_they_then_are(kind: str) -> None:
    w, H = weight(8, 50), correlated(50).hessian
    by = factor(H, 0.01, act_order=False)
    fixed = levels_of(kind, w, 2, 16)
    seen: list[Tensor] = []

    def find(part: Tensor, place: slice) -> Levels:
        seen.append(part.clone())
        c = place.start // 16
        shift = None if fixed.shift is None else fixed.shift[:, c : c + 1]
        return replace(fixed, scales=fixed.scales[:, c : c + 1], shift=shift)

    fit = feedback_by_group(w, by, 16, find)
    assert [t.shape[1] for t in seen] == [16, 16, 16, 2]
    assert torch.equal(fit.levels.scales, fixed.scales)
    error = w - fixed.decode(fit.codes)
    torch.testing.assert_close(seen[2], w[:, 32:48] + error[:, :32] @ by.mix[:32, 32:48], rtol=1e-4, atol=1e-6)
    assert (fit.codes == feedback(w, by, fixed).codes).float().mean() > 0.99


@every_kind
@pytest.mark.parametrize(("bits", "K", "group"), [(1, 6, 6), (1, 6, 4), (2, 5, 3), (2, 4, 1), (1, 1, 1)])
def test_descent_ends_near_the_best_of_all_codes(kind: str, bits: int, K: int, group: int) -> None:
    w, H = weight(20, K, seed=K), correlated(K).hessian
    levels = levels_of(kind, w, bits, group)
    every = torch.tensor(list(product(range(2**bits), repeat=K)), dtype=torch.uint8)
    best = torch.stack([row_errors(w, H, Fit(codes.expand(20, K).contiguous(), levels)) for codes in every]).amin(0)
    start = feedback(w, factor(H, 0.01, act_order=True), levels)
    found = row_errors(w, H, improve(w, H, H, start, [descend] * 5))
    slack = 1e-5 * best + 1e-10
    assert (found >= best - slack).all()
    assert (found <= row_errors(w, H, start) + slack).all()
    assert float(found.sum()) <= 1.25 * float(best.sum())
    assert (found <= best + slack).float().mean() >= 0.5


@every_kind
@pytest.mark.parametrize(("K", "group"), [(32, 16), (30, 8), (20, 20)])
def test_the_scales_are_those_of_least_squares(kind: str, K: int, group: int) -> None:
    w, H = weight(6, K), correlated(K).hessian
    levels = levels_of(kind, w, 2, group)
    fit = feedback(w, factor(H, 0.01, act_order=True), levels)
    got = best_scales(w, H, fit)
    root = torch.linalg.cholesky(H.double()).T  # |root e|² = e H eᵀ
    C, U = got.shape[1:]
    for n in range(6):
        A = torch.zeros(K, C * U, dtype=torch.float64)
        for u, feature in enumerate(levels.features(fit.codes)[:, n]):
            for k in range(K):
                A[k, (k // group) * U + u] = feature[k]
        exact = torch.linalg.lstsq(root @ A, root @ w[n].double(), driver="gelsd").solution
        left = [float((root @ (A @ x - w[n].double())).square().sum()) for x in (got[n].flatten(), exact)]
        assert left[0] == pytest.approx(left[1], rel=1e-4)
    errors = [row_errors(w, H, f) for f in (fit, Fit(fit.codes, replace(levels, scales=got.float())))]
    assert (errors[1] <= errors[0] * (1 + 1e-5)).all()


def test_rows_are_solved_alike_whatever_their_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    w, H = weight(9, 40), correlated(40).hessian
    fit = feedback(w, factor(H, 0.01, act_order=True), levels_of("affine", w, 2, 16))
    whole = best_scales(w, H, fit)
    monkeypatch.setattr(tools, "_UNKNOWNS", 1)
    torch.testing.assert_close(best_scales(w, H, fit), whole, rtol=1e-4, atol=1e-7)


def test_what_the_codes_leave_open_stays_as_it_is() -> None:
    w, H = weight(4, 32), correlated(32).hessian
    H[16:], H[:, 16:] = 0, 0  # a group whose inputs are never seen
    levels = levels_of("affine", w, 2, 16)
    fit = Fit(nearest(w, levels), levels)
    torch.testing.assert_close(best_scales(w, H, fit)[:, 1].float(), levels.scales[:, 1])
    same = Fit(torch.zeros_like(fit.codes), levels)  # scale and low cannot be told apart, nor can the scale be seen
    assert torch.isfinite(best_scales(w, H, same)).all()


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Tensor, Tensor, Levels]:
    N, K, bits = draw(st.integers(1, 6)), draw(st.integers(1, 24)), draw(st.integers(1, 4))
    w = weight(N, K, draw(st.integers(0, 999)))
    kind = draw(st.sampled_from(KINDS))
    tokens = draw(st.integers(1, 60))  # often fewer than inputs: H is then singular
    return (
        kind,
        w,
        correlated(K, draw(st.integers(0, 999)), tokens).hessian,
        levels_of(kind, w, bits, draw(st.integers(1, K))),
    )


@quick
@given(cases(), st.lists(st.sampled_from([solve, descend]), max_size=4))
def test_no_step_ever_raises_a_rows_error(case: tuple[str, Tensor, Tensor, Levels], steps: list) -> None:
    _, w, H, levels = case
    by = factor(H, 0.01, act_order=True)
    fit = feedback(w, by, levels)
    error = row_errors(w, H, fit)
    for step in steps:
        fit = improve(w, H, by.damped, fit, [step])
        now = row_errors(w, H, fit)
        assert (now <= error).all()
        error = now
    assert torch.isfinite(fit.levels.scales).all()
    assert torch.equal(fit.levels.scales, fit.levels.scales.half().float())


@quick
@given(cases())
def test_a_pass_of_descent_alone_never_raises_the_error_but_for_rounding(
    case: tuple[str, Tensor, Tensor, Levels],
) -> None:
    _, w, H, levels = case
    fit = Fit(nearest(w, levels), levels)
    total = (w @ H * w).sum(1)
    assert (row_errors(w, H, descend(w, H, fit)) <= row_errors(w, H, fit) + 1e-5 * total + 1e-9).all()


@pytest.mark.parametrize(
    "hessian",
    [torch.zeros(6, 6), torch.ones(6, 6), torch.diag(torch.tensor([1.0, 0, 2, 0, 0, 3])), -torch.eye(6) * 1e-4],
    ids=["zero", "rank one", "dead inputs", "a little negative"],
)
def test_a_hessian_that_is_not_definite_is_damped_until_it_is(hessian: Tensor) -> None:
    for damp in (0.0, 0.01):
        by = factor(hessian, damp, act_order=True)
        assert torch.isfinite(by.mix).all()
        assert (by.cost > 0).all()


@pytest.mark.parametrize("bad", [torch.full((3, 3), float("nan")), torch.eye(3) * float("inf")])
def test_statistics_that_are_no_numbers_are_refused(bad: Tensor) -> None:
    with pytest.raises(SchemeError, match="statistics of a layer's inputs contain NaN or infinity"):
        factor(bad, 0.01, act_order=True)


def test_statistics_that_are_no_hessian_are_refused() -> None:
    H = torch.eye(3)
    H[0, 1] = H[1, 0] = 100.0
    with pytest.raises(SchemeError, match="not positive"):
        factor(H, 0.01, act_order=True)
    assert stats_of(torch.eye(3)).output_error(torch.ones(1, 3)) == 3.0


def test_the_factor_solves_for_the_damped_hessian() -> None:
    by = factor(correlated(40).hessian, 0.01, act_order=True)
    b = weight(7, 40)
    torch.testing.assert_close(solve_damped(by, b) @ by.damped, b, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ core")
@pytest.mark.parametrize("isa", cpu.core().isas() if cpu.available() is None else [])
@every_kind
@pytest.mark.parametrize(("N", "K"), [(5, 23), (37, 130)])
def test_scales_and_errors_in_cpp_are_those_in_torch(
    isa: str, kind: str, N: int, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, stats = weight(N, K), correlated(K)
    by = factor(stats.hessian, 0.01, act_order=True)
    fit = feedback(w, by, levels_of(kind, w, 2, 16))
    with instruction_set(isa):
        scales, errors = best_scales(w, by.damped, fit), row_errors(w, stats.hessian, fit)
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "available", lambda: "is not asked")
        wanted, wanted_errors = best_scales(w, by.damped, fit), row_errors(w, stats.hessian, fit)
    torch.testing.assert_close(errors, wanted_errors, rtol=1e-4, atol=1e-7)
    assert scales.shape == wanted.shape
    now, before = (
        row_errors(w, by.damped, Fit(fit.codes, replace(fit.levels, scales=s.float()))) for s in (scales, wanted)
    )
    torch.testing.assert_close(now, before, rtol=1e-3, atol=1e-7)
