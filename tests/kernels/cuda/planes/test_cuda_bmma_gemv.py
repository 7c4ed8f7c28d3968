"""bmma_gemv.cu and encode.cu against f64 of the dequantized weight; what can be checked without a GPU comes first."""

from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from plane_weights import KINDS, TOLERANCE, random_weight, relative
from torch._subclasses.fake_tensor import FakeTensorMode

from crelle.kernels import ops
from crelle.kernels.cuda.planes import bmma_gemv
from crelle.kernels.cuda.planes.bmma_gemv import GemvTileConfig
from crelle.kernels.cuda.planes.kernel import Cuda
from crelle.kernels.cuda.planes.weight_layout import ScaleKind, lay_out
from crelle.kernels.cuda.step.activations import Prologue, is_gated
from crelle.kernels.reference import matmul_fp64

HALF, BF16 = torch.float16, torch.bfloat16


# --- without a GPU ----------------------------------------------------------------------------------------------------


@given(st.integers(-13107, 13107))
def test_eight_digits_of_base_minus_four_hold_the_integer(q: int) -> None:
    digits = (q + 0xCCCC) ^ 0xCCCC  # as encode.cu makes them
    assert 0 <= digits < 1 << 16
    assert sum((digits >> 2 * i & 3) * (-4) ** i for i in range(8)) == q


def test_the_operator_has_a_shape_before_it_runs() -> None:
    w = lay_out(random_weight(ScaleKind.BCQ, 3, 40, 300, 128))
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = Cuda().run(torch.empty(5, 300, dtype=HALF), w)
    assert (y.shape, y.dtype) == ((5, 40), HALF)


@pytest.mark.parametrize("P", [2, 3, 4])
def test_tile_configs_measured_for_other_groups_stay_near_their_size(P: int) -> None:
    def chosen(group: int, N: int, K: int) -> GemvTileConfig:
        w = replace(lay_out(random_weight(ScaleKind.BCQ, P, 16, 12288, group)), N=N, K=K)
        return bmma_gemv.choose(w, 1, processors=132)

    measured = {
        (m.groups, m.P): m.config for m in bmma_gemv._autotuned() if m.groups != 2 and (m.N, m.K) == (12288, 12288)
    }
    assert chosen(64, 12288, 12288) == measured[4, P]
    assert chosen(12288, 12288, 12288) == measured[1, P]
    assert chosen(64, 4096, 4096) == GemvTileConfig(1, 8, 1, chosen(64, 4096, 4096).stages, 1, 16)
    assert chosen(256, 4096, 4096) == chosen(128, 4096, 4096)  # the size says more than the group


@given(
    P=st.integers(1, 8),
    rows=st.integers(1, 60000),
    tokens=st.integers(1, 4),
    kind=st.sampled_from(ScaleKind),
    group=st.sampled_from([32, 128, 256]),
    epilogue=st.sampled_from(bmma_gemv.EPILOGUES),
)
def test_every_choice_fits_a_multiprocessor(
    P: int, rows: int, tokens: int, kind: ScaleKind, group: int, epilogue: bmma_gemv.EpilogueOut
) -> None:
    w = lay_out(random_weight(kind, P, 16, 512, group))
    tall = replace(w, N=rows)
    s = bmma_gemv.choose(tall, tokens, processors=132, in_graph=epilogue != "STORE", epilogue=epilogue)
    assert s.tiles <= s.stages
    assert epilogue == "STORE" or 128 % (8 * s.tiles if is_gated(epilogue) else 16 * s.tiles) == 0  # whole clusters
    assert (
        s.warps * bmma_gemv._pipeline_bytes(tall, s) <= 99 * 1024
    )  # what every chip since Ampere gives one thread block


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def device_weight(kind: ScaleKind, P: int, N: int, K: int, group: int, dtype: torch.dtype = HALF):  # type: ignore[no-untyped-def]
    return random_weight(kind, P, N, K, group, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "P", "group"), KINDS)
