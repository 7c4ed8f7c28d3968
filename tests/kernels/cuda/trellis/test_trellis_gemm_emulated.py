"""trellis_gemm.cu on the CPU, thread by thread."""

import pytest
import torch
from emulated import COMPILER, EmulatedKernel
from plane_weights import relative
from trellis_weights import KINDS, random_trellis

from crelle.kernels.cuda.trellis import trellis_gemm
from crelle.kernels.cuda.trellis.trellis_gemm import TrellisGemmConfig
from crelle.kernels.cuda.trellis.trellis_layout import lay_out

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
HALF = torch.float16


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trellis_gemm, "load", EmulatedKernel)
    monkeypatch.setattr(trellis_gemm, "multiprocessors", lambda: 2)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("code", "bits"), KINDS)
@pytest.mark.parametrize("split", [0, 2], ids=["sm_80", "sm_90"])
def test_every_rate_matches_oracle(code: str, bits: float, split: int) -> None:
    w = random_trellis(300, 200, code, bits)
    torch.manual_seed(0)
    x = torch.randn(20, 200, dtype=HALF)
    y = trellis_gemm.product(x, lay_out(w), config=TrellisGemmConfig(32, 3, split, 1))
    assert relative(y, x.double() @ w.dequantize(torch.float64).T) < 4e-4


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("N", "K", "rows", "config"),
    [
        (1, 8, 1, TrellisGemmConfig(32, 2, 0, 1)),
        (257, 456, 33, TrellisGemmConfig(32, 4, 4, 2)),  # two groups of rows, tiles in turns
        (600, 64, 70, TrellisGemmConfig(64, 3, 1, 2)),  # fewer inputs than stages
        (40, 1032, 128, TrellisGemmConfig(128, 3, 2, 1)),
    ],
)
def test_products_match_oracle(N: int, K: int, rows: int, config: TrellisGemmConfig) -> None:
    w = random_trellis(N, K, "pair", 2.0)
    laid = lay_out(w)
    torch.manual_seed(rows)
    x, bias, residual = (torch.randn(*shape).half() for shape in ((rows, K), (N,), (rows, N)))
    wanted = x.double() @ w.dequantize(torch.float64).T
    assert relative(trellis_gemm.product(x, laid, config=config), wanted) < 4e-4
    y = trellis_gemm.product(x, laid, bias, residual, config)
    assert relative(y, wanted + bias.double() + residual.double()) < 4e-4
    assert torch.equal(y, trellis_gemm.product(x, laid, bias, residual, config))


def test_what_goes_another_way() -> None:
    w = lay_out(random_trellis(32, 36, "pair", 2.0))
    assert "multiple of 8" in str(trellis_gemm.supports(torch.zeros(20, 36, dtype=HALF), w))
    w = lay_out(random_trellis(32, 40, "pair", 2.0))
    assert trellis_gemm.supports(torch.zeros(20, 40, dtype=HALF), w) is None
    assert "float16" in str(trellis_gemm.supports(torch.zeros(20, 40, dtype=torch.bfloat16), w))
    rows = trellis_gemm.MOST_ROWS + 1
    assert str(rows) in str(trellis_gemm.supports(torch.zeros(rows, 40, dtype=HALF), w))
