"""Sum, norm or activation and gemm.cu's order in one launch: what the launches one by one give."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from plane_weights import random_weight
from torch import Tensor

from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.planes import gemm
from crelle.kernels.cuda.planes.weight_layout import CudaWeight, ScaleKind, lay_out
from crelle.kernels.cuda.step import residual_norm_pack
from crelle.kernels.cuda.step.activations import Prologue, is_gated
from crelle.kernels.cuda.step.fused_linear import Norm

HALF, BF16 = torch.float16, torch.bfloat16
TOLERANCE = {HALF: 2e-3, BF16: 1.6e-2}  # of a normed number, relative to the largest: a last digit or two


def weight(K: int, group: int, device: str = "cuda") -> CudaWeight:
    return lay_out(random_weight(ScaleKind.BCQ, 2, 16, K, group, device=device))


@pytest.mark.parametrize(("K", "reason"), [(4096, None), (1000, None), (1001, "multiple of 8"), (40_000, "up to")])
def test_what_does_not_fit_is_said(K: int, reason: str | None) -> None:
    said = residual_norm_pack.supports(weight(K, 128, "cpu"), K)
    assert said is None if reason is None else reason in (said or "")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("op", get_args(Prologue))
@pytest.mark.parametrize(
    ("M", "K", "group"), [(1, 1024, 128), (9, 1000, 40), (130, 4096, 128), (33, 11008, 128), (3, 20480, 40)]
)
def test_one_launch_gives_what_three_give(M: int, K: int, group: int, op: Prologue, dtype: torch.dtype) -> None:
    torch.manual_seed(M + K)
    w = weight(K, group)  # groups of 40 are padded: inputs have an order
    wide = 2 * K if is_gated(op) else K
    x, addend = (torch.randn(M, wide, device="cuda").to(dtype) for _ in range(2))
    some: Tensor | None = None if is_gated(op) else addend
    normed = "NORM" in op
    norm, shift = (torch.randn(K, device="cuda").to(dtype) for _ in range(2))
    settings = (norm if normed else None, shift if op == "LAYER_NORM" else None, 1e-5)
    found, total = residual_norm_pack.add_norm_pack(x, w, op, Norm(*settings), addend=some)
    wanted = x if some is None else x + some
    assert torch.equal(total, wanted)
    h = wanted if op == "PLAIN" else dense.apply(wanted, op, *settings)
    plain = gemm.pack(h, w)
    assert found.tokens == plain.tokens
    assert bool((found.semaphores == 0).all())
    if normed:  # the sums have another order
        assert float((found.xs - plain.xs).abs().max()) <= TOLERANCE[dtype] * float(plain.xs.abs().max())
    else:
        assert torch.equal(found.xs, plain.xs)
    again, _ = residual_norm_pack.add_norm_pack(x, w, op, Norm(*settings), addend=some)
    assert torch.equal(again.xs, found.xs)
    ordered, _ = residual_norm_pack.add_norm_permute(x, w, op, Norm(*settings), addend=some)
    assert torch.equal(gemm.pack(ordered, replace(w, perm=None)).xs, found.xs)


@pytest.mark.gpu
def test_a_row_has_the_same_bits_in_any_batch() -> None:
    w, x, addend = weight(4096, 128), *torch.randn(2, 64, 4096, device="cuda").half()
    norm = Norm(torch.randn(4096, device="cuda").half(), None, 1e-5)
    whole, _ = residual_norm_pack.add_norm_pack(x, w, "RMS_NORM", norm, addend=addend)
    for some in (slice(0, 8), slice(24, 40)):  # from a multiple of 8 on: then rows are swizzled alike
        found, _ = residual_norm_pack.add_norm_pack(x[some], w, "RMS_NORM", norm, addend=addend[some])
        assert torch.equal(found.xs, whole.xs[:, some])
