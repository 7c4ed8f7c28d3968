"""Encode once, multiply often: the same bits as separate products, and a refusal where a weight shares no input."""

import pytest
import torch

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.wrappers.composite import PermutedTensor
from crelle.kernels import cuda, ops
from crelle.kernels.base import Problem
from crelle.kernels.registry import explain, kernels
from crelle.quantizers.scheme import parse

K = 256
DEVICES = [("cpu", torch.float32), pytest.param("cuda", torch.float16, marks=pytest.mark.gpu)]
SCHEMES = ("rtn:bits=4,group=64", "bcq:bits=3,group=64", "fp16")


def weight(scheme: str, N: int, device: str, K: int = K) -> QuantTensor:
    return parse(scheme).fit(torch.randn(N, K, generator=torch.Generator().manual_seed(N))).to(device)


def names(w: QuantTensor, dtype: torch.dtype) -> list[str]:
    return [name for name, reason in explain(Problem.of(w, dtype)) if reason is None]


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_encoding_once_gives_the_bits_of_separate_products(scheme: str, device: str, dtype: torch.dtype) -> None:
    matrices = [weight(scheme, N, device) for N in (48, 16, 16)]  # q, k, v
    found = names(matrices[0], dtype)
    assert found
    assert device == "cpu" or scheme == "fp16" or cuda.available() or "cuda" in found
    for name in found:
        prepared = [ops.prepare(w, dtype, name) for w in matrices]
        for lead in ((1,), (3,), (2, 3), (20,), (40,), (0,)):  # gemv, skinny gemm, gemm; no rows at all
            x = torch.randn(*lead, K, generator=torch.Generator().manual_seed(7)).to(device, dtype)
            encoded = ops.encode(x, prepared[0])
            for w in prepared:
                y = ops.matmul(encoded, w)
                assert y.shape == (*lead, w.problem.N), name
                assert torch.equal(y, ops.matmul(x, w)), name


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_permuted_inputs_are_shared_only_in_the_same_order(device: str, dtype: torch.dtype) -> None:
    order = torch.randperm(K, generator=torch.Generator().manual_seed(0)).int().to(device)
    inner = [weight(SCHEMES[0], N, device) for N in (32, 16)]
    for name in names(PermutedTensor(inner[0], order), dtype):
        a, b = (ops.prepare(PermutedTensor(w, order.clone()), dtype, name) for w in inner)
        other = ops.prepare(PermutedTensor(inner[1], order.flip(0)), dtype, name)
        x = torch.randn(2, K, generator=torch.Generator().manual_seed(7)).to(device, dtype)
        encoded = ops.encode(x, a)
        assert torch.equal(ops.matmul(encoded, b), ops.matmul(x, b)), name
        if not a.kernel.shares(a.data, other.data):
            with pytest.raises(UnsupportedError, match="encode it again"):
                ops.matmul(encoded, other)


def test_what_was_encoded_for_others_is_refused_in_a_sentence() -> None:
    w = ops.prepare(weight(SCHEMES[0], 16, "cpu"), torch.float32, "reference")
    shorter = ops.prepare(weight(SCHEMES[0], 16, "cpu", 128), torch.float32, "reference")
    plain = ops.prepare(weight(SCHEMES[0], 16, "cpu"), torch.float32, "dequantized")
    encoded = ops.encode(torch.randn(2, K), w)
    for other in (shorter, plain):
        assert not ops.shares(w, other)
        with pytest.raises(UnsupportedError, match=r"kernel 'reference'.*encode it again"):
            ops.matmul(encoded, other)
    with pytest.raises(UnsupportedError, match="x has 9 inputs, the weight takes 256"):
        ops.encode(torch.randn(2, 9), w)


@pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: kernel.name)
def test_quantized_activations_are_refused_where_no_kernel_has_them(kernel: object) -> None:
    for fmt in ("bcq", "dense"):
        for device in ("cpu", "cuda"):
            problem = Problem(fmt, 32, 64, 4, 32, device, torch.float16, activation="int4")
            assert kernel.supports(problem)  # type: ignore[attr-defined]
            assert "int4 activations" in str(problem)
