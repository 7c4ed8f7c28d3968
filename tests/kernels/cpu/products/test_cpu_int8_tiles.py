"""Products of int8 tiles (AMX) against f64 of the very integers that x is rounded to: nothing else may be lost."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from crelle.formats.bcq import UniformTensor
from crelle.kernels.cpu import available
from crelle.kernels.cpu.kernel import Cpu

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from cpu_models import error
from test_cpu_matmul import inputs, product, weight

from crelle.kernels.cpu import _core

pytestmark = [
    pytest.mark.usefixtures("threads_as_before"),
    pytest.mark.skipif("amx" not in _core.isas(), reason="this machine has no AMX"),
]

SEGMENT = 128  # inputs of a group that share one scale of x
NEAR_F32 = 5e-7  # relative error (Frobenius); rounding x to int8 costs 7e-3

# N, K, G: whole tiles; a last group shorter than a tile, a chunk, a segment; groups of 64, 192, 384; whole rows.
SHAPES = [
    (64, 256, 128),
    (67, 333, 64),
    (33, 264, 128),
    (40, 1000, 384),
    (31, 576, 192),
    (65, 515, 515),
    (5, 40, 40),
    (17, 9, 9),
]


@pytest.fixture
def tiles() -> Iterator[None]:
    before = _core.isa()
    _core.set_isa("amx-int8")
    yield
    _core.set_isa(before)


def rounded(x: Tensor, G: int) -> Tensor:
    """Round x to 127 steps per row and segment of a group, in f32 as the kernel does."""
    y = torch.empty_like(x, dtype=torch.float64)
    for group in range(0, x.shape[1], G):
        end = min(group + G, x.shape[1])
        for k in range(group, end, SEGMENT):
            part = x[:, k : min(k + SEGMENT, end)]
            unit = part.abs().amax(1, keepdim=True) / 127
            steps = (part * torch.where(unit > 0, 1 / unit, 0)).round()
            y[:, k : k + part.shape[1]] = steps.double() * unit.double()
    return y


def int8_error(x: Tensor, N: int, P: int, G: int, *, bias: bool, dtype: torch.dtype = torch.float16) -> float:
    w = weight("uniform", N, x.shape[1], P, G, bias=bias, dtype=dtype)
    y = product(x, Cpu("int8").prepare(w, torch.float32))
    return error(y, rounded(x, G) @ w.dequantize(torch.float64).T)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("P", range(1, 9))
def test_only_rounding_x_loses_anything(P: int, bias: bool) -> None:
    for i, (N, K, G) in enumerate(SHAPES):
        for M in (24, 33, 65):
            dtype = torch.float32 if i % 2 else torch.float16
            assert int8_error(inputs(M, K), N, P, G, bias=bias, dtype=dtype) < NEAR_F32, (M, N, K, G)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("M", [*range(24, 34), 47, 48, 49, 64, 127, 257, 512, 600])
def test_any_number_of_rows(M: int) -> None:
    assert int8_error(inputs(M, 200), 70, 4, 64, bias=True) < NEAR_F32


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("M", [17, 23])
def test_few_rows_round_x_alike(M: int) -> None:
    """Below 24 rows the stream's own kernel multiplies the same integers."""
    assert int8_error(inputs(M, 200), 70, 4, 64, bias=True) < NEAR_F32


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("P", range(1, 9))
@pytest.mark.parametrize("zero", ["lowest", "highest"])
def test_largest_sums_do_not_overflow(P: int, zero: str) -> None:
    """All inputs at the end of their range, all codes as far from their zero points as they get."""
    top = 2**P - 1
    codes = torch.full((48, 384), top if zero == "lowest" else 0, dtype=torch.uint8)
    zeros = torch.full((48, 3), 0 if zero == "lowest" else top, dtype=torch.uint8)
    w = UniformTensor.from_codes(codes, P, torch.rand(48, 3) + 0.5, zeros, 128)
    for x in (torch.ones(32, 384), -torch.ones(32, 384)):
        y = product(x, Cpu("int8").prepare(w, torch.float32))
        assert error(y, x.double() @ w.dequantize(torch.float64).T) < NEAR_F32


@pytest.mark.usefixtures("tiles")
def test_zeros_and_extremes() -> None:
    for value in (0.0, 1e-30, 1e30):
        x = inputs(40, 160).sign() * value
        x[3] = 0
        w = weight("uniform", 40, 160, 4, 64, bias=True)
        y, wanted = product(x, Cpu("int8").prepare(w, torch.float32)), rounded(x, 64) @ w.dequantize(torch.float64).T
        assert torch.isfinite(y).all()
        assert (y[3] == 0).all()
        assert (y.double() - wanted).norm() <= NEAR_F32 * wanted.norm()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("P", [2, 4, 8])
@pytest.mark.parametrize("G", [64, 128, 500])
def test_bitwise_equal_on_rerun_and_for_any_thread_count(P: int, G: int) -> None:
    w = Cpu("int8").prepare(weight("uniform", 301, 500, P, G, bias=True), torch.float32)
    x = inputs(77, 500)
    first = product(x, w)
    for threads in (1, 2, 3, 8, 1):
        _core.set_threads(threads)
        assert torch.equal(product(x, w), first), threads


def tiles_of(isa: str, kind: str, G: int, precision: str = "int8") -> str:
    _core.set_isa(isa)
    return str(Cpu().prepare(weight(kind, 16, 512, 4, G, bias=True), torch.float32).data.tiles(precision))


@pytest.mark.usefixtures("tiles")
def test_a_weight_says_which_tiles_it_takes() -> None:
    assert [tiles_of("amx-int8", "uniform", G) for G in (32, 64, 96, 128, 512)] == [
        "bf16",
        "int8",
        "bf16",
        "int8",
        "int8",
    ]
    assert tiles_of("amx-int8", "bcq", 128) == "bf16"
    assert tiles_of("amx-int8", "uniform", 128, "exact") == "bf16"
    assert tiles_of("amx-bf16", "uniform", 128) == "bf16"
    assert tiles_of("generic", "uniform", 128) == "none"
