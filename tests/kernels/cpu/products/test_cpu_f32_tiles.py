"""Products of f32 tiles (sets without AMX, many rows of x) against f64: x is not rounded, so the error is f32's own."""

from collections.abc import Iterator

import pytest
import torch

from crelle.kernels.cpu import available
from crelle.kernels.cpu.kernel import Cpu, Precision
from crelle.kernels.reference import matmul_fp64

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from cpu_models import error, mixed_weight
from test_cpu_matmul import PRECISIONS, SHAPES, inputs, product, weight

from crelle.kernels.cpu import _core

pytestmark = [pytest.mark.usefixtures("threads_as_before"), pytest.mark.sample(3)]

ROUNDING = 2e-6
# Sets that multiply all planes and mixed matrices by f32 tiles; the generic one has the vectors that Arm has.
FIELDS = {"generic-tiles": (), "avx2-tiles": (1, 2, 3, 4, 8), "avx512-tiles": (1, 2, 3, 4, 8), "vbmi-tiles": (4, 8)}
SETS = [name for name in FIELDS if name.removesuffix("-tiles") in _core.isas()]


@pytest.fixture(params=SETS)
def tiled(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _core.isa()
    _core.set_isa(request.param)
    yield request.param
    _core.set_isa(before)


@pytest.mark.parametrize("kind", ["bcq", "uniform", "mixed"])
@pytest.mark.parametrize("P", range(1, 9))
def test_f32_tiles_match_oracle(tiled: str, kind: str, P: int) -> None:
    """32 rows fill two tiles, 40 two and a half; 65 leave one row for the last."""
    for i, (N, K, G) in enumerate(SHAPES):
        w = weight(kind, N, K, P, G, bias=i % 2 == 1, dtype=torch.float32 if i % 3 == 0 else torch.float16)
        prepared = Cpu("exact").prepare(w, torch.float32)
        if kind == "uniform" and P in FIELDS[tiled]:  # multiplied by bytes
            assert prepared.data.tiles("exact") == "none"
            continue
        assert prepared.data.tiles("exact") == "f32"
        for M in (32, 40, 65):
            x = inputs(M, K)
            assert error(product(x, prepared), matmul_fp64(x, w)) < ROUNDING, (M, N, K, G)


def test_sets_take_f32_tiles_where_look_ups_are_slower(isa: str) -> None:
    """Bits times bytes of x from which on they are, and mixed matrices where no byte products are as fast."""
    least = {"avx2": 5, "avx-vnni": 5, "avx512": 4, "avx512-vnni": 4, "vbmi": 7, "neon": 3, "dotprod": 3}.get(isa, 99)
    for precision, digits in (("int8", 1), ("exact", 2)):
        for P in range(1, 9):
            w = Cpu("exact").prepare(weight("bcq", 64, 256, P, 64, bias=True), torch.float32)
            assert (w.data.tiles(precision) == "f32") == (P * digits >= least), (precision, P)
        w = Cpu("exact").prepare(weight("mixed", 64, 256, 4, 64, bias=True), torch.float32)
        mixed = precision == "exact" and isa in ("avx2", "avx-vnni", "avx512", "neon", "dotprod")
        assert (w.data.tiles(precision) == "f32") == mixed


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["bcq", "mixed"])
def test_a_row_has_the_same_bits_in_any_batch(tiled: str, kind: str, precision: Precision) -> None:
    w = Cpu(precision).prepare(weight(kind, 301, 200, 3, 64, bias=True), torch.float32)
    x = inputs(65, 200)
    every = product(x, w)
    order = torch.randperm(65, generator=torch.Generator().manual_seed(3))
    assert torch.equal(product(x[order], w), every[order])
    for M, threads in ((32, 1), (33, 2), (48, 3)):
        _core.set_threads(threads)
        assert torch.equal(product(x[:M].contiguous(), w), every[:M])


@pytest.mark.parametrize("group", [8, 16, 32, 64])
def test_mixed_outliers_and_groups(tiled: str, group: int) -> None:
    """Groups that end within a word or a panel, blocks that share second-order scales or do not, many outliers."""
    for block, K in ((16, 333), (7, 520)):
        w = mixed_weight(75, K, group, 0.3, 0.05, block=block)
        x = inputs(32, K)
        assert error(product(x, Cpu("exact").prepare(w, torch.float32)), matmul_fp64(x, w)) < ROUNDING, (block, K)


def test_what_is_not_finite_stays_in_its_row(tiled: str) -> None:
    w = Cpu("exact").prepare(weight("bcq", 70, 200, 3, 64, bias=True), torch.float32)
    x = inputs(36, 200)
    calm = product(x, w)
    x[7, 3], x[20, 100], x[21] = float("nan"), float("inf"), 1e35
    y = product(x, w)
    assert y[7].isnan().all()
    assert not y[20].isfinite().any()
    assert y[21].isfinite().all()
    kept = [m for m in range(36) if m not in (7, 20, 21)]
    assert torch.equal(y[kept], calm[kept])
