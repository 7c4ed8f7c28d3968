"""The torch kernels against f64 of the dequantized weight, on fresh inputs and odd shapes."""

import pytest
import torch

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.kernels import ops, reference
from crelle.kernels.reference import matmul_fp64
from crelle.quantizers.scheme import parse

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # relative to the largest output
SCHEMES = (
    "rtn:bits=4,group=32",
    "rtn:bits=3,group=row,symmetric=true",
    "bcq:bits=2,group=24",
    "bcq:bits=1,group=7",
    "fp16",
)


SHAPES = [(37, 75), (1, 1), (3, 7), (64, 256), (5, 129)]


def weight(scheme: str, N: int = 37, K: int = 75) -> QuantTensor:
    return parse(scheme).fit(torch.randn(N, K, generator=torch.Generator().manual_seed(N * K)))


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def kernels_for(w: QuantTensor) -> list[str]:
    return ["dense", "reference"] if w.format == "dense" else ["dequantized", "reference"]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("N", "K"), SHAPES)
@pytest.mark.parametrize("M", [1, 5])
def test_matmul_matches_oracle(scheme: str, dtype: torch.dtype, M: int, N: int, K: int) -> None:
    w = weight(scheme, N, K)
    x = inputs(M, K).to(dtype)
    wanted = matmul_fp64(x, w)
    assert wanted.dtype == torch.float64
    assert torch.allclose(wanted, x.double() @ w.dequantize().double().T, rtol=1e-5, atol=1e-6)
    for kernel in kernels_for(w):
        y = ops.matmul(x, ops.prepare(w, dtype, kernel))
        assert y.dtype == dtype
        assert (y.double() - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max(), kernel


def test_slabs_of_rows_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight("bcq:bits=3,group=32")
    x = inputs(2, w.shape[1])
    whole = ops.matmul(x, ops.prepare(w, torch.float32, "reference"))
    monkeypatch.setattr(reference, "_SLAB", 4 * w.shape[1])
    slabs = ops.matmul(x, ops.prepare(w, torch.float32, "reference"))
    torch.testing.assert_close(slabs, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", ["dequantized", "reference"])
def test_batched_equals_single_rows(kernel: str) -> None:
    w = weight("rtn:bits=3,group=16")
    prepared = ops.prepare(w, torch.float32, kernel)
    x = inputs(4, w.shape[1])
    single = torch.cat([ops.matmul(row, prepared) for row in x.split(1)])
    torch.testing.assert_close(ops.matmul(x, prepared), single, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rerun_is_bitwise_equal(scheme: str) -> None:
    w = weight(scheme)
    x = inputs(3, w.shape[1])
    for kernel in kernels_for(w):
        prepared = ops.prepare(w, torch.float32, kernel)
        first = ops.matmul(x, prepared)
        assert torch.equal(ops.matmul(x, prepared), first), kernel
        assert torch.equal(ops.matmul(x, ops.prepare(w, torch.float32, kernel)), first), kernel


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inputs_that_lie_apart_in_memory_are_taken(scheme: str) -> None:
    w = weight(scheme)
    x = inputs(75, 8).T[::2]  # neither rows nor columns are contiguous
    for kernel in kernels_for(w):
        prepared = ops.prepare(w, torch.float32, kernel)
        torch.testing.assert_close(ops.matmul(x, prepared), ops.matmul(x.contiguous(), prepared), rtol=0, atol=1e-5)


def test_a_matmul_changes_neither_weight_nor_input() -> None:
    w, x = weight("rtn:bits=4,group=32"), inputs(3, 75)
    before = {k: t.clone() for k, t in w.tensors().items()}, x.clone()
    for kernel in kernels_for(w):
        ops.matmul(x, ops.prepare(w, torch.float32, kernel))
    assert all(torch.equal(t, before[0][k]) for k, t in w.tensors().items())
    assert torch.equal(x, before[1])


def test_leading_dimensions_are_kept() -> None:
    w = weight("rtn:bits=4,group=32")
    assert ops.matmul(inputs(2, 3, w.shape[1]), ops.prepare(w, torch.float32)).shape == (2, 3, w.shape[0])


def test_wrong_input_width_is_a_sentence() -> None:
    w = weight("rtn:bits=4,group=32")
    with pytest.raises(UnsupportedError, match="x has 74 inputs, the weight takes 75"):
        ops.matmul(inputs(1, 74), ops.prepare(w, torch.float32))
