"""Integer products: exact integers against int64, any shape, and NaN, infinities, zeros and huge outliers in x."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.activations import ActivationSpec
from crelle.formats.base import QuantTensor, format_of
from crelle.kernels import cpu, ops
from crelle.kernels.base import Problem
from crelle.kernels.reference import matmul_fp64
from crelle.kernels.registry import explain

NAME = "integer-reference"

# format, weight bits, activation bits, group, outliers, bits of outliers; group 0: activations have one scale
CASES = [
    ("grouped", 4, 4, 128, 128, 8),
    ("grouped", 4, 8, 128, 0, 8),
    ("grouped", 3, 3, 32, 17, 8),
    ("grouped", 8, 8, 128, 64, 8),
    ("grouped", 4, 4, 64, 20, 16),
    ("grouped", 4, 4, 4096, 40, 8),
    ("grouped", 8, 8, 8192, 0, 8),
    ("two-level", 4, 8, 0, 64, 8),
    ("two-level", 4, 4, 32, 30, 8),
]


def weight(case: tuple[str, int, int, int, int, int], N: int, K: int, seed: int = 0, permuted: bool = True) -> Any:
    form, w, a, group, n, wide = case
    one_scale = group == 0
    act = ActivationSpec(a, K, 0) if one_scale else ActivationSpec(a, group, n, wide, 0.9)
    spec = {"format": form, "shape": [N, K], "bits": w, "group": 128 if one_scale else group, "outliers": n}
    spec |= {"permuted": permuted, "activation": act.to_json()} | ({"outlier_bits": wide} if form == "grouped" else {})
    return format_of(spec).random(spec, torch.Generator().manual_seed(seed))


def inputs(M: int, K: int, seed: int = 7) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(M, K, generator=random) * torch.exp(torch.randn(K, generator=random))


def shares_inputs_in_the_same_order_and_format_only(kernel: str, case: tuple[str, int, int, int, int, int]) -> None:
    """Check that matrices of a case take each other's encoded input if it is in their order and format."""
    a, b = weight(case, 8, 256, 0), weight(case, 12, 256, 1)
    b = type(b).from_parts(b.spec(), {**b.tensors(), "perm": a.perm.clone()})
    x = inputs(3, 256)
    first, second = (ops.prepare(w, torch.float32, kernel) for w in (a, b))
    assert ops.shares(first, second)
    assert torch.equal(ops.matmul(ops.encode(x, first), second), ops.matmul(x, second))
    clip = type(b).from_parts(b.spec() | {"activation": ActivationSpec(4, 128, 128, clip=0.8).to_json()}, b.tensors())
    for other in (weight(case, 8, 256, 1), clip):
        with pytest.raises(UnsupportedError, match="encode it again"):
            ops.matmul(ops.encode(x, first), ops.prepare(other, torch.float32, kernel))


def by_integers(x: Tensor, w: Any) -> Tensor:
    """The formula in int64 and f64, weight group by weight group."""
    q = w.activation.quantize(x if w.perm is None else x[:, w.perm.long()])
    integers = w.integers().long()
    scale = w.scale.double().reshape(w.sizes.N, -1)
    y = torch.zeros(len(x), w.sizes.N, dtype=torch.float64)
    column_scale = torch.zeros(w.sizes.N, integers.shape[1], dtype=torch.float64)
    for i, k in enumerate(w.scale_slices()):
        column_scale[:, k] = scale[:, i, None]
    for i, k in enumerate(w.activation.slices(w.sizes.K)[: q.scales.shape[1]]):
        y += q.scales[:, i, None].double() * (q.codes[:, k].double() @ (integers * column_scale)[:, k].T)
    return y if q.floats is None else y + q.floats.double() @ w.outliers.double().T


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(5, 48, 384), (1, 7, 300), (0, 5, 200), (3, 1, 129)])
def test_products_are_those_of_the_formula(case: tuple[str, int, int, int, int, int], M: int, N: int, K: int) -> None:
    for permuted in (True, False):
        w, x = weight(case, N, K, permuted=permuted), inputs(M, K)
        problem = Problem.of(w, torch.float32)
        assert (problem.outliers, problem.code_bits) == (min(case[4], K), case[1])
        able = [n for n, why in explain(problem) if why is None]
        assert able == ([] if case[5] == 16 or cpu.available() else ["cpu-integer"]) + [NAME]
        prepared = ops.prepare(w, torch.float32, NAME)
        y = ops.matmul(x, prepared)
        wanted = by_integers(x, w)
        torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()) if M else 0)
        assert torch.equal(y, ops.matmul(x, prepared))
        assert torch.equal(y, ops.matmul(ops.encode(x, prepared), prepared))
        # What calibration computes: rounded inputs times the dequantized weight.
        torch.testing.assert_close(y.double(), matmul_fp64(w.round_input(x), w), rtol=1e-4, atol=1e-5)
        if M > 1 and case[5] == 8:
            assert torch.equal(ops.matmul(x[1:2], prepared), y[1:2])  # exact integers: any batch gives the same


