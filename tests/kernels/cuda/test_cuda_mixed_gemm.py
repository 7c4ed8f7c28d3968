"""mixed_gemm.cu against f64 of the dequantized weight; what can be checked without a GPU comes first."""

import pytest
import torch
from emulated import COMPILER, EmulatedKernel
from mixed_weights import FORMS, random_mixed
from plane_weights import TOLERANCE, relative
from product_checks import graph_gives_the_same
from torch import Tensor

from crelle.kernels import cuda
from crelle.kernels.cuda import gemm, jit, mixed_gemm, mixed_gemv
from crelle.kernels.cuda.gemm import GemmSm80TileConfig, GemmTileConfig, PackedX
from crelle.kernels.cuda.mixed_gemm_layout import operand_place
from crelle.kernels.cuda.mixed_layout import MixedWeight, join, lay_out, pair_scale

HALF, BF16 = torch.float16, torch.bfloat16
CONFIGS = [
    GemmTileConfig(16, 1, 2, 4, 3, 3),
    GemmTileConfig(32, 2, 2, 4, 2, 1),
    GemmTileConfig(64, 2, 2, 4, 2),
    GemmTileConfig(80, 2, 2, 4, 2),
    GemmTileConfig(128, 2, 2, 4, 2, split_k=2),
    GemmTileConfig(256, 2, 1, 4, 2),
    GemmTileConfig(256, 2, 1, 4, 2, split_k=2),
    GemmSm80TileConfig(8, 1, 2, 2, 2),
    GemmSm80TileConfig(64, 1, 4, 1, 2),
]
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))
emulated = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


# --- without a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gemm, mixed_gemm):
        monkeypatch.setattr(module, "load", EmulatedKernel)
        monkeypatch.setattr(module, "multiprocessors", lambda: 2)


def unpacked(xs: PackedX, w: MixedWeight) -> Tensor:
    """Packed x [M, 256 blocks] in the weight's order, by the description of both orders alone."""
    chunks, rows, _ = xs.xs.shape
    units = xs.xs.view(chunks, rows, 8, 8)
    token, unit = torch.arange(rows)[:, None], torch.arange(8)
    units = units[:, token, (unit ^ token) % 8]  # out of the swizzle
    # chunk; token; step, pair; t, second input of the pair
    six = units.view(chunks, rows, 4, 2, 4, 2)
    two = six[: 4 * w.U2].permute(1, 0, 4, 3, 5, 2).reshape(rows, 256 * w.U2)
    four = six[4 * w.U2 :].view(-1, 2, rows, 4, 2, 4, 2).permute(2, 0, 5, 1, 3, 4, 6).reshape(rows, -1)
    return torch.cat([two, four], 1)[: xs.tokens]


@emulated
@pytest.mark.parametrize("form", [(16, 700, 16, 0.25, 0.0), (16, 333, 8, 0.4, 0.0), (16, 640, 32, 0.6, 0.0)])
@pytest.mark.usefixtures("on_cpu")
def test_x_is_packed_in_the_order_of_the_weight(form: tuple[int, int, int, float, float]) -> None:
    w = lay_out(random_mixed(*form))
    x = torch.randn(11, form[1], dtype=HALF)
    padded = torch.nn.functional.pad(x, (0, 1))[:, torch.nn.functional.pad(w.perm, (0, 256 * w.blocks - w.places), value=-1).long()]
    found = gemm.pack(x, w)
    assert torch.equal(unpacked(found, w), padded)
    assert not found.semaphores.any()
    for each in gemm.pack_each(x, w, torch.stack([w.perm, w.perm])):
        assert torch.equal(each.xs, found.xs)


@pytest.mark.parametrize("form", [(40, 700, 16, 0.25, 0.03), (70, 333, 8, 0.4, 0.1)])
def test_outliers_by_blocks_are_those_by_rows(form: tuple[int, int, int, float, float]) -> None:
    w = random_mixed(*form)
    laid = lay_out(w)
    assert laid.block_outliers is not None
    assert laid.block_starts is not None
    assert w.outlier_values is not None
    rows, columns = w.outlier_places()
    place = torch.empty(w.K, dtype=torch.int64)
    inside = laid.perm >= 0
    place[laid.perm[inside].long()] = inside.nonzero()[:, 0]
    low = operand_place(rows, place[columns], laid.U2)
    key = rows // 16 * laid.blocks + place[columns] // 256
    wanted = {(int(k), int(at)): float(v) for k, at, v in zip(key, low, w.outlier_values, strict=True)}
    assert len(wanted) == w.outliers  # no two in one place
    found = {}
    for k in range(len(laid.block_starts) - 1):
        words = laid.block_outliers[int(laid.block_starts[k]) : int(laid.block_starts[k + 1])].flatten()
        for word in words[1 : 1 + int(words[0])]:
            found[k, int(word & 0xFFFF)] = float((word >> 16).to(torch.int16).view(HALF))
        assert not words[1 + int(words[0]) :].any()
    assert found == wanted
    assert int(low.max()) < 1 << 13
    assert pair_scale(laid).shape == laid.perm.shape


@emulated
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("form", "tokens", "config", "dtype"),
    [
        ((100, 520, 16, 0.25, 0.02), 9, GemmSm80TileConfig(16, 2, 4, 1, 2), HALF),
        ((33, 333, 16, 0.4, 0.3), 5, GemmSm80TileConfig(8, 1, 2, 2, 2), HALF),  # more outliers than a stage holds
        ((20, 1300, 8, 0.25, 0.02), 20, GemmSm80TileConfig(32, 1, 2, 2, 3), BF16),
        ((40, 512, 32, 1.0, 0.0), 3, GemmSm80TileConfig(8, 1, 2, 1, 2), BF16),
        ((17, 128, 64, 1.0, 0.0), 3, GemmSm80TileConfig(8, 1, 2, 1, 2), HALF),
    ],
)
def test_emulated_products_match_oracle(
    form: tuple[int, int, int, float, float], tokens: int, config: GemmSm80TileConfig, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    w = random_mixed(*form)
    laid, (N, K) = lay_out(w), form[:2]
    x, bias, residual = (torch.randn(*shape, dtype=dtype) for shape in ((tokens, K), (N,), (tokens, N)))
    wanted = x.double() @ w.dequantize(torch.float64).T
    xs = gemm.pack(x, laid)
    y = torch.full((tokens, N), torch.nan, dtype=dtype)
    mixed_gemm.product(xs, laid, out=y, config=config)
    assert relative(y, wanted) < TOLERANCE[dtype] / 2
    mixed_gemm.product(xs, laid, bias, residual, out=y, config=config)
    assert relative(y, wanted + bias.double() + residual.double()) < TOLERANCE[dtype] / 2


@emulated
@pytest.mark.usefixtures("on_cpu")
def test_emulated_products_of_joined_weights() -> None:
    parts = [random_mixed(n, 256, 16, 0.25, 0.05) for n in (32, 40)]
    joined = join([lay_out(w) for w in parts])
    assert joined is not None
    whole, pieces = joined
    x = torch.randn(6, 256, dtype=HALF)
    each = [x.double() @ w.dequantize(torch.float64).T for w in parts]
    for w, wanted in zip((whole, *pieces), (torch.cat(each, 1), *each), strict=True):
        y = mixed_gemm.product(gemm.pack(x, w), w, config=GemmSm80TileConfig(8, 1, 2, 1, 2))
        assert relative(y, wanted) < TOLERANCE[HALF]
