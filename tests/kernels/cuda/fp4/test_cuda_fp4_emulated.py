"""The kernels of four-bit floats run on the CPU, thread by thread: what they compute, without a GPU."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated import COMPILER, EmulatedKernel
from fp4_weights import FORMATS, extreme_fp4, random_fp4
from plane_weights import relative
from torch import Tensor

from crelle.formats.fp4 import Fp4Tensor
from crelle.kernels.base import Prepared, Problem
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.fp4 import fp4_gemm, fp4_gemv
from crelle.kernels.cuda.fp4.fp4_gemv import Fp4TileConfig
from crelle.kernels.cuda.fp4.fp4_kernel import CudaFp4
from crelle.kernels.cuda.fp4.fp4_layout import Fp4Weight, lay_out
from crelle.kernels.cuda.planes import gemm
from crelle.kernels.cuda.planes.gemm import GemmSm80TileConfig
from crelle.kernels.cuda.step import fused_linear, residual_norm_pack
from crelle.kernels.cuda.step.activations import Prologue
from crelle.kernels.cuda.step.fuse import fuse
from crelle.kernels.cuda.step.fused_linear import Norm

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
HALF, BF16 = torch.float16, torch.bfloat16
TOLERANCE = {HALF: 3e-4, BF16: 2.4e-3}  # of the rounding of y: nothing else is rounded but f32 sums
SMALL_TILES = GemmSm80TileConfig(8, 1, 2, 2, 2)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_linear, "SMALL", 0)  # by what is stored, as large matrices
    for module in (fp4_gemv, fp4_gemm, gemm, dense, residual_norm_pack):
        monkeypatch.setattr(module, "load", EmulatedKernel)
    for module in (fp4_gemv, fp4_gemm, gemm):
        monkeypatch.setattr(module, "multiprocessors", lambda: 2)
    monkeypatch.setattr(fp4_gemv, "most_shared_memory", lambda: 99 * 1024)
    monkeypatch.setattr(fp4_gemm, "_choose_sm80", lambda *_: SMALL_TILES)
    monkeypatch.setattr(fp4_gemm, "_SM80_INVARIANT", SMALL_TILES)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))


def oracle(x: Tensor, w: Fp4Tensor) -> Tensor:
    return x.double() @ w.dequantize(torch.float64).T


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("hopper", [True, False], ids=["sm_90", "sm_80"])
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_products_of_odd_shapes_match_oracle(
    kind: str, hopper: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9 if hopper else 8, 0))
    torch.manual_seed(0)
    for N, K, tokens in ((40, 301, 1), (70, 1030, 1), (1, 1, 1)):
        w = random_fp4(N, K, kind)
        laid = lay_out(w)
        x, bias, residual = (torch.randn(*shape).to(dtype) for shape in ((tokens, K), (N,), (tokens, N)))
        config = Fp4TileConfig(2, 2, 3, 1)
        y = fp4_gemv.product(x, laid, config=config)
        assert relative(y, oracle(x, w)) < TOLERANCE[dtype] * (4 if N == 1 else 1)
        y = fp4_gemv.product(x, laid, bias=bias, residual=residual, dtype=torch.float32, config=config)
        assert relative(y, oracle(x, w) + bias.double() + residual.double()) < 2e-6


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_rows_together_are_rows_alone(kind: str, dtype: torch.dtype) -> None:
    """In a launch of the GEMV, in several, in the GEMM; extreme scales."""
    torch.manual_seed(0)
    w = extreme_fp4(37, 555, kind)
    laid, x = lay_out(w), torch.randn(9, 555).to(dtype)
    wanted = oracle(x, w)
    scale = wanted.abs().amax(0).clamp(min=1e-300)  # of outputs, which differ by many powers of two
    alone = torch.cat([fp4_gemv.product(x[i : i + 1], laid, dtype=torch.float32) for i in range(9)])
    assert relative(alone / scale, wanted / scale) < 1e-5
    assert torch.equal(fp4_gemv.product(x, laid, dtype=torch.float32), alone)  # 8 and 1
    plain = replace(w, scale=random_fp4(37, 555, kind).scale)
    small = lay_out(plain)
    assert relative(fp4_gemm.product(gemm.pack(x, small), small), oracle(x, plain)) < TOLERANCE[dtype]
    many = fp4_gemm.matmul(x, small, batch_invariant=True)
    for i in range(9):
        assert torch.equal(fp4_gemm.matmul(x[i : i + 1], small, batch_invariant=True), many[i : i + 1])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_stay_so_alone(kind: str, bad: float) -> None:
    w = random_fp4(40, 301, kind)
    laid, x = lay_out(w), torch.randn(3, 301, dtype=HALF)
    x[1, 5], x[2] = bad, 0
    y = fp4_gemv.product(x, laid)
    assert not bool(y[1].isfinite().any())
    assert relative(y[:1], oracle(x[:1], w)) < TOLERANCE[HALF]
    assert bool((y[2] == 0).all())


BEFORE: dict[Prologue, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "RMS_NORM": lambda v, norm, shift: v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-5) * norm,
    "LAYER_NORM": lambda v, norm, shift: torch.nn.functional.layer_norm(v, v.shape[-1:], norm, shift, 1e-5),
    "SILU_MUL": lambda v, norm, shift: torch.nn.functional.silu(v[:, : len(norm)]) * v[:, len(norm) :],
    "RELU": lambda v, norm, shift: v.relu(),
}


def layers_of(weights: list[Fp4Tensor]) -> list[Any]:
    made: list[Any] = []
    for w in weights:
        bias = torch.randn(w.shape[0], dtype=HALF)
        made.append(SimpleNamespace(prepared=Prepared(Problem.of(w, HALF), CudaFp4(), lay_out(w)), bias=bias))
    return made


@pytest.mark.sample(4)
@pytest.mark.parametrize("op", BEFORE)
@pytest.mark.parametrize("sizes", [(32, 48, 40), (33, 20)], ids=["joined", "apart"])
@pytest.mark.parametrize("rows", [3, 11])
def test_linears_of_one_input_with_what_comes_before(op: Prologue, sizes: tuple[int, ...], rows: int) -> None:
    K = 304
    torch.manual_seed(0)
    weights = [random_fp4(n, K, "nvfp4", seed=n) for n in sizes]
    layers = layers_of(weights)
    fused = fuse(layers, HALF)
    assert len(fused.weights) == (1 if sizes[0] % 16 == 0 else 2)
    assert all(isinstance(layer.prepared.data, Fp4Weight) for layer in layers)
    x, norm, shift = torch.randn(rows, 2 * K if op == "SILU_MUL" else K), torch.randn(K), torch.randn(K)
    given = {"RMS_NORM": Norm(norm.half(), None, 1e-5), "LAYER_NORM": Norm(norm.half(), shift.half(), 1e-5)}.get(op)
    h = BEFORE[op](x.half().double(), norm.half().double(), shift.half().double())
    wanted = torch.cat([oracle(h, w) + layer.bias.double() for w, layer in zip(weights, layers, strict=True)], 1)
    y = fused.linear(x.half(), op, given)
    assert relative(y, wanted) < 1e-3
    if rows <= fp4_gemv.TOKENS[-1]:
        assert torch.equal(fused(x.half(), op, given), y)
    if op in ("RMS_NORM", "LAYER_NORM"):
        assert given is not None
        addend = torch.randn(rows, K).half()
        h = BEFORE[op]((x.half() + addend).double(), norm.half().double(), shift.half().double())
        wanted = torch.cat([oracle(h, w) + layer.bias.double() for w, layer in zip(weights, layers, strict=True)], 1)
        for invariant in (False, True):
            y, total = fused.norm_linear(x.half(), addend, op, given, batch_invariant=invariant)
            assert relative(y, wanted) < 1.5e-3
            assert torch.equal(total, x.half() + addend)


def test_copies_of_small_matrices_are_the_weights() -> None:
    w = random_fp4(24, 40, "mxfp4")
    fused = fuse(layers_of([w]), HALF)
    assert torch.equal(fused._dequantize(fused.weights[0], torch.eye(40).half()), w.dequantize(HALF))


def test_rows_too_long_for_shared_memory_take_the_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp4_gemv, "most_shared_memory", lambda: 20 * 1024)
    w = random_fp4(24, 304, "mxfp4")
    fused, x = fuse(layers_of([w]), HALF), torch.randn(2, 304).half()
    assert not fp4_gemv.fits(fused.weights[0])
    assert relative(fused(x, "RELU"), oracle(x.relu(), w) + fused.bias.double()) < 1e-3  # type: ignore[union-attr]


def test_kernel_encodes_once_for_weights_of_one_input() -> None:
    kernel: Any = CudaFp4()
    weights = [random_fp4(40, 304, "mxfp4"), random_fp4(33, 304, "nvfp4")]
    first, second = (kernel.prepare(w, HALF) for w in weights)
    assert kernel.shares(first, second)
    for rows in (0, 2, 11):
        x = torch.randn(rows, 304, dtype=HALF)
        encoded = kernel.encode(x, first)
        for w, laid in zip(weights, (first, second), strict=True):
            y = kernel.run(encoded, laid)
            assert y.shape == (rows, w.shape[0])
            assert rows == 0 or relative(y, oracle(x, w)) < TOLERANCE[HALF]
            assert torch.equal(kernel.run(x, laid), y)
    assert torch.equal(torch.ops.crelle.fp4_matmul(x, first.data, 40, 304, "mxfp4"), kernel.run(x, first))
