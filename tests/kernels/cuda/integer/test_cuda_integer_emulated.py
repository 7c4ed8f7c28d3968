"""Encodings and the integer GEMM together, both in the emulator: linears and layers against the reference."""

from dataclasses import replace
from typing import Any

import pytest
import test_cuda_integer_kernel as kernels
import test_cuda_integer_step as steps
import torch
from emulated import COMPILER, EmulatedKernel

from crelle.kernels.base import Problem
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.integer import integer_encode, integer_kernel

integer_gemm: Any = pytest.importorskip("crelle.kernels.cuda.integer.integer_gemm")
cases: Any = pytest.importorskip("integer_cases")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(autouse=True, params=[(8, 9), (9, 0)], ids=["sm_89", "sm_90a"])
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (integer_encode, integer_gemm, dense):
        monkeypatch.setattr(module, "load", EmulatedKernel)
    monkeypatch.setattr(integer_gemm, "multiprocessors", lambda: 3)
    monkeypatch.setattr(integer_gemm, "tensor_map", cases.emulated_tensor_map)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: request.param)

    def supports(self: Any, problem: Problem) -> str | None:
        return None if problem.format in ("grouped", "two-level") else "takes integer groups"

    monkeypatch.setattr(integer_kernel.CudaInteger, "supports", supports)
    chosen = integer_gemm.choose

    def choose(w: Any, tokens: int) -> Any:
        """A config without clusters, which the emulator does not have."""
        if request.param < (9, 0):
            return integer_gemm._choose_sm80(w, tokens, 99 * 1024)
        s = chosen(w, tokens, 3, request.param)
        return replace(s, split_k=1) if isinstance(s, integer_gemm.IntegerTileConfig) else s

    monkeypatch.setattr(integer_gemm, "choose", choose)


@pytest.mark.parametrize("scheme", kernels.SCHEMES)
@pytest.mark.sample(3)
def test_products_are_those_of_the_reference(scheme: str) -> None:
    kernels.test_products_are_those_of_the_reference(scheme)


@pytest.mark.parametrize("scheme", ["w4a4", "two-level"])
@pytest.mark.parametrize("sizes", [(128, 64, 70), (64, 33, 20)])  # that can be joined, and not
@pytest.mark.sample(3)
def test_norm_and_matrices_of_one_input(scheme: str, sizes: tuple[int, int, int]) -> None:
    kernels.test_norm_and_matrices_of_one_input(scheme, sizes)


@pytest.mark.parametrize(
    "what",
    [
        "matrices_with_orders_of_their_own",
        "activation_residual_and_sandwich_norm",
        "a_row_has_the_same_bits_in_any_batch",
    ],
)
@pytest.mark.sample(2)
def test_orders_residuals_and_batch_invariance(what: str) -> None:
    getattr(kernels, f"test_{what}")()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("scheme", steps.SCHEMES)
@pytest.mark.sample(4)
def test_layers_are_those_of_the_model(scheme: str, batch_invariant: bool) -> None:
    steps.test_layers_are_those_of_the_model(steps.LLAMA, scheme, batch_invariant)
