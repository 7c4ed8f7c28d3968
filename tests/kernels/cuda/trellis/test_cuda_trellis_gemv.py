"""The trellis kernels on a real GPU."""

from itertools import product as combinations

import pytest
import torch
from plane_weights import TOLERANCE, relative
from product_checks import graph_gives_the_same
from trellis_weights import KINDS, random_trellis

from crelle.kernels import cuda, ops
from crelle.kernels.cuda.trellis import trellis_gemv
from crelle.kernels.cuda.trellis.trellis_gemv import TrellisTileConfig
from crelle.kernels.cuda.trellis.trellis_layout import lay_out

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))]
HALF, BF16 = torch.float16, torch.bfloat16
SHAPES = [(256, 1024, 1024), (300, 208, 16), (4096, 4096, 1024), (1, 1, 0), (33, 333, 0), (2000, 11008, 256)]


@pytest.mark.parametrize(("code", "bits"), KINDS)
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_every_rate_matches_oracle(code: str, bits: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for (N, K, block), tokens in combinations(SHAPES, (1, 2, 3, 5, 16, 17, 70)):
        w = random_trellis(N, K, code, bits, block, "cuda")
        laid = lay_out(w)
        x, bias, residual = (torch.randn(*s, device="cuda").to(dtype) for s in ((tokens, K), (N,), (tokens, N)))
        wanted = x.double() @ w.dequantize(torch.float64).T
        y = trellis_gemv.matmul(x, laid)
        few = tokens <= trellis_gemv.GEMV_ROWS
        tolerance = TOLERANCE[dtype] * (0.5 if few else 1) * (4 if N == 1 else 1)
        assert relative(y, wanted) < tolerance, (N, K, tokens)
        wanted += bias.double() + residual.double()
        assert relative(trellis_gemv.matmul(x, laid, bias, residual), wanted) < tolerance, (N, K, tokens)
        for i in range(tokens if few else 0):
            assert torch.equal(trellis_gemv.matmul(x[i : i + 1], laid), y[i : i + 1])


@pytest.mark.parametrize("bits", [2.0, 3.0, 4.0])
def test_bits_do_not_depend_on_the_config(bits: float) -> None:
    w = lay_out(random_trellis(4000, 4096, "pair", bits, 1024, "cuda"))
    x = torch.randn(4, 4096, device="cuda", dtype=HALF)
    wanted = trellis_gemv.matmul(x, w)
    splits = trellis_gemv.SPLITS if torch.cuda.get_device_capability() == (9, 0) else (0,)
    for warps, stages, run, split in combinations((4, 8, 16), (2, 4), (1, 2), splits):
        c = TrellisTileConfig(warps, stages, run, 1, split)
        if trellis_gemv.shared_bytes(w, 4, c) > 226 * 1024 or (not split and warps * stages * run > 64):
            continue
        for _ in range(5):
            assert torch.equal(trellis_gemv.product(trellis_gemv.encode(x, w), w, config=c), wanted), c


def test_reruns_graphs_and_a_row_alone() -> None:
    w = lay_out(random_trellis(11008, 4096, "pair", 2.0, 1024, "cuda"))
    x = torch.randn(1, 4096, device="cuda", dtype=HALF)
    y = trellis_gemv.matmul(x, w)
    for _ in range(200):
        assert torch.equal(trellis_gemv.matmul(x, w), y)
    encoded = trellis_gemv.encode(x, w)
    assert graph_gives_the_same(lambda out: trellis_gemv.product(encoded, w, out=out))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_stay_so_alone(bad: float) -> None:
    w = lay_out(random_trellis(512, 1024, "pair", 2.0, 256, "cuda"))
    x = torch.randn(4, 1024, device="cuda", dtype=HALF)
    wanted = trellis_gemv.matmul(x, w)
    x[2, 77] = bad
    y = trellis_gemv.matmul(x, w)
    assert bool(y[2].isnan().all())
    assert torch.equal(y[[0, 1, 3]], wanted[[0, 1, 3]])


@pytest.mark.parametrize("block", [0, 128])
def test_kernel_is_selected(block: int) -> None:
    w = random_trellis(512, 1024, "mul1", 3.0, block, "cuda")
    prepared = ops.prepare(w, HALF)
    assert prepared.kernel.name == "cuda-trellis"
    x = torch.randn(2, 1024, device="cuda", dtype=HALF)
    wanted = x.double() @ w.dequantize(torch.float64).T
    assert relative(ops.matmul(x, prepared), wanted) < TOLERANCE[HALF]
    w = prepared.data
    y = torch.ops.crelle.trellis_matmul(x, w.units, w.scale, w.signs, w.N, w.K, w.block, w.bits, w.code.name)
    assert torch.equal(y, ops.matmul(x, prepared))
