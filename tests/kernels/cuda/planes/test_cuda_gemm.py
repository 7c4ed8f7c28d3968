"""gemm.cu against f64 of the dequantized weight; what can be checked without a GPU comes first."""

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
from crelle.kernels.cuda.planes import gemm
from crelle.kernels.cuda.planes.gemm import GemmSm80TileConfig, GemmTileConfig
from crelle.kernels.cuda.planes.weight_layout import ScaleKind, lay_out

HALF, BF16 = torch.float16, torch.bfloat16
HOPPER, ADA = (9, 0), (8, 9)
CONFIGS = [
    GemmTileConfig(16, 1, 2, 4, 3, 3),
    GemmTileConfig(32, 2, 2, 4, 3, 2),
    GemmTileConfig(64, 2, 2, 3, 2, 2),
    GemmTileConfig(80, 2, 2, 4, 2),
    GemmTileConfig(128, 2, 2, 4, 2),
    GemmTileConfig(128, 2, 2, 4, 2, split_k=2),
    GemmTileConfig(144, 2, 1, 5, 2),
    GemmTileConfig(256, 2, 1, 4, 2),
    GemmTileConfig(256, 2, 1, 4, 2, split_k=2),
    GemmSm80TileConfig(8, 1, 2, 2, 2),
    GemmSm80TileConfig(64, 2, 4, 1, 2),
]


# --- without a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "P", "group"), KINDS)
@pytest.mark.parametrize("tokens", [1, 5, 16, 40, 100, 150, 300, 512, 5000])
def test_the_chosen_shape_fits_the_chip(kind: ScaleKind, P: int, group: int, tokens: int) -> None:
    w = lay_out(random_weight(kind, P, 500, 1024, group, torch.float32))
    s = gemm.choose(w, tokens, HALF, 132, HOPPER)
    assert isinstance(s, GemmTileConfig)
    assert s.occupancy * (gemm.shared_bytes(w, s) + 1024 + 256) <= 228 * 1024
    assert s.occupancy <= gemm._OCCUPANCY
    assert s.tokens % 16 == 0
    assert s.tokens <= 256


def test_more_tokens_take_larger_tiles() -> None:
    w = replace(lay_out(random_weight(ScaleKind.BCQ, 3, 16, 512, 128)), N=12288)
    sizes = [gemm.choose(w, m, HALF, 132, HOPPER).tokens for m in (5, 16, 33, 64, 100, 128, 150, 256, 512, 4096)]
    assert sizes == [16, 16, 48, 64, 112, 128, 160, 256, 256, 256]


@pytest.mark.parametrize(("N", "tokens", "split_k"), [(4096, 256, 2), (4096, 512, 2), (4096, 64, 1), (12288, 256, 1)])
def test_two_thread_blocks_share_a_tile_where_that_comes_out_even(N: int, tokens: int, split_k: int) -> None:
    w = replace(lay_out(random_weight(ScaleKind.BCQ, 4, 16, 4096, 128)), N=N)
    s = gemm.choose(w, tokens, HALF, 132, HOPPER)
    assert isinstance(s, GemmTileConfig)
    assert s.split_k == split_k
    if split_k > 1:
        grid, whole = gemm.stream_k_schedule(w, tokens, s, 132)
        assert 0.85 * 132 < grid <= 132
        assert grid == whole * split_k


@pytest.mark.parametrize("room", [99 * 1024, 163 * 1024])
@pytest.mark.parametrize("tokens", [1, 16, 40, 500])
def test_the_older_shape_fits_its_room(room: int, tokens: int) -> None:
    w = lay_out(random_weight(ScaleKind.BCQ, 8, 40, 512, 32))
    s = gemm._choose_sm80(w, tokens, room)
    assert gemm.sm80_shared_bytes(w, s) <= room
    assert s.tokens < 2 * max(tokens, 5)


