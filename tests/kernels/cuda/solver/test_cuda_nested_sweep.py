"""Common codes of several precisions in CUDA against those in torch: in the emulator, and (gpu) on a device."""

import pytest
import torch
from solver_cases import SIZES, device_fixture, hessian_of, in_torch, mostly
from torch import Tensor

from crelle.kernels import cuda
from crelle.kernels.cuda.solver import nested_sweep as kernels
from crelle.kernels.cuda.solver import sweep
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.schemes.nested import Nested
from crelle.quantizers.solvers import nested_sweep
from crelle.quantizers.solvers.gptq_solver import factor, mixing
from crelle.quantizers.solvers.nested_sweep import NestedGrids, nearest_nested, sweep_nested

PRECISIONS = [(4, 2), (1, 1), (4, 4), (3, 2), (4, 1), (8, 5), (8, 8), (6, 1), (8, 1)]  # bits, the lowest


device = device_fixture(kernels)


def grids_of(N: int, K: int, group: int, bits: int, lowest: int) -> NestedGrids:
    """Grids over about [-2, 2], those of coarser precisions near the middles of the finest one's levels."""
    chance = torch.Generator().manual_seed(N + bits)
    P, C = bits - lowest + 1, -(-K // group)
    noise = torch.rand(P, N, C, 2, generator=chance)
    top = torch.tensor([2.0**p - 1 for p in range(lowest, bits + 1)])[:, None, None]
    scale = (3.5 + 0.5 * noise[..., 0]) / top
    low = -2 + 0.2 * noise[..., 1] + 0.5 * scale
    weights = 2.0 ** torch.arange(1.0 - P, 1.0)
    return NestedGrids(torch.stack([scale, low], -1), group, bits, weights)


def moved(grids: NestedGrids, device: str) -> NestedGrids:
    return NestedGrids(grids.scales.to(device), grids.group, grids.bits, grids.weights.to(device))


def found_on(
    device: str, target: Tensor, errors: Tensor | None, mix: Tensor, grids: NestedGrids, order: list[int]
) -> Tensor:
    there = moved(grids, device)
    group = torch.tensor(order, dtype=torch.int32, device=device) // grids.group
    before = None if errors is None else errors.to(device)
    arguments = target.to(device), before, mix.to(device), there.by_column(), group
    return kernels.sweep_nested(*arguments, there.weights, there.coarse).cpu()


def problem(N: int, K: int, P: int, descent: bool) -> tuple[Tensor, Tensor | None, Tensor, list[int]]:
    chance = torch.Generator().manual_seed(N + K)
    target, hessian = torch.randn(K, N, generator=chance), hessian_of(K)
    order = torch.randperm(K, generator=chance).tolist()
    if not descent:
        return target, None, factor(hessian, 0.01, act_order=False).mix, order
    return target, 0.1 * torch.randn(K, P * N, generator=chance), mixing(hessian), order


def compare(device: str, N: int, K: int, grids: NestedGrids, descent: bool) -> None:
    target, errors, mix, order = problem(N, K, len(grids.scales), descent)
    codes = found_on(device, target, errors, mix, grids, order)
    wanted = in_torch(sweep_nested, target, errors, mix, grids, order)
    assert mostly((codes == wanted).all(0))


@pytest.mark.parametrize(("N", "K"), SIZES)
@pytest.mark.parametrize("descent", [False, True])
def test_a_pass_is_that_in_torch(device: str, N: int, K: int, descent: bool) -> None:
    compare(device, N, K, grids_of(N, K, 32, 4, 2), descent)


@pytest.mark.parametrize(("bits", "lowest"), PRECISIONS)
@pytest.mark.parametrize("descent", [False, True])
@pytest.mark.sample(2)
def test_any_number_of_precisions(device: str, bits: int, lowest: int, descent: bool) -> None:
    compare(device, 33, 70, grids_of(33, 70, 24, bits, lowest), descent)


def test_a_pass_over_several_large_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_OUTER", 128)
    for descent in (False, True):
        compare(device, 40, 300, grids_of(40, 300, 128, 4, 2), descent)


@pytest.mark.parametrize("descent", [False, True])
def test_a_rerun_is_bitwise_equal(device: str, descent: bool) -> None:
    N, K = 50, 90
    grids = grids_of(N, K, 32, 4, 2)
    target, errors, mix, order = problem(N, K, 3, descent)
    assert torch.equal(*(found_on(device, target, errors, mix, grids, order) for _ in range(2)))


@pytest.mark.parametrize(("bits", "lowest"), PRECISIONS)
@pytest.mark.parametrize(("N", "K", "group"), [(1, 1, 1), (37, 50, 16), (65, 131, 131)])
@pytest.mark.sample(3)
def test_nearest_codes_are_those_in_torch(device: str, N: int, K: int, group: int, bits: int, lowest: int) -> None:
    grids, w = grids_of(N, K, group, bits, lowest), torch.randn(N, K, generator=torch.Generator().manual_seed(K))
    there = moved(grids, device)
    weight = w.to(device).T
    codes = kernels.nearest_nested(weight, there.by_column(), group, there.weights, there.coarse).T.cpu()
    wanted = in_torch(nearest_nested, w, grids)
    assert (codes == wanted).float().mean() > 0.995  # but for ties
    again = kernels.nearest_nested(weight, there.by_column(), group, there.weights, there.coarse).T.cpu()
    assert torch.equal(codes, again)


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("descent", [False, True])
def test_a_pass_is_in_f32(tf32: bool, descent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the process has allowed TF32."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
    compare("cuda", 300, 1100, grids_of(300, 1100, 128, 4, 2), descent)
    assert torch.backends.cuda.matmul.allow_tf32 == tf32


@pytest.mark.gpu
def test_a_fit_runs_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is that of the passes in torch."""
    assert cuda.available() is None
    hessian = hessian_of(600).cuda()
    stats = Stats(hessian, hessian.diagonal().sqrt(), 1000)
    w = torch.randn(200, 600, generator=torch.Generator().manual_seed(0)).cuda()
    with monkeypatch.context() as here:
        here.setattr(nested_sweep, "sweep", None)  # the loop in torch
        found = Nested().fit(w, stats)
    with monkeypatch.context() as here:
        here.setattr(cuda, "available", lambda: "is not asked")
        wanted = Nested().fit(w, stats)
    for p in found.precisions:
        errors = [stats.output_error(w - q.at(p).dequantize(torch.float32)) for q in (found, wanted)]
        assert errors[0] == pytest.approx(errors[1], rel=0.01)