def test_sums_of_extreme_codes_are_exact() -> None:
    w = weight(("grouped", 8, 8, 1 << 13, 0, 8), 3, 5000, permuted=False)
    codes = torch.full((3, 5000), 127, dtype=torch.int8)
    w = type(w).from_codes(codes, 8, torch.ones(3, 1).half(), 1 << 13, activation=w.activation)
    x = torch.full((2, 5000), 127.0)
    x[1, 1:] = -127 * 2 ** torch.arange(4999).remainder(2).float().neg()
    act = ActivationSpec(8, 1 << 13)
    w = type(w).from_codes(codes, 8, torch.ones(3, 1).half(), 1 << 13, activation=act)
    q = act.quantize(x)
    wanted = (q.codes.long() @ codes.long().T).double() * q.scales.double()
    torch.testing.assert_close(ops.matmul(x, ops.prepare(w, torch.float32, NAME)).double(), wanted, rtol=1e-7, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_not_finite_values_spoil_their_row_and_no_other(case: tuple[str, int, int, int, int, int], bad: float) -> None:
    w, x = weight(case, 9, 300), inputs(4, 300)
    prepared = ops.prepare(w, torch.float32, NAME)
    clean = ops.matmul(x, prepared)
    for k in (0, 299):
        hurt = x.clone()
        hurt[2, k] = bad
        y = ops.matmul(hurt, prepared)
        assert not y[2].isfinite().any()
        assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_adversarial_inputs(case: tuple[str, int, int, int, int, int]) -> None:
    w = weight(case, 11, 300)
    prepared = ops.prepare(w, torch.float32, NAME)
    x = torch.zeros(4, 300)
    x[1, 17] = 6e37  # one huge value
    x[2] = 1e-41  # denormals
    x[3] = -1e-3
    y = ops.matmul(x, prepared)
    assert bool(y.isfinite().all())
    assert float(y[[0, 2]].abs().max()) < 1e-38
    torch.testing.assert_close(y.double(), by_integers(x, w), rtol=1e-4, atol=1e-30)


def test_inputs_are_shared_in_the_same_order_and_format_only() -> None:
    shares_inputs_in_the_same_order_and_format_only(NAME, CASES[0])


def test_float_activations_run_through_the_other_kernels() -> None:
    for form in ("grouped", "two-level"):
        spec = {"format": form, "shape": [9, 70], "bits": 4, "group": 16, "outliers": 6, "permuted": True}
        spec |= {"activation": None} | ({"outlier_bits": 8} if form == "grouped" else {})
        w: QuantTensor = format_of(spec).random(spec, torch.Generator().manual_seed(0))
        able = [name for name, why in explain(Problem.of(w, torch.float32)) if why is None]
        assert able == ["dequantized", "reference"]
        x = inputs(3, 70)
        for name in able:
            y = ops.matmul(x, ops.prepare(w, torch.float32, name))
            torch.testing.assert_close(y.double(), matmul_fp64(x, w), rtol=1e-4, atol=1e-5)
