"""mixed_gemm.cu against f64 of the dequantized weight; what can be checked without a GPU comes first."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from emulated import COMPILER, EmulatedKernel
from mixed_weights import FORMS, random_mixed
from plane_weights import TOLERANCE, relative
from product_checks import graph_gives_the_same
from torch import Tensor

from crelle.kernels import cuda
from crelle.kernels.base import Prepared, Problem
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.mixed import mixed_gemm, mixed_gemv
from crelle.kernels.cuda.mixed.mixed_gemm_layout import operand_place
from crelle.kernels.cuda.mixed.mixed_kernel import CudaMixed
from crelle.kernels.cuda.mixed.mixed_layout import MixedWeight, join, lay_out
from crelle.kernels.cuda.planes import gemm
from crelle.kernels.cuda.planes.gemm import GemmSm80TileConfig, GemmTileConfig, PackedX
from crelle.kernels.cuda.step import residual_norm_pack
from crelle.kernels.cuda.step.fuse import fuse
from crelle.kernels.cuda.step.fused_linear import Norm

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
    monkeypatch.setattr(residual_norm_pack, "load", EmulatedKernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(mixed_gemm, "_choose_sm80", lambda tokens: GemmSm80TileConfig(8, 1, 2, 2, 2))


def unpacked(xs: PackedX, w: MixedWeight) -> Tensor:
    """Packed x [M, 256 blocks] in the weight's order, by the description of both orders alone."""
    chunks, rows, _ = xs.xs.shape
    units = xs.xs.view(chunks, rows, 8, 8)
    token, unit = torch.arange(rows)[:, None], torch.arange(8)
    units = units[:, token, (unit ^ token) % 8]  # out of the swizzle
    # chunk; token; step, pair; t, second input of the pair
    six = units.view(chunks, rows, 4, 2, 4, 2)
    two = six[: 4 * w.U2].permute(1, 0, 4, 2, 3, 5).reshape(rows, 256 * w.U2)
    four = six[4 * w.U2 :].view(-1, 2, rows, 4, 2, 4, 2).permute(2, 0, 5, 1, 3, 4, 6).reshape(rows, -1)
    return torch.cat([two, four], 1)[: xs.tokens]


@emulated
@pytest.mark.parametrize("form", [(16, 700, 16, 0.25, 0.0), (16, 333, 8, 0.4, 0.0), (16, 640, 32, 0.6, 0.0)])
@pytest.mark.usefixtures("on_cpu")
def test_x_is_packed_in_the_order_of_the_weight(form: tuple[int, int, int, float, float]) -> None:
    w = lay_out(random_mixed(*form))
    x = torch.randn(11, form[1], dtype=HALF)
    order = F.pad(w.perm, (0, 256 * w.blocks - w.places), value=-1).long()
    padded = F.pad(x, (0, 1))[:, order]
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
@pytest.mark.sample(2)
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


@dataclass
class Layer:
    """A linear layer, as far as FusedLinear uses it."""

    prepared: Prepared
    bias: Tensor | None


def check_fused_linears(
    device: str, rows: int, seeds: tuple[int, int], sizes: tuple[int, int], invariant: bool
) -> None:
    """Sum, norm and packing for both weights are one launch, whether they have the same 4-bit groups or not."""
    torch.manual_seed(0)
    weights = [random_mixed(n, 256, 16, 0.25, 0.02, device, seed=seed) for n, seed in zip(sizes, seeds, strict=True)]
    kernel, bias = CudaMixed(), torch.randn(sizes[0], dtype=HALF, device=device)
    prepared = [Prepared(Problem.of(w, HALF), kernel, lay_out(w)) for w in weights]
    layers = [Layer(prepared[0], bias), Layer(prepared[1], None)]
    fused = fuse(layers, HALF)
    assert len(fused.weights) == 1 + (seeds[0] != seeds[1])
    x, more = (torch.randn(rows, 256, dtype=HALF, device=device) for _ in range(2))
    norm = Norm(torch.randn(256, dtype=HALF, device=device), None, 1e-5)
    total = (x + more).double()
    before = (total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5)).half() * norm.weight
    wanted = torch.cat([before.double() @ w.dequantize(torch.float64).T for w in weights], -1)
    wanted[:, : sizes[0]] += bias.double()
    y, added = fused.norm_linear(x, more, "RMS_NORM", norm, invariant)
    assert torch.equal(added, x + more)
    assert relative(y, wanted) < TOLERANCE[HALF]
    alone = fuse([layers[0]], HALF)
    same, addend = alone.linear_residual(x, more[:, : sizes[0]].contiguous(), batch_invariant=invariant)
    assert addend is not None
    assert relative(addend, x.double() @ weights[0].dequantize(torch.float64).T + bias.double()) < TOLERANCE[HALF]
    assert torch.equal(same, more[:, : sizes[0]])


@emulated
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("seeds", "sizes"), [((0, 0), (32, 20)), ((0, 1), (32, 20)), ((0, 1), (32, 21))])
def test_emulated_norms_pack_for_the_gemm(seeds: tuple[int, int], sizes: tuple[int, int]) -> None:
    check_fused_linears("cpu", 9, seeds, sizes, False)


