"""integer_gemm.cu against integer_reference; what can be checked without a GPU comes first."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from disassembly import disassemble
from emulated import COMPILER, EmulatedKernel
from integer_cases import (
    CASES,
    Case,
    emulated_tensor_map,
    inputs,
    integer_x,
    oracle,
    quantized,
    random_integer_weight,
)
from product_checks import graph_gives_the_same
from torch import Tensor

from crelle.formats.activations import QuantizedX, least_and_top
from crelle.formats.packing import pack_stream
from crelle.kernels import cuda
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.integer import integer_gemm
from crelle.kernels.cuda.integer.integer_gemm import IntegerSm80TileConfig, IntegerTileConfig
from crelle.kernels.cuda.integer.integer_layout import lay_out

HALF, BF16 = torch.float16, torch.bfloat16
EPSILON = {HALF: 2**-11, BF16: 2**-8}
SM80 = [
    IntegerSm80TileConfig(8, 1, 4, 1, 2, 2),
    IntegerSm80TileConfig(16, 2, 4, 2, 3, 3),
    IntegerSm80TileConfig(32, 1, 4, 1, 2, 4),
    IntegerSm80TileConfig(8, 2, 2, 8, 2, 2, half_bytes=False),
    IntegerSm80TileConfig(16, 2, 1, 4, 2, 3, 2, half_bytes=False),
]
SM90 = [
    IntegerTileConfig(8, 1, 3),
    IntegerTileConfig(16, 2, 4),
    IntegerTileConfig(32, 2, 3),
    IntegerTileConfig(16, 1, 3, split_k=2),
    IntegerTileConfig(24, 3, 3),
    IntegerTileConfig(64, 1, 4, occupancy=2),
    IntegerTileConfig(96, 2, 4, split_k=2),
    IntegerTileConfig(128, 2, 4),
    IntegerTileConfig(128, 3, 3),
    IntegerTileConfig(128, 2, 4, split_k=4),
]
EMULATED = 5  # of these, the first
Config = IntegerTileConfig | IntegerSm80TileConfig
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))
emulated = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def close(y: Tensor, wanted: Tensor) -> bool:
    """Whether y is `wanted` in f32, but for the rounding of y's type and of scales and sums in f32."""
    error = (y.float() - wanted).abs()
    allowed = EPSILON[y.dtype] * wanted.abs() + 4e-6 * wanted.abs().amax(-1, keepdim=True) + 2**-24
    return bool((error <= allowed).all())


def check(case: Case, M: int, N: int, K: int, config: Config | None, dtype: torch.dtype, device: str = "cpu") -> None:
    w = random_integer_weight(case, N, K, device)
    laid = lay_out(w)
    q = quantized(inputs(M, K, dtype, device), w)
    x, wanted = integer_x(q, w, dtype), oracle(q, w)
    y = torch.full((M, N), torch.nan, dtype=dtype, device=device)
    integer_gemm.product(x, laid, out=y, config=config)
    assert close(y, wanted)
    assert torch.equal(y, integer_gemm.product(x, laid, config=config))
    bias, residual = (torch.randn(*shape, device=device).to(dtype) for shape in ((N,), (M, N)))
    integer_gemm.product(x, laid, bias, residual, residual, config)  # in place on the residual stream
    assert not laid.semaphores.any()
    again = integer_gemm.product(x, laid, bias, None, None, config)
    assert close(again, wanted + bias.float())


# --- without a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_gemm, "load", EmulatedKernel)
    monkeypatch.setattr(integer_gemm, "multiprocessors", lambda: 3)
    monkeypatch.setattr(integer_gemm, "tensor_map", emulated_tensor_map)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))


@emulated
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sample(4)
def test_emulated_products_match_oracle(case: Case) -> None:
    i = CASES.index(case)
    for config, (M, N, K) in zip(
        (SM80[i % 5], SM90[i % EMULATED]),
        ((9, 100, 300), (33, 139, 700)) if i % 2 else ((1, 17, 515), (9, 70, 300)),
        strict=True,
    ):
        check(case, M, N, K, config, (HALF, BF16)[i % 2])


