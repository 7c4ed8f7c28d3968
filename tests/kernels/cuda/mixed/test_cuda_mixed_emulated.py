"""The mixed 2/4-bit kernels run on the CPU, thread by thread: what they compute, without a GPU."""

from dataclasses import dataclass, replace

import pytest
import torch
from emulated import COMPILER, EmulatedKernel
from mixed_weights import random_mixed
from plane_weights import relative
from torch import Tensor

from crelle.formats.mixed import MixedTensor
from crelle.kernels.base import Prepared, Problem
from crelle.kernels.cuda import dispatch
from crelle.kernels.cuda.mixed import mixed_config, mixed_decode, mixed_gemv
from crelle.kernels.cuda.mixed.mixed_config import MixedTileConfig
from crelle.kernels.cuda.mixed.mixed_decode import DecodeConfig
from crelle.kernels.cuda.mixed.mixed_kernel import CudaMixed
from crelle.kernels.cuda.mixed.mixed_layout import join, lay_out
from crelle.kernels.cuda.step import fused_linear
from crelle.kernels.cuda.step.activations import Prologue
from crelle.kernels.cuda.step.fuse import fuse
from crelle.kernels.cuda.step.fused_linear import Activated, Norm

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
HALF = torch.float16


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_linear, "SMALL", 0)  # by what is stored, as large matrices
    for module in (mixed_gemv, mixed_decode):
        monkeypatch.setattr(module, "load", EmulatedKernel)
    for module in (mixed_gemv, mixed_config, mixed_decode):
        monkeypatch.setattr(module, "multiprocessors", lambda: 2)
    for module in (mixed_config, mixed_decode):
        monkeypatch.setattr(module, "room_of_device", lambda: 227 * 1024)


@pytest.mark.parametrize(
    ("form", "tokens", "config"),
    [
        ((100, 520, 16, 0.25, 0.02), 1, MixedTileConfig(3, 8, 2, 2)),
        ((100, 520, 16, 0.25, 0.02), 1, MixedTileConfig(2, 4, 2, 2, asynchronous=True)),
        ((100, 520, 16, 0.25, 0.015), 1, MixedTileConfig(1, 3, 1, 2)),  # loads, waits, decodes, multiplies
        ((33, 333, 16, 0.4, 0.05), 3, MixedTileConfig(1, 3, 3, 2)),
        ((20, 300, 8, 0.25, 0.02), 2, MixedTileConfig(2, 2, 1, 1)),
    ],
)
@pytest.mark.sample(2)
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


def test_dataflows_differ_in_what_is_loaded_and_decoded_meanwhile() -> None:
    laid = lay_out(random_mixed(100, 520, 16, 0.25, 0.02))
    found = {way: mixed_config.dataflow_configs(laid, 1, way) for way in mixed_config.DATAFLOWS}
    assert {c.stages for c in found["synchronous"]} == {1}
    assert all(c.stages > 1 for way in ("pipelined", "asynchronous") for c in found[way])
    assert {way: {c.asynchronous for c in each} for way, each in found.items()} == {
        "synchronous": {False},
        "pipelined": {False},
        "asynchronous": {True},
    }


