"""One token through mixed 2/4-bit weights in one launch against fp64: configs, prologues, several matrices."""

from dataclasses import replace

import pytest
import torch
from mixed_weights import FORMS, random_mixed
from plane_weights import TOLERANCE, relative
from product_checks import graph_gives_the_same

from crelle.kernels import cuda
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.mixed import mixed_decode, mixed_gemv
from crelle.kernels.cuda.mixed.mixed_decode import DecodeConfig
from crelle.kernels.cuda.mixed.mixed_layout import MixedWeight, join, lay_out
from crelle.kernels.cuda.step.activations import Prologue, is_gated

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))
HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CONFIGS = [DecodeConfig(2, 12, 2, 2), DecodeConfig(1, 8, 3, 2, 2), DecodeConfig(3, 8, 2, 2), DecodeConfig(4, 5, 1, 1)]
TAKEN = [form for form in FORMS if form[2] > 8 and form[1] % 8 == 0]


@pytest.mark.skipif(bool(jit.missing()), reason=str(jit.missing()))
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)])  # its samples: compiled/
def test_it_compiles(arch: str) -> None:
    kernels = [mixed_decode.variant("RMS_NORM", config, BF16, F32) for config in CONFIGS]
    assert all(
        built.cubin for built in jit.compile_all([*kernels, mixed_decode.variant("GELU", CONFIGS[0], HALF, HALF)], arch)
    )


def test_thread_blocks_are_shared_out() -> None:
    assert mixed_decode._shares([256], 132) == (132,)
    assert mixed_decode._shares([256] * 3, 132) == (44, 88, 132)
    assert mixed_decode._shares([3, 1], 132) == (3, 4)
    assert mixed_decode._shares([1000, 1, 1], 4) == (2, 3, 4)


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_decode, "room_of_device", lambda: 227 * 1024)
    laid = lay_out(random_mixed(32, 512, 16, 0.25, 0.0))
    x = torch.randn(2, 512, dtype=HALF)
    assert mixed_decode.supports(x[:1], [laid])
    assert not mixed_decode.supports(x, [laid])
    assert not mixed_decode.supports(x[:1], [laid] * 4)
    assert not mixed_decode.supports(x[:1], [replace(laid, spans=None)])
    assert not mixed_decode.supports(torch.randn(513, dtype=HALF)[None, 1:], [laid])  # not 16 bytes aligned
    assert not mixed_decode.supports(x[:1], [laid], "RMS_NORM", torch.ones(512))  # another dtype


@gpu
@needs_gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("N", "K", "G", "four", "outliers"), TAKEN)
def test_products_match_oracle(N: int, K: int, G: int, four: float, outliers: float, config: DecodeConfig) -> None:
    torch.manual_seed(N)
    w = random_mixed(N, K, G, four, outliers, "cuda")
    laid, oracle = lay_out(w), w.dequantize(torch.float64).T
    for dtype in (HALF, BF16):
        x = torch.randn(1, K, device="cuda", dtype=dtype)
        y = torch.full((1, N), torch.nan, dtype=F32, device="cuda")
        mixed_decode.product(x, [laid], F32, out=y, config=config)
        assert relative(y, x.double() @ oracle) <= 2e-4
        assert torch.equal(y, mixed_decode.product(x, [laid], F32, config=config))
        assert relative(mixed_gemv.matmul(x, laid), x.double() @ oracle) <= TOLERANCE[dtype]


@gpu
@needs_gpu
@pytest.mark.parametrize("op", ["PLAIN", "RMS_NORM", "LAYER_NORM", "SILU_MUL", "RELU", "GELU_TANH_MUL"])
@pytest.mark.parametrize("K", [1000, 4096])
def test_several_matrices_and_what_comes_before(op: Prologue, K: int) -> None:
    torch.manual_seed(K)
    weights = [random_mixed(n, K, 16, 0.25, 0.01, "cuda", seed=n) for n in (77, 160, 33)]
    laid = [lay_out(w) for w in weights]
    x = torch.randn(1, K * (2 if is_gated(op) else 1), device="cuda", dtype=HALF)
    norm, shift = (torch.randn(K, device="cuda", dtype=HALF) if "NORM" in op else None for _ in range(2))
    shift = shift if op == "LAYER_NORM" else None
    biases = [torch.randn(77, device="cuda", dtype=HALF), None, torch.randn(33, device="cuda", dtype=HALF)]
    before = dense.apply(x, op, norm, shift, 1e-5)
    wanted = torch.cat([before.double() @ w.dequantize(torch.float64).T for w in weights], 1)
    for bias, at in zip(biases, (slice(0, 77), slice(77, 237), slice(237, 270)), strict=True):
        wanted[:, at] += 0 if bias is None else bias.double()
    assert mixed_decode.supports(x, laid, op, norm, shift)
    y = mixed_decode.product(x, laid, HALF, op, norm, shift, 1e-5, biases)
    assert relative(y, wanted) <= TOLERANCE[HALF]
    residual = torch.randn(1, 270, device="cuda", dtype=HALF)
    total = residual.double() + wanted
    mixed_decode.product(x, laid, HALF, op, norm, shift, 1e-5, biases, residual, out=residual)  # in place
    assert relative(residual, total) <= TOLERANCE[HALF]


