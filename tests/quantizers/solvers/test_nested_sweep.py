"""Common codes of several precisions in C++ against those in torch, on every instruction set of this machine."""

from unittest import mock

import pytest
import torch
from problems import correlated, output_error, weight
from torch import Tensor

from crelle.kernels import cpu
from crelle.kernels.cpu import solver
from crelle.kernels.cpu.check import instruction_set
from crelle.quantizers.schemes.nested import Nested
from crelle.quantizers.solvers.gptq_solver import factor, mixing
from crelle.quantizers.solvers.nested_sweep import NestedGrids, nearest_nested, sweep_nested

pytestmark = pytest.mark.sample(4)

SIZES = [(1, 1), (1, 16), (16, 64), (37, 50), (100, 203)]
PRECISIONS = [(4, 2), (1, 1), (4, 4), (3, 2), (4, 1), (8, 5), (8, 8), (6, 1), (8, 1)]  # bits, the lowest
every_isa = pytest.mark.parametrize("isa", cpu.core().isas() if cpu.available() is None else [])


def grids_of(w: Tensor, group: int, bits: int, lowest: int) -> NestedGrids:
    """Grids that cover the weights [N, K], those of precisions a little apart from each other."""
    (N, K), P = w.shape, bits - lowest + 1
    noise = torch.rand(P, N, -(-K // group), 2, generator=torch.Generator().manual_seed(bits))
    top = torch.tensor([2.0**p - 1 for p in range(lowest, bits + 1)])[:, None, None]
    scale = 0.1 * (0.9 + 0.2 * noise[..., 0]) / top
    low = -0.05 + 0.01 * noise[..., 1]
    return NestedGrids(torch.stack([scale, low], -1), group, bits, 2.0 ** torch.arange(1.0 - P, 1.0))


def same_rows(N: int, K: int, grids: NestedGrids, isa: str, descent: bool) -> float:
    """Return the share of rows that have the same codes in C++ and torch."""
    w, hessian = weight(N, K), correlated(K).hessian
    chance = torch.Generator().manual_seed(N + K)
    order = torch.randperm(K, generator=chance).tolist()
    errors = 0.002 * torch.randn(K, len(grids.scales) * N, generator=chance) if descent else None
    mix = mixing(hessian) if descent else factor(hessian, 0.01, act_order=False).mix
    with instruction_set(isa):
        found = sweep_nested(w.T, errors, mix, grids, order)
    with mock.patch.object(cpu, "available", return_value="is not asked"):
        wanted = sweep_nested(w.T, errors, mix, grids, order)
    return float((found == wanted).all(0).float().mean())  # a tie decided otherwise changes the rest of its row


@every_isa
@pytest.mark.parametrize(("N", "K"), SIZES)
@pytest.mark.parametrize("descent", [False, True])
def test_a_pass_in_cpp_is_that_in_torch(isa: str, N: int, K: int, descent: bool) -> None:
    assert same_rows(N, K, grids_of(weight(N, K), 32, 4, 2), isa, descent) > 0.95


@every_isa
@pytest.mark.parametrize(("bits", "lowest"), PRECISIONS)
@pytest.mark.parametrize("descent", [False, True])
def test_any_number_of_precisions(isa: str, bits: int, lowest: int, descent: bool) -> None:
    assert same_rows(40, 70, grids_of(weight(40, 70), 24, bits, lowest), isa, descent) > 0.9


@every_isa
@pytest.mark.parametrize(("bits", "lowest"), PRECISIONS)
@pytest.mark.parametrize(("N", "K", "group"), [(1, 1, 1), (37, 50, 16), (65, 131, 131)])
def test_nearest_codes_are_those_in_torch(isa: str, N: int, K: int, group: int, bits: int, lowest: int) -> None:
    w = weight(N, K)
    grids = grids_of(w, group, bits, lowest)
    with instruction_set(isa):
        found = nearest_nested(w, grids)
    with mock.patch.object(cpu, "available", return_value="is not asked"):
        wanted = nearest_nested(w, grids)
    assert (found == wanted).float().mean() > 0.995  # but for ties


@pytest.mark.skipif(cpu.available() is not None, reason="no C++ core")
@pytest.mark.parametrize("config", [Nested(), Nested(group=32, bits=6, lowest=3), Nested(group=64, data=False)])
def test_a_fit_is_as_good_as_that_in_torch(config: Nested) -> None:
    w, stats = weight(64, 250), correlated(250)
    found = config.fit(w, stats)
    with mock.patch.object(cpu, "available", return_value="is not asked"):
        wanted = config.fit(w, stats)
    for p in found.precisions:
        error = output_error(wanted.at(p), w, stats)
        assert output_error(found.at(p), w, stats) == pytest.approx(error, rel=0.02)  # ties, in few rows


@pytest.mark.skipif(cpu.available() is not None, reason="no C++ core")
def test_arguments_that_do_not_fit_are_refused() -> None:
    w = weight(16, 20)
    grids = grids_of(w, 10, 4, 2)
    mix, columns, group = torch.zeros(20, 20), grids.by_column(), torch.arange(20) // 10
    with pytest.raises(ValueError, match="beyond the grids"):
        solver.nested_sweep(w.T, None, mix, columns, grids.weights, 4, group + 1)
    with pytest.raises(ValueError, match="mix must be"):
        solver.nested_sweep(w.T, None, mix[:19], columns, grids.weights, 4, group)
    with pytest.raises(ValueError, match="1 to 8 bits"):
        solver.nested_sweep(w.T, None, mix, columns, grids.weights, 128, group)
    with pytest.raises(ValueError, match="grids must be"):
        solver.nested_sweep(w.T, None, mix, columns[:, 1:], grids.weights, 4, group)
