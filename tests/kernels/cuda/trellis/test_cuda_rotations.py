"""Rotations that the trellis kernels of a GPU do not have: torch rotates around them, and a whole step refuses them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from trellis_weights import random_trellis

from crelle.formats.base import format_of
from crelle.formats.wrappers.rotated import RotatedTensor, Rotation
from crelle.kernels import cuda, ops
from crelle.kernels.base import Problem
from crelle.kernels.cuda.trellis.trellis_kernel import CudaTrellis
from crelle.kernels.reference import matmul_fp64
from crelle.kernels.registry import select
from crelle.kernels.rotated_kernel import RotatedKernel, rotates

HALF = torch.float16
BLOCKS = [(64, 32), (576, None), (36, 20), (192, 320), (1, 64)]  # of inputs, of outputs


def rotated(block: int, out_block: int | None, form: str = "trellis") -> RotatedTensor:
    """A matrix of 320 x 576."""
    if form == "trellis":
        inner = random_trellis(320, 576, "pair", 2.0)
    else:
        spec = {"format": form, "shape": [320, 576], "bits": 3, "group": 64, "symmetric": True}
        inner = format_of(spec).random(spec, torch.Generator().manual_seed(0))  # type: ignore[assignment]
    outputs = None if out_block is None else Rotation.of_outputs(320, out_block)
    return RotatedTensor(inner, Rotation.of_inputs(576, block), outputs)


@pytest.mark.parametrize(("block", "out_block"), BLOCKS)
def test_torch_rotates_what_the_kernel_does_not(
    block: int, out_block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "available", lambda: None)
    problem = replace(Problem.of(rotated(block, out_block), HALF), device="cuda")
    chosen = select(problem)
    assert isinstance(chosen, RotatedKernel)
    assert isinstance(chosen.kernel, CudaTrellis)
    assert "outputs of matrices" in rotates(problem)
    usual = replace(Problem.of(rotated(64, None), HALF), device="cuda")
    assert isinstance(select(usual), CudaTrellis), "powers of two are the kernel's own"


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["trellis", "uniform"])
@pytest.mark.parametrize(("block", "out_block"), BLOCKS)
def test_products_match_f64(block: int, out_block: int | None, form: str) -> None:
    w = rotated(block, out_block, form).to("cuda")
    prepared = ops.prepare(w, HALF)
    assert isinstance(prepared.kernel, RotatedKernel)
    for M in (1, 3, 40):
        x = torch.randn(M, 576, dtype=HALF, device="cuda", generator=torch.Generator("cuda").manual_seed(M))
        y = ops.matmul(x, prepared)
        assert _error(y, matmul_fp64(x, w)) < 2e-3
        assert torch.equal(ops.matmul(ops.encode(x, prepared), prepared), y)


def _error(y: Tensor, wanted: Tensor) -> float:
    return float((y.double() - wanted).norm() / wanted.norm())
