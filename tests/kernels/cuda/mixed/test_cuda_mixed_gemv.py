"""Products with mixed 2/4-bit weights against fp64: all forms, odd sizes, one to many tokens, prologues."""

from dataclasses import replace

import pytest
import torch
from mixed_weights import FORMS, random_mixed
from plane_weights import TOLERANCE, relative
from product_checks import graph_gives_the_same
from torch import Tensor

from crelle.formats.wrappers.composite import PermutedTensor
from crelle.kernels import cuda, ops
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.mixed import mixed_gemv
from crelle.kernels.cuda.mixed.mixed_config import MixedTileConfig
from crelle.kernels.cuda.mixed.mixed_layout import join, lay_out
from crelle.kernels.cuda.step.activations import Prologue, is_gated

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))
HALF, BF16 = torch.float16, torch.bfloat16
CONFIGS = [
    MixedTileConfig(1, 8, 4, 2),
    MixedTileConfig(1, 8, 4, 2, asynchronous=True),
    MixedTileConfig(1, 8, 1, 2),  # loads, waits, decodes, multiplies
    MixedTileConfig(2, 4, 2, 2),
    MixedTileConfig(2, 10, 2, 1, asynchronous=True),
    MixedTileConfig(3, 8, 2, 2),
    MixedTileConfig(4, 12, 1, 1),
]


@pytest.mark.skipif(bool(jit.missing()), reason=str(jit.missing()))
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)])  # its samples: compiled/
def test_mixed_compiles(arch: str) -> None:
    kernels = [mixed_gemv.product_variant(2, 2, config, BF16, torch.float32) for config in CONFIGS]
    kernels += [mixed_gemv.encode_variant("LAYER_NORM", 1, 501, BF16), mixed_gemv.dequant_variant(1, 501, HALF)]
    assert all(built.cubin for built in jit.compile_all(kernels, arch))


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize(("N", "K", "G", "four", "outliers"), FORMS)
def test_products_match_oracle(N: int, K: int, G: int, four: float, outliers: float, dtype: torch.dtype) -> None:
    torch.manual_seed(N)
    w = random_mixed(N, K, G, four, outliers, "cuda")
    prepared, dequantized = ops.prepare(w, dtype, "cuda-mixed"), w.dequantize(torch.float64)
    for M in (1, 2, 3, 4, 5, 8, 13, 32, 33, 70):
        x = torch.randn(M, K, device="cuda", dtype=dtype)
        torch.full((M, N), torch.nan, dtype=dtype, device="cuda")  # what the output will lie in
        y = ops.matmul(x, prepared)
        assert relative(y, x.double() @ dequantized.T) <= TOLERANCE[dtype], M
        assert torch.equal(y, ops.matmul(x, prepared))
        assert torch.equal(y, ops.matmul(ops.encode(x, prepared), prepared))
    assert ops.matmul(torch.randn(0, K, device="cuda", dtype=dtype), prepared).shape == (0, N)


@gpu
@needs_gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("N", "K", "G", "four", "outliers"), FORMS)
def test_every_config_gives_the_product(
    N: int, K: int, G: int, four: float, outliers: float, config: MixedTileConfig
) -> None:
    w = random_mixed(N, K, G, four, outliers, "cuda")
    laid, oracle = lay_out(w), w.dequantize(torch.float64).T
    for M in (1, 2, 4, 8) if config.tiles == 1 else (1, 2):
        x = torch.randn(M, K, device="cuda", dtype=HALF)
        xs = mixed_gemv.encode(x, laid)
        y = torch.full((M, N), torch.nan, dtype=torch.float32, device="cuda")
        mixed_gemv.product(xs, laid, torch.float32, out=y, config=config)
        assert relative(y, x.double() @ oracle) <= 2e-5
        assert torch.equal(y, mixed_gemv.product(xs, laid, torch.float32, config=config))


@gpu
@needs_gpu
def test_a_row_does_not_depend_on_the_others() -> None:
    laid = lay_out(random_mixed(200, 2048, 16, 0.25, 0.01, "cuda"))
    x = torch.randn(40, 2048, device="cuda", dtype=HALF)
    alone = torch.cat([mixed_gemv.matmul(row[None], laid, batch_invariant=True) for row in x])
    for M in (2, 3, 8, 17, 40):
        assert torch.equal(mixed_gemv.matmul(x[:M], laid, batch_invariant=True), alone[:M])


@gpu
@needs_gpu
@pytest.mark.parametrize("op", ["RMS_NORM", "LAYER_NORM", "SILU_MUL", "RELU", "GELU_TANH_MUL"])
@pytest.mark.parametrize("K", [1000, 333])
def test_operations_before_it(op: Prologue, K: int) -> None:
    torch.manual_seed(K)
    w = random_mixed(77, K, 16, 0.25, 0.01, "cuda")
    laid = lay_out(w)
    x = torch.randn(3, K * (2 if is_gated(op) else 1), device="cuda", dtype=HALF)
    norm, shift = (torch.randn(K, device="cuda", dtype=HALF) if "NORM" in op else None for _ in range(2))
    shift = shift if op == "LAYER_NORM" else None
    bias, residual = torch.randn(77, device="cuda", dtype=HALF), torch.randn(3, 77, device="cuda", dtype=HALF)
    before = dense.apply(x, op, norm, shift, 1e-5)
    xs = mixed_gemv.encode(x, laid, op, norm, shift, 1e-5)
    y = mixed_gemv.product(xs, laid, HALF, bias, residual)
    wanted = before.double() @ w.dequantize(torch.float64).T + bias.double() + residual.double()
    assert relative(y, wanted) <= TOLERANCE[HALF]
    mixed_gemv.product(xs, laid, HALF, bias, residual, out=residual)  # in place on the residual stream
    assert torch.equal(residual, y)


