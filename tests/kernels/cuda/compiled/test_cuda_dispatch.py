"""The table from row count to kernel; no GPU needed."""

import pytest

from crelle.kernels.cuda.dispatch import dense_route, gemm_route, mixed_route, route

HOPPER, AMPERE, ADA, BLACKWELL = (9, 0), (8, 0), (8, 9), (10, 0)


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_hopper_and_newer_have_a_kernel_for_a_few_dozen_rows(capability: tuple[int, int]) -> None:
    assert {route(m, capability) for m in range(1, 5)} == {"gemv"}
    assert {route(m, capability) for m in range(5, 33)} == {"skinny_gemm"}
    assert {route(m, capability) for m in (33, 64, 4096)} == {"gemm"}
    assert {gemm_route(m, capability) for m in range(1, 33)} == {"skinny_gemm"}
    assert gemm_route(33, capability) == "gemm"


@pytest.mark.parametrize("capability", [AMPERE, ADA])
def test_before_hopper_the_gemv_runs_twice(capability: tuple[int, int]) -> None:
    assert {route(m, capability) for m in range(1, 9)} == {"gemv"}
    assert {route(m, capability) for m in (9, 32, 33, 4096)} == {"gemm"}
    assert {gemm_route(m, capability) for m in (1, 8, 9, 32, 4096)} == {"gemm"}


def test_dense_weights_of_more_rows_are_for_torch() -> None:
    assert [dense_route(m) for m in (1, 4, 5, 300)] == ["gemv", "gemv", "torch", "torch"]


def test_mixed_weights_of_very_many_rows_are_dequantized_for_torch() -> None:
    assert [mixed_route(m) for m in (1, 4, 5, 33, 2048, 2049)] == ["gemv"] * 2 + ["gemm"] * 3 + ["torch"]
