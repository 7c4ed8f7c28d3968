"""Passes over the columns of a weight in CUDA against those in torch: in the emulator, and (gpu) on a device."""

import pytest
import torch
from solver_cases import SIZES, device_fixture, hessian_of, in_torch, mostly
from torch import Tensor

from crelle.kernels import cuda
from crelle.kernels.cuda.solver import sweep as kernels
from crelle.quantizers.solvers import sweep
from crelle.quantizers.solvers.fast_error import _feedback
from crelle.quantizers.solvers.gptq_solver import factor, mixing
from crelle.quantizers.solvers.sweep import LevelTable, sweep_levels

device = device_fixture(kernels)


def table_of(N: int, counts: list[int], coded: bool = True) -> LevelTable:
    chance = torch.Generator().manual_seed(N)
    values = torch.cat([torch.randn(n, N, generator=chance).sort(0).values for n in counts])
    codes = torch.cat([torch.rand(n, N, generator=chance).argsort(0) for n in counts]).to(torch.uint8)
    first = [sum(counts[:g]) for g in range(len(counts))]
    return LevelTable(values, codes if coded else None, first, counts)


def found_on(
    device: str,
    target: Tensor,
    error: Tensor | None,
    mix: Tensor,
    table: LevelTable,
    group: list[int],
    outliers: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    first, count = (torch.tensor([of[g] for g in group], dtype=torch.int32) for of in (table.first, table.count))
    args = [target, error, mix, table.values, table.codes, first, count]
    moved = [t if t is None else t.to(device) for t in args]
    some = None if outliers is None else outliers.to(device)
    codes, kept = kernels.sweep_table(*moved, max(table.count), some)  # type: ignore[arg-type]
    return codes.cpu(), None if kept is None else kept.cpu()


def compare(
    device: str,
    N: int,
    K: int,
    table: LevelTable,
    outliers: bool,
    descent: bool,
    scale: float = 1.0,
) -> None:
    chance = torch.Generator().manual_seed(N + K)
    target = torch.randn(K, N, generator=chance) * scale
    group = torch.randint(0, len(table.count), (K,), generator=chance).tolist()
    some = torch.rand(K, N, generator=chance) < 0.1 if outliers else None
    hessian = hessian_of(K)
    error, mix = (target * 0.1, mixing(hessian)) if descent else (None, factor(hessian, 0.01, act_order=False).mix)
    codes, kept = found_on(device, target, error, mix, table, group, some)
    wanted, wanted_kept = in_torch(sweep_levels, target, error, mix, table, group, some)
    same = (codes == wanted).all(0)
    assert mostly(same)
    if some is None or kept is None or wanted_kept is None:
        assert kept is None
    else:
        assert not kept[~some].any()
        torch.testing.assert_close(kept[:, same], wanted_kept[:, same], rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(("N", "K"), SIZES)
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("descent", [False, True])
@pytest.mark.sample(2)
def test_a_pass_is_that_in_torch(device: str, N: int, K: int, outliers: bool, descent: bool) -> None:
    compare(device, N, K, table_of(N, [4, 16, 2]), outliers, descent)


@pytest.mark.parametrize(
    "counts", [[1], [2], [3, 2], [4], [7], [8, 8, 8], [16], [16, 255, 4], [256]], ids=lambda c: "-".join(map(str, c))
)
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.sample(2)
def test_any_number_of_levels(device: str, counts: list[int], coded: bool) -> None:
    compare(device, 33, 70, table_of(33, counts, coded), False, descent=coded)


def test_a_pass_over_several_large_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_OUTER", 128)
    for descent in (False, True):
        compare(device, 40, 300, table_of(40, [8, 4]), True, descent)


def test_a_rerun_is_bitwise_equal(device: str) -> None:
    N, K = 50, 90
    table, target = table_of(N, [8]), torch.randn(K, N)
    mix = factor(hessian_of(K), 0.01, act_order=False).mix
    runs = [found_on(device, target, None, mix, table, [0] * K, None)[0] for _ in range(2)]
    assert torch.equal(*runs)


@pytest.mark.parametrize(("N", "K"), SIZES)
def test_feedback_on_uniform_grids_is_that_in_torch(device: str, N: int, K: int) -> None:
    chance = torch.Generator().manual_seed(N + K)
    target = torch.randn(K, N, generator=chance)
    scale, low = 0.3 + torch.rand(K, N, generator=chance), -2 + torch.rand(K, N, generator=chance)
    top = 2.0 ** torch.randint(1, 5, (N,), generator=chance) - 1
    mix = factor(hessian_of(K), 0.01, act_order=False).mix
    args = target, mix, scale, low, top
    left = kernels.sweep_uniform(*(t.to(device) for t in args)).cpu()
    wanted = _feedback(*args)
    assert mostly(((left - wanted).abs() < 1e-4).all(0))


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [False, True])
def test_sweep_levels_runs_the_kernel(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the process has allowed TF32."""
    assert cuda.available() is None
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
    N, K = 300, 1100
    table, chance = table_of(N, [8, 16]), torch.Generator().manual_seed(0)
    target = torch.randn(K, N, generator=chance)
    mix = factor(hessian_of(K), 0.01, act_order=False).mix
    group = [k // 128 % 2 for k in range(K)]
    there = LevelTable(table.values.cuda(), None if table.codes is None else table.codes.cuda(), table.first, [8, 16])
    with monkeypatch.context() as here:
        here.setattr(sweep, "sweep", None)  # the loop in torch
        codes, _ = sweep_levels(target.cuda(), None, mix.cuda(), there, group)
    wanted, _ = in_torch(sweep_levels, target, None, mix, table, group)
    assert (codes.cpu() == wanted).all(0).float().mean() > 0.95
    assert torch.backends.cuda.matmul.allow_tf32 == tf32