@pytest.mark.parametrize(
    ("form", "config"),
    [
        ((100, 520, 16, 0.25, 0.02), DecodeConfig(2, 4, 2, 2)),  # sets of tiles that are not whole
        ((33, 336, 16, 0.4, 0.05), DecodeConfig(1, 3, 3, 2, 2)),
        ((50, 2080, 32, 0.25, 0.01), DecodeConfig(3, 3, 2, 2)),  # a thread has several spans of inputs
        ((40, 512, 64, 1.0, 0.0), DecodeConfig(1, 2, 1, 1)),
    ],
)
@pytest.mark.sample(2)
def test_one_token_in_one_launch(form: tuple[int, int, int, float, float], config: DecodeConfig) -> None:
    torch.manual_seed(form[0])
    w = random_mixed(*form)
    laid, (N, K) = lay_out(w), form[:2]
    x, bias, residual = (torch.randn(*shape, dtype=HALF) for shape in ((1, K), (N,), (1, N)))
    assert mixed_decode.supports(x, [laid], "PLAIN", bias, residual)
    wanted = x.double() @ w.dequantize(torch.float64).T
    y = torch.full((1, N), torch.nan)
    mixed_decode.product(x, [laid], torch.float32, out=y, config=config)
    assert relative(y, wanted) < 2e-4
    mixed_decode.product(x, [laid], torch.float32, biases=[bias], residual=residual, out=y, config=config)
    assert relative(y, wanted + bias.double() + residual.double()) < 2e-4
    x[0, 7] = torch.inf
    assert not bool(mixed_decode.product(x, [laid], torch.float32, config=config).isfinite().any())


@pytest.mark.parametrize("op", ["RMS_NORM", "LAYER_NORM", "SILU_MUL", "RELU", "GELU"])
@pytest.mark.sample(2)
def test_one_token_several_matrices_and_what_comes_before(op: Prologue) -> None:
    """Three matrices whose 4-bit groups differ, with an operation on x before them."""
    torch.manual_seed(0)
    weights = [random_mixed(n, 272, 16, 0.25, 0.05, seed=n) for n in (32, 40, 17)]
    x, norm, shift = (torch.randn(n, dtype=HALF) for n in (544, 272, 272))
    x = x[None, : 272 * (2 if op == "SILU_MUL" else 1)]
    scale, added = (norm, shift) if op == "LAYER_NORM" else (norm, None) if op == "RMS_NORM" else (None, None)
    v = x.double()
    before = {
        "RMS_NORM": lambda: v[:, :272] * torch.rsqrt(v.square().mean() + 1e-5) * norm.double(),
        "LAYER_NORM": lambda: torch.nn.functional.layer_norm(v, (272,), norm.double(), shift.double(), 1e-5),
        "SILU_MUL": lambda: torch.nn.functional.silu(v[:, :272]) * v[:, 272:],
        "RELU": v.relu,
        "GELU": lambda: torch.nn.functional.gelu(v),
    }[op]()
    laid = [lay_out(w) for w in weights]
    config = DecodeConfig(2, 4, 2, 1, 3)
    y = mixed_decode.product(x, laid, torch.float32, op, scale, added, 1e-5, config=config)
    assert relative(y, torch.cat([before @ w.dequantize(torch.float64).T for w in weights], 1)) < 5e-4


@pytest.mark.parametrize("config", [DecodeConfig(2, 4, 2, 1), DecodeConfig(1, 3, 1, 1, 2)])
def test_gate_and_up_of_one_token(config: DecodeConfig) -> None:
    torch.manual_seed(0)
    gate, up = (random_mixed(100, 272, 16, 0.25, 0.05, seed=seed) for seed in (1, 2))
    x, bias, norm = torch.randn(1, 272, dtype=HALF), torch.randn(100, dtype=HALF), torch.randn(272, dtype=HALF)
    before = x.double() * torch.rsqrt(x.double().square().mean() + 1e-5) * norm.double()
    wanted = torch.nn.functional.silu(before @ gate.dequantize(torch.float64).T + bias.double())
    wanted *= before @ up.dequantize(torch.float64).T
    laid = [lay_out(gate), lay_out(up)]
    assert mixed_decode.pairs(laid)
    assert not mixed_decode.pairs([laid[0], replace(laid[1], N=99)])
    y = torch.full((1, 100), torch.nan)
    more = (None, 1e-5, [bias, None], None, y, config, True)
    mixed_decode.product(x, laid, torch.float32, "RMS_NORM", norm, *more)
    assert relative(y, wanted) < 5e-4


