"""The C++ products against f64, on every instruction set that this machine has."""

from typing import Any

import pytest
import torch
from torch import Tensor

from crelle.formats.affine import AffineTensor
from crelle.formats.bcq import BCQTensor, UniformTensor
from crelle.formats.mixed import GROUPS, MixedTensor
from crelle.kernels.base import Problem
from crelle.kernels.cpu import available
from crelle.kernels.cpu.kernel import Cpu, CpuWeight, Precision
from crelle.kernels.reference import matmul_fp64

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from cpu_models import error, mixed_weight, nearest_group

from crelle.kernels.cpu import _core

pytestmark = [pytest.mark.usefixtures("threads_as_before"), pytest.mark.sample(6)]

# Relative error (Frobenius) of x @ W.T that each precision may have on Gaussian inputs.
TOLERANCE: dict[Precision, float] = {"int8": 1.5e-2, "exact": 1e-4}
PRECISIONS: list[Precision] = ["int8", "exact"]
KINDS = ["bcq", "uniform", "affine", "mixed"]

# N, K, G: whole blocks; odd everything; groups of 8, 24 and 32; row-wise; several segments to a group; a last group
# that is shorter, and one that is shorter than a chunk.
SHAPES = [
    (64, 256, 128),
    (67, 333, 64),
    (33, 136, 8),
    (17, 240, 24),
    (96, 256, 32),
    (65, 515, 515),
    (40, 1000, 384),
    (31, 264, 128),
    (5, 40, 40),
]


def weight(
    kind: str, N: int, K: int, P: int, G: int, *, bias: bool, dtype: torch.dtype = torch.float16, seed: int = 0
) -> BCQTensor | UniformTensor | AffineTensor | MixedTensor:
    """Mixed: a group size that it takes, more groups of 4 bits the larger P is, outliers where `bias` says so."""
    if kind == "mixed":
        return mixed_weight(N, K, nearest_group(G), (P - 1) / 7, 0.02 if bias else 0.0, dtype=dtype, seed=seed)
    rng = torch.Generator().manual_seed(hash((N, K, P, G, seed)) & 0xFFFF)
    C = -(-K // G)
    codes = torch.randint(0, 2**P, (N, K), generator=rng, dtype=torch.uint8)
    if kind == "bcq":
        alpha = (torch.rand(P, N, C, generator=rng) * 0.02 + 0.01).to(dtype)
        z = (torch.randn(N, C, generator=rng) * 0.02).to(dtype) if bias else None
        return BCQTensor.from_codes(codes, alpha, z, G)
    scale = (torch.rand(N, C, generator=rng) * 0.02 + 0.01).to(dtype)
    if kind == "affine":  # `low` is near the negative middle of the grid, as for real weights
        low = (-scale * (2**P - 1) * (0.4 + 0.2 * torch.rand(N, C, generator=rng))).to(dtype)
        return AffineTensor.from_codes(codes, P, scale, low, G)
    zero = torch.randint(0, 2**P, (N, C), generator=rng, dtype=torch.uint8) if bias else None
    return UniformTensor.from_codes(codes, P, scale, zero, G)


def inputs(M: int, K: int, seed: int = 1) -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(seed))


def product(x: Tensor, prepared: CpuWeight) -> Tensor:
    """Multiply into an output full of NaN: what is not written shows."""
    y = torch.full((x.shape[0], prepared.data.shape[0]), float("nan"))
    _core.matmul(x.numpy(), prepared.data, y.numpy(), prepared.precision)
    return y


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("P", range(1, 9))
def test_matmul_matches_oracle(isa: str, kind: str, P: int, precision: Precision) -> None:
    for i, (N, K, G) in enumerate(SHAPES):
        w = weight(kind, N, K, P, G, bias=i % 2 == 0)
        x = inputs(3, K)
        y = product(x, Cpu(precision).prepare(w, torch.float32))
        assert error(y, matmul_fp64(x, w)) < TOLERANCE[precision], (N, K, G)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("P", range(1, 9))
def test_many_rows_match_oracle(isa: str, kind: str, P: int, precision: Precision) -> None:
    """Prefill: from 24 rows on AMX multiplies tiles, codes later; 24, 40 and 65 rows fill them differently."""
    shapes = SHAPES if isa.startswith("amx") else SHAPES[:2]
    for i, (N, K, G) in enumerate(shapes):
        w = weight(kind, N, K, P, G, bias=i % 2 == 1, dtype=torch.float32 if i % 3 == 0 else torch.float16)
        prepared = Cpu(precision).prepare(w, torch.float32)
        for M in (24, 40, 65) if isa.startswith("amx") else (65,):
            x = inputs(M, K)
            y = product(x, prepared)
            assert error(y, matmul_fp64(x, w)) < TOLERANCE[precision], (M, N, K, G)


