"""The trellis kernels run on the CPU, thread by thread: what they compute, without a GPU."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated import COMPILER, EmulatedKernel
from plane_weights import relative
from torch import Tensor
from trellis_weights import KINDS, random_trellis

from crelle.formats.trellis import TrellisTensor
from crelle.formats.wrappers.rotated import RotatedTensor, Rotation
from crelle.kernels.base import Prepared, Problem
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.step import fused_linear
from crelle.kernels.cuda.step.activations import Prologue
from crelle.kernels.cuda.step.fuse import fuse
from crelle.kernels.cuda.step.fused_linear import Norm
from crelle.kernels.cuda.trellis import trellis_gemv
from crelle.kernels.cuda.trellis.trellis_gemv import TrellisTileConfig
from crelle.kernels.cuda.trellis.trellis_kernel import CudaTrellis
from crelle.kernels.cuda.trellis.trellis_layout import TrellisWeight, lay_out

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
HALF, BF16 = torch.float16, torch.bfloat16
TOLERANCE = {HALF: 4e-4, BF16: 3e-3}  # of the output's last bit, mostly: x has 16 bits


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_linear, "SMALL", 0)  # by what is stored, as large matrices
    for module in (trellis_gemv, dense):
        monkeypatch.setattr(module, "load", EmulatedKernel)
    monkeypatch.setattr(trellis_gemv, "multiprocessors", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def oracle(x: Tensor, w: Any) -> Tensor:
    return x.double() @ w.dequantize(torch.float64).T


@pytest.mark.sample(3)
@pytest.mark.parametrize(("code", "bits"), KINDS)
@pytest.mark.parametrize("hopper", [True, False], ids=["sm_90", "sm_80"])
def test_every_rate_matches_oracle(code: str, bits: float, hopper: bool) -> None:
    w = random_trellis(300, 208, code, bits, 16)
    laid = lay_out(w)
    torch.manual_seed(0)
    x = torch.randn(1, 208, dtype=HALF)
    y = trellis_gemv.product(trellis_gemv.encode(x, laid), laid, config=TrellisTileConfig(2, 2, 2, 1, 2 * hopper))
    assert relative(y, oracle(x, w)) < TOLERANCE[HALF]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("code", "bits"), KINDS)
def test_dequantized_weight_is_that_of_the_format(code: str, bits: float) -> None:
    for K in (22, 208):
        w = random_trellis(70, K, code, bits)
        assert torch.equal(trellis_gemv.dequantize(lay_out(w), HALF), w.dequantize(HALF))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("N", "K", "block", "tokens", "config"),
    [
        (1, 1, 0, 1, TrellisTileConfig(1, 1, 1, 1, 0)),
        (31, 18, 2, 2, TrellisTileConfig(2, 2, 1, 1, 0)),
        (257, 333, 0, 3, TrellisTileConfig(4, 2, 2, 1, 3)),  # pairs of outputs that thread blocks share unevenly
        (600, 1536, 512, 4, TrellisTileConfig(3, 3, 4, 1, 4)),
        (64, 2048, 1024, 5, TrellisTileConfig(4, 4, 1, 1, 1)),
        (96, 130, 2, 9, TrellisTileConfig(8, 2, 1, 2, 2)),  # more warps than units
    ],
)
def test_products_match_oracle(N: int, K: int, block: int, tokens: int, config: TrellisTileConfig) -> None:
    torch.manual_seed(tokens)
    for dtype in (HALF, BF16):
        w = random_trellis(N, K, "pair", 2.0, block)
        laid = lay_out(w)
        x, bias, residual = (torch.randn(*shape).to(dtype) for shape in ((tokens, K), (N,), (tokens, N)))
        xs, wanted = trellis_gemv.encode(x, laid), oracle(x, w)
        y = trellis_gemv.product(xs, laid, config=config)
        assert relative(y, wanted) < TOLERANCE[dtype] * (3 if N == 1 else 1)
        assert torch.equal(y[:1], trellis_gemv.product(trellis_gemv.encode(x[:1], laid), laid))  # other configs
        wide = torch.full((tokens, N + 3), torch.nan, dtype=dtype)
        trellis_gemv.product(xs, laid, bias, residual, out=wide[:, 2 : N + 2], config=config)
        assert relative(wide[:, 2 : N + 2], wanted + bias.double() + residual.double()) < TOLERANCE[dtype]
        assert bool(wide[:, [0, 1, N + 2]].isnan().all())


def test_inputs_beyond_one_pass_of_the_encoder() -> None:
    """A thread block has 16384 inputs at a time; sums of more do not fit into 32 bits."""
    K = 17408
    w = random_trellis(32, K, "mul1", 1.0, 1024)
    laid, x = lay_out(w), torch.randn(2, K, dtype=HALF)
    assert relative(trellis_gemv.product(trellis_gemv.encode(x, laid), laid), oracle(x, w)) < TOLERANCE[HALF]
    assert isinstance(w.inner, TrellisTensor)
    w.inner.codes.fill_(0)  # all states alike, all x: the largest sums
    ones = torch.ones(1, K, dtype=HALF)
    plain = lay_out(w.inner)
    for hopper in (0, 2):
        config = TrellisTileConfig(4, 2, 1, 1, hopper)
        y = trellis_gemv.product(trellis_gemv.encode(ones, plain), plain, config=config)
        assert relative(y, oracle(ones, w.inner)) < TOLERANCE[HALF]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("block", [0, 64])
def test_rows_that_are_not_finite_stay_so_alone(bad: float, block: int) -> None:
    w = random_trellis(40, 64, "pair", 2.0, block)
    laid, x = lay_out(w), torch.randn(3, 64, dtype=HALF)
    x[1, 5], x[2] = bad, 0
    y = trellis_gemv.product(trellis_gemv.encode(x, laid), laid)
    assert bool(y[1].isnan().all())
    assert relative(y[:1], oracle(x[:1], w)) < TOLERANCE[HALF]
    assert bool((y[2] == 0).all())


BEFORE: dict[Prologue, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "RMS_NORM": lambda v, norm, shift: v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-5) * norm,
    "LAYER_NORM": lambda v, norm, shift: torch.nn.functional.layer_norm(v, v.shape[-1:], norm, shift, 1e-5),
    "SILU_MUL": lambda v, norm, shift: torch.nn.functional.silu(v[:, : len(norm)]) * v[:, len(norm) :],
    "RELU": lambda v, norm, shift: v.relu(),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("op", BEFORE)
@pytest.mark.parametrize("sizes", [(256, 512, 40), (33, 20, 5)], ids=["joined", "apart"])
@pytest.mark.parametrize("rows", [3, 18])
def test_linears_of_one_input_with_what_comes_before(op: Prologue, sizes: tuple[int, ...], rows: int) -> None:
    K = 96
    torch.manual_seed(0)
    weights = [random_trellis(n, K, "pair", 2.0, 32, seed=n) for n in sizes]
    weights = [type(w)(w.inner, weights[0].rotation) for w in weights]  # type: ignore[union-attr,call-arg]
    layers: list[Any] = []
    for w in weights:
        bias = torch.randn(w.shape[0], dtype=HALF)
        layers.append(SimpleNamespace(prepared=Prepared(Problem.of(w, HALF), CudaTrellis(), lay_out(w)), bias=bias))
    fused = fuse(layers, HALF)
    assert len(fused.weights) == (1 if sizes[0] % 256 == 0 else 3)
    assert all(isinstance(layer.prepared.data, TrellisWeight) for layer in layers)
    x, norm, shift = torch.randn(rows, 2 * K if op == "SILU_MUL" else K), torch.randn(K), torch.randn(K)
    given = {"RMS_NORM": Norm(norm.half(), None, 1e-5), "LAYER_NORM": Norm(norm.half(), shift.half(), 1e-5)}.get(op)
    h = BEFORE[op](x.half().double(), norm.half().double(), shift.half().double())
    wanted = torch.cat([oracle(h, w) + layer.bias.double() for w, layer in zip(weights, layers, strict=True)], 1)
    y = fused.linear(x.half(), op, given)
    assert relative(y, wanted) < 1e-3
    if rows <= trellis_gemv.GEMV_ROWS:
        assert torch.equal(fused(x.half(), op, given), y)
        alone = [fused.linear(x[i : i + 1].half(), op, given, batch_invariant=True) for i in range(rows)]
        assert torch.equal(fused.linear(x.half(), op, given, batch_invariant=True), torch.cat(alone))
    assert (
        relative(fused._dequantize(fused.weights[-1], torch.eye(K).half())[-5:], weights[-1].dequantize()[-5:]) < 1e-3
    )


def test_kernel_shares_inputs_of_one_rotation() -> None:
    kernel: Any = CudaTrellis()
    a, same = (random_trellis(64, 96, "mul1", 3.0, 32, seed=s) for s in (1, 2))
    b = RotatedTensor(same.inner, Rotation.random(96, torch.Generator().manual_seed(1)))  # type: ignore[union-attr]
    first, other, shared = (kernel.prepare(w, HALF) for w in (a, b, same))
    assert kernel.shares(first, shared)
    assert not kernel.shares(first, other)
    for rows in (0, 2, 18):
        x = torch.randn(rows, 96, dtype=HALF)
        encoded = kernel.encode(x, first)
        for w, laid in ((a, first), (same, shared)):
            y = kernel.run(encoded, laid)
            assert y.shape == (rows, 64)
            assert rows == 0 or relative(y, oracle(x, w)) < 1e-3
            assert torch.equal(kernel.run(x, laid), y)
    rest = first.scale, first.signs, first.N, first.K, first.block, first.bits, first.code.name
    assert torch.equal(torch.ops.crelle.trellis_matmul(x, first.units, *rest), kernel.run(x, first))