@pytest.mark.parametrize(("N", "K"), [(16, 256), (100, 576), (17, 300), (1, 8), (333, 1023)])
def test_decode_matches_oracle(kind: ScaleKind, P: int, group: int, N: int, K: int) -> None:
    torch.manual_seed(N + P)
    w = device_weight(kind, P, N, K, group)
    prepared = lay_out(w)
    for tokens in (1, 2, 3, 4):
        x = torch.randn(tokens, K, device="cuda", dtype=HALF)
        out = torch.full((tokens, N), torch.nan, device="cuda", dtype=HALF)
        bmma_gemv.product(bmma_gemv.encode(x, prepared), prepared, HALF, out=out)
        size = x.double().abs() @ w.dequantize(torch.float64).abs().T  # one output may cancel to nearly nothing
        error = (out.double() - matmul_fp64(x, w)).norm()
        alike = min(K, 16) if N > 1 else 1  # roundings that half cancel; too few outputs do not show that they do
        assert error < TOLERANCE[HALF] * size.norm() / alike**0.5, (tokens, N, K)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "P", "group"), KINDS)
@pytest.mark.parametrize("op", ["PLAIN", "RMS_NORM", "LAYER_NORM", "SILU_MUL", "RELU", "GELU_TANH_MUL"])
def test_encoding_inside_the_product_has_the_bits_of_two_launches(
    kind: ScaleKind, P: int, group: int, op: Prologue
) -> None:
    torch.manual_seed(P)
    for N, K in ((100, 576), (333, 1023), (16, 256), (512, 2048)):
        w = lay_out(device_weight(kind, P, N, K, group))
        norm = [torch.randn(K, device="cuda", dtype=HALF) if "NORM" in op else None for _ in range(2)]
        norm[1] = norm[1] if op == "LAYER_NORM" else None
        for tokens in (1, 2, 3, 4):
            x = torch.randn(tokens, K * (2 if is_gated(op) else 1), device="cuda", dtype=HALF)
            bias, residual = (
                torch.randn(N, device="cuda", dtype=HALF),
                torch.randn(tokens, N, device="cuda", dtype=HALF),
            )
            out = torch.full((tokens, N), torch.nan, device="cuda", dtype=HALF)
            config = bmma_gemv.choose(w, tokens)
            bmma_gemv.encode_product(x, w, HALF, op, *norm, 1e-5, bias, residual, out, config)
            wanted = bmma_gemv.product(bmma_gemv.encode(x, w, op, *norm, 1e-5), w, HALF, bias, residual, config=config)
            # a layer norm is contracted otherwise by the compiler, so that now and then a digit differs
            same = relative(out, wanted.double()) < TOLERANCE[HALF] if op == "LAYER_NORM" else torch.equal(out, wanted)
            assert same, (N, K, tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [HALF, BF16, torch.float32])
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_decode_takes_every_type(dtype: torch.dtype, scales: torch.dtype) -> None:
    for kind in ScaleKind:
        w = device_weight(kind, 3, 48, 640, 128, scales)
        # The same x in every run: of random ones, 1 in about 1,000 is rounded too coarsely for affine weights.
        x = torch.randn(2, 640, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
        assert relative(ops.matmul(x, ops.prepare(w, dtype, "cuda")), matmul_fp64(x, w)) < TOLERANCE[dtype]


@pytest.mark.gpu
def test_outliers_keep_the_small_inputs() -> None:
    w = device_weight(ScaleKind.BCQ, 3, 64, 1024, 128)
    x = torch.randn(1, 1024, device="cuda", dtype=HALF)
    x[0, 5] = 1000
    assert relative(ops.matmul(x, ops.prepare(w, HALF, "cuda")), matmul_fp64(x, w)) < TOLERANCE[HALF]


@pytest.mark.gpu
def test_zero_and_one_hot_inputs() -> None:
    w = device_weight(ScaleKind.UNIFORM, 4, 64, 512, 128)
    prepared = ops.prepare(w, HALF, "cuda")
    assert not ops.matmul(torch.zeros(1, 512, device="cuda", dtype=HALF), prepared).any()
    numbers = w.dequantize(torch.float64)
    for k in (0, 31, 127, 128, 300, 511):
        x = torch.zeros(1, 512, device="cuda", dtype=HALF)
        x[0, k] = 1
        torch.testing.assert_close(ops.matmul(x, prepared)[0].double(), numbers[:, k], rtol=2e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_bias_and_residual_are_added(tokens: int) -> None:
    w = device_weight(ScaleKind.AFFINE, 4, 100, 512, 64)
    prepared = lay_out(w)
    x = torch.randn(tokens, 512, device="cuda", dtype=HALF)
    bias, residual = torch.randn(100, device="cuda", dtype=HALF), torch.randn(tokens, 100, device="cuda", dtype=HALF)
    y = bmma_gemv.product(bmma_gemv.encode(x, prepared), prepared, HALF, bias, residual)
    assert relative(y, matmul_fp64(x, w) + bias.double() + residual.double()) < TOLERANCE[HALF]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_operations_on_the_way_match_torch(dtype: torch.dtype, tokens: int) -> None:
    K = 1000
    w = device_weight(ScaleKind.BCQ, 3, 80, K, 128)
    prepared = lay_out(w)
    x, gain, shift = torch.randn(tokens, K, device="cuda", dtype=dtype), *torch.randn(2, K, device="cuda", dtype=dtype)
    both = torch.randn(tokens, 2 * K, device="cuda", dtype=dtype)
    wide = x.double()
    rms = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)) * gain.double()
    cases = [
        (bmma_gemv.encode(x, prepared, "RMS_NORM", gain, None, 1e-5), rms),
        (
            bmma_gemv.encode(x, prepared, "LAYER_NORM", gain, shift, 1e-5),
            F.layer_norm(wide, (K,), gain.double(), shift.double(), 1e-5),
        ),
        (bmma_gemv.encode(both, prepared, "SILU_MUL"), F.silu(both[:, :K].double()) * both[:, K:].double()),
        (bmma_gemv.encode(x, prepared, "RELU"), wide.relu()),
        (bmma_gemv.encode(x, prepared, "GELU"), F.gelu(wide)),
        (bmma_gemv.encode(x, prepared, "GELU_TANH"), F.gelu(wide, approximate="tanh")),
        (bmma_gemv.encode(both, prepared, "GELU_MUL"), F.gelu(both[:, :K].double()) * both[:, K:].double()),
        (
            bmma_gemv.encode(both, prepared, "GELU_TANH_MUL"),
            F.gelu(both[:, :K].double(), approximate="tanh") * both[:, K:].double(),
        ),
    ]
    for digits, plain in cases:
        y = bmma_gemv.product(digits, prepared, dtype)
        assert relative(y, plain @ w.dequantize(torch.float64).T) < TOLERANCE[dtype]


