"""The C++ solver of groups against the one in torch: the same levels but for ties, and no larger an error."""

import pytest
import torch
from torch import Tensor

from crelle.errors import SchemeError
from crelle.kernels import cpu
from crelle.kernels.cpu import solver
from crelle.quantizers.schemes import bcq
from crelle.quantizers.schemes.gptq import GPTQ
from crelle.quantizers.solvers.alternating_ls import SortedGroups, squared_error

pytestmark = [pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ core"), pytest.mark.sample(3)]


def groups(R: int, G: int, seed: int = 0) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(R, G, generator=chance) * torch.rand(R, 1, generator=chance) * 0.1


def importances(C: int, G: int, padding: int = 0) -> Tensor:
    h = torch.rand(C, G, generator=torch.Generator().manual_seed(1)) * 3 + 0.01
    h[-1, G - padding :] = 0
    return h


def reference_scales(g: Tensor, h: Tensor | None, P: int, rounds: int, bias: bool) -> tuple[Tensor, Tensor]:
    alpha, z = bcq._binary_scales(g, h, P, rounds, bias)
    return alpha.abs().sort(-1, descending=True).values, z


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("G", [1, 7, 64, 130])
def test_binary_scales_have_the_error_of_the_reference(bits: int, bias: bool, G: int) -> None:
    g = groups(66 if bits < 8 else 6, G)
    h = importances(3, G, padding=G // 3)
    for importance in (None, h):
        every = None if importance is None else importance.repeat(len(g) // 3, 1)
        wanted, found = (make(g, every, bits, 20, bias) for make in (reference_scales, bcq.binary_scales))
        s, book = SortedGroups.of(g, every), bcq.signs(bits, g.device)
        before, now = (squared_error(s, *pair, book) for pair in (wanted, found))
        assert now.sum() <= before.sum() * 1.001 + 1e-12 * len(g)
        same = torch.isclose(found[0], wanted[0], rtol=1e-3, atol=1e-6).all(1)
        assert same.float().mean() > (0.95 if bits < 8 else 0.3)  # with 256 levels many sets of planes do as well


def test_greedy_planes_are_those_of_the_reference() -> None:
    g = groups(40, 24)
    for a, b in zip(reference_scales(g, None, 3, 0, True), bcq.binary_scales(g, None, 3, 0, True), strict=True):
        torch.testing.assert_close(a, b)


def test_binary_codes_are_the_nearest_levels() -> None:
    g = groups(50, 33)
    alpha, z = bcq.binary_scales(g, None, 3, 20, True)
    codes = solver.binary_codes(g, alpha, z)
    levels = alpha @ bcq.signs(3, g.device).T + z[:, None]
    distance = (g[..., None] - levels[:, None]).abs()
    torch.testing.assert_close(distance.gather(2, codes.long()[..., None])[..., 0], distance.amin(2))


@pytest.mark.parametrize("config", [GPTQ(bits=3), GPTQ(bits=2, symmetric=True), GPTQ(bits=4), GPTQ(bits=5)])
@pytest.mark.parametrize("G", [1, 40, 200])
def test_uniform_grids_are_those_of_the_reference(config: GPTQ, G: int) -> None:
    g, h = groups(60, G), importances(4, G, padding=G // 5)
    s = SortedGroups.of(g, h.repeat(15, 1))
    book = torch.arange(2.0**config.bits)[:, None]
    (scale, zero), (want_scale, want_zero) = config.grids(g, h), config.grid(s)
    assert ((scale == want_scale) & (zero == want_zero)).float().mean() > 0.95
    now, before = (
        squared_error(s, a[:, None], -a * o, book).sum() for a, o in ((scale, zero), (want_scale, want_zero))
    )
    assert now <= before * 1.001 + 1e-12


@pytest.mark.parametrize("bits", [1, 2, 3, 5])
@pytest.mark.parametrize("G", [2, 40, 200])
def test_affine_grids_have_the_error_of_the_reference(bits: int, G: int) -> None:
    g, h = groups(60, G), importances(4, G, padding=G // 5)
    config, s = GPTQ(bits=bits, free=True), SortedGroups.of(g, h.repeat(15, 1))
    book = torch.arange(2.0**bits)[:, None]
    found, wanted = config.grids(g, h), config._free(s)
    now, before = (squared_error(s, a[:, None], low, book).sum() for a, low in (found, wanted))
    assert now <= before * 1.001 + 1e-12
    assert torch.isclose(found[0], wanted[0], rtol=2e-3).float().mean() > 0.95


def test_equal_weights_have_a_grid() -> None:
    g = torch.full((4, 16), 0.25)
    for config in (GPTQ(bits=3), GPTQ(bits=3, free=True)):
        scale, _ = config.grids(g, torch.ones(2, 16))
        assert (scale > 0).all()
        assert scale.isfinite().all()
    alpha, z = bcq.binary_scales(g, None, 2, 20, True)
    torch.testing.assert_close(z, g[:, 0])
    assert alpha.abs().max() < 1e-6


def test_a_scale_beyond_f16_is_refused() -> None:
    with pytest.raises(SchemeError, match="outside the range of f16"):
        GPTQ(bits=2).grids(torch.tensor([[-4e5, 4e5]]), torch.ones(1, 2))
