"""Products with packed bf16 matrices against f64 of the rounded inputs: emulated everywhere, by AMX where there is."""

import pytest
import torch
from tile_kinds import AMX, TILES
from torch import Tensor

from crelle.kernels.cpu import available

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from crelle.kernels.cpu import _core
from crelle.kernels.cpu.bf16_gemm import PackedWeight

pytestmark = pytest.mark.usefixtures("threads_as_before")

F32, BF16 = torch.float32, torch.bfloat16


def inputs(M: int, N: int, K: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(M * 1_000_000 + N * 10_000 + K)
    x = torch.randn(M, K, generator=chance) * torch.logspace(-1, 1, K)
    return x.to(dtype), torch.randn(N, K, generator=chance).to(dtype), torch.randn(N, generator=chance)


def poisoned(weight: Tensor, x: Tensor, bias: Tensor | None, emulate: bool) -> Tensor:
    y = torch.full((len(x), len(weight)), torch.nan, dtype=BF16)
    _core.PackedBf16(weight, emulate).product(x, bias, y)
    return y


def check(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Compare with f64: what is lost is the rounding of f32 sums, and one rounding to bf16."""
    a, w = x.bfloat16().double(), weight.bfloat16().double()
    b = torch.zeros(len(w), dtype=torch.float64) if bias is None else bias.double()
    wanted = a @ w.T + b
    near = 2e-7 * (10 + a.shape[-1] ** 0.5) * (a.abs() @ w.abs().T + b.abs())
    assert y.dtype == BF16
    assert ((y.double() - wanted).abs() <= near + (wanted.abs() + near) * 2**-8 + 1e-30).all()


@pytest.mark.parametrize("emulate", TILES)
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        *((M, 33, 40) for M in (1, 15, 16, 17, 31, 32, 33, 64, 100, 257)),
        *((33, N, 40) for N in (1, 15, 16, 17, 31, 32, 48, 64, 96, 100)),
        *((17, 35, K) for K in (1, 2, 31, 32, 33, 63, 64, 65, 96, 200)),
        *((M, N, K) for M in (1, 257) for N in (1, 48) for K in (1, 33, 200)),
        *((70, 40, K) for K in (320, 321, 352, 641, 1000)),  # chunks, of equal and of different lengths
        (40, 40, 4128),  # two ranges, whose sums wait for each other
        (33, 65, 8200),
    ],
)
def test_products_of_any_shape(M: int, N: int, K: int, emulate: bool) -> None:
    x, weight, bias = inputs(M, N, K)
    check(poisoned(weight, x, bias, emulate), x, weight, bias)
    check(poisoned(weight, x, None, emulate), x, weight, None)


@pytest.mark.parametrize("emulate", TILES)
@pytest.mark.parametrize(("M", "N", "K"), [(5700, 2, 8), (4700, 33, 64), (350, 33, 4110)])
def test_more_rows_than_stay_in_the_cache(M: int, N: int, K: int, emulate: bool) -> None:
    """One thread takes groups of at most 170, 128 and 7 blocks of 32 rows: two of each, of different lengths."""
    _core.set_threads(1)
    x, weight, bias = inputs(M, N, K)
    check(poisoned(weight, x, bias, emulate), x, weight, bias)


@pytest.mark.parametrize("emulate", TILES)
def test_more_outputs_than_are_taken_at_a_time(emulate: bool) -> None:
    _core.set_threads(1)
    x, weight, bias = inputs(2, 16384 + 33, 3)
    check(poisoned(weight, x, bias, emulate), x, weight, bias)


@pytest.mark.parametrize("emulate", TILES)
@pytest.mark.parametrize("x_type", [F32, BF16])
@pytest.mark.parametrize("weight_type", [F32, BF16])
def test_f32_is_rounded_to_bf16(x_type: torch.dtype, weight_type: torch.dtype, emulate: bool) -> None:
    x, weight, bias = inputs(45, 70, 75, F32)
    x[0], weight[0] = 1 + torch.arange(75) / 512, 1 + torch.arange(75) / 512  # halfway values among them
    wanted = PackedWeight(weight.bfloat16(), emulate=emulate).product(x.bfloat16(), bias)
    found = PackedWeight(weight.to(weight_type), emulate=emulate).product(x.to(x_type), bias)
    check(found, x, weight, bias)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("emulate", TILES)
def test_sums_and_bias_are_rounded_together(emulate: bool) -> None:
    """1 + 2^-8 is halfway, and even is below; 2^-9 more is above. Either rounded before would give 1."""
    halfway, more, above = 1 + 2**-8, 2**-9, 1 + 2**-7
    weight = torch.ones(40, 2, dtype=BF16)
    for x, added in (([1, 2**-8], more), ([2**-9, 0], halfway)):
        y = PackedWeight(weight, emulate=emulate).product(torch.tensor([x]), torch.full((40,), added))
        assert torch.equal(y, torch.full((1, 40), above, dtype=BF16))
    zeros = PackedWeight(torch.zeros(3, 1), emulate=emulate)
    y = zeros.product(torch.ones(1, 1), torch.tensor([1.0, halfway, 1 + 3 * 2**-8]))
    assert y.tolist() == [[1.0, 1.0, 1 + 2**-6]]  # ties to even
    for bias in (torch.tensor([1.5, -2.0, 3e30]), torch.tensor([1.5, -2.0, 3e30], dtype=BF16)):
        assert torch.equal(zeros.product(torch.ones(1, 1), bias)[0], bias.bfloat16())


@pytest.mark.parametrize("emulate", TILES)
def test_x_may_have_other_dimensions(emulate: bool) -> None:
    x, weight, bias = inputs(60, 20, 33)
    packed = PackedWeight(weight, emulate=emulate)
    wanted = packed.product(x, bias)
    assert torch.equal(packed.product(x.view(3, 4, 5, 33), bias), wanted.view(3, 4, 5, 20))
    assert torch.equal(packed.product(x[7], bias), wanted[7])
    for rows in (torch.cat((x, x), 1)[:, :33], x.T.contiguous().T, x.clone().requires_grad_()):
        assert torch.equal(packed.product(rows, bias), wanted)
    assert torch.equal(packed.product(x[::2], bias), wanted[::2])
    wide = torch.stack((weight, weight), 2)
    assert torch.equal(
        PackedWeight(wide[..., 0], emulate=emulate).product(x, torch.stack((bias, bias), 1)[:, 0]), wanted
    )
    assert not packed.product(x.clone().requires_grad_()).requires_grad
    for shape in ((0, 33), (2, 0, 33)):
        assert packed.product(torch.zeros(shape), bias).shape == (*shape[:-1], 20)


@pytest.mark.parametrize("emulate", TILES)
@pytest.mark.parametrize(("M", "N", "K"), [(100, 130, 700), (10, 330, 64), (330, 10, 64), (1, 1, 1), (70, 100, 4200)])
def test_threads_change_nothing(M: int, N: int, K: int, emulate: bool) -> None:
    """Rows are shared out among them, or outputs, or both; some threads may have none."""
    x, weight, bias = inputs(M, N, K)
    results = []
    for threads in (1, 2, 3, 4, 6):
        _core.set_threads(threads)
        results.append(poisoned(weight, x, bias, emulate))
    assert not results[0].isnan().any()
    for other in results[1:]:
        assert torch.equal(other, results[0])


@pytest.mark.parametrize("emulate", TILES)
@pytest.mark.parametrize("K", [75, 700, 4200])
def test_a_row_is_the_same_alone_and_among_others(K: int, emulate: bool) -> None:
    x, weight, bias = inputs(300 if K == 75 else 40, 37, K)
    packed = PackedWeight(weight, emulate=emulate)
    together = packed.product(x, bias)
    for row in (0, 15, 16, 31, 32, len(x) - 1):
        assert torch.equal(packed.product(x[row], bias), together[row])
    assert torch.equal(packed.product(x[3:38], bias), together[3:38])


@pytest.mark.parametrize("emulate", TILES)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row_or_column(bad: float, dtype: torch.dtype, emulate: bool) -> None:
    x, weight, bias = inputs(40, 50, 345, dtype)
    clean = poisoned(weight, x, bias, emulate)
    touched = torch.zeros(40, 50, dtype=torch.bool)
    x[33, 20], weight[21, 340] = bad, bad
    touched[33], touched[:, 21] = True, True
    found = poisoned(weight, x, bias, emulate)
    assert torch.equal(~found.isfinite(), touched)
    assert torch.equal(found[~touched], clean[~touched])
    one = poisoned(torch.ones(1, 2, dtype=dtype), torch.tensor([[bad, 1.0]], dtype=dtype), None, emulate)
    assert torch.equal(one, torch.full((1, 1), bad, dtype=BF16)) or (one.isnan().all() and bad != bad)


@pytest.mark.parametrize("emulate", TILES)
def test_what_is_too_large_for_bf16_is_infinite(emulate: bool) -> None:
    largest = torch.finfo(BF16).max
    y = poisoned(torch.ones(2, 1), torch.tensor([[largest], [-largest]]), torch.full((2,), largest), emulate)
    assert y.tolist() == [[torch.inf] * 2, [0.0] * 2]


@pytest.mark.skipif(AMX, reason="this machine has AMX")
def test_without_amx_there_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="no AMX"):
        PackedWeight(torch.ones(3, 3))


def test_wrong_shapes_and_types_are_refused() -> None:
    x, weight, bias = inputs(9, 20, 30)
    for said, wrong in (
        ("f32 or bf16", weight.half()),
        ("f32 or bf16", weight.double()),
        ("f32 or bf16", weight.int()),
        (r"\[N, K\], got \[30\]", weight[0]),
        ("at least 1", weight[:0]),
        ("at least 1", weight[:, :0]),
    ):
        with pytest.raises(ValueError, match=said):
            PackedWeight(wrong, emulate=True)
    packed = PackedWeight(weight, emulate=True)
    for said, given in (
        (r"x must be \[\.\.\., 30\]", (x[:, :29], None)),
        (r"x must be \[\.\.\., 30\]", (torch.tensor(1.0), None)),
        ("x must be f32 or bf16", (x.half(), None)),
        ("x must be f32 or bf16", (x.double(), bias)),
        (r"bias must be \[20\]", (x, bias[:19])),
        (r"bias must be \[20\]", (x, bias[None])),
        ("bias must be f32 or bf16", (x, bias.half())),
        ("x must be f32 or bf16", (x[:0].half(), None)),
    ):
        with pytest.raises(ValueError, match=said):
            packed.product(*given)


def test_the_core_checks_what_it_is_given() -> None:
    x, weight, bias = inputs(9, 20, 30)
    core, y = _core.PackedBf16(weight, True), torch.zeros(9, 20, dtype=BF16)
    for said, given in (
        (r"\[M, K\]", (x[:, :29].contiguous(), bias, y)),
        (r"y must be \[M, N\]", (x, bias, y[:8])),
        (r"y must be \[M, N\]", (x, bias, y[:, :19].contiguous())),
        ("y must be bf16", (x, bias, y.float())),
        ("y must be bf16", (x, bias, y.half())),
        (r"bias must be \[N\]", (x, bias[:19], y)),
    ):
        with pytest.raises(ValueError, match=said):
            core.product(*given)
    for given in ((x.T, bias, y), (x, bias, y.T), (x, bias[None], y)):
        with pytest.raises(TypeError):
            core.product(*given)
    assert not y.any()
