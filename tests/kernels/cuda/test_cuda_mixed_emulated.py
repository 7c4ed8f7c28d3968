"""The mixed 2/4-bit kernels run on the CPU, thread by thread: what they compute, without a GPU."""

from dataclasses import dataclass

import pytest
import torch
from emulated import COMPILER, EmulatedKernel
from mixed_weights import random_mixed
from plane_weights import relative
from torch import Tensor

from crelle.kernels.base import Prepared, Problem
from crelle.kernels.cuda import dispatch, mixed_config, mixed_gemv
from crelle.kernels.cuda.fused_linear import FusedLinear, Norm
from crelle.kernels.cuda.mixed_config import MixedTileConfig
from crelle.kernels.cuda.mixed_kernel import CudaMixed
from crelle.kernels.cuda.mixed_layout import join, lay_out
from crelle.kernels.cuda.norm_linear import linear_residual, norm_linear

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
HALF = torch.float16


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_gemv, "load", EmulatedKernel)
    for module in (mixed_gemv, mixed_config):
        monkeypatch.setattr(module, "multiprocessors", lambda: 2)
    monkeypatch.setattr(mixed_config, "_room", lambda: 227 * 1024)


@pytest.mark.parametrize(
    ("form", "tokens", "config"),
    [
        ((100, 520, 16, 0.25, 0.02), 1, MixedTileConfig(3, 8, 2, 2)),
        ((100, 520, 16, 0.25, 0.02), 1, MixedTileConfig(2, 4, 2, 2, asynchronous=True)),
        ((33, 333, 16, 0.4, 0.05), 3, MixedTileConfig(1, 3, 3, 2)),
        ((20, 300, 8, 0.25, 0.02), 2, MixedTileConfig(2, 2, 1, 1)),
    ],
)
def test_products_match_oracle(form: tuple[int, int, int, float, float], tokens: int, config: MixedTileConfig) -> None:
    torch.manual_seed(tokens)
    w = random_mixed(*form)
    laid, (N, K) = lay_out(w), form[:2]
    x, bias, residual = (torch.randn(*shape, dtype=HALF) for shape in ((tokens, K), (N,), (tokens, N)))
    xs = mixed_gemv.encode(x, laid)
    wanted = x.double() @ w.dequantize(torch.float64).T
    y = torch.full((tokens, N), torch.nan)
    mixed_gemv.product(xs, laid, torch.float32, out=y, config=config)
    assert relative(y, wanted) < 1e-6
    mixed_gemv.product(xs, laid, torch.float32, bias, residual, out=y, config=config)
    assert relative(y, wanted + bias.double() + residual.double()) < 1e-6


def test_joined_weights_norms_and_what_is_not_finite() -> None:
    torch.manual_seed(0)
    parts = [random_mixed(n, 256, 16, 0.25, 0.05) for n in (32, 40)]
    joined = join([lay_out(w) for w in parts])
    assert joined is not None
    whole, pieces = joined
    x, norm = torch.randn(2, 256, dtype=HALF), torch.randn(256, dtype=HALF)
    before = (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)).half() * norm
    each = [before.double() @ w.dequantize(torch.float64).T for w in parts]
    config = MixedTileConfig(2, 2, 2, 2)
    xs = mixed_gemv.encode(x, whole, "RMS_NORM", norm, None, 1e-5)
    for w, wanted in zip((whole, *pieces), (torch.cat(each, 1), *each), strict=True):
        assert relative(mixed_gemv.product(xs, w, torch.float32, config=config), wanted) < 1e-3
    x[1, 7] = torch.inf
    y = mixed_gemv.product(mixed_gemv.encode(x, whole), whole, torch.float32, config=config)
    assert bool(y[0].isfinite().all())
    assert not bool(y[1].isfinite().any())


@pytest.mark.parametrize("form", [(40, 520, 16, 0.25, 0.02), (20, 301, 8, 0.25, 0.02)])
def test_dequantized_matrices(form: tuple[int, int, int, float, float]) -> None:
    w = random_mixed(*form)
    wanted = w.dequantize(torch.float64)
    assert relative(mixed_gemv.dequantize(lay_out(w), HALF), wanted) < 1e-3
    assert relative(mixed_gemv.dequantize(lay_out(w), HALF, slice(16, None)), wanted[16:]) < 1e-3


def test_x_is_encoded_for_several_orders_in_one_launch() -> None:
    laid = [lay_out(random_mixed(16, 300, 16, 0.25, 0.0, seed=seed)) for seed in (1, 2)]
    x = torch.randn(2, 300, dtype=HALF)
    each = mixed_gemv.encode_each(x, laid[0], torch.stack([w.perm for w in laid]))
    for w, xs in zip(laid, each, strict=True):
        assert torch.equal(xs.rows, mixed_gemv.encode(x, w).rows)


@dataclass
class Layer:
    """A linear layer, as far as FusedLinear uses it."""

    prepared: Prepared
    bias: Tensor | None


@pytest.mark.parametrize(
    "seeds", [(0, 0), (0, 1)]
)  # the same 4-bit groups: one weight; others: x encoded once for both
def test_fused_linears(seeds: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weights = [random_mixed(n, 256, 16, 0.25, 0.02, seed=seed) for n, seed in zip((32, 20), seeds, strict=True)]
    kernel, bias = CudaMixed(), torch.randn(32, dtype=HALF)
    prepared = [Prepared(Problem.of(w, HALF), kernel, lay_out(w)) for w in weights]
    layers = [Layer(prepared[0], bias), Layer(prepared[1], None)]
    fused = FusedLinear(layers, HALF)
    assert len(fused.weights) == 1 + (seeds[0] != seeds[1])
    x, norm = torch.randn(3, 256, dtype=HALF), Norm(torch.randn(256, dtype=HALF), None, 1e-5)
    before = (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)).half() * norm.weight
    wanted = torch.cat([before.double() @ w.dequantize(torch.float64).T for w in weights], -1)
    wanted[:, :32] += bias.double()
    y, total = norm_linear(fused, x, None, "RMS_NORM", norm)
    assert torch.equal(total, x)
    assert relative(y, wanted) < 1e-3
    alone = FusedLinear([layers[0]], HALF)
    residual = torch.randn(3, 32, dtype=HALF)
    added, rest = linear_residual(alone, x, residual)
    plain = x.double() @ weights[0].dequantize(torch.float64).T + bias.double() + residual.double()
    assert rest is None
    assert relative(added, plain) < 1e-3


def test_many_rows_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_gemv, "_SCRATCH", 2 * 300 * 40)
    monkeypatch.setattr(dispatch, "mixed_route", lambda rows: "torch")
    w = random_mixed(70, 300, 16, 0.25, 0.02)
    x, bias = torch.randn(33, 300, dtype=HALF), torch.randn(70, dtype=HALF)
    wanted = x.double() @ w.dequantize(torch.float64).T
    assert relative(mixed_gemv.matmul(x, lay_out(w)), wanted) < 1e-3
    assert relative(mixed_gemv.matmul(x, lay_out(w), bias), wanted + bias.double()) < 1e-3
