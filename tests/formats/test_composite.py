"""Matrices whose inputs were sorted: W[:, order] is what is inside."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crelle.errors import FormatError
from crelle.formats.base import QuantTensor, nbytes
from crelle.formats.dense import DenseTensor
from crelle.formats.wrappers.composite import PermutedTensor
from crelle.kernels import ops
from crelle.kernels.base import Problem
from crelle.kernels.reference import matmul_fp64
from crelle.kernels.registry import explain, select
from crelle.quantizers.scheme import parse

quick = settings(deadline=None, max_examples=40)
SCHEMES = ("rtn:bits=4,group=8", "rtn:bits=3,group=row,symmetric=true", "bcq:bits=2,group=8")


def permuted(scheme: str = SCHEMES[0], N: int = 5, K: int = 21, seed: int = 0) -> PermutedTensor:
    random = torch.Generator().manual_seed(seed)
    inner = parse(scheme).fit(torch.randn(N, K, generator=random))
    return PermutedTensor(inner, torch.randperm(K, generator=random).to(torch.int32))


@quick
@given(st.sampled_from(SCHEMES), st.integers(1, 6), st.integers(1, 40), st.integers(0, 2**31))
def test_columns_stand_where_order_says(scheme: str, N: int, K: int, seed: int) -> None:
    w = permuted(scheme, N, K, seed)
    numbers, inside = w.dequantize(), w.inner.dequantize()
    assert torch.equal(numbers[:, w.order.long()], inside)
    assert all(torch.equal(numbers[:, int(k)], inside[:, j]) for j, k in enumerate(w.order))
    for which in (slice(0, 1), torch.tensor([N - 1, 0])):
        assert torch.equal(w.rows(which).dequantize(), numbers[which])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_round_trip_and_cost_the_order_too(scheme: str) -> None:
    w = permuted(scheme)
    assert isinstance(w, QuantTensor)
    assert sorted(w.parts(w.spec())) == sorted(w.tensors())
    again = PermutedTensor.from_parts(w.spec(), w.tensors())
    assert again.spec() == w.spec() == w.to("cpu").spec()
    assert torch.equal(again.dequantize(), w.dequantize())
    assert (w.bits, w.group, w.device) == (w.inner.bits, w.inner.group, torch.device("cpu"))
    assert nbytes(w) == nbytes(w.inner) + 4 * 21


@pytest.mark.parametrize("inner", [None, "uniform", {}, {"format": "dense", "shape": [5, 21]}, {"format": ["uniform"]}])
def test_what_is_inside_must_be_known(inner: object) -> None:
    w = permuted()
    for refuse in (PermutedTensor.parts, lambda spec: PermutedTensor.from_parts(spec, w.tensors())):
        with pytest.raises(FormatError, match="'inner' should be one of uniform, affine, bcq"):
            refuse({**w.spec(), "inner": inner})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"order": torch.arange(21)}, "'order' should be int32"),
        ({"order": torch.arange(20, dtype=torch.int32)}, "'order' should be int32"),
        ({"order": torch.zeros(21, dtype=torch.int32)}, "must name each of the 21 inputs once"),
        ({"order": torch.arange(1, 22, dtype=torch.int32)}, "must name each of the 21 inputs once"),
        ({"planes": torch.zeros(1)}, "'planes' should be"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, Any], sentence: str) -> None:
    w = permuted()
    with pytest.raises(FormatError, match=sentence):
        PermutedTensor.from_parts(w.spec(), {**w.tensors(), **change})
    with pytest.raises(FormatError, match=f"'{next(iter(change))}' is missing"):
        PermutedTensor.from_parts(w.spec(), {k: v for k, v in w.tensors().items() if k not in change})


def test_a_shape_that_differs_from_what_is_inside_is_refused() -> None:
    w = permuted()
    with pytest.raises(FormatError, match=r"the matrix is 5 x 20, but the inner matrix is \[5, 21\]"):
        PermutedTensor.from_parts({**w.spec(), "shape": [5, 20]}, w.tensors())
    with pytest.raises(FormatError, match="does not know the key 'sparsity'"):
        PermutedTensor.from_parts({**w.spec(), "sparsity": 2}, w.tensors())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("M", [1, 4])
@pytest.mark.parametrize(("N", "K"), [(37, 75), (1, 1), (64, 128)])
def test_every_kernel_of_what_is_inside_multiplies(scheme: str, M: int, N: int, K: int) -> None:
    w = permuted(scheme, N, K)
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(1))
    wanted = matmul_fp64(x, w)
    problem = Problem.of(w, torch.float32)
    assert explain(problem) == explain(Problem.of(w.inner, torch.float32))
    for name in [name for name, reason in explain(problem) if reason is None]:
        prepared = ops.prepare(w, torch.float32, name)
        assert prepared.kernel.name == name
        assert prepared.kernel.supports(problem) is None
        y = ops.matmul(x, prepared)
        tolerance = 3e-2 if "int8" in name else 1e-4
        assert float((y.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max()) + 1e-12, name
        assert torch.equal(y, ops.matmul(x, prepared))
    assert select(problem).name == select(Problem.of(w.inner, torch.float32)).name


def test_problems_with_and_without_an_order_differ() -> None:
    w = permuted()
    assert "inputs permuted" in str(Problem.of(w, torch.float32))
    assert "permuted" not in str(Problem.of(w.inner, torch.float32))
    assert Problem.of(DenseTensor(torch.zeros(2, 2)), torch.float32).permuted is False
