"""Trellis codes in C++, bare and with rotated inputs and outputs: any shape, code and instruction set, against f64."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampled_cases import share_of
from torch import Tensor

from crelle.formats.trellis import BITS, CODES, TrellisTensor
from crelle.formats.wrappers.hadamard import known_orders, paley_order
from crelle.formats.wrappers.rotated import RotatedTensor, Rotation
from crelle.kernels import cpu, ops
from crelle.kernels.base import Problem
from crelle.kernels.cpu import available
from crelle.kernels.reference import matmul_fp64
from crelle.kernels.registry import select

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("threads_as_before")

CASES = [(bits, code) for bits in BITS for code, c in CODES.items() if (c.weights * bits) % 1 == 0]
TOLERANCE = {"exact": 5e-5, "int8": 1.2e-2}  # of outputs of Gaussian inputs, relative to their root mean square
PRECISIONS = tuple(TOLERANCE)


def weight(
    N: int, K: int, bits: float, code: str, block: int | None = None, seed: int = 0, out_block: int | None = None
) -> Any:
    """A matrix with random codes and scales; block, out_block: its inputs, its outputs are rotated."""
    rng = torch.Generator().manual_seed(seed)
    w: Any = TrellisTensor.random({"format": "trellis", "shape": [N, K], "bits": bits, "code": code}, rng)
    w = w.with_scales({"scale": (w.scale.float() * (0.5 + torch.rand(N, generator=rng))).half()})
    if block is None:
        return w
    inputs = Rotation.random(K, rng, block)
    return RotatedTensor(w, inputs, None if out_block is None else Rotation.random(N, rng, out_block))


def inputs(M: int, K: int, seed: int = 1) -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(seed))


def product(x: Tensor, w: Any, precision: str = "exact") -> Tensor:
    """Multiply into an output full of NaN: what is not written shows."""
    prepared = ops.prepare(w, torch.float32, "cpu").data.data
    y = torch.full((len(x), w.shape[0]), math.nan)
    cpu.core().matmul(x.contiguous().numpy(), prepared, y.numpy(), precision)
    return y


def error(y: Tensor, x: Tensor, w: Any) -> float:
    """The root mean square of the error, relative to that of the sums' terms: sums may cancel."""
    size = (x.double().square() @ w.dequantize(torch.float64).square().T).sqrt()
    return float((y - matmul_fp64(x, w)).square().mean().sqrt() / size.square().mean().sqrt().clamp_min(1e-300))