def test_more_rows_than_are_packed_at_once(isa: str) -> None:
    w, x = weight("uniform", 16, 64, 4, 32, bias=True), inputs(1030, 64)
    assert error(product(x, Cpu("exact").prepare(w, torch.float32)), matmul_fp64(x, w)) < TOLERANCE["exact"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_prepared_weight_holds_the_same_numbers(isa: str, kind: str, dtype: torch.dtype, bias: bool) -> None:
    for P in (1, 3, 4, 8):
        for N, K, G in SHAPES:
            w = weight(kind, N, K, P, G, bias=bias, dtype=dtype)
            out = torch.full(w.shape, float("nan"))
            Cpu().prepare(w, torch.float32).data.dequantize(out.numpy())
            atol = 2e-6 if kind == "affine" else 1e-7  # low and the codes may nearly cancel
            torch.testing.assert_close(out, w.dequantize(), rtol=1e-6, atol=atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("P", [2, 4, 8])
def test_16_bit_inputs_are_widened_and_outputs_rounded_once(isa: str, kind: str, P: int, dtype: torch.dtype) -> None:
    for N, K, G in ((67, 333, 64), (64, 256, 128)):
        w = Cpu().prepare(weight(kind, N, K, P, G, bias=True), torch.float32)
        for M in (1, 3, 17, 70):
            x = inputs(M, 2 * K).to(dtype)[:, ::2]  # not contiguous
            x[M // 2, 1] = float("nan")
            y = Cpu().run(x, w)
            assert torch.equal(y.isnan().any(1), x.isnan().any(1))
            expected = product(x.float().contiguous(), w).to(dtype)
            assert torch.equal(y.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("P", [3, 4, 8])
def test_rows_are_looked_up(isa: str, kind: str, P: int) -> None:
    data = Cpu().prepare(weight(kind, 67, 333, P, 64, bias=True), torch.float32).data
    whole = torch.empty(67, 333)
    data.dequantize(whole.numpy())
    for rows in ([66], [3, 0, 3], [i * 5 % 67 for i in range(200)], []):
        out = torch.full((len(rows), 333), float("nan"))
        data.dequantize_rows(torch.tensor(rows, dtype=torch.int64).numpy(), out.numpy())
        assert torch.equal(out, whole[torch.tensor(rows, dtype=torch.int64)])
    for beyond in (-1, 67):
        with pytest.raises(ValueError, match="rows must be among those of the weight"):
            data.dequantize_rows(torch.tensor([0, beyond]).numpy(), torch.empty(2, 333).numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_matmul_with_wide_scales(isa: str, kind: str) -> None:
    for P in (2, 4):
        w = weight(kind, 50, 300, P, 64, bias=True, dtype=torch.float32)
        x = inputs(2, 300)
        assert error(product(x, Cpu("exact").prepare(w, torch.float32)), matmul_fp64(x, w)) < TOLERANCE["exact"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("P", [1, 2, 3, 4, 8])
def test_matmul_is_bitwise_equal_on_rerun_and_for_any_thread_count(
    isa: str, kind: str, P: int, precision: Precision
) -> None:
    w = Cpu(precision).prepare(weight(kind, 301, 200, P, 64, bias=True), torch.float32)
    for M in (1, 5, 33):
        x = inputs(M, 200)
        first = product(x, w)
        for threads in (1, 2, 3, 8):
            _core.set_threads(threads)
            assert torch.equal(product(x, w), first), threads


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("P", [1, 2, 3, 4, 8])
def test_batched_equals_single_rows(isa: str, kind: str, P: int, precision: Precision) -> None:
    w = Cpu(precision).prepare(weight(kind, 70, 200, P, 64, bias=True), torch.float32)
    x = inputs(23, 200)
    rows = torch.cat([product(x[m : m + 1].contiguous(), w) for m in range(23)])
    for M in (2, 3, 4, 5, 9, 16, 17, 23):
        assert torch.equal(product(x[:M].contiguous(), w), rows[:M])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("K", "G"), [(576, 128), (200, 24), (96, 32), (640, 256), (100, 100), (33, 16)])
@pytest.mark.parametrize("P", [4, 8])
def test_codes_as_tiles_have_the_bits_of_single_rows(
    isa: str, P: int, K: int, G: int, bias: bool, precision: Precision
) -> None:
    """Groups that end within a tile or a segment, outputs that end within a block, scales of 16 and 32 bits."""
    most = 31 if isa == "amx" else 16  # the other sets of AMX have tiles for 24 and more
    for N, dtype in ((50, torch.float16), (33, torch.float32)):
        w = Cpu(precision).prepare(weight("uniform", N, K, P, G, bias=bias, dtype=dtype), torch.float32)
        x = inputs(most, K)
        x[3] = 0
        rows = torch.cat([product(row[None].contiguous(), w) for row in x])
        for M in (most, 16, 9, 8, 5):
            assert torch.equal(product(x[:M], w), rows[:M])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("P", [4, 8])
def test_codes_as_tiles_hold_the_largest_sums(isa: str, P: int, precision: Precision) -> None:
    N, K = 32, 512
    codes = torch.full((N, K), 2**P - 1, dtype=torch.uint8)
    scale, zero = torch.full((N, K // 128), 0.01), torch.zeros(N, K // 128, dtype=torch.uint8)
    stored = UniformTensor.from_codes(codes, P, scale.half(), zero, 128)
    w, x = Cpu(precision).prepare(stored, torch.float32), torch.ones(16, K)
    x[1::2] = -1
    x[2] = 255 / 256  # every low digit at its end
    wanted = matmul_fp64(x, stored)
    assert error(product(x, w), wanted) < TOLERANCE[precision]
    assert torch.equal(product(x, w), torch.cat([product(row[None].contiguous(), w) for row in x]))


def test_exact_error_is_far_below_int8(isa: str) -> None:
    w, x = weight("bcq", 128, 1024, 3, 128, bias=True), inputs(4, 1024)
    errors = {p: error(product(x, Cpu(p).prepare(w, torch.float32)), matmul_fp64(x, w)) for p in PRECISIONS}
    assert errors["exact"] < errors["int8"] / 50


def test_an_outlier_spoils_its_own_segment_only(isa: str) -> None:
    """One activation scale per 128 inputs: a spike in the last segment leaves the others' error as it was."""
    w, x = weight("bcq", 64, 512, 2, 128, bias=False), inputs(1, 512)
    w_first = BCQTensor(w.planes, w.K, w.group, w.alpha.clone().index_fill_(2, torch.tensor(3), 0.0))  # type: ignore[union-attr]
    prepared = Cpu("int8").prepare(w_first, torch.float32)
    calm = product(x, prepared)
    x[0, 500] = 1000.0
    assert torch.equal(product(x, prepared), calm)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30])
def test_extreme_inputs(isa: str, value: float) -> None:
    w = weight("uniform", 40, 160, 4, 32, bias=True)
    x = inputs(2, 160).sign() * value
    y = product(x, Cpu("exact").prepare(w, torch.float32))
    want = matmul_fp64(x, w)
    assert torch.isfinite(y).all()
    assert (y.double() - want).norm() <= TOLERANCE["exact"] * want.norm()


@pytest.mark.parametrize("block", [1, 7, 16, 48, 1000])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_mixed_rows_that_share_second_order_scales(isa: str, precision: Precision, block: int) -> None:
    """Blocks of 16 rows decode their scales in registers; others have them decoded beforehand."""
    for G in GROUPS:
        w, x = mixed_weight(75, 333, G, 0.3, 0.01, block=block), inputs(5, 333)
        prepared = Cpu(precision).prepare(w, torch.float32)
        y = product(x, prepared)
        assert error(y, matmul_fp64(x, w)) < TOLERANCE[precision]
        assert torch.equal(y, torch.cat([product(row[None].contiguous(), prepared) for row in x]))


def test_mixed_outliers_multiply_x_as_it_is(isa: str) -> None:
    """All of a row, none of the next; codes that stand for nothing, so that only outliers are left."""
    w = mixed_weight(33, 100, 16, 0.0, 0.01)
    added = torch.zeros(33, 100)
    added[5], added[32, 99] = torch.randn(100, generator=torch.Generator().manual_seed(1)), 1.0
    w = MixedTensor.from_codes(w.shape, w.four, w.codes(), torch.zeros_like(w.second_scale), None, added.half())
    x = inputs(3, 100)
    y = product(x, Cpu("int8").prepare(w, torch.float32))
    torch.testing.assert_close(y.double(), matmul_fp64(x, w), rtol=1e-5, atol=1e-5)
    assert (y[:, :5] == 0).all()
    assert torch.equal(y[:, 32], x[:, 99])


def test_mixed_sums_hold_the_largest_values(isa: str) -> None:
    """Every code and scale at its end, with the inputs whose digits are largest."""
    for G, share in ((8, 0.0), (64, 0.0), (16, 1.0), (64, 0.5)):
        w = mixed_weight(16, 512, G, share)
        codes = w.codes()
        top = codes._replace(
            codes2=torch.full_like(codes.codes2, 3),
            codes4=torch.full_like(codes.codes4, 15),
            scale_codes=torch.full_like(codes.scale_codes, 15),
            zeros=torch.zeros_like(codes.zeros),
            second_zeros=torch.full_like(codes.second_zeros, 15),
        )
        row = None if w.row_scale is None else (w.row_scale, torch.zeros(16, dtype=torch.uint8))
        w = MixedTensor.from_codes(w.shape, w.four, top, w.second_scale, row, None, "general")
        x = torch.ones(4, 512)
        x[1], x[2], x[3, ::2] = -1, 255 / 256, -255 / 256
        y = product(x, Cpu("exact").prepare(w, torch.float32))
        assert error(y, matmul_fp64(x, w)) < TOLERANCE["exact"]


@pytest.mark.parametrize("kind", ["bcq", "mixed"])
def test_activations_are_shared_by_weights_that_fit(isa: str, kind: str) -> None:
    cpu = Cpu("exact")
    P = 3 if kind == "bcq" else 1  # no groups of 4 bits: one order of the inputs
    a, b = (cpu.prepare(weight(kind, N, 256, P, 64, bias=True, seed=N), torch.float32) for N in (48, 80))
    other = cpu.prepare(weight(kind, 48, 256, 3, 128, bias=True), torch.float32)
    x = inputs(2, 256)
    shared = _core.Activations()
    shared.prepare(x.numpy(), a.data, "exact")
    assert shared.fits(b.data)
    assert not shared.fits(other.data)
    for w in (a, b):
        y = torch.full((2, w.data.shape[0]), float("nan"))
        shared.matmul(w.data, y.numpy())
        assert torch.equal(y, product(x, w))
    with pytest.raises(ValueError, match="another group size"):
        shared.matmul(other.data, torch.empty(2, 48).numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_run_takes_and_gives_every_float_type(dtype: torch.dtype) -> None:
    w = weight("bcq", 48, 128, 3, 64, bias=True)
    kernel = Cpu()
    x = inputs(2, 128).to(dtype)
    y = kernel.run(x, kernel.prepare(w, dtype))
    assert y.dtype == dtype
    assert error(y, matmul_fp64(x, w)) < (1e-4 if dtype == torch.float32 else 1e-2)


def test_run_takes_strided_and_unaligned_inputs(isa: str) -> None:
    w, kernel = weight("uniform", 48, 129, 4, 64, bias=True), Cpu()
    prepared = kernel.prepare(w, torch.float32)
    x = inputs(4, 259)[:, 1:130]
    assert torch.equal(kernel.run(x, prepared), kernel.run(x.clone(), prepared))


def problem(**changes: Any) -> Problem:
    what = {"format": "bcq", "N": 8, "K": 64, "bits": 2, "group": 32, "device": "cpu", "dtype": torch.float32}
    return Problem(**(what | changes))


def test_supports_gives_reasons() -> None:
    kernel = Cpu()
    assert kernel.supports(problem()) is None
    assert kernel.supports(problem(group=64)) is None
    assert kernel.supports(problem(format="mixed", group=16, bits=2.5)) is None
    assert "multiple of 8" in (kernel.supports(problem(group=20)) or "")
    assert "'dense'" in (kernel.supports(problem(format="dense")) or "")
    assert "cuda" in (kernel.supports(problem(device="cuda")) or "")


def test_wrong_arguments_are_refused() -> None:
    w = Cpu().prepare(weight("bcq", 8, 64, 2, 32, bias=False), torch.float32).data
    with pytest.raises(ValueError, match=r"x must be"):
        _core.matmul(torch.zeros(1, 63).numpy(), w, torch.zeros(1, 8).numpy(), "exact")
    with pytest.raises(ValueError, match=r"y must be"):
        _core.matmul(torch.zeros(1, 64).numpy(), w, torch.zeros(1, 9).numpy(), "exact")
    with pytest.raises(ValueError, match="precision must be"):
        _core.matmul(torch.zeros(1, 64).numpy(), w, torch.zeros(1, 8).numpy(), "int4")
    with pytest.raises(ValueError, match="no instruction set"):
        _core.set_isa("avx1024")
