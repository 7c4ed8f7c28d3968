"""integer_gemm.cu against integer_reference; what can be checked without a GPU comes first."""

from dataclasses import replace

import pytest
import torch
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

from crelle.kernels import cuda
from crelle.kernels.cuda import integer_gemm, jit
from crelle.kernels.cuda.integer_gemm import IntegerSm80TileConfig, IntegerTileConfig
from crelle.kernels.cuda.integer_layout import IntegerTiles, lay_out

HALF, BF16 = torch.float16, torch.bfloat16
EPSILON = {HALF: 2**-11, BF16: 2**-8}
SM80 = [
    IntegerSm80TileConfig(8, 1, 4, 1, 2),
    IntegerSm80TileConfig(16, 2, 4, 2, 3),
    IntegerSm80TileConfig(32, 1, 4, 1, 2),
]
SM90 = [
    IntegerTileConfig(8, 1, 3),
    IntegerTileConfig(16, 2, 4, "BLOCKS"),
    IntegerTileConfig(32, 2, 3, "HALVES"),
    IntegerTileConfig(64, 2, 4, "WARPGROUPS", 2),
    IntegerTileConfig(64, 2, 4, "HALVES"),
    IntegerTileConfig(96, 2, 4, "BLOCKS", split_k=2),
    IntegerTileConfig(128, 2, 4, "HALVES"),
    IntegerTileConfig(128, 3, 3),
    IntegerTileConfig(128, 2, 4, split_k=4),
]
Config = IntegerTileConfig | IntegerSm80TileConfig
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))
emulated = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def close(y: Tensor, wanted: Tensor) -> bool:
    """Whether y is `wanted` in f32, but for the rounding of y's type and of scales and sums in f32."""
    error = (y.float() - wanted).abs()
    allowed = EPSILON[y.dtype] * wanted.abs() + 4e-6 * wanted.abs().amax(-1, keepdim=True) + 2**-24
    return bool((error <= allowed).all())


def usable(config: Config, w: IntegerTiles) -> Config:
    """The config without a second set of accumulators where the kernel for this weight has none."""
    if isinstance(config, IntegerTileConfig) and (w.segments or w.subs > 1):
        return replace(config, overlap="WARPGROUPS")
    return config


def check(case: Case, M: int, N: int, K: int, config: Config | None, dtype: torch.dtype, device: str = "cpu") -> None:
    w = random_integer_weight(case, N, K, device)
    laid = lay_out(w)
    q = quantized(inputs(M, K, dtype, device), w)
    x, wanted = integer_x(q, w, dtype), oracle(q, w)
    config = usable(config, laid) if config else None
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
def test_emulated_products_match_oracle(case: Case) -> None:
    i = CASES.index(case)
    for config, (M, N, K) in zip(
        (SM80[i % 3], SM90[i % 4]),
        ((9, 100, 300), (33, 139, 700)) if i % 2 else ((1, 17, 515), (9, 70, 300)),
        strict=True,
    ):
        check(case, M, N, K, config, (HALF, BF16)[i % 2])