@pytest.mark.parametrize("tokens", [1, 16, 17, 40, 100, 150, 256, 300, 5000])
@pytest.mark.parametrize("N", [100, 4096, 12288])
def test_the_chosen_configs_fit_the_chip(N: int, tokens: int) -> None:
    w = replace(lay_out(random_mixed(16, 4096, 16, 0.25, 0.0)), N=N)
    s = mixed_gemm.choose(w, tokens, 132, (9, 0))
    assert isinstance(s, GemmTileConfig)
    assert s.occupancy * (mixed_gemm.shared_bytes(s) + 1024 + 256) <= 228 * 1024
    assert s.split_k == 1 or s.x_chunks * s.x_stages >= 2 * s.warpgroups  # whose place the sums take
    assert s.x_stages >= 2
    assert s.w_stages >= 2
    if tokens <= 256:
        s = mixed_gemm.invariant_config(tokens)
        assert s.tokens >= tokens
        assert mixed_gemm.shared_bytes(s) + 1024 + 256 <= 228 * 1024
    for room in (99 * 1024, 163 * 1024):
        assert mixed_gemm.sm80_shared_bytes(mixed_gemm._choose_sm80(tokens, room)) <= room


@pytest.mark.skipif(bool(jit.missing()), reason=str(jit.missing()))
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)])  # its samples: compiled/
def test_the_kernels_compile(arch: str) -> None:
    kind = GemmTileConfig if arch == "sm_90a" else GemmSm80TileConfig
    kernels = [mixed_gemm.variant(2, config, BF16) for config in CONFIGS if isinstance(config, kind)]
    assert all(built.cubin for built in jit.compile_all(kernels, arch))


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize(("N", "K", "G", "four", "outliers"), FORMS)
def test_products_match_oracle(N: int, K: int, G: int, four: float, outliers: float, dtype: torch.dtype) -> None:
    torch.manual_seed(N)
    w = random_mixed(N, K, G, four, outliers, "cuda")
    laid, dequantized = lay_out(w), w.dequantize(torch.float64)
    for M in (1, 5, 16, 33, 70, 130, 300):
        x, bias = torch.randn(M, K, device="cuda", dtype=dtype), torch.randn(N, device="cuda", dtype=dtype)
        residual, wanted = torch.randn(M, N, device="cuda", dtype=dtype), x.double() @ dequantized.T + bias.double()
        xs = gemm.pack(x, laid)
        y = torch.full((M, N), torch.nan, dtype=dtype, device="cuda")
        mixed_gemm.product(xs, laid, bias, out=y)
        assert relative(y, wanted) <= TOLERANCE[dtype], M
        assert torch.equal(y, mixed_gemm.product(xs, laid, bias))
        added = mixed_gemm.product(xs, laid, bias, residual)
        assert relative(added, wanted + residual.double()) <= TOLERANCE[dtype], M
        mixed_gemm.product(xs, laid, bias, residual, out=residual)  # in place on the residual stream
        assert torch.equal(residual, added)
        assert not xs.semaphores.any()


@gpu
@needs_gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("form", [(1100, 2304, 16, 0.25, 0.01), (500, 1700, 8, 0.4, 0.2), (333, 1111, 64, 0.5, 0.0)])
def test_every_config_matches_oracle(
    form: tuple[int, int, int, float, float], config: GemmTileConfig | GemmSm80TileConfig
) -> None:
    if isinstance(config, GemmTileConfig) and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    w = random_mixed(*form, "cuda")
    x, laid = torch.randn(300, form[1], dtype=HALF, device="cuda"), lay_out(w)
    xs = gemm.pack(x, laid)
    y = mixed_gemm.product(xs, laid, config=config)
    assert relative(y, x.double() @ w.dequantize(torch.float64).T) <= TOLERANCE[HALF]
    for _ in range(5):
        assert torch.equal(mixed_gemm.product(xs, laid, config=config), y)
    assert not xs.semaphores.any()


@gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [16, 32, 64, 128, 256, 512])
def test_large_products_rerun_and_in_graphs(tokens: int) -> None:
    w = random_mixed(4096, 4096, 16, 0.25, 0.002, "cuda")
    x, laid = torch.randn(tokens, 4096, dtype=HALF, device="cuda"), lay_out(w)
    y = mixed_gemv.matmul(x, laid)
    assert relative(y, x.double() @ w.dequantize(torch.float64).T) <= TOLERANCE[HALF]
    for _ in range(30):
        assert torch.equal(mixed_gemv.matmul(x, laid), y)
    xs = gemm.pack(x, laid)
    assert graph_gives_the_same(lambda out: mixed_gemm.product(xs, laid, out=out))


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize(("N", "K", "G"), [(500, 1024, 16), (4096, 2900, 16), (17000, 300, 8)])
def test_a_row_has_the_same_bits_in_any_batch(N: int, K: int, G: int, dtype: torch.dtype) -> None:
    w = random_mixed(N, K, G, 0.25, 0.01, "cuda")
    laid, x, bias = lay_out(w), torch.randn(300, K, device="cuda").to(dtype), torch.randn(N, device="cuda").to(dtype)
    whole = mixed_gemv.matmul(x, laid, bias, batch_invariant=True)
    assert relative(whole, x.double() @ w.dequantize(torch.float64).T + bias.double()) < TOLERANCE[dtype]
    for rows in (slice(0, 1), slice(299, 300), slice(5, 14), slice(3, 20), slice(0, 64), slice(40, 200)):
        assert torch.equal(mixed_gemv.matmul(x[rows], laid, bias, batch_invariant=True), whole[rows])


@gpu
@needs_gpu
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("rows", [9, 40, 300])
@pytest.mark.parametrize(("seeds", "sizes"), [((0, 0), (32, 20)), ((0, 1), (64, 20)), ((0, 1), (64, 21))])
def test_norms_pack_for_the_gemm(rows: int, seeds: tuple[int, int], sizes: tuple[int, int], invariant: bool) -> None:
    check_fused_linears("cuda", rows, seeds, sizes, invariant)