@gpu
@needs_gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_row_alone(value: float) -> None:
    w = random_mixed(200, 1000, 16, 0.25, 0.01, "cuda")
    for dtype in (HALF, BF16):
        prepared = ops.prepare(w, dtype, "cuda-mixed")
        for M in (1, 2, 3, 8, 16, 40):
            x = torch.randn(M, 1000, device="cuda", dtype=dtype)
            clean = ops.matmul(x, prepared)
            for row, at in ((0, 0), (M - 1, 999), (M // 2, 517)):
                bad = x.clone()
                bad[row, at] = value
                y = ops.matmul(bad, prepared)
                others = [i for i in range(M) if i != row]
                assert not bool(y[row].isfinite().any())
                assert torch.equal(y[others], clean[others])


@gpu
@needs_gpu
@pytest.mark.parametrize("size", [1e-30, 1e-6, 3e4, 1e30])
def test_any_size_of_x(size: float) -> None:
    """An input is scaled by a power of two before it becomes fp16."""
    w = random_mixed(64, 1024, 16, 0.25, 0.01, "cuda")
    dtype = HALF if 1e-7 < size < 6e4 else BF16
    x = (torch.randn(2, 1024, device="cuda").clamp(-2, 2) / 2 * size).to(dtype)
    laid = lay_out(w)
    y = mixed_gemv.product(mixed_gemv.encode(x, laid), laid, torch.float32)
    assert relative(y, x.double() @ w.dequantize(torch.float64).T) <= 2e-5
    assert not mixed_gemv.product(mixed_gemv.encode(torch.zeros_like(x), laid), laid, HALF).any()


@gpu
@needs_gpu
def test_large_matrices_rerun_and_in_graphs() -> None:
    w = random_mixed(4096, 4096, 16, 0.25, 0.002, "cuda")
    laid, oracle = lay_out(w), w.dequantize(torch.float64).T
    for M in (1, 4, 8):
        x = torch.randn(M, 4096, dtype=HALF, device="cuda")
        y = mixed_gemv.matmul(x, laid)
        assert relative(y, x.double() @ oracle) <= TOLERANCE[HALF]
        for _ in range(20):
            assert torch.equal(mixed_gemv.matmul(x, laid), y)
        xs = mixed_gemv.encode(x, laid)
        assert graph_gives_the_same(lambda out, xs=xs: mixed_gemv.product(xs, laid, HALF, out=out))  # type: ignore[misc]
    x = torch.randn(4, 49152, dtype=HALF, device="cuda")  # too long for all tokens at once
    w = random_mixed(40, 49152, 16, 0.25, 0.002, "cuda")
    assert relative(mixed_gemv.matmul(x, lay_out(w)), x.double() @ w.dequantize(torch.float64).T) <= TOLERANCE[HALF]


@gpu
@needs_gpu
def test_joined_matrices_and_permuted_ones() -> None:
    parts = [random_mixed(n, 512, 16, 0.25, 0.01, "cuda") for n in (32, 64, 33)]
    joined = join([lay_out(w) for w in parts])
    assert joined is not None
    x = torch.randn(3, 512, dtype=HALF, device="cuda")
    each: list[Tensor] = [x.double() @ w.dequantize(torch.float64).T for w in parts]
    assert relative(mixed_gemv.matmul(x, joined[0]), torch.cat(each, 1)) <= TOLERANCE[HALF]
    for w, wanted in zip(joined[1], each, strict=True):
        assert relative(mixed_gemv.matmul(x, w), wanted) <= TOLERANCE[HALF]
        assert relative(mixed_gemv.matmul(x, replace(w)), wanted) <= TOLERANCE[HALF]
    permuted = PermutedTensor(parts[1], torch.randperm(512, device="cuda"))
    y = ops.matmul(x, ops.prepare(permuted, HALF))
    assert relative(y, x.double() @ permuted.dequantize(torch.float64).T) <= TOLERANCE[HALF]


@gpu
@needs_gpu
def test_x_is_encoded_for_several_orders_in_one_launch() -> None:
    weights = [random_mixed(n, 1000, 16, 0.25, 0.01, "cuda", seed=n) for n in (40, 64, 100)]
    laid = [lay_out(w) for w in weights]
    for M in (2, 3, 4):
        x = torch.randn(M, 1000, dtype=HALF, device="cuda")
        each = mixed_gemv.encode_each(x, laid[0], torch.stack([w.perm for w in laid]))
        for w, xs in zip(laid, each, strict=True):
            assert torch.equal(xs.rows, mixed_gemv.encode(x, w).rows)
            assert torch.equal(mixed_gemv.product(xs, w, HALF), mixed_gemv.matmul(x, w))