@pytest.mark.sample(6)
@pytest.mark.parametrize(("bits", "code"), CASES, ids=str)
def test_products_match_f64(isa: str, bits: float, code: str) -> None:
    for N, K, block in ((64, 512, None), (33, 300, 4), (1, 129, None), (7, 1, 1), (96, 704, 64), (40, 1030, 2)):
        w = weight(N, K, bits, code, block)
        for precision in PRECISIONS:
            for M in (0, 1, 2, 5, 19):
                x = inputs(M, K)
                y = product(x, w, precision)
                if not M:
                    continue
                assert error(y, x, w) < TOLERANCE[precision]
                for m in {0, M - 1, M // 2}:
                    assert torch.equal(product(x[m : m + 1], w, precision), y[m : m + 1])  # the same bits in any batch


@pytest.mark.parametrize(
    ("N", "K", "block", "out_block"),
    [(64, 576, 576, 64), (33, 300, 12, 11), (40, 1120, 140, 40), (72, 96, 24, 36), (96, 64, 64, 96), (44, 40, 20, 1)],
)
def test_any_order_and_rotated_outputs_match_f64(isa: str, N: int, K: int, block: int, out_block: int) -> None:
    if N % out_block or paley_order(out_block) is None:
        out_block = 1
    w = weight(N, K, 2.0, "pair", block, out_block=out_block)
    for precision in PRECISIONS:
        for M in (0, 1, 3, 19):
            x = inputs(M, K)
            y = product(x, w, precision)
            if not M:
                continue
            assert error(y, x, w) < TOLERANCE[precision]
            for m in {0, M - 1}:
                assert torch.equal(product(x[m : m + 1], w, precision), y[m : m + 1])


def test_rotated_inputs_have_the_bits_of_the_reference(isa: str) -> None:
    """Inputs that torch rotates first, times the matrix without its rotation."""
    for K, block in ((576, 576), (576, 64), (600, 24), (1536, 1536), (1120, 280)):
        w, x = weight(40, K, 3.0, "pair", block), inputs(5, K)
        assert torch.equal(product(x, w), product(w.rotation(x), w.inner))


@settings(max_examples=share_of(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_shape(isa: str, data: st.DataObject) -> None:
    draw = data.draw
    N, K, M = draw(st.integers(1, 70)), draw(st.integers(1, 1200)), draw(st.integers(1, 18))
    bits, code = draw(st.sampled_from(CASES))
    block = draw(st.sampled_from([None, *known_orders(K)]))
    out_block = None if block is None else draw(st.sampled_from([None, *known_orders(N)]))
    w, x = weight(N, K, bits, code, block, K, out_block), inputs(M, K, seed=N)
    scaled = x * draw(st.sampled_from([1.0, 1e-30, 1e30]))
    for precision in PRECISIONS:
        assert error(product(x, w, precision), x, w) < 2 * TOLERANCE[precision]
        assert error(product(scaled, w, precision), scaled, w) < 2 * TOLERANCE[precision]


def test_values_are_those_of_the_format(isa: str) -> None:
    for bits, code in CASES:
        for block in (None, 4):
            w = weight(35, 300, bits, code, block)
            out = torch.full((35, 300), math.nan)
            ops.prepare(w, torch.float32, "cpu").data.data.dequantize(out.numpy())
            torch.testing.assert_close(out, w.dequantize(), rtol=0, atol=0 if block is None else 1e-6)


def test_sums_of_extreme_values_are_exact(isa: str) -> None:
    """All x of one sign and size: sums of bytes are as large as they get, and are what the zero is taken from."""
    for code in CODES:
        w = weight(33, 5000, 2.0, code)
        x = torch.full((3, 5000), 32639.0)
        x[1] = -32639
        wanted = matmul_fp64(x, w)
        torch.testing.assert_close(product(x, w).double(), wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


def test_an_outlier_spoils_few_inputs(isa: str) -> None:
    x = inputs(1, 4096)
    x[0, 77] = 1000
    w = weight(64, 4096, 2.0, "pair")
    x[0, 77] = 0
    rest = matmul_fp64(x, w)
    x[0, 77] = 1000
    found = product(x, w).double() - 1000 * w.dequantize(torch.float64)[:, 77]
    assert float((found - rest).norm() / rest.norm()) < 2e-3  # 1e-2 if it shared a scale with the whole row


@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_values_spoil_their_row_and_no_other(isa: str, bad: float, block: int | None) -> None:
    w, x = weight(35, 300, 3.0, "pair", block), inputs(20, 300)
    clean = product(x, w)
    rest = [m for m in range(20) if m != 2]
    for k in (0, 150, 299):
        hurt = x.clone()
        hurt[2, k] = bad
        y = product(hurt, w)
        assert bool(y[2].isnan().all())
        assert torch.equal(y[rest], clean[rest])


@pytest.mark.parametrize("block", [None, 4])
def test_rows_of_very_large_and_small_values(isa: str, block: int | None) -> None:
    w, x = weight(35, 300, 2.0, "pair", block), inputs(4, 300)
    x[1] *= 1e36
    x[2] *= 1e-36
    x[3] = 0
    y = product(x, w)
    for m in (0, 1, 2):
        assert error(y[m : m + 1], x[m : m + 1], w) < TOLERANCE["exact"]
    assert not y[3].any()


@pytest.mark.parametrize("block", [None, 64])
def test_many_rows(isa: str, block: int | None) -> None:
    """Where there are tiles: as exact as few rows, and a row has the same bits in any batch that they take."""
    for bits, code in ((1.0, "pair"), (2.0, "pair"), (3.5, "pair"), (3.0, "mul1")):
        for N, K in ((70, 1344), (32, 64)):
            w, x = weight(N, K, bits, code, block), inputs(50, K)
            for precision in PRECISIONS:
                y = product(x, w, precision)
                assert error(y, x, w) < TOLERANCE[precision]
                assert torch.equal(product(x[10:45], w, precision), y[10:45])
    x[3, 5], x[4, 6] = math.nan, math.inf
    x[5] *= 1e36
    x[6] *= 1e-36
    hurt = product(x, w)
    rest = [m for m in range(50) if m not in (3, 4, 5, 6)]
    assert bool(hurt[3:5].isnan().all())
    assert torch.equal(hurt[rest], product(inputs(50, K), w)[rest])
    assert max(error(hurt[m : m + 1], x[m : m + 1], w) for m in (5, 6)) < TOLERANCE["exact"]


def test_instruction_sets_agree() -> None:
    core = cpu.core()
    before, found = core.isa(), {}
    for name in core.isas():
        core.set_isa(name)
        found[name] = [product(inputs(5, 300), weight(70, 300, *case, block=4)) for case in CASES]
    core.set_isa(before)
    first = next(iter(found.values()))
    for each in found.values():
        for y, wanted in zip(each, first, strict=True):
            torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)  # x may round the other way


def test_threads_change_no_bit() -> None:
    w, found = weight(300, 512, 2.0, "pair", 512), []
    for x in (inputs(1, 512), inputs(33, 512)):
        for n in (1, 2, 3):
            cpu.core().set_threads(n)
            found.append(product(x, w))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[3], found[4])
    assert torch.equal(found[3], found[5])


def test_is_chosen_bare_and_rotated() -> None:
    for block in (None, 8):
        problem = Problem.of(weight(32, 64, 2.0, "pair", block), torch.float32)
        assert select(problem).name == "cpu"
        assert problem.rotated is (block is not None)


def test_inputs_are_shared_with_equal_rotations_only() -> None:
    def prepared(w: Any) -> Any:
        return ops.prepare(w, torch.float32, "cpu").data.data

    w = weight(32, 64, 2.0, "pair", 64)
    same = RotatedTensor(weight(64, 64, 3.0, "mul1"), w.rotation)
    other = weight(32, 64, 2.0, "pair", 64, seed=5)
    core = cpu.core()
    assert core.same_rotation(prepared(w), prepared(same))
    assert not core.same_rotation(prepared(w), prepared(other))
    assert not core.same_rotation(prepared(w), prepared(w.inner))