@pytest.mark.gpu
def test_first_planes_of_a_nested_weight() -> None:
    w = device_weight(ScaleKind.AFFINE, 4, 128, 1024, 128)
    whole = lay_out(w)
    for p in (1, 2, 3):
        fewer = type(w)(w.planes[:p].contiguous(), w.K, w.group, w.scale, w.low)
        nested = replace(whole, P=p, scales=lay_out(fewer).scales)
        x = torch.randn(1, 1024, device="cuda", dtype=HALF)
        y = bmma_gemv.product(bmma_gemv.encode(x, nested), nested, HALF)
        assert relative(y, matmul_fp64(x, fewer)) < TOLERANCE[HALF]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4])
def test_rerun_is_bitwise_equal(tokens: int) -> None:
    w = lay_out(device_weight(ScaleKind.BCQ, 3, 4096, 4096, 128))
    x = torch.randn(tokens, 4096, device="cuda", dtype=HALF)
    first = bmma_gemv.product(bmma_gemv.encode(x, w), w, HALF)
    for _ in range(20):
        assert torch.equal(bmma_gemv.product(bmma_gemv.encode(x, w), w, HALF), first)


@pytest.mark.gpu
def test_every_cut_gives_the_same_numbers() -> None:
    w = device_weight(ScaleKind.BCQ, 2, 200, 2048, 128)
    prepared = lay_out(w)
    x = torch.randn(1, 2048, device="cuda", dtype=HALF)
    digits, oracle = bmma_gemv.encode(x, prepared), matmul_fp64(x, w)
    for config in [
        (1, 4, 1, 4, 32),
        (1, 8, 2, 2, 16),
        (2, 8, 1, 4, 24),
        (4, 4, 1, 5, 16),
        (1, 16, 1, 1, 32),
        (3, 2, 2, 3, 8),
    ]:
        y = bmma_gemv.product(digits, prepared, HALF, config=bmma_gemv.GemvTileConfig(*config))
        assert relative(y, oracle) < TOLERANCE[HALF], config


@pytest.mark.gpu
def test_capture_and_replay() -> None:
    w = device_weight(ScaleKind.BCQ, 3, 64, 512, 128)
    prepared = ops.prepare(w, HALF, "cuda")
    x = torch.randn(1, 512, device="cuda", dtype=HALF)
    ops.matmul(x, prepared)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.matmul(x, prepared)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert relative(y, matmul_fp64(x, w)) < TOLERANCE[HALF]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its own parts