@emulated
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("case", "config"),
    [
        (CASES[11], IntegerTileConfig(16, 1, 3, split_k=2)),
        (CASES[12], IntegerTileConfig(16, 1, 2, split_k=2)),
        (CASES[0], IntegerTileConfig(16, 2, 2, split_k=2)),
        (CASES[10], IntegerTileConfig(16, 1, 3, split_k=4)),
        (CASES[4], IntegerTileConfig(24, 1, 3, split_k=4)),
    ],
    ids=str,
)
@pytest.mark.sample(2)
def test_emulated_clusters(case: Case, config: IntegerTileConfig) -> None:
    check(case, 19, 330, 900, config, HALF)


def extreme(case: Case, which: int, device: str = "cpu") -> tuple[Any, QuantizedX]:
    """A weight and x of the largest codes, with scales that are powers of two: sums in f32 are exact."""
    N, K, M = 70, 400, 9
    w = random_integer_weight(case, N, K, device)
    least, top = least_and_top(case.bits)
    if case.format == "grouped":
        codes = torch.full((N, w.sizes.normal), (top, least)[which % 2], dtype=torch.int8, device=device)
        w = replace(w, packed=pack_stream(codes.view(torch.uint8) & (2**case.bits - 1), case.bits))
        w = replace(w, scale=torch.full_like(w.scale, 2**-10))
    else:
        a, z = ((16, 113), (16, 127))[which % 2]
        codes = torch.full((N, w.sizes.normal), (15, 0)[which % 2], dtype=torch.uint8, device=device)
        w = replace(w, packed=pack_stream(codes, 4), scale=torch.full_like(w.scale, 2**-10))
        w = replace(w, group_scale=torch.full_like(w.group_scale, a), group_zero=torch.full_like(w.group_zero, z))
    if w.outliers is not None:
        w = replace(w, outliers=torch.full_like(w.outliers, (127, -127)[which % 2]))
    q = quantized(inputs(M, K, HALF, device), w)
    least, top = least_and_top(case.bits_x)
    codes_x = torch.full_like(q.codes, (top, least)[which // 2])
    if case.outliers and case.outliers_x:
        codes_x[:, K - case.outliers :] = (127, -127)[which // 2]
    codes_x[1::2, ::2] = 1
    return w, QuantizedX(codes_x, torch.full_like(q.scales, 0.25), None)


@emulated
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sample(4)
def test_emulated_sums_of_extreme_codes_are_exact(case: Case) -> None:
    i = CASES.index(case)
    for which in (i % 4, (i + 1) % 4, (i + 2) % 4):
        w, q = extreme(case, which)
        laid = lay_out(w)
        for config in (SM80[i % 3], SM90[i % EMULATED]):
            y = integer_gemm.product(integer_x(q, w, BF16), laid, config=config)
            assert torch.equal(y, oracle(q, w, BF16))


def adversarial(K: int, device: str = "cpu") -> Tensor:
    x = torch.zeros(5, K, device=device)
    x[1, 17] = 60000  # one huge value
    x[2] = 1e-7
    x[3] = -1
    x[4, 5] = torch.inf
    return x.half()


def check_adversarial(case: Case, config: Config | None, device: str = "cpu") -> None:
    w = random_integer_weight(case, 40, 300, device)
    laid = lay_out(w)
    q = quantized(adversarial(300, device), w)
    y = integer_gemm.product(integer_x(q, w, BF16), laid, config=config)
    assert close(y[:4], oracle(q, w)[:4])
    assert not y[0].any()
    assert bool(y[:4].isfinite().all())
    assert not bool(y[4].isfinite().any())


@emulated
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sample(4)
def test_emulated_adversarial_inputs(case: Case) -> None:
    i = CASES.index(case)
    for config in (SM80[i % 3], SM90[i % EMULATED]):
        check_adversarial(case, config)


@pytest.mark.usefixtures("on_cpu")
def test_no_rows() -> None:
    w = random_integer_weight(CASES[0], 40, 300)
    x = integer_x(quantized(torch.zeros(0, 300, dtype=HALF), w), w, HALF)
    assert integer_gemm.product(x, lay_out(w)).shape == (0, 40)


@pytest.mark.parametrize("tokens", [1, 16, 17, 40, 64, 100, 150, 256, 300, 512, 5000])
@pytest.mark.parametrize("N", [100, 4096, 11008])
def test_the_chosen_configs_fit_the_chip(N: int, tokens: int) -> None:
    for case in (CASES[0], CASES[4], CASES[10], CASES[12]):
        w = replace(lay_out(random_integer_weight(case, 16, 4096)), N=N)
        s = integer_gemm.choose(w, tokens, 132, (9, 0))
        if isinstance(s, IntegerSm80TileConfig):
            assert tokens <= 16
            assert integer_gemm.sm80_shared_bytes(w, s) + 1024 <= 228 * 1024
        else:
            assert s.occupancy * (integer_gemm.shared_bytes(w, s) + 1024 + 256) <= 228 * 1024
            assert s.stages >= 2
            grid, whole = integer_gemm.schedule(w, tokens, s, 132)
            assert s.split_k > 1 or grid <= w.semaphores.numel()
            assert whole <= integer_gemm._tiles(w, tokens, s)
        for room in (99 * 1024, 163 * 1024):
            assert integer_gemm.sm80_shared_bytes(w, integer_gemm._choose_sm80(w, tokens, room)) <= room


@pytest.mark.skipif(bool(jit.missing()), reason=str(jit.missing()))
@pytest.mark.parametrize(
    ("case", "config"), [(CASES[1], SM90[7]), (CASES[1], SM90[9]), (CASES[12], SM90[7]), (CASES[10], SM90[8])]
)
@pytest.mark.sample(4)
def test_products_are_not_waited_for_one_by_one(case: Case, config: IntegerTileConfig) -> None:
    """Where the assembler cannot follow which instructions are under way, it waits behind each of them."""
    laid = lay_out(random_integer_weight(case, 64, 512))
    built = jit.compile(*integer_gemm.variant(laid, config, HALF), "sm_90a")
    if (code := disassemble(built.cubin)) is None:
        pytest.skip("no disassembler")
    groups = len(re.findall(r"IGMMA.*gsb0", code))
    assert groups * 4 == len(re.findall("IGMMA", code))


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@gpu
@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_match_oracle(case: Case) -> None:
    for i, M in enumerate((0, 1, 5, 16, 33, 70, 130, 300)):
        for N, K in ((500, 1024), (139, 700)):
            check(case, M, N, K, None, (HALF, BF16)[i % 2], "cuda")
    for which in range(4):
        w, q = extreme(case, which, "cuda")
        assert torch.equal(integer_gemm.product(integer_x(q, w, BF16), lay_out(w)), oracle(q, w, BF16))
    check_adversarial(case, None, "cuda")


@gpu
@needs_gpu
@pytest.mark.parametrize("config", [*SM80, *SM90], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_config_matches_oracle(case: Case, config: Config) -> None:
    if isinstance(config, IntegerTileConfig) and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    check(case, 300, 1100, 2300, config, HALF, "cuda")


@gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 128, 256, 512, 1000])
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[10], CASES[12]], ids=str)
def test_large_products_rerun_and_in_graphs(case: Case, tokens: int) -> None:
    w = random_integer_weight(case, 4096, 4096, "cuda")
    laid = lay_out(w)
    q = quantized(inputs(tokens, 4096, HALF, "cuda"), w)
    x = integer_x(q, w, HALF)
    y = integer_gemm.product(x, laid)
    assert close(y, oracle(q, w))
    for _ in range(30):
        assert torch.equal(integer_gemm.product(x, laid), y)
    assert not laid.semaphores.any()
    assert graph_gives_the_same(lambda out: integer_gemm.product(x, laid, out=out))
