"""Grids and second-order scales of mixed matrices in CUDA against torch: in the emulator, and (gpu) on a device."""

from dataclasses import fields, replace

import pytest
import torch
from solver_cases import device_fixture, hessian_of, in_torch
from torch import Tensor

from crelle.kernels import cpu, cuda
from crelle.kernels.cuda.solver import mixed_solver as kernels
from crelle.kernels.cuda.solver import sweep
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.schemes.mixed import Mixed
from crelle.quantizers.solvers import mixed_solver
from crelle.quantizers.solvers.mixed_solver import MixedFit, SecondOrder, search_grids, tune_scales

device = device_fixture(kernels)


def weight(N: int, K: int) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(N * K)) * 0.02


def stats_of(K: int) -> Stats:
    hessian = hessian_of(K)
    return Stats(hessian, hessian.diagonal().sqrt(), 1000)


@pytest.mark.parametrize("group", kernels.GROUPS)
@pytest.mark.parametrize(("N", "K"), [(1, 8), (37, 50), (64, 64), (20, 131)])
@pytest.mark.sample(2)
def test_grids_are_those_in_torch(device: str, N: int, K: int, group: int) -> None:
    w = weight(N, K)
    importance = torch.rand(N, K, generator=torch.Generator().manual_seed(3)) * (torch.arange(K) % 5 > 0)
    importance[0, :8] = 0  # with groups of 8: one without any weight that counts
    given = w.to(device), importance.to(device), group, mixed_solver._SHRINK
    scale, zero = (t.cpu() for t in kernels.search_grids(*given))
    wanted_scale, wanted_zero = in_torch(search_grids, w, importance, group)
    agree = ((scale / wanted_scale - 1).abs() < 1e-5) & (zero == wanted_zero)
    assert agree.float().mean() > 0.98 if agree.numel() > 50 else agree.all()  # others have two of the same error
    again = kernels.search_grids(*given)
    assert torch.equal(scale, again[0].cpu())
    assert torch.equal(zero, again[1].cpu())


def problem(config: Mixed, N: int, K: int) -> tuple[Tensor, Tensor, MixedFit]:
    target = weight(N, K)
    _, _, by = config.wanted(target, stats_of(K))
    start = config.start(target, by.cost, config.assign(target, by))
    codes = torch.randint(0, 4, (N, K), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    return target, by.damped, replace(start, codes=codes, values=target)


def moved(fit: MixedFit, device: str) -> MixedFit:
    second = SecondOrder(*(t.to(device) for t in fit.second))
    parts = {f.name: getattr(fit, f.name) for f in fields(fit)}
    there = {name: t.to(device) for name, t in parts.items() if isinstance(t, Tensor)}
    return replace(fit, second=second, **there)


def loss(target: Tensor, hessian: Tensor, fit: MixedFit) -> float:
    error = (target - fit.weight()).double()
    return float(((error @ hessian.double()) * error).sum())


def tuned_on(device: str, target: Tensor, hessian: Tensor, fit: MixedFit) -> MixedFit:
    """Run the kernel, also on a CPU, where it is the emulator's."""
    with pytest.MonkeyPatch.context() as here:
        here.setattr(cpu, "available", lambda: "is not asked")
        here.setattr(mixed_solver, "_in_cuda", lambda _: True)
        return moved(tune_scales(target.to(device), hessian.to(device), moved(fit, device)), "cpu")


@pytest.mark.parametrize("group", kernels.GROUPS)
@pytest.mark.parametrize("four", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(("N", "K"), [(1, 16), (16, 64), (37, 50), (100, 203)])
@pytest.mark.sample(3)
def test_scales_are_those_in_torch(device: str, N: int, K: int, group: int, four: float) -> None:
    target, hessian, fit = problem(Mixed(group=group, four=four, outliers=0.01), N, K)
    found = tuned_on(device, target, hessian, fit)
    wanted = in_torch(tune_scales, target, hessian, fit)
    before, here, there = (loss(target, hessian, f) for f in (fit, found, wanted))
    assert here <= before * (1 + 1e-6)
    assert here == pytest.approx(there, rel=0.02)  # a code on the edge moves all groups behind it
    assert torch.equal(found.second.scale, found.second.scale.half().float())
    assert (found.second.codes <= found.second.top).all()
    assert (found.second.scales() > 0).all()
    same = (found.second.codes == wanted.second.codes).float().mean()
    assert same > 0.95 or found.second.codes.numel() < 50 or four == 1


def test_scales_over_several_large_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_OUTER", 128)
    target, hessian, fit = problem(Mixed(group=16), 40, 400)
    found, again = (tuned_on(device, target, hessian, fit) for _ in range(2))
    wanted = in_torch(tune_scales, target, hessian, fit)
    assert loss(target, hessian, found) == pytest.approx(loss(target, hessian, wanted), rel=0.01)
    assert torch.equal(found.second.codes, again.second.codes)
    assert torch.equal(found.second.scale, again.second.scale)


@pytest.mark.gpu
def test_a_fit_runs_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda.available() is None
    w, stats = weight(200, 600).cuda(), stats_of(600)
    stats = Stats(stats.hessian.cuda(), stats.absmean.cuda(), stats.tokens)
    with monkeypatch.context() as here:
        here.setattr(mixed_solver, "_descend_scales_torch", None)
        found = Mixed().fit(w, stats)
    with monkeypatch.context() as here:
        here.setattr(cuda, "available", lambda: "is not asked")
        wanted = Mixed().fit(w, stats)
    errors = [stats.output_error(w - q.dequantize(torch.float32)) for q in (found, wanted)]
    assert errors[0] == pytest.approx(errors[1], rel=0.01)
