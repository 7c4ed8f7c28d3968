"""skinny_gemm.cu against f64 of the dequantized weight; what can be checked without a GPU comes first."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plane_weights import KINDS, TOLERANCE, random_weight, relative
from product_checks import check_first_planes, check_reruns, graph_gives_the_same

from crelle.kernels.cuda import jit
from crelle.kernels.cuda.planes import skinny_gemm
from crelle.kernels.cuda.planes.skinny_gemm import SkinnyTileConfig
from crelle.kernels.cuda.planes.weight_layout import ScaleKind, lay_out

HALF, BF16 = torch.float16, torch.bfloat16
CONFIGS = [
    SkinnyTileConfig(8, 2, 1, 16),
    SkinnyTileConfig(16, 1, 2, 8),
    SkinnyTileConfig(16, 3, 2, 4, 2),
    SkinnyTileConfig(24, 1, 1, 4),
    SkinnyTileConfig(32, 2, 1, 8),
]


# --- without a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "P", "group"), KINDS)
@pytest.mark.parametrize("tokens", [5, 8, 9, 16, 20, 32])
@pytest.mark.parametrize("N", [17, 500, 4096, 11008, 49152])
def test_the_chosen_shape_fits_the_chip(kind: ScaleKind, P: int, group: int, tokens: int, N: int) -> None:
    w = replace(lay_out(random_weight(kind, P, 16, 4096, group, torch.float32)), N=N)
    s = skinny_gemm.choose(w, tokens, 132)
    assert s.occupancy * (skinny_gemm.shared_bytes(w, s) + 1024) <= 228 * 1024
    assert s.tokens >= tokens
    assert s.tokens % 8 == 0
    assert s.warps_k <= w.blocks
    assert s.warps_n * s.warps_k <= (16 if tokens <= 16 else 8)


@pytest.mark.parametrize("N", [4096, 5120, 8192, 11008, 12288, 13824, 28672])
def test_no_multiprocessor_has_twice_the_rows_of_another(N: int) -> None:
    w = replace(lay_out(random_weight(ScaleKind.BCQ, 4, 16, 4096, 128)), N=N)
    s = skinny_gemm.choose(w, 16, 132)
    sets = -(-N // (16 * s.tiles * s.warps_n))
    rounds = -(-sets // (132 * s.occupancy))
    assert N / 132 / (rounds * s.occupancy * 16 * s.tiles * s.warps_n) > 0.6


def test_rows_are_taken_as_they_are() -> None:
    w = lay_out(random_weight(ScaleKind.BCQ, 2, 16, 512, 128))
    x = torch.randn(16, 512).half()
    assert skinny_gemm.permuted_rows(x, w) is x


@pytest.mark.skipif(bool(jit.missing()), reason=str(jit.missing()))
@pytest.mark.parametrize(
    ("kind", "P"), [(ScaleKind.BCQ, 2), (ScaleKind.BCQ, 4), (ScaleKind.UNIFORM, 4), (ScaleKind.BCQ, 8)]
)
@pytest.mark.sample(2)
def test_the_kernel_stays_in_registers(kind: ScaleKind, P: int, tmp_path: Path) -> None:
    from cuda.pathfinder import find_nvidia_binary_utility

    w = replace(lay_out(random_weight(kind, P, 16, 4096, 128)), N=4096)
    built = jit.compile(*skinny_gemm.variant(w, skinny_gemm.choose(w, 16, 132), HALF), "sm_90a")
    assert jit.compile(*skinny_gemm.permute_variant(HALF), "sm_90a").cubin
    if (disassembler := shutil.which("nvdisasm") or find_nvidia_binary_utility("nvdisasm")) is None:
        pytest.skip("nvdisasm is not installed")
    (tmp_path / "kernel.cubin").write_bytes(built.cubin)
    text = subprocess.run(
        [disassembler, "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    assert "HMMA" in text
    assert not re.search(r"\b(LDL|STL)\b", text)


# --- on a GPU ---------------------------------------------------------------------------------------------------------

hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper"
)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(("kind", "P", "group"), KINDS)
@pytest.mark.parametrize(("N", "K", "M"), [(100, 576, 5), (17, 1300, 16), (200, 256, 27), (1000, 2048, 32)])
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_product_matches_oracle(
    kind: ScaleKind, P: int, group: int, N: int, K: int, M: int, dtype: torch.dtype
) -> None:
    w = random_weight(kind, P, N, K, group, dtype, "cuda")
    prepared, x = lay_out(w), torch.randn(M, K, dtype=dtype, device="cuda")
    bias, residual = torch.randn(N, dtype=dtype, device="cuda"), torch.randn(M, N, dtype=dtype, device="cuda")
    y = torch.full((M, N), float("nan"), dtype=dtype, device="cuda")
    skinny_gemm.product(skinny_gemm.permuted_rows(x, prepared), prepared, bias, residual, y)
    oracle = x.double() @ w.dequantize(torch.float64).T + bias.double() + residual.double()
    assert relative(y, oracle) <= TOLERANCE[dtype]


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("scale_dtype", [HALF, BF16, torch.float32])
def test_every_shape_matches_oracle(config: SkinnyTileConfig, scale_dtype: torch.dtype) -> None:
    w = random_weight(ScaleKind.BCQ, 4, 1100, 2304, 128, scale_dtype, "cuda")
    x, prepared = torch.randn(70, 2304, dtype=HALF, device="cuda"), lay_out(w)  # tiles of tokens, the last not full
    y = skinny_gemm.product(x, prepared, config=config)
    assert relative(y, x.double() @ w.dequantize(torch.float64).T) <= TOLERANCE[HALF]
    for _ in range(5):
        assert torch.equal(skinny_gemm.product(x, prepared, config=config), y)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("tokens", [8, 16, 32])
@pytest.mark.parametrize("P", [2, 4])
def test_no_weight_is_overwritten_while_it_is_read(P: int, tokens: int) -> None:
    # all processors busy, queues filled again and again
    check_reruns(skinny_gemm.product, P, 12288, 8192, tokens, times=100)


@pytest.mark.gpu
@hopper
def test_first_planes_alone_are_a_weight() -> None:
    check_first_planes(skinny_gemm.product)


@pytest.mark.gpu
@hopper
def test_inputs_are_taken_in_the_order_of_the_weight() -> None:
    w = lay_out(random_weight(ScaleKind.UNIFORM, 3, 64, 512, 128, HALF, "cuda"))
    order = torch.randperm(512, device="cuda").to(torch.int32)
    x = torch.randn(20, 512, dtype=HALF, device="cuda")
    permuted = replace(w, perm=order)
    y = skinny_gemm.product(skinny_gemm.permuted_rows(x, permuted), permuted)
    assert torch.equal(y, skinny_gemm.product(x[:, order.long()].contiguous(), w))


@pytest.mark.gpu
@hopper
def test_rows_at_an_odd_address_are_copied() -> None:
    w = lay_out(random_weight(ScaleKind.BCQ, 3, 64, 512, 128, HALF, "cuda"))
    x = torch.randn(20 * 512 + 1, dtype=HALF, device="cuda")[1:].view(20, 512)
    assert torch.equal(skinny_gemm.product(skinny_gemm.permuted_rows(x, w), w), skinny_gemm.product(x.clone(), w))


@pytest.mark.gpu
@hopper
def test_a_graph_of_products_gives_the_same() -> None:
    w = lay_out(random_weight(ScaleKind.BCQ, 2, 300, 1024, 128, HALF, "cuda"))
    x = torch.randn(16, 1024, dtype=HALF, device="cuda")
    assert graph_gives_the_same(lambda out: skinny_gemm.product(x, w, out=out))