@pytest.mark.parametrize("tokens", [5, 64, 300, 512, 4096])
@pytest.mark.parametrize("N", [17, 4096, 8192, 11008])
def test_every_block_of_every_tile_is_done_once(N: int, tokens: int) -> None:
    w = replace(lay_out(random_weight(ScaleKind.BCQ, 1, 16, 2304, 128)), N=N)
    s = gemm.choose(w, tokens, HALF, 132, HOPPER)
    assert isinstance(s, GemmTileConfig)
    grid, whole = gemm.stream_k_schedule(w, tokens, s, 132)
    count = gemm._tiles(w, tokens, s.tokens, s.warpgroups)
    if s.split_k > 1:
        assert (grid, whole) == (s.split_k * count, count)
        return
    rest = count - whole
    done = [0] * (count * w.blocks)
    for i in range(grid):  # as Work in gemm_sm90.cuh
        at, end = rest * w.blocks * i // grid, rest * w.blocks * (i + 1) // grid
        assert rest == 0 or at < end  # whoever waits for a part of a tile must get one
        for unit in range(at, end):
            done[unit] += 1
        for tile in range(rest + i, count, grid):
            for b in range(w.blocks):
                done[tile * w.blocks + b] += 1
    assert done == [1] * len(done)
    assert whole in (count, whole // grid * grid)


def test_a_nearly_full_round_is_not_cut() -> None:
    w = replace(lay_out(random_weight(ScaleKind.BCQ, 1, 16, 8192, 128)), N=8192)
    assert gemm.stream_k_schedule(w, 512, GemmTileConfig(256, 2, 1, 5, 2), 132) == (128, 128)
    assert gemm.stream_k_schedule(w, 256, GemmTileConfig(256, 2, 1, 5, 2), 132) == (132, 0)
    assert gemm.stream_k_schedule(w, 4096, GemmTileConfig(256, 2, 1, 5, 2), 132) == (132, 6 * 132)


@pytest.mark.skipif(bool(jit.missing()), reason=str(jit.missing()))
@pytest.mark.parametrize("arch", jit.ARCHITECTURES)
@pytest.mark.sample(3)
def test_the_kernels_compile(arch: str) -> None:
    w = lay_out(random_weight(ScaleKind.BCQ, 3, 40, 512, 128))
    config = gemm.choose(w, 64, HALF, 132, HOPPER) if arch == "sm_90a" else gemm._choose_sm80(w, 64, 99 * 1024)
    for kernel in (gemm.pack_variant(HALF), gemm.product_variant(w, config, HALF)):
        assert jit.compile(*kernel, arch).cubin


@pytest.mark.slow
@pytest.mark.skipif(bool(jit.missing()), reason=str(jit.missing()))
@pytest.mark.parametrize(
    ("kind", "P"), [(ScaleKind.BCQ, 3), (ScaleKind.BCQ, 8), (ScaleKind.UNIFORM, 4), (ScaleKind.AFFINE, 8)]
)
@pytest.mark.parametrize("tokens", [48, 64, 128, 256])
def test_products_of_a_warpgroup_are_not_serialized(kind: ScaleKind, P: int, tokens: int, tmp_path: Path) -> None:
    from cuda.pathfinder import find_nvidia_binary_utility

    disassembler = shutil.which("nvdisasm") or find_nvidia_binary_utility("nvdisasm")
    if disassembler is None:
        pytest.skip("nvdisasm is not installed")
    w = replace(lay_out(random_weight(kind, P, 16, 512, 128)), N=12288)
    built = jit.compile(*gemm.product_variant(w, gemm.choose(w, tokens, HALF, 132, HOPPER), HALF), "sm_90a")
    (tmp_path / "kernel.cubin").write_bytes(built.cubin)
    text = subprocess.run(
        [disassembler, "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    assert "HGMMA" in text
    assert text.count("WARPGROUP.ARRIVE") == 4  # one per four steps of a block: ptxas had registers enough
    assert not re.search(r"\b(LDL|STL)\b", text)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "P", "group"), KINDS)
@pytest.mark.parametrize(("N", "K", "M"), [(100, 576, 5), (17, 1300, 40), (200, 256, 130)])
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_matmul_matches_oracle(kind: ScaleKind, P: int, group: int, N: int, K: int, M: int, dtype: torch.dtype) -> None:
    w = random_weight(kind, P, N, K, group, dtype, "cuda")
    x, bias = torch.randn(M, K, dtype=dtype, device="cuda"), torch.randn(N, dtype=dtype, device="cuda")
    y = torch.full((M, N), float("nan"), dtype=dtype, device="cuda")
    gemm.matmul(x, lay_out(w), bias, y)
    assert relative(y, x.double() @ w.dequantize(torch.float64).T + bias.double()) <= TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("scale_dtype", [HALF, BF16, torch.float32])
def test_every_shape_matches_oracle(config: GemmTileConfig | GemmSm80TileConfig, scale_dtype: torch.dtype) -> None:
    if isinstance(config, GemmTileConfig) and torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs Hopper")
    w = random_weight(ScaleKind.BCQ, 3, 1100, 2304, 128, scale_dtype, "cuda")
    x, prepared = torch.randn(300, 2304, dtype=HALF, device="cuda"), lay_out(w)
    xs = gemm.pack(x, prepared)
    y = gemm.product(xs, prepared, config=config)
    assert relative(y, x.double() @ w.dequantize(torch.float64).T) <= TOLERANCE[HALF]
    for _ in range(5):
        assert torch.equal(gemm.product(xs, prepared, config=config), y)
    assert not xs.semaphores.any()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [48, 128, 256])
def test_reruns_of_a_large_product_are_equal(tokens: int) -> None:
    check_reruns(gemm.matmul, 2, 8192, 4096, tokens, times=50)


@pytest.mark.gpu
def test_first_planes_alone_are_a_weight() -> None:
    check_first_planes(gemm.matmul)


@pytest.mark.gpu
def test_inputs_are_taken_in_the_order_of_the_weight() -> None:
    w = lay_out(random_weight(ScaleKind.UNIFORM, 3, 64, 512, 128, HALF, "cuda"))
    order = torch.randperm(512, device="cuda").to(torch.int32)
    x = torch.randn(20, 512, dtype=HALF, device="cuda")
    assert torch.equal(gemm.matmul(x, replace(w, perm=order)), gemm.matmul(x[:, order.long()], w))


@pytest.mark.gpu
def test_a_graph_of_products_gives_the_same() -> None:
    w = lay_out(random_weight(ScaleKind.BCQ, 2, 300, 1024, 128, HALF, "cuda"))
    x = torch.randn(40, 1024, dtype=HALF, device="cuda")
    assert graph_gives_the_same(lambda out: gemm.matmul(x, w, out=out))
