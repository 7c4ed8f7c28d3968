"""Kernels around which x is rotated: any format that `rotated` may hold."""

from typing import Any

import pytest
import torch

from crelle.errors import UnsupportedError
from crelle.formats.base import format_of
from crelle.formats.wrappers.rotated import RotatedTensor, Rotation
from crelle.kernels import ops
from crelle.kernels.base import Problem
from crelle.kernels.cpu import available
from crelle.kernels.registry import explain
from crelle.kernels.rotated_kernel import RotatedKernel

N, K = 40, 192


def rotated(form: str, block: int = 64, seed: int = 0, out_block: int | None = None) -> RotatedTensor:
    spec: dict[str, Any] = {"format": form, "shape": [N, K], "bits": 3, "group": 64}
    if form == "uniform":
        spec |= {"symmetric": False}
    if form == "bcq":
        spec |= {"bias": True}
    rng = torch.Generator().manual_seed(seed)
    inner = format_of(spec).random(spec, rng)
    inputs = Rotation.random(K, rng, block)
    return RotatedTensor(inner, inputs, None if out_block is None else Rotation.random(N, rng, out_block))


@pytest.mark.parametrize(("block", "out_block"), [(64, None), (192, None), (96, 20), (64, 8)])
@pytest.mark.parametrize("form", ["uniform", "bcq"])
def test_product_is_that_of_the_rotated_matrix(form: str, block: int, out_block: int | None) -> None:
    w, x = rotated(form, block, out_block=out_block), torch.randn(5, K, generator=torch.Generator().manual_seed(1))
    wanted = x.double() @ w.dequantize(torch.float64).T
    named = [name for name, why in explain(Problem.of(w, torch.float32)) if why is None]
    assert "dequantized" in named
    for name in named:
        prepared = ops.prepare(w, torch.float32, name)
        assert isinstance(prepared.kernel, RotatedKernel)
        y = ops.matmul(x, prepared)
        assert float((y - wanted).norm() / wanted.norm()) < (2e-2 if "int8" in name else 1e-4)
        assert torch.equal(ops.matmul(ops.encode(x, prepared), prepared), y)


def test_inputs_are_shared_with_equal_rotations_only() -> None:
    a, b, c = rotated("uniform"), rotated("uniform"), rotated("uniform", 32)
    prepared = [ops.prepare(w, torch.float32, "dequantized") for w in (a, b, c, a.inner)]
    assert ops.shares(prepared[0], prepared[1])
    assert not ops.shares(prepared[0], prepared[2])
    assert not ops.shares(prepared[0], prepared[3])


def test_inputs_are_shared_whatever_happens_to_outputs() -> None:
    kinds = rotated("uniform"), rotated("uniform", out_block=40)
    one, other = (ops.prepare(w, torch.float32, "dequantized") for w in kinds)
    assert ops.shares(one, other)
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ops.matmul(ops.encode(x, one), other), ops.matmul(x, other))


def test_a_problem_says_that_inputs_are_rotated() -> None:
    problem = Problem.of(rotated("uniform"), torch.float32)
    assert problem.format == "uniform"
    assert "inputs rotated" in str(problem)


@pytest.mark.skipif(available() is not None, reason="no C++ extension")
def test_the_fused_decoder_refuses_them_with_a_sentence() -> None:
    from crelle.kernels.cpu.fused_decoder import matrix

    w = rotated("uniform")
    refused = matrix(w, ops.prepare(w, torch.float32, "cpu"))
    assert isinstance(refused, str)
    assert "rotates inputs" in refused


def test_integer_kernels_say_what_they_do_not_take() -> None:
    with pytest.raises(UnsupportedError, match="integer groups"):
        ops.prepare(rotated("uniform"), torch.float32, "cpu-integer")