def test_outliers_of_uneven_tiles() -> None:
    """Where some tiles have many more outliers than others, the kernel looks up where they begin."""
    w = random_mixed(64, 256, 16, 0.25, 0.0)
    outliers = torch.zeros(64, 256)
    outliers[3] = outliers[40, ::7] = 1
    codes = w.codes()
    w = MixedTensor.from_codes((64, 256), w.four, codes, w.second_scale, _row(w), outliers, w.packing, w.block)
    even, uneven = lay_out(random_mixed(64, 256, 16, 0.25, 0.05)), lay_out(w)
    assert even.runs > 0
    assert uneven.runs == 0
    x = torch.randn(1, 256, dtype=HALF)
    y = mixed_decode.product(x, [uneven], torch.float32, config=DecodeConfig(2, 4, 2, 1))
    assert relative(y, x.double() @ w.dequantize(torch.float64).T) < 2e-4


def _row(w: MixedTensor) -> tuple[Tensor, Tensor]:
    assert w.row_scale is not None
    assert w.row_zero is not None
    return w.row_scale, w.row_zero


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
    fused = fuse(layers, HALF)
    assert len(fused.weights) == 1 + (seeds[0] != seeds[1])
    x, norm = torch.randn(3, 256, dtype=HALF), Norm(torch.randn(256, dtype=HALF), None, 1e-5)
    before = (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)).half() * norm.weight
    wanted = torch.cat([before.double() @ w.dequantize(torch.float64).T for w in weights], -1)
    wanted[:, :32] += bias.double()
    y, total = fused.norm_linear(x, None, "RMS_NORM", norm)
    assert torch.equal(total, x)
    assert relative(y, wanted) < 1e-3
    one, _ = fused.norm_linear(x[:1], None, "RMS_NORM", norm)  # in one launch
    assert relative(one, wanted[:1]) < 1e-3
    alone = fuse([layers[0]], HALF)
    residual = torch.randn(3, 32, dtype=HALF)
    added, rest = alone.linear_residual(x, residual)
    plain = x.double() @ weights[0].dequantize(torch.float64).T + bias.double() + residual.double()
    assert rest is None
    assert relative(added, plain) < 1e-3


def test_activated_products_of_one_token() -> None:
    """Gate and up give silu(gate) * up where one launch makes both, and the next product takes it as it is."""
    torch.manual_seed(0)
    kernel = CudaMixed()
    forms = ((96, 256, 1), (96, 256, 2), (32, 96, 3))
    weights = [random_mixed(N, K, 16, 0.25, 0.02, seed=seed) for N, K, seed in forms]
    gate, up, down = (Layer(Prepared(Problem.of(w, HALF), kernel, lay_out(w)), None) for w in weights)
    pair, after = fuse([gate, up], HALF), fuse([down], HALF)
    x, norm = torch.randn(2, 256, dtype=HALF), Norm(torch.ones(256, dtype=HALF), None, 1e-5)
    inner = pair.activated(x[:1], "SILU_MUL", after, "RMS_NORM", norm)
    assert isinstance(inner, Activated)
    both = pair.activated(x, "SILU_MUL", after, "RMS_NORM", norm)  # two tokens: the next product's prologue does it
    assert isinstance(both, Tensor)
    y, seen = after.normed(inner, norm, pair, "SILU_MUL")
    assert y is seen
    assert relative(y, after(both, "SILU_MUL")[:1].double()) < 2e-3


def test_many_rows_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_gemv, "_SCRATCH", 2 * 300 * 40)
    monkeypatch.setattr(dispatch, "mixed_route", lambda rows: "torch")
    w = random_mixed(70, 300, 16, 0.25, 0.02)
    x, bias = torch.randn(33, 300, dtype=HALF), torch.randn(70, dtype=HALF)
    wanted = x.double() @ w.dequantize(torch.float64).T
    assert relative(mixed_gemv.matmul(x, lay_out(w)), wanted) < 1e-3
    assert relative(mixed_gemv.matmul(x, lay_out(w), bias), wanted + bias.double()) < 1e-3