@gpu
@needs_gpu
def test_gate_and_up() -> None:
    torch.manual_seed(0)
    for N, K in ((77, 1000), (11008, 4096)):
        gate, up = (random_mixed(N, K, 16, 0.25, 0.01, "cuda", seed=seed) for seed in (1, 2))
        laid, x = [lay_out(gate), lay_out(up)], torch.randn(1, K, device="cuda", dtype=HALF)
        wanted = torch.nn.functional.silu(x.double() @ gate.dequantize(torch.float64).T)
        wanted *= x.double() @ up.dequantize(torch.float64).T
        y = torch.full((1, N), torch.nan, device="cuda", dtype=F32)
        mixed_decode.product(x, laid, F32, out=y, paired=True)
        assert relative(y, wanted) <= 5e-4
        assert torch.equal(y, mixed_decode.product(x, laid, F32, paired=True))


@gpu
@needs_gpu
def test_large_matrices_rerun_and_in_graphs() -> None:
    for N, K in ((4096, 4096), (4096, 11008), (1000, 16384)):
        weights = [random_mixed(N, K, 16, 0.25, 0.002, "cuda", seed=seed) for seed in (1, 2)]
        laid = [lay_out(w) for w in weights]
        x = torch.randn(1, K, dtype=HALF, device="cuda")
        y = mixed_decode.product(x, laid, HALF)
        wanted = torch.cat([x.double() @ w.dequantize(torch.float64).T for w in weights], 1)
        assert relative(y, wanted) <= TOLERANCE[HALF]
        for _ in range(20):
            assert torch.equal(mixed_decode.product(x, laid, HALF), y)
        assert graph_gives_the_same(lambda out, x=x, laid=laid: mixed_decode.product(x, laid, HALF, out=out))  # type: ignore[misc]


@gpu
@needs_gpu
@pytest.mark.parametrize("size", [1e-30, 1e-6, 3e4, 1e30])
def test_any_size_of_x(size: float) -> None:
    w = random_mixed(64, 1024, 16, 0.25, 0.01, "cuda")
    dtype = HALF if 1e-7 < size < 6e4 else BF16
    x = (torch.randn(1, 1024, device="cuda").clamp(-2, 2) / 2 * size).to(dtype)
    laid = lay_out(w)
    y = mixed_decode.product(x, [laid], F32)
    assert relative(y, x.double() @ w.dequantize(torch.float64).T) <= 2e-4
    assert not mixed_decode.product(torch.zeros_like(x), [laid], HALF).any()
    for value in (float("nan"), float("inf"), float("-inf")):
        for op in ("PLAIN", "RMS_NORM"):
            x[0, 517] = value
            assert not bool(mixed_decode.product(x, [laid], HALF, op, eps=1e-5).isfinite().any())


@gpu
@needs_gpu
def test_parts_of_joined_matrices() -> None:
    parts = [random_mixed(n, 512, 16, 0.25, 0.01, "cuda") for n in (32, 64, 33)]
    joined = join([lay_out(w) for w in parts])
    assert joined is not None
    x = torch.randn(1, 512, dtype=HALF, device="cuda")
    each = [x.double() @ w.dequantize(torch.float64).T for w in parts]
    whole: list[MixedWeight] = [joined[0]]
    for weights, wanted in ((whole, torch.cat(each, 1)), (joined[1], torch.cat(each, 1)), (joined[1][1:2], each[1])):
        assert relative(mixed_decode.product(x, weights, HALF), wanted) <= TOLERANCE[HALF]
