"""Sums over tokens as bf16 tiles against f64 of the rounded inputs: emulated everywhere, and by AMX where there is."""

from typing import NamedTuple

import pytest
import torch
from tile_kinds import AMX, TILES
from torch import Tensor

from crelle.kernels.cpu import available

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from crelle.kernels.cpu import _core
from crelle.kernels.cpu.stats import StatsTiles

pytestmark = pytest.mark.usefixtures("threads_as_before")

F32, BF16 = torch.float32, torch.bfloat16


class Sums(NamedTuple):
    hessian: Tensor
    cross: Tensor | None
    abssum: Tensor


def inputs(T: int, K: int, types: tuple[torch.dtype, torch.dtype] = (F32, F32)) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(T * 10_000 + K)
    x = torch.randn(T, K, generator=chance) * torch.logspace(-1, 1, K)
    full = x * (1 + 0.1 * torch.randn(T, K, generator=chance))
    return x.to(types[0]), full.to(types[1]), torch.rand(T, generator=chance) + 0.3


def zeros(K: int) -> Sums:
    return Sums(torch.zeros(K, K), torch.zeros(K, K), torch.zeros(K))


def added(x: Tensor, full: Tensor | None, weight: Tensor | None, emulate: bool, to: Sums | None = None) -> Sums:
    sums = to or zeros(x.shape[1])
    StatsTiles(emulate=emulate).add(x, full, weight, *sums)
    return sums


