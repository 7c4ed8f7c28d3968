"""The search for trellis codes in CUDA beside C++ and brute force: in the emulator, and (gpu) on a device."""

import pytest
import torch
from solver_cases import device_fixture, hessian_of
from torch import Tensor
from viterbi_reference import rings as reference

from crelle.formats.trellis import BITS, CODES, COLUMNS, ROWS, STATES, Code, rings_of, states_of
from crelle.kernels import cpu, cuda
from crelle.kernels.cpu import solver
from crelle.kernels.cuda.solver import viterbi as kernels
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.schemes.trellis import Trellis
from crelle.quantizers.solvers import trellis_solver
from crelle.quantizers.solvers.gptq_solver import factor
from crelle.quantizers.solvers.trellis_solver import BlockFactor

KINDS = [(code.name, bits) for code in CODES.values() for bits in BITS if not (code.weights * bits) % 1]

device = device_fixture(kernels)


def table(code: Code) -> Tensor:
    return code.values(torch.arange(STATES)).float()


def roots_of(code: Code) -> Tensor:
    """Roots whose products with values are exact: nothing depends on how a device rounds them."""
    if code.weights == 1:
        return 45 * torch.tensor([0.75, 0.5, 1, 0.625]).view(4, 1, 1)
    return torch.tensor([[[61.375, 0], [12.25, 58.5]], [[50.75, 0], [-20.5, 40.0]]])


def sequences(code: Code, count: int, size: float = 1.0) -> Tensor:
    x = torch.randn(count, 128, generator=torch.Generator().manual_seed(5)) * 50 * code.std * size
    return x.clamp(-32767, 32767).to(torch.int16)


@pytest.mark.parametrize(("name", "bits"), KINDS)
@pytest.mark.sample(3)
def test_rings_are_those_in_cpp(device: str, name: str, bits: float) -> None:
    code = CODES[name]
    values, roots, shift = table(code), roots_of(code), code.shift(bits)
    x = sequences(code, 3 if device == "cpu" else 150)
    x[1] = (x[1].float() * 3).clamp(-32767, 32767).to(torch.int16)  # beyond all values: distances saturate
    x[2] = 0  # many states are as near as another
    given = [t.to(device) for t in (values, roots, x)]
    found = kernels.rings(*given, shift)
    if cpu.available() is None:
        wanted = solver.viterbi(solver.in_viterbi_order(values, shift), roots, x, shift, 128 // code.weights)
        assert torch.equal(found.cpu().long(), wanted.long())
    assert torch.equal(found[:20].long(), reference(given[0], given[1], given[2][:20], shift))
    if device == "cuda":
        assert torch.equal(found, kernels.rings(*given, shift))


def test_no_ring_that_goes_back_and_forth_is_nearer(device: str) -> None:
    """Brute force over every way to replace one state of a ring, and the bits that its neighbours share with it."""
    code, bits = CODES["pair"], 4.0
    values, shift = table(code), code.shift(bits)
    roots = torch.eye(2).mul(61).repeat(2, 1, 1)
    x = sequences(code, 2)
    states = kernels.rings(values.to(device), roots.to(device), x.to(device), shift).cpu().long()
    assert torch.equal(states_of(rings_of(states, shift), shift).long(), states)
    scaled = 61 * values
    for s in range(2):
        wanted = x[s].float().view(64, 2)

        def error(at: int, of: Tensor, wanted: Tensor = wanted) -> Tensor:
            return (scaled[of] - wanted[at % 64]).square().sum(-1)

        own = torch.arange(256)
        for t in range(0, 64, 7):  # byte t of the ring: the high one of state t - 1, the low one of state t
            before, here = states[s, t - 1], states[s, t]
            others = error(t - 1, (before & 255) | own << 8) + error(t, (here & ~255) | own)
            found = others[here & 255]
            assert found <= others.min() * 1.03 + 1e5, "costs are rounded to steps of 2^15"


@pytest.mark.parametrize(("name", "bits", "N", "K"), [("pair", 2.0, 33, 6), ("mul1", 3.0, 5, 10), ("pair", 3.5, 30, 9)])
@pytest.mark.sample(1)
def test_codes_are_as_good_as_those_in_cpp(
    device: str, name: str, bits: float, N: int, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd sizes too. Sums of errors are rounded otherwise, so codes may differ, but not their error."""
    code, hessian = CODES[name], hessian_of(K)
    target = torch.randn(N, K, generator=torch.Generator().manual_seed(N)) * 0.02
    by = BlockFactor.of(factor(hessian, 0.1, act_order=False))
    codes, scale = trellis_solver.encode(target, by, code, bits)
    monkeypatch.setattr(kernels, "usable", lambda x, shift: True)
    monkeypatch.setattr(kernels, "_INPUTS", 8)  # errors of blocks within a launch and of launches before
    there = BlockFactor(by.mix.to(device), by.cost.to(device), by.damped.to(device))
    found, found_scale = (t.cpu() for t in trellis_solver.encode(target.to(device), there, code, bits))
    assert found.shape == codes.shape
    assert (found == codes).float().mean() > 0.5

    def error(codes: Tensor, scale: Tensor) -> float:
        values = code.values(states_of(codes, code.shift(bits))).reshape(*codes.shape[:2], ROWS, COLUMNS)
        values = values.transpose(1, 2).reshape(len(codes) * ROWS, -1)[:N, :K].double()
        left = target.double() - values * scale.double()[:, None] / 128
        return float(((left @ by.damped.double()) * left).sum())

    assert error(found, found_scale) == pytest.approx(error(codes, scale), rel=0.02)


def test_the_first_block_is_that_of_the_reference(device: str) -> None:
    """Before any error is fed back both search for the same integers: those of the reference are those of C++."""
    code, shift = CODES["pair"], 4
    rows = torch.randint(-300, 301, (64, 4), generator=torch.Generator().manual_seed(1)).float()
    roots, values = roots_of(code), table(code)
    x = (rows.view(2, 32, 2, 1, 2) @ roots).round().clamp(-32767, 32767).to(torch.int16).reshape(2, 128)
    wanted = reference(values, roots, x, shift)
    given = rows, torch.zeros(4, 4), roots[None], values
    found, codes = (t.cpu() for t in kernels.encode(*(t.to(device) for t in given), shift))
    assert torch.equal(codes[:, 0], rings_of(wanted, shift))
    assert torch.equal(found, values[wanted].reshape(64, 4))


def test_what_stays_in_shared_memory_fits() -> None:
    for shift in range(1, 9):
        for room in kernels._ROOMS:
            count = kernels.kept(shift, room)
            assert count <= 0 or count * 32768 + 4 * (STATES >> shift) + kernels._SMALL <= room
    assert kernels.kept(4, 227 << 10) == 6
    assert kernels.kept(1, 99 << 10) <= 0, "such a device searches in torch"


@pytest.mark.gpu
def test_a_fit_runs_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda.available() is None
    hessian, w = hessian_of(200), torch.randn(100, 200, generator=torch.Generator().manual_seed(1)) * 0.02
    stats = Stats(hessian, hessian.diagonal().sqrt(), 1000)
    wanted = Trellis(bits=2).fit(w, stats)
    there = Stats(hessian.cuda(), stats.absmean.cuda(), stats.tokens)
    monkeypatch.setattr(trellis_solver, "paths", None)
    found = Trellis(bits=2).fit(w.cuda(), there)
    errors = [stats.output_error(w - q.dequantize(torch.float32).cpu()) for q in (found, wanted)]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)
