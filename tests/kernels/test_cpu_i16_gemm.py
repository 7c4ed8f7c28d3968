"""Products by 16-bit integers against f64: in plain C++ everywhere, and by each instruction set that has them."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from crelle.kernels import cpu
from crelle.kernels.cpu import i16_gemm

if (reason := cpu.available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from crelle.kernels.cpu.i16_gemm import PackedI16Weight, StatsI16

pytestmark = pytest.mark.usefixtures("threads_as_before")

HERE = i16_gemm.usable(torch.device("cpu"))
SETS = ["emulated", *(["avx2", "avx-vnni", "avx512", "avx512-vnni"] if HERE else [])]
STEP = 1 / 2560  # of a chunk's largest magnitude
NEAR = 3e-6  # of the sums of absolute products: f32


@pytest.fixture(params=SETS)
def emulate(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Select an instruction set for the test; whether it is to be plain C++."""
    if request.param == "emulated":
        yield True
        return
    core = cpu.core()
    if request.param not in core.isas():
        pytest.skip(f"needs {request.param}")
    before = core.isa()
    core.set_isa(request.param)
    yield False
    core.set_isa(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chunks(count: int) -> list[slice]:
    """Which values share a scale: equal parts of at most 160 pairs."""
    pairs = (count + 1) // 2
    n = -(-pairs // 160)
    return [slice(2 * (pairs * i // n), 2 * (pairs * (i + 1) // n)) for i in range(n)]


def rounded(x: Tensor) -> Tensor:
    """Return rows [M, K] as the integers stand for them."""
    out = []
    for part in (x[:, c] for c in chunks(x.shape[1])):
        scale = part.abs().amax(1, keepdim=True).double() * STEP
        out.append(torch.where(scale > 0, (part / scale).round() * scale, 0.0))
    return torch.cat(out, 1)


def off_by_one(x: Tensor) -> Tensor:
    """Return the distance of two integers at each value of rows [M, K]."""
    steps = [part.abs().amax(1, keepdim=True).expand_as(part) * STEP for part in (x[:, c] for c in chunks(x.shape[1]))]
    return torch.cat(steps, 1).double()


@pytest.mark.parametrize(("M", "N", "K"), [(1, 1, 1), (3, 70, 2), (37, 33, 321), (300, 5, 642), (9, 100, 1537)])
def test_product_is_that_of_the_rounded_factors(emulate: bool, M: int, N: int, K: int) -> None:
    x, w, bias = normal(M, K) * torch.logspace(-3, 2, M)[:, None], normal(N, K, seed=1), normal(N, seed=2)
    found = PackedI16Weight(w, emulate=emulate).product(x, bias).double()
    a, b = rounded(x), rounded(w)
    # Few values lie so near the middle of two integers that f32 rounds them the other way.
    room = NEAR * (a.abs() @ b.abs().T + bias.abs() + 1) + 0.02 * off_by_one(x) @ b.abs().T
    assert ((found - (a @ b.T + bias)).abs() <= room).all()
    exact = x.double() @ w.double().T
    assert (found - bias - exact).norm() <= 1.5e-3 * exact.norm() + 1e-6


def test_an_outlier_costs_digits_in_its_chunk_only(emulate: bool) -> None:
    x, w = normal(4, 640), normal(8, 640, seed=1)
    x[:, 5] = 1e6
    w[:, 5] = 0
    error = (PackedI16Weight(w, emulate=emulate).product(x).double() - x.double() @ w.double().T).abs()
    second = x.clone()
    second[:, 5] = 0
    alone = PackedI16Weight(w, emulate=emulate).product(second).double()
    assert error.max() < 1.5 * w[:, :320].abs().sum(1).max() + 1  # the first 320 values are lost
    whole = x[:, 320:].double() @ w[:, 320:].double().T
    assert (PackedI16Weight(w, emulate=emulate).product(x).double() - whole).norm() < 1e-2 * alone.norm()


def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(emulate: bool) -> None:
    x, packed = normal(75, 400), PackedI16Weight(normal(50, 400, seed=1), emulate=emulate)
    cpu.core().set_threads(1)
    wanted = packed.product(x)
    assert all(torch.equal(packed.product(x[i : i + 1])[0], wanted[i]) for i in (0, 7, 74))
    cpu.core().set_threads(3)
    assert torch.equal(packed.product(x), wanted)


def test_what_is_not_finite_stays_in_its_row(emulate: bool) -> None:
    x, packed = normal(20, 400), PackedI16Weight(normal(40, 400, seed=1), emulate=emulate)
    wanted = packed.product(x)
    x[3, 7], x[11, 399] = torch.nan, torch.inf
    found = packed.product(x)
    assert found[[3, 11]].isnan().all()
    rest = [i for i in range(20) if i not in (3, 11)]
    assert torch.equal(found[rest], wanted[rest])
    assert torch.equal(packed.product(torch.zeros(2, 400)), torch.zeros(2, 40))


def sums(K: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(K, K), torch.zeros(K, K), torch.zeros(K)


@pytest.mark.parametrize(("T", "K"), [(1, 1), (2, 65), (321, 31), (1500, 70), (1024, 33)])
def test_stats_are_sums_over_the_rounded_tokens(emulate: bool, T: int, K: int) -> None:
    x = normal(T, K) * torch.logspace(-2, 2, K)
    full, weight = x * (1 + 0.1 * normal(T, K, seed=1)), torch.rand(T, generator=torch.Generator().manual_seed(2)) + 0.3
    hessian, cross, abssum = sums(K)
    StatsI16(emulate=emulate).add(x, full, weight, hessian, cross, abssum)
    a = (weight[:, None] * x).double()
    d = (weight[:, None] * (full - x)).double()
    scale = a.square().sum(0).sqrt()
    assert ((hessian - a.T @ a).triu().abs() <= 2e-3 * scale[:, None] * scale).all()
    assert ((cross - d.T @ a).abs() <= 2e-3 * d.square().sum(0).sqrt()[:, None] * scale).all()
    torch.testing.assert_close(abssum.double(), a.abs().sum(0), rtol=1e-5, atol=1e-6)


def test_equal_inputs_have_no_cross_sums_and_all_is_added(emulate: bool) -> None:
    x = normal(700, 40)
    hessian, cross, abssum = sums(40)
    stats = StatsI16(emulate=emulate)
    stats.add(x, x.clone(), None, hessian, cross, abssum)
    assert torch.equal(cross, torch.zeros(40, 40))
    once = hessian.clone()
    stats.add(x, None, None, hessian, None, abssum)
    torch.testing.assert_close(hessian, 2 * once, rtol=1e-6, atol=1e-3)


def test_stats_have_the_same_bits_on_any_number_of_threads(emulate: bool) -> None:
    x, full = normal(900, 150), normal(900, 150, seed=1)
    found = []
    for threads in (1, 3):
        cpu.core().set_threads(threads)
        found.append(sums(150))
        StatsI16(emulate=emulate).add(x, full, None, *found[-1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_channel_that_is_not_finite_spoils_its_own_sums_only(emulate: bool) -> None:
    x = normal(50, 40)
    wanted, spoilt = sums(40), sums(40)
    StatsI16(emulate=emulate).add(x, 1.1 * x, None, *wanted)
    x[7, 3] = torch.nan
    StatsI16(emulate=emulate).add(x, 1.1 * x, None, *spoilt)
    rest = [i for i in range(40) if i != 3]
    assert torch.equal(spoilt[0].triu()[rest][:, rest], wanted[0].triu()[rest][:, rest])
    assert spoilt[0][:4, 3].isnan().all()
    assert spoilt[1][3].isnan().all()


def test_wrong_shapes_are_refused(emulate: bool) -> None:
    packed = PackedI16Weight(normal(4, 6), emulate=emulate)
    with pytest.raises(ValueError, match=r"x must be \[..., 6\]"):
        packed.product(normal(3, 5))
    with pytest.raises(ValueError, match=r"the bias must be \[4\]"):
        packed.product(normal(3, 6), normal(3))
    with pytest.raises(ValueError, match=r"a weight must be \[N, K\]"):
        PackedI16Weight(normal(4), emulate=emulate)
    with pytest.raises(ValueError, match=r"\[K, K\]"):
        StatsI16(emulate=emulate).add(normal(3, 5), None, None, torch.zeros(4, 4), None, torch.zeros(5))


def test_other_instruction_sets_say_that_they_have_none() -> None:
    core, before = cpu.core(), cpu.core().isa()
    core.set_isa("generic")
    try:
        assert not i16_gemm.usable(torch.device("cpu"))
        with pytest.raises(ValueError, match="no products of 16-bit integers"):
            PackedI16Weight(normal(4, 6))
    finally:
        core.set_isa(before)