@pytest.mark.gpu
def test_torch_compile_sees_through() -> None:
    w = device_weight(ScaleKind.BCQ, 3, 64, 512, 128)
    prepared = ops.prepare(w, HALF, "cuda")
    compiled = torch.compile(lambda x: ops.matmul(x.relu(), prepared) + 1, fullgraph=True)
    x = torch.randn(2, 512, device="cuda", dtype=HALF)
    torch.testing.assert_close(compiled(x), ops.matmul(x.relu(), prepared) + 1, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("op", [op for op in get_args(Prologue) if op != "PLAIN"])
def test_a_product_leaves_as_digits_of_what_comes_next(op: Prologue, tokens: int, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("thread blocks do not meet before sm_90")
    N, K, rows = 1280, 600, 2560 if is_gated(op) else 1280
    w, behind = device_weight(ScaleKind.BCQ, 3, rows, K, 128), device_weight(ScaleKind.BCQ, 4, 72, N, 128)
    first, second = lay_out(w), lay_out(behind)
    assert bmma_gemv.epilogue_encodes(first, op, dtype)
    assert not bmma_gemv.epilogue_encodes(replace(first, N=rows - 16), op, dtype)
    x, residual = (torch.randn(tokens, n, device="cuda", dtype=dtype) for n in (K, N))
    residual += 1  # a mean, which a layer norm subtracts
    bias, gain, shift = (torch.randn(n, device="cuda", dtype=dtype) for n in (rows, N, N))
    plain = matmul_fp64(x, w) + bias.double()
    fold = after = None
    if op in ("RMS_NORM", "LAYER_NORM"):
        y, digits = bmma_gemv.product_encode(bmma_gemv.encode(x, first), first, dtype, op, gain, 1e-5, bias, residual)
        assert y is not None
        assert relative(y, plain + residual.double()) < TOLERANCE[dtype]
        wide = y.double()
        if op == "LAYER_NORM":
            between = F.layer_norm(wide, (N,), gain.double(), shift.double(), 1e-5)
            fold = behind.dequantize(torch.float64).matmul(gain.double()).float()
            after = matmul_fp64(shift[None], behind)[0].to(dtype)
        else:
            between = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * gain.double()
    else:
        y, digits = bmma_gemv.product_encode(bmma_gemv.encode(x, first), first, dtype, op, bias=bias)
        assert y is None
        act = {"SILU": F.silu, "RELU": F.relu, "GELU": F.gelu, "GELU_TANH": partial(F.gelu, approximate="tanh")}
        activated = act[op.removesuffix("_MUL")](plain[:, :N])
        between = activated * plain[:, N:] if is_gated(op) else activated
    found = bmma_gemv.product(digits, second, dtype, after, fold=fold)
    assert relative(found, between @ behind.dequantize(torch.float64).T) < 1.5 * TOLERANCE[dtype]  # of two products


@pytest.mark.gpu
@pytest.mark.parametrize("config", [(1, 8, 1, 2), (2, 8, 1, 4), (4, 4, 1, 4), (1, 16, 1, 1), (2, 4, 1, 2)])
def test_digits_do_not_depend_on_the_cut_or_the_rounds(config: tuple[int, int, int, int]) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("thread blocks do not meet before sm_90")
    w = lay_out(device_weight(ScaleKind.BCQ, 2, 40960, 512, 128))  # more than fit at once
    x, gain = torch.randn(1, 512, device="cuda", dtype=HALF), torch.randn(40960, device="cuda", dtype=HALF)
    digits = bmma_gemv.encode(x, w)
    y, made = bmma_gemv.product_encode(
        digits, w, HALF, "RMS_NORM", gain, config=bmma_gemv.GemvTileConfig(*config, 1, 32, 1)
    )
    assert y is not None
    behind = replace(w, K=40960, words=w.words.new_empty(1, 160, 2, 32, 4))
    wanted = bmma_gemv.encode(y.float() * gain.float(), behind)
    assert torch.equal(made.bits.view(-1), wanted.bits.view(-1))
    assert torch.equal(made.scale, wanted.scale)
    assert made.moments is not None
    squares = y.double().view(-1, 128).pow(2).sum(-1)
    torch.testing.assert_close(made.moments[:, 0, 1].double(), squares, rtol=1e-5, atol=0)
