"""Products with plain weights against fp64, with every operation before them, odd sizes and one to four tokens."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.kernels import cuda
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.step.activations import Prologue, is_gated

gpu = pytest.mark.gpu
TOLERANCE = {torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
CASES: list[tuple[int, int, int, Prologue, torch.dtype, torch.dtype]] = [  # tokens, N, K, before, dtype of x, of y
    (1, 4096, 4096, "RMS_NORM", torch.float16, torch.float16),
    (4, 1000, 1000, "SILU_MUL", torch.bfloat16, torch.float32),
    (3, 77, 501, "LAYER_NORM", torch.float16, torch.float16),  # rows that are not aligned
    (2, 33, 11008, "SILU_MUL", torch.float16, torch.float16),
    (4, 50, 2056, "LAYER_NORM", torch.bfloat16, torch.bfloat16),
    (1, 3, 8, "RELU", torch.float16, torch.float32),
    (4, 130, 49152, "RELU", torch.float16, torch.float16),  # too long for all tokens at once
    (3, 16, 72, "PLAIN", torch.float16, torch.float16),
    (2, 100, 333, "RMS_NORM", torch.bfloat16, torch.float32),
    (1, 5, 7, "SILU_MUL", torch.float16, torch.float16),
    (2, 40, 4096, "GELU", torch.float16, torch.float16),
    (1, 40, 333, "GELU_TANH", torch.bfloat16, torch.float32),
    (4, 33, 2048, "GELU_MUL", torch.bfloat16, torch.bfloat16),
    (3, 33, 2056, "GELU_TANH_MUL", torch.float16, torch.float16),
]


@pytest.mark.skipif(bool(jit.missing()), reason=str(jit.missing()))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("K", [4096, 501])
def test_dense_compiles(arch: str, K: int) -> None:
    kernels = [dense.product_variant("RMS_NORM", 2, K, torch.float16, torch.float32)]
    kernels.append(dense.apply_variant("LAYER_NORM", K, torch.bfloat16))
    assert all(built.cubin for built in jit.compile_all(kernels, arch))


def _applied(x: Tensor, op: Prologue, norm: Tensor, shift: Tensor, eps: float) -> Tensor:
    x = x.double()
    if op == "RMS_NORM":
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * norm.double()
    if op == "LAYER_NORM":
        return F.layer_norm(x, x.shape[-1:], norm.double(), shift.double(), eps)
    if op == "PLAIN":
        return x
    act = {"SILU": F.silu, "RELU": F.relu, "GELU": F.gelu, "GELU_TANH": partial(F.gelu, approximate="tanh")}
    if is_gated(op):
        gate, up = x.chunk(2, -1)
        return act[op.removesuffix("_MUL")](gate) * up
    return act[op](x)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@gpu
@pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))
@pytest.mark.parametrize(("tokens", "N", "K", "op", "dtype", "out"), CASES)
def test_dense_matches_oracle(tokens: int, N: int, K: int, op: Prologue, dtype: torch.dtype, out: torch.dtype) -> None:
    torch.manual_seed(N)
    x = (torch.randn(tokens, K * (2 if is_gated(op) else 1), device="cuda") + 0.3).to(dtype)
    w = (torch.randn(N, K, device="cuda") / 30).to(dtype)
    norm, shift = (1 + 0.2 * torch.randn(K, device="cuda")).to(dtype), torch.randn(K, device="cuda").to(dtype)
    bias, residual = torch.randn(N, device="cuda").to(dtype), torch.randn(tokens, N, device="cuda").to(dtype)
    before = _applied(x, op, norm, shift, 1e-5)
    wanted = before @ w.double().T

    def product(rows: slice = slice(None), **more: Tensor) -> Tensor:
        y = torch.full((x[rows].shape[0], N), float("nan"), dtype=out, device="cuda")
        return dense.product(x[rows], w, op, norm, shift, 1e-5, out=y, **more)

    y = product()
    assert _error(y, wanted) < TOLERANCE[dtype]
    assert torch.equal(y, product())
    assert torch.equal(y, torch.cat([product(slice(m, m + 1)) for m in range(tokens)]))
    all_added = product(bias=bias, residual=residual)
    assert _error(all_added, wanted + bias.double() + residual.double()) < TOLERANCE[dtype]
    if out == dtype:  # in place on the residual stream
        dense.product(x, w, op, norm, shift, 1e-5, bias=bias, residual=residual, out=residual)
        assert torch.equal(residual, all_added)

    alone = torch.full((tokens, K), float("nan"), dtype=dtype, device="cuda")
    dense.apply(x, op, norm, shift, 1e-5, out=alone)
    assert _error(alone, before) < TOLERANCE[dtype]