def check(found: Sums, x: Tensor, full: Tensor, weight: Tensor) -> None:
    """Compare with f64: what is lost is the rounding of f32 sums, relative to the sums of absolute products."""
    here = weight[:, None] * x.float()
    a = here.bfloat16().double()
    d = (weight[:, None] * (full.float() - x.float())).bfloat16().double()
    near = 2e-7 * (10 + len(x) ** 0.5)
    assert ((found.hessian - a.T @ a).triu().abs() <= near * (a.abs().T @ a.abs())).all()
    assert found.cross is not None
    assert ((found.cross - d.T @ a).abs() <= near * (d.abs().T @ a.abs()) + 1e-30).all()
    torch.testing.assert_close(found.abssum.double(), here.double().abs().sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("emulate", TILES)
@pytest.mark.parametrize(
    ("T", "K"),
    [
        *((T, 19) for T in (1, 2, 31, 32, 33, 1023, 1024, 1025, 2081)),
        *((40, K) for K in (1, 15, 16, 17, 31, 32, 33, 64, 100)),
        (33, 545),  # more than two strips of rows, the last one of one row
        (64, 512),
    ],
)
def test_sums_of_any_shape(T: int, K: int, emulate: bool) -> None:
    x, full, weight = inputs(T, K)
    check(added(x, full, weight, emulate), x, full, weight)


@pytest.mark.parametrize("emulate", TILES)
@pytest.mark.parametrize("x_type", [F32, BF16])
@pytest.mark.parametrize("full_type", [F32, BF16])
def test_inputs_of_either_type(x_type: torch.dtype, full_type: torch.dtype, emulate: bool) -> None:
    x, full, weight = inputs(70, 45, (x_type, full_type))
    check(added(x, full, weight, emulate), x, full, weight)


@pytest.mark.parametrize("emulate", TILES)
@pytest.mark.parametrize("x_type", [F32, BF16])
def test_without_the_full_inputs(x_type: torch.dtype, emulate: bool) -> None:
    x, full, weight = inputs(70, 45, (x_type, F32))
    wanted = added(x, full, weight, emulate)
    for cross, given in ((torch.full((45, 45), 3.0), None), (None, full)):
        found = added(x, given, weight, emulate, Sums(torch.zeros(45, 45), cross, torch.zeros(45)))
        assert torch.equal(found.hessian, wanted.hessian)
        assert torch.equal(found.abssum, wanted.abssum)
        assert cross is None or (cross == 3).all()


@pytest.mark.parametrize("emulate", TILES)
def test_equal_inputs_have_no_difference(emulate: bool) -> None:
    x, _, weight = inputs(70, 45)
    found = added(x, x.clone(), weight, emulate)
    assert found.cross is not None
    assert not found.cross.any()


@pytest.mark.parametrize("emulate", TILES)
@pytest.mark.parametrize("K", [32, 70])
def test_sums_go_on_from_what_was_there(K: int, emulate: bool) -> None:
    """In two batches as in one; what lies below the diagonal does not reach the rest."""
    x, full, weight = inputs(90, K)
    sums = zeros(K)
    sums.hessian.copy_(torch.full((K, K), torch.nan).tril(-1))
    tiles = StatsTiles(emulate=emulate)
    for part in (slice(0, 50), slice(50, 90)):
        tiles.add(x[part], full[part], weight[part], *sums)
    check(sums, x, full, weight)


@pytest.mark.parametrize("emulate", TILES)
def test_no_weight_is_one(emulate: bool) -> None:
    x, full, _ = inputs(40, 20)
    for one, other in zip(added(x, full, None, emulate), added(x, full, torch.ones(40), emulate), strict=True):
        assert one is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("emulate", TILES)
def test_threads_change_nothing(emulate: bool) -> None:
    x, full, weight = inputs(1100, 300)
    results = []
    for threads in (1, 2, 3):
        _core.set_threads(threads)
        results.append(added(x, full, weight, emulate))
    for other in results[1:]:
        assert torch.equal(other.hessian.triu(), results[0].hessian.triu())
        assert torch.equal(other.cross, results[0].cross)
        assert torch.equal(other.abssum, results[0].abssum)


@pytest.mark.parametrize("emulate", TILES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_column(bad: float, emulate: bool) -> None:
    x, full, weight = inputs(40, 50)
    x[33, 20] = bad
    found = added(x, full, weight, emulate)
    assert found.cross is not None
    touched = torch.zeros(50, 50, dtype=torch.bool)
    touched[20], touched[:, 20] = True, True
    upper = torch.ones(50, 50).triu().bool()
    assert torch.equal(found.hessian.isfinite() & upper, ~touched & upper)
    assert torch.equal(found.cross.isfinite(), ~touched)
    assert torch.equal(found.abssum.isfinite(), torch.arange(50) != 20)


@pytest.mark.parametrize("emulate", TILES)
def test_values_round_to_the_nearest_even_bf16(emulate: bool) -> None:
    """1 + i/512: two in four are not bf16, one of them halfway; times 1, sums show the roundings themselves."""
    x = (1 + torch.arange(64) / 512)[None]
    sums = zeros(64)
    StatsTiles(emulate=emulate).add(torch.cat((x, torch.ones(1, 64))), None, None, sums.hessian, None, sums.abssum)
    a = torch.cat((x, torch.ones(1, 64))).bfloat16().float()
    assert torch.equal(sums.hessian.triu(), (a.T @ a).triu())


@pytest.mark.skipif(not AMX, reason="needs AMX")
@pytest.mark.parametrize(("T", "K"), [(777, 100), (1500, 300)])
@pytest.mark.parametrize("types", [(F32, F32), (BF16, F32), (BF16, BF16)])
def test_amx_and_emulated_tiles_agree(T: int, K: int, types: tuple[torch.dtype, torch.dtype]) -> None:
    x, full, weight = inputs(T, K, types)
    real, emulated = (added(x, full, weight, emulate) for emulate in (False, True))
    scale = emulated.hessian.diagonal().sqrt()
    near = 2e-5 * scale[:, None] * scale
    assert ((real.hessian - emulated.hessian).triu().abs() <= near).all()
    assert real.cross is not None
    assert emulated.cross is not None
    assert ((real.cross - emulated.cross).abs() <= near).all()
    torch.testing.assert_close(real.abssum, emulated.abssum)


@pytest.mark.skipif(AMX, reason="this machine has AMX")
def test_without_amx_there_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="no AMX"):
        StatsTiles()


def test_wrong_shapes_and_types_are_refused() -> None:
    x, full, weight = inputs(9, 20)
    H, C, A = zeros(20)
    core = _core.StatsTiles(True)
    for said, given in (
        ("alike", (x, full[:8], weight, H, C, A)),
        ("weights must be", (x, full, weight[:8], H, C, A)),
        (r"\[K, K\]", (x, full, weight, H[:19], C, A)),
        (r"\[K, K\]", (x, full, weight, H, C[:19], A)),
        (r"must be \[K\]", (x, full, weight, H, C, A[:19])),
        ("both or neither", (x, None, weight, H, C, A)),
        ("both or neither", (x, full, weight, H, None, A)),
        ("f32 or bf16", (x.half(), full, weight, H, C, A)),
        ("f32 or bf16", (x, full.half(), weight, H, C, A)),
        ("inputs must be f32 or bf16", (x.double(), full, weight, H, C, A)),
        ("at least 1", (x[:, :0].contiguous(), None, weight, H[:0, :0].contiguous(), None, A[:0])),
    ):
        with pytest.raises(ValueError, match=said):
            core.add(*given)
    with pytest.raises(TypeError):
        core.add(x, full, weight.double(), H, C, A)
    with pytest.raises(TypeError):
        core.add(x.T, full, weight, H, C, A)
    assert not any(sums.any() for sums in (H, C, A))
    core.add(x[:0], full[:0], weight[:0], H, C, A)  # no token: nothing to add
    assert not any(sums.any() for sums in (H, C, A))


def test_other_inputs_are_brought_into_shape() -> None:
    """Columns of a wider matrix, f16: as contiguous f32."""
    x, full, weight = inputs(40, 20)
    wide = torch.cat((full, full), 1)
    for one, other in zip(
        added(x.half(), wide[:, :20], weight, True), added(x.half().float(), full, weight, True), strict=True
    ):
        assert one is not None
        assert torch.equal(one, other)
