"""Levels of groups in CUDA against torch and C++: in the emulator, and (gpu) on a device."""

import pytest
import torch
from solver_cases import device_fixture
from torch import Tensor

from crelle.errors import FormatError, SchemeError
from crelle.kernels import cpu, cuda
from crelle.kernels.cpu import solver
from crelle.kernels.cuda.solver import group_solver as kernels
from crelle.quantizers.schemes import bcq, gptq
from crelle.quantizers.schemes.bcq import BCQ
from crelle.quantizers.schemes.gptq import GPTQ
from crelle.quantizers.solvers import fast_error
from crelle.quantizers.solvers import group_solver as choice
from crelle.quantizers.solvers.alternating_ls import SortedGroups, levels_of, squared_error

pytestmark = pytest.mark.sample(4)

SHRINKS = [1.0, 0.8, 0.6, 0.4]
ERROR = 1.001  # of the reference's


device = device_fixture(kernels)


def groups(R: int, G: int, seed: int = 0) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(R, G, generator=chance) * torch.rand(R, 1, generator=chance) * 0.1


def importances(C: int, G: int) -> Tensor:
    """Return importances with a third of the last group padding."""
    h = torch.rand(C, G, generator=torch.Generator().manual_seed(1)) * 3 + 0.01
    h[-1, G - G // 3 :] = 0
    return h


def on(device: str, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.to(device) for t in tensors]


def alike(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    """Return the part of groups whose scales are bit by bit the same."""
    return float(
        torch.stack([(a == b).reshape(len(b), -1).all(1) for a, b in zip(found, wanted, strict=True)])
        .all(0)
        .float()
        .mean()
    )


def few_levels(bits: int, G: int) -> bool:
    """Whether there are far more weights than levels: otherwise ties and singular systems decide, and rounding them."""
    return 4 * 2**bits <= G


def check(
    found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], g: Tensor, h: Tensor | None, book: Tensor
) -> None:
    """Compare the errors of two solutions alpha [R, P], z [R]."""
    s = SortedGroups.of(g, None if h is None else choice.expanded(h, len(g)))
    now, before = (squared_error(s, alpha, z, book).sum() for alpha, z in (found, wanted))
    near = few_levels(len(book).bit_length() - 1, g.shape[1])
    assert now <= before * (ERROR if near else 1.1) + 1e-12 * len(g)


def binary(device: str, g: Tensor, h: Tensor | None, P: int, rounds: int, bias: bool) -> tuple[Tensor, Tensor]:
    w, importance = on(device, g, h)
    assert w is not None
    alpha, z = kernels.binary_scales(w, importance, P, rounds, bias)
    return alpha.cpu(), z.cpu()


@pytest.mark.parametrize("P", range(1, 9))
@pytest.mark.parametrize("G", [1, 8, 64, 128, 1000])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.sample(8)
def test_binary_scales_are_those_of_the_reference(device: str, P: int, G: int, weighted: bool) -> None:
    R, C = (2, 1) if device == "cpu" and (P > 4 or G > 500) else (39, 3)  # few where the emulator is slow
    g, h = groups(R, G), importances(C, G) if weighted else None
    bias = (P + G) % 2 == 0
    found = binary(device, g, h, P, 20, bias)
    every = None if h is None else choice.expanded(h, len(g))
    check(found, bcq._binary_scales(g, every, P, 20, bias), g, h, bcq.signs(P, g.device))
    if cpu.available() is None:
        wanted = solver.binary_scales(g, h, P, 20, bias)
        check(found, wanted, g, h, bcq.signs(P, g.device))
        if device == "cpu" or few_levels(P, G):
            assert alike(found, wanted) > (0.9 if P <= 4 else 0.3)  # with many levels many sets of planes do as well


@pytest.mark.parametrize("P", [1, 3, 6])
@pytest.mark.parametrize("bias", [False, True])
def test_greedy_planes_are_those_of_the_reference(device: str, P: int, bias: bool) -> None:
    g, h = groups(33, 50), importances(3, 50)
    alpha, z = binary(device, g, h, P, 0, bias)
    wanted, wanted_z = bcq._binary_scales(g, choice.expanded(h, len(g)), P, 0, bias)
    torch.testing.assert_close(alpha, wanted, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(z, wanted_z, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("P", range(1, 9))
@pytest.mark.parametrize(("R", "G"), [(1, 1), (50, 33), (7, 200)])
@pytest.mark.sample(3)
def test_codes_are_those_of_the_reference(device: str, P: int, R: int, G: int) -> None:
    g = groups(R, G)
    alpha, z = groups(R, P, seed=1), groups(R, 1, seed=2)[:, 0]  # in any order, and negative ones
    moved = [t for t in on(device, g, alpha, z) if t is not None]
    codes = kernels.binary_codes(*moved).cpu()
    levels, order = levels_of(alpha, z, bcq.signs(P, g.device))
    wanted = order.gather(1, bcq._ranks(g, levels))
    assert (codes == wanted).float().mean() > 0.99  # but for ties
    values = alpha @ bcq.signs(P, g.device).T + z[:, None]
    torch.testing.assert_close(values.gather(1, codes.long()), values.gather(1, wanted), rtol=1e-4, atol=1e-4)
    if cpu.available() is None:
        assert torch.equal(codes, solver.binary_codes(g, alpha, z))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("G", [1, 8, 64, 128, 1000])
@pytest.mark.parametrize("weighted", [False, True])
def test_uniform_grids_are_those_of_the_reference(device: str, bits: int, G: int, weighted: bool) -> None:
    R = 6 if device == "cpu" and (bits > 4 or G > 500) else 39
    g, h = groups(R, G), importances(3, G) if weighted else None
    symmetric = bits > 1 and (bits + G) % 2 == 0
    config = GPTQ(bits=bits, symmetric=symmetric)
    aside = max(config._aside())
    w, importance = on(device, g, h)
    assert w is not None
    scale, zero = kernels.uniform_grids(w, importance, bits, config._shrinks(), symmetric=symmetric, aside=aside)
    found, book = (scale.cpu(), zero.cpu()), torch.arange(2.0**bits)[:, None]
    wanted = config.grid(SortedGroups.of(g, None if h is None else choice.expanded(h, len(g))))
    assert alike(found, wanted) > 0.9
    check(*((a[:, None], -a * o) for a, o in (found, wanted)), g, h, book)
    if cpu.available() is None:
        by_cpu = solver.uniform_grids(g, h, bits, config._shrinks(), symmetric=symmetric, aside=aside)
        assert alike(found, by_cpu) > 0.9


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("G", [2, 8, 64, 128, 1000])
@pytest.mark.parametrize("weighted", [False, True])
def test_affine_grids_are_those_of_the_reference(device: str, bits: int, G: int, weighted: bool) -> None:
    R = 6 if device == "cpu" and (bits > 4 or G > 500) else 39
    g, h = groups(R, G), importances(3, G) if weighted else None
    config = GPTQ(bits=bits, free=True)
    w, importance = on(device, g, h)
    assert w is not None
    scale, low = (t.cpu() for t in kernels.affine_grids(w, importance, bits, config._shrinks(), 10))
    book = torch.arange(2.0**bits)[:, None]
    wanted = config._free(SortedGroups.of(g, None if h is None else choice.expanded(h, len(g))))
    check((scale[:, None], low), (wanted[0][:, None], wanted[1]), g, h, book)
    if cpu.available() is None:
        by_cpu = solver.affine_grids(g, h, bits, config._shrinks(), 10)
        if device == "cpu" or few_levels(bits, G):
            assert alike((scale, low), by_cpu) > 0.8


def test_groups_in_the_workspace_are_solved_alike(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in slabs that end within the rows of importances."""
    g, h = groups(45, 70), importances(9, 70)
    w, importance = (t for t in on(device, g, h) if t is not None)

    def solved() -> list[Tensor]:
        return [
            *kernels.binary_scales(w, importance, 3, 20, True),
            *kernels.binary_scales(w, None, 3, 20, False),
            *kernels.uniform_grids(w, importance, 4, SHRINKS, symmetric=False, aside=1),
            *kernels.affine_grids(w, importance, 2, SHRINKS, 10),
        ]

    wanted = solved()
    monkeypatch.setattr(kernels, "_SHARED_WARP", 1000)
    monkeypatch.setattr(kernels, "_WORKSPACE", 50_000)
    assert kernels._Layout.of(3, 70, True, 0).in_workspace
    for a, b in zip(solved(), wanted, strict=True):
        assert torch.equal(a, b)


def test_a_row_is_a_group(device: str) -> None:
    """Larger than shared memory."""
    g = groups(2, 9001)
    assert kernels._Layout.of(3, 9001, False, 0).in_workspace
    found = binary(device, g, None, 3, 5, True)
    check(found, bcq._binary_scales(g, None, 3, 5, True), g, None, bcq.signs(3, g.device))


def test_equal_weights_and_padding_alone_have_a_grid(device: str) -> None:
    g = torch.full((6, 16), 0.25)
    h = torch.ones(3, 16)
    h[1] = 0  # nothing but padding
    w, importance = (t for t in on(device, g, h) if t is not None)
    alpha, z = (t.cpu() for t in kernels.binary_scales(w, importance, 2, 20, True))
    torch.testing.assert_close(z, torch.tensor([0.25, 0.0, 0.25] * 2))
    assert alpha.abs().max() < 1e-6
    pairs = (
        kernels.uniform_grids(w, importance, 3, SHRINKS, symmetric=False, aside=1),
        kernels.affine_grids(w, importance, 3, SHRINKS, 10),
    )
    for scale, other in pairs:
        assert (scale > 0).all()
        assert scale.isfinite().all()
        assert other.isfinite().all()


def test_no_groups_are_no_work(device: str) -> None:
    w = torch.empty(0, 8, device=device)
    alpha, z = kernels.binary_scales(w, None, 3, 20, True)
    assert kernels.binary_codes(w, alpha, z).shape == (0, 8)


def test_reruns_are_bitwise_equal(device: str) -> None:
    g, h = groups(41, 128), importances(1, 128)
    runs = [binary(device, g, h, 3, 20, True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    w, importance = (t for t in on(device, g, h) if t is not None)
    grids = [kernels.affine_grids(w, importance, 3, SHRINKS, 10) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*grids, strict=True))


@pytest.fixture
def quantizers(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the quantizers take the kernels on either device."""
    if device == "cpu":
        monkeypatch.setattr(choice.cpu_solver, "usable", lambda _: False)
        monkeypatch.setattr(kernels, "usable", lambda _: True)
    return device


def test_bcq_takes_the_kernels(quantizers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = groups(20, 150)
    with monkeypatch.context() as here:
        here.setattr(bcq, "_greedy", None)  # the solver in torch
        here.setattr(bcq, "_ranks", None)
        found = BCQ(bits=3, group=64).fit(w.to(quantizers)).dequantize(torch.float32).cpu()
    monkeypatch.setattr(choice.cpu_solver, "usable", lambda _: False)
    monkeypatch.setattr(kernels, "usable", lambda _: False)
    wanted = BCQ(bits=3, group=64).fit(w).dequantize(torch.float32)
    errors = [(w - t).square().sum() for t in (found, wanted)]
    assert errors[0] <= errors[1] * ERROR
    assert (found == wanted).float().mean() > 0.9


@pytest.mark.parametrize("free", [False, True])
def test_gptq_takes_the_kernels(quantizers: str, free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config, w, cost = GPTQ(bits=3, free=free), groups(10, 150), torch.rand(150) + 0.1
    with monkeypatch.context() as here:
        here.setattr(gptq, "group_solver", lambda _: None)
        wanted = config.levels(w, cost, 64)
    with monkeypatch.context() as here:
        here.setattr(SortedGroups, "of", None)  # the search in torch
        found = config.levels(w.to(quantizers), cost.to(quantizers), 64)
    assert torch.isclose(found.scales.cpu(), wanted.scales, rtol=1e-3, atol=1e-6).float().mean() > 0.9


def test_fast_errors_take_the_kernels(quantizers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w, cost = groups(10, 150), torch.rand(150) + 0.1
    with monkeypatch.context() as here:
        here.setattr(fast_error, "_codes", None)  # the search in torch
        found = fast_error._grid(w.to(quantizers), cost.to(quantizers), 3, 64)
    monkeypatch.setattr(kernels, "usable", lambda _: False)
    wanted = fast_error._grid(w, cost, 3, 64)

    def error(scale: Tensor, low: Tensor) -> Tensor:
        return (((w - low) / scale).round().clamp(0, 7) * scale + low - w).square() @ cost

    assert error(*(t.cpu() for t in found)).sum() <= error(*wanted).sum() * 1.01


def test_what_is_not_finite_is_refused(quantizers: str) -> None:
    w = groups(4, 64)
    w[2, 5] = torch.inf
    with pytest.raises(FormatError, match="NaN or infinity"):
        BCQ().fit(w.to(quantizers))
    far = torch.tensor([[-4e5, 4e5]], device=quantizers)
    with pytest.raises(SchemeError, match="outside the range of f16"):
        GPTQ(bits=2).grids(far, torch.ones(1, 2, device=quantizers))
    with pytest.raises(SchemeError, match="outside the range of f16"):
        BCQ(bits=2, group=2).fit(far)


@pytest.mark.gpu
def test_a_matrix_of_many_thread_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda.available() is None
    w = torch.randn(1000, 4096, generator=torch.Generator().manual_seed(0)).cuda()
    for P in (2, 3, 4):
        config = BCQ(bits=P)
        found = config.fit(w).dequantize(torch.float32)
        with monkeypatch.context() as here:
            here.setattr(cuda, "available", lambda: "is not asked")
            wanted = config.fit(w).dequantize(torch.float32)
        assert (w - found).square().sum() <= (w - wanted).square().sum() * ERROR
        assert (found == wanted).float().mean() > 0.95
